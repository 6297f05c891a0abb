"""The simulated engine: the steps that an engine takes, and what its users see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.serve.engines import CONFIG, GREEDY, engine_of, model_of, prompts_of, run

from capibara.serve import EngineConfig, Request, SamplingParams
from capibara.serve.cache_size import CacheSize
from capibara.serve.load.trace import Lengths
from capibara.serve.prediction import simulation
from capibara.serve.prediction.simulation import SimulatedEngine, Traffic, all_at_once, steady
from capibara.serve.programs import Shape


class Clockwork:
    """Step times that anyone can add up: so much a step, and so much a token."""

    def __init__(self, config: EngineConfig, step: float = 1e-3, token: float = 0.0) -> None:
        self.config, self._step, self._token = config, step, token

    def of_shape(self, shape: Shape, context: int | None = None) -> float:
        del context
        return shape.steps * (self._step + self._token * shape.tokens)

    def of_plan(self, shape: Shape, plan: Any) -> float:
        return plan.steps * (self._step + self._token * plan.tokens)


def simulated(target_ms: float | None = None, *, pages: int = 24, longest: int = 64, **changes: Any) -> SimulatedEngine:
    times = {name: changes.pop(name) for name in ("step", "token") if name in changes}
    clockwork = Clockwork(EngineConfig(**{**CONFIG, **changes}), **times)
    size = CacheSize(pages, clockwork.config.page_size, 1, 0, longest, "pages")
    return SimulatedEngine(clockwork, size, target_ms)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"pages": 12}, {"decode_steps": 4}], ids=["plain", "preempting", "several"])
def test_it_takes_the_steps_that_the_engine_takes(changes: dict[str, Any], programs: Path) -> None:
    prompts = prompts_of(20, 7, 30, 3, 12, 9)
    engine = engine_of(model_of("attention"), programs, prefix_sharing=False, **changes)
    seen: list[Shape] = []
    sent = engine.runner.send

    def watched(*args: Any) -> Any:
        step = sent(*args)
        seen.append(step.shape)
        return step

    engine.runner.send = watched  # type: ignore[method-assign]
    asked = SamplingParams(max_tokens=8, **GREEDY)
    run(engine, [Request(str(n), prompt, asked) for n, prompt in enumerate(prompts)])
    like = simulated(**changes)
    planned: list[Shape] = []
    plan = like.scheduler.plan

    def noted(**options: Any) -> Any:
        step = plan(**options)
        planned.extend([] if step is None else [like.shapes.of(step)])
        return step

    like.scheduler.plan = noted  # type: ignore[method-assign]
    all_at_once(like, Traffic([Lengths(len(prompt), 8) for prompt in prompts]), len(prompts))
    assert planned == seen
    assert like.scheduler.preemptions == engine.stats().preemptions
    assert (like.scheduler.preemptions > 0) == ("pages" in changes)


@pytest.mark.quick
def test_a_batch_takes_its_prompts_and_then_a_token_a_step() -> None:
    seen = all_at_once(simulated(), Traffic([Lengths(8, 5)]), 4)
    # All prompts in one step of 32 tokens, which also draws the first of five tokens each.
    assert seen.steps == 5
    assert seen.output_tokens_per_second == pytest.approx(4 * 5 / 5e-3)
    assert seen.prompt_tokens_per_second == pytest.approx(4 * 8 / 5e-3)
    assert (seen.p50_ms, seen.p95_ms, seen.first_p95_ms) == pytest.approx((1, 1, 1))
    assert seen.running == pytest.approx(4)
    assert seen.prompt_share == pytest.approx(1 / 5)


def test_users_ask_again_and_those_who_have_no_place_wait() -> None:
    held, crowd = (steady(simulated(), Traffic([Lengths(8, 8)]), users) for users in (4, 12))
    assert held.waiting == pytest.approx(0, abs=0.3)
    assert held.running == pytest.approx(4, abs=0.3)
    assert crowd.waiting == pytest.approx(8, abs=1)
    assert crowd.first_p50_ms > 2 * held.first_p50_ms
    thoughtful = steady(simulated(), Traffic([Lengths(8, 8)], think_s=0.016), 4)
    # Half of the time or more each user thinks.
    assert thoughtful.running < 0.6 * held.running
    assert thoughtful.output_tokens_per_second < 0.7 * held.output_tokens_per_second


def test_a_target_is_kept_by_the_engines_own_rules() -> None:
    # 1 ms and 0.01 ms a token: steps of up to 64 tokens are 1.64 ms, and a whole prompt of 400 takes 5.
    quick, slow = (
        steady(
            simulated(target, step=1e-3, token=1e-5, max_batch_tokens=512, pages=480, longest=480),
            Traffic([Lengths(400, 32)]),
            4,
        )
        for target in (1.7, 100.0)
    )
    assert quick.p95_ms <= 1.7 < slow.p95_ms
    assert quick.output_tokens_per_second < slow.output_tokens_per_second


def test_traffic_has_requests_and_nobody_thinks_for_less_than_no_time() -> None:
    with pytest.raises(ValueError, match="Traffic has a request"):
        Traffic([])
    for seconds in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="0 or more seconds"):
            Traffic([Lengths(1, 1)], think_s=seconds)
    with pytest.raises(ValueError, match="asks for one"):
        Traffic([Lengths(8, 8), Lengths(8, 0)])


@pytest.mark.quick
def test_answers_of_one_token_end_and_have_no_gaps() -> None:
    seen = steady(simulated(), Traffic([Lengths(8, 1)]), 2)
    assert seen.p95_ms == 0
    assert seen.first_p95_ms > 0
    assert seen.prompt_tokens_per_second == pytest.approx(8 * seen.output_tokens_per_second)


def test_prompts_count_while_long_answers_are_still_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_MOST_STEPS", 20)
    seen = steady(simulated(), Traffic([Lengths(8, 40)]), 1)
    assert seen.prompt_tokens_per_second > 0
    assert seen.output_tokens_per_second > 0
