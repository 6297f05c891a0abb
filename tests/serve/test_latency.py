"""The controller: what a step may hold follows from what steps of each shape take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.serve.engines import GREEDY, answers, engine_of, model_of, prompts_of, wanted

from capibara.serve import Engine, Request, RequestOutput, SamplingParams, Usage
from capibara.serve.engine import StepTime
from capibara.serve.latency import LatencyController, TpuInferenceOptimizer, choose_steps
from capibara.serve.programs import Shape
from capibara.serve.scheduler import StepPlan


def seconds_of(shape: Shape, context: int = 0) -> float:
    """A device that takes 2 ms a pass and 0.1 ms a token, whatever they look back on."""
    del context
    return shape.steps * (2e-3 + 1e-4 * shape.tokens)


def seconds_by_keys(shape: Shape, context: int = 0) -> float:
    """The same, and 1 us more for each key of each sequence."""
    return seconds_of(shape) + shape.steps * 1e-6 * context * shape.sequences


def controller_of(
    programs: Path, target_ms: float | None, seconds: Callable[[Shape, int], float] = seconds_of, **changes: Any
) -> LatencyController:
    choose_batch = changes.pop("choose_batch", True)
    engine = engine_of(
        model_of("attention"), programs, **{"max_sequences": 64, "max_batch_tokens": 512, "decode_steps": 4, **changes}
    )
    engine.runner.time_step = lambda shape, context=0, repeats=3: seconds(shape, context)  # type: ignore[method-assign]
    return LatencyController(engine, target_ms, choose_batch=choose_batch)


def started(controller: LatencyController, count: int) -> Engine:
    """The controller's engine with so many sequences that wait for their next token."""
    engine = controller.engine
    for number, prompt in enumerate(prompts_of(*[2] * count)):
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=8, **GREEDY)))
    engine.scheduler.plan()
    for sequence in engine.scheduler.running:
        engine.scheduler.take(sequence, [1], drawn=1)
    return engine


@pytest.mark.quick
def test_the_batch_and_prompts_pieces_are_the_largest_within_the_target(programs: Path) -> None:
    controller = controller_of(programs, 9.0)
    report = controller.calibrate()
    assert report.possible
    assert report.best_ms == pytest.approx(2.1)
    # 2 + 0.1 n ms: 64 sequences take 8.4 ms.
    assert report.max_sequences == 64
    # A ragged step of 64 tokens and more takes 8.4 ms, one of 128 takes 14.8.
    engine = started(controller, 3)
    controller.adjust()
    assert engine.limits.prefill_tokens == 64 - 3
    assert engine.decode_steps == 1  # four steps of 16 would be 14.4 ms
    # A smaller target leaves fewer, and none of a prompt while others wait for tokens.
    controller = controller_of(programs, 4.0)
    assert controller.calibrate().max_sequences == 16
    controller = controller_of(programs, 12.0)
    controller.calibrate()
    started(controller, 1)
    controller.adjust()
    assert controller.engine.decode_steps == 4  # of one sequence: 8.4 ms


def _of_length(engine: Engine, length: int) -> None:
    """Every running sequence has so many tokens, all but the last computed."""
    for sequence in engine.scheduler.running:
        sequence.tokens += [0] * (length - len(sequence.tokens))
        sequence.computed = length - 1


@pytest.mark.quick
def test_what_a_step_may_hold_follows_from_how_long_contexts_are(programs: Path) -> None:
    controller = controller_of(programs, 10.0, seconds_by_keys, max_length=4096, pages=2048)
    controller.calibrate()
    engine = started(controller, 4)
    controller.saw([_output("0")], 0.0)
    controller.saw([_output("0")], 0.011)  # a long step was just now: another has to be within the target
    _of_length(engine, 100)
    controller.adjust()
    # A program for 64 takes 8.4 ms and 100 us for each that is there, so that 16 are: one for 32 takes 5.2 ms.
    assert engine.limits.max_sequences == 32
    assert engine.limits.prefill_tokens == 64 - 4  # 8.4 ms, and 0.4 for the keys of those that draw beside it
    _of_length(engine, 600)
    controller.adjust()
    assert engine.limits.max_sequences == 10  # a program for 16 takes 3.6 ms, and 10 times 0.6 are left
    assert engine.limits.prefill_tokens == 0  # 8.4 ms and 2.4


def test_steps_of_few_keys_are_measured_where_keys_are_all_that_takes_time(programs: Path) -> None:
    """A line through such times starts below nothing: what it says of a step is a time all the same."""

    def all_in_keys(shape: Shape, context: int | None = None) -> float:
        return shape.steps * 1e-4 * (context or 1) ** 3

    controller = controller_of(programs, 9.0, all_in_keys, max_sequences=4)
    controller.calibrate()
    shape = controller.engine.runner.shapes.decode(4, 1)
    for _ in range(3):
        controller.took(shape, 1e-3, keys=0)
    assert 0 < controller._milliseconds(shape, 0) < 1e3


def test_without_the_optimizer_the_batch_stays(programs: Path) -> None:
    controller = controller_of(programs, 4.0, choose_batch=False)
    controller.calibrate()
    assert controller.engine.limits.max_sequences == 64


def test_a_target_that_cannot_be_kept_is_said_with_the_best_there_is(
    programs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    controller = controller_of(programs, 1.0)
    with caplog.at_level(logging.WARNING):
        report = controller.calibrate()
    assert not report.possible
    assert "A latency of 1 ms a token is impossible here: one sequence alone takes 2.10 ms" in caplog.text
    assert report.max_sequences == 1  # and the best is kept to
    assert "impossible" in str(report)


def test_prompts_that_always_take_too_long_come_seldom(programs: Path) -> None:
    controller = controller_of(programs, 5.0)  # the smallest piece is a step of 8.4 ms
    controller.calibrate()
    engine = started(controller, 2)
    controller.adjust()
    assert engine.limits.prefill_tokens == 64 - 2
    controller.saw([_output("0")], 0.0)
    controller.saw([_output("0")], 0.009)  # longer than the target: that was one
    controller.adjust()
    assert engine.limits.prefill_tokens == 0
    for number in range(25):
        controller.saw([_output("0")], 0.009 + 0.003 * (number + 1))
    controller.adjust()
    assert engine.limits.prefill_tokens == 64 - 2
    for id in ("0", "1"):
        engine.cancel(id)
    controller.adjust()
    assert engine.limits.prefill_tokens == 512  # nobody waits for a token


def test_measured_times_take_the_place_of_those_at_the_start(programs: Path) -> None:
    controller = controller_of(programs, 9.0)
    controller.calibrate()
    shape = controller.engine.runner.shapes.decode(64, 1)
    for _ in range(40):
        controller.engine.on_step(StepTime(shape, StepPlan([]), 20e-3))  # type: ignore[misc]
    controller.adjust()
    assert controller.engine.limits.max_sequences == 32


def test_a_machine_that_stalls_once_serves_as_many_as_before(programs: Path) -> None:
    """A shape that is held to be too slow is not run, and so not measured: its time has to fade by itself."""
    controller = controller_of(programs, 9.0)
    controller.calibrate()
    engine = controller.engine
    small, large = (engine.runner.shapes.decode(n, 1) for n in (16, 64))
    controller.took(large, 30.0)
    controller.adjust()
    assert engine.limits.max_sequences == 32
    for _ in range(3500):
        controller.took(small, seconds_of(small))
    controller.adjust()
    assert engine.limits.max_sequences == 64


def test_times_that_cannot_be_are_not_counted(programs: Path) -> None:
    controller = controller_of(programs, 9.0)
    shape = controller.engine.runner.shapes.decode(1, 1)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):  # before anything was measured, and after
        controller.took(shape, seconds)
    assert controller.best_ms == 0
    controller.adjust()
    controller.took(shape, 2e-3)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        controller.took(shape, seconds, keys=7)
    assert controller.best_ms == pytest.approx(2.0)
    controller.saw([_output("a")], 5.0)
    controller.saw([_output("a")], 4.0)  # a clock that was set back
    assert controller.p95_ms == 0
    controller.adjust()
    assert controller.report().possible


def test_a_report_is_made_while_requests_come_and_go(programs: Path) -> None:
    """As by another thread: those that are looked at are queued no more when the next one is."""
    controller = controller_of(programs, None)
    scheduler, controller_times = controller.engine.scheduler, controller._times

    class Leaving:
        @property
        def length(self) -> int:
            del scheduler.waiting[self]  # type: ignore[arg-type]
            controller_times[Shape(len(controller_times) + 2, 1, 1, 1)] = controller._time(Shape(1, 1, 1, 1))
            return 5

    for _ in range(3):
        scheduler.waiting[Leaving()] = None  # type: ignore[index]
    assert controller.report().max_sequences == 64
    assert not scheduler.waiting


def test_steps_are_timed_again_without_spoiling_what_prompts_share(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    (prompt,) = prompts_of(12)
    right = answers(engine, [prompt])
    shapes = [engine.runner.shapes.decode(2, 2)]
    engine.runner.shapes.all = lambda: iter(shapes)  # type: ignore[method-assign]
    LatencyController(engine, 50.0).calibrate(repeats=1)
    assert answers(engine, [prompt]) == right
    assert engine.stats().prefix_hits == 0


def test_what_is_seen_leaves_room_for_what_lies_between_steps(programs: Path) -> None:
    controller = controller_of(programs, 9.0)
    controller.calibrate()
    for number in range(80):  # every gap is above what steps take
        controller.saw([_output("a")], 0.010 * number)
    assert controller.p95_ms == pytest.approx(10.0)
    controller.adjust()
    assert controller.engine.limits.max_sequences < 64


def test_the_percentile_is_numpys(programs: Path) -> None:
    controller = controller_of(programs, None)
    draw = np.random.default_rng(0)
    for size in (1, 2, 3, 20, 21, 40, 511, 512):
        gaps = draw.exponential(5.0, size)
        controller._gaps.clear()
        controller._gaps.extend(gaps.tolist())
        assert controller.p95_ms == pytest.approx(np.percentile(gaps, 95), rel=1e-12)


@pytest.mark.quick
def test_no_target_changes_nothing(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    controller = LatencyController(engine, None)
    controller.adjust()
    assert engine.limits.max_sequences == 4
    assert str(controller.report()).startswith("no target")
    prompts = prompts_of(5)
    assert answers(engine, prompts) == [wanted("attention", prompts[0])]
    assert controller.best_ms > 0  # its steps were measured


def test_shapes_are_timed_on_the_device(programs: Path) -> None:
    engine = engine_of(model_of("attention"), programs)
    for shape in (engine.runner.shapes.decode(2, 2), engine.runner.shapes.ragged(20, 3)):
        assert 0 < engine.runner.time_step(shape, repeats=2) < 60
    prompts = prompts_of(5, 9)  # and nothing is left of it
    assert answers(engine, prompts) == [wanted("attention", prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("target_ms", "steps"), [(None, 8), (100.0, 8), (17.0, 4), (16.0, 2), (8.5, 2), (8.3, 1), (1.0, 1)]
)
def test_programs_draw_as_many_tokens_in_a_row_as_the_target_has_time_for(
    target_ms: float | None, steps: int, programs: Path
) -> None:
    """Of 2.1 ms each."""
    controller = controller_of(programs, target_ms, decode_steps=8)
    engine = controller.engine
    choose_steps(engine, target_ms)
    assert engine.decode_steps == steps
    assert {shape.steps for shape in engine.runner.shapes.all()} == {1, steps}


def test_steps_that_are_all_of_one_shape_draw_one_token(programs: Path) -> None:
    controller = controller_of(programs, 100.0, decode_steps=8, batch_invariant=True)
    choose_steps(controller.engine, 100.0)
    assert {shape.steps for shape in controller.engine.runner.shapes.all()} == {1}


class _Step:
    """A step's tokens, on a device that takes so long for it."""

    def __init__(self, told: list[str], seconds: float) -> None:
        self.told, self.seconds = told, seconds
        told.append("started")

    def block_until_ready(self) -> None:
        self.told.append("waited for")
        time.sleep(self.seconds)


@pytest.mark.parametrize(("seconds", "in_a_row"), [(0.0, 8), (0.03, 1)])
def test_short_steps_are_timed_in_a_row(
    seconds: float, in_a_row: int, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine starts the next one while the device has one: what starting takes is not a step's time."""
    engine = engine_of(model_of("attention"), programs)
    told: list[str] = []
    monkeypatch.setattr(engine.runner, "_run", lambda *_: (_Step(told, seconds), None))
    engine.runner.time_step(engine.runner.shapes.decode(2, 2), repeats=2)
    one = ["started", "waited for"]
    assert told == 2 * one + 2 * [*in_a_row * ["started"], "waited for"]


def test_a_target_is_above_zero() -> None:
    for target in (0, -1, float("nan"), "50", True):
        with pytest.raises(ValueError, match="target_latency_ms is a number above 0"):
            TpuInferenceOptimizer(target_latency_ms=target)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="target_latency_ms is a number above 0"):
            LatencyController(None, target)  # type: ignore[arg-type]


def _output(id: str) -> RequestOutput:
    return RequestOutput(id, (1,), "", Usage(1, 1, 0))
