"""The host is a step ahead of the device: the next one is sent before the last one's tokens are waited for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.serve.engines import GREEDY, engine_of, model_of, prompts_of

from capibara.serve import Engine, Request, SamplingParams
from capibara.serve.latency import LatencyController
from capibara.serve.runner import Sent
from capibara.serve.scheduler import Chunk, StepPlan


class Device:
    """Takes `step_s` for a step, and the host `host_s`, by a clock of its own; `log` has each sending and each wait."""

    def __init__(self, engine: Engine, *, step_s: float, host_s: float) -> None:
        self.engine, self.step_s, self.host_s = engine, step_s, host_s
        self.now = self.free = 0.0
        self.log: list[tuple[str, int]] = []
        self.plans: list[StepPlan] = []
        engine.runner.send = self.send  # type: ignore[method-assign]

    def send(self, plan: StepPlan, allowed: np.ndarray | None = None) -> Sent:
        del allowed
        number = len(self.plans)
        self.plans.append(plan)
        self.log.append(("send", number))
        self.now += self.host_s
        self.free = max(self.free, self.now) + self.step_s
        drawing = itertools.count()
        rows = [next(drawing) if chunk.samples else -1 for chunk in plan.chunks]
        tokens: Any = np.zeros(len(rows), np.int32)
        shape = self.engine.runner.shapes.of(plan)
        return _Waited(self, number, self.free, plan, rows, tokens, None, self.now, shape, compiled=False)


class _Waited(Sent):
    def __init__(self, device: Device, number: int, done: float, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.device, self.number, self.done = device, number, done

    def drawn(self) -> Iterator[tuple[Chunk, list[int], int]]:
        self.device.log.append(("wait", self.number))
        self.device.now = max(self.device.now, self.done)
        return super().drawn()


def decode(programs: Path) -> tuple[Engine, Callable[[], Request]]:
    """Nobody ends while it is looked at."""
    return _asked(engine_of(model_of("attention"), programs, pages=64), lambda number: (2, 60))


def mixed(programs: Path) -> tuple[Engine, Callable[[], Request]]:
    """One ends at nearly every step, and another's prompt comes in two pieces."""
    engine = engine_of(model_of("attention"), programs, pages=64, prefill_chunk=6, max_sequences=8)
    return _asked(engine, lambda number: (9 + number % 3, 5 + number % 4))


def _asked(engine: Engine, lengths: Callable[[int], tuple[int, int]]) -> tuple[Engine, Callable[[], Request]]:
    numbers = itertools.count()

    def ask() -> Request:
        number = next(numbers)
        prompt, new = lengths(number)
        return Request(str(number), prompts_of(prompt, seed=number)[0], SamplingParams(max_tokens=new, **GREEDY))

    return engine, ask


@pytest.mark.quick
@pytest.mark.parametrize("host_s", [1e-3, 6e-3])
@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("users", [decode, mixed])
def test_a_step_takes_as_long_as_the_slower_of_host_and_device(
    users: Callable[[Path], tuple[Engine, Callable[[], Request]]], target: bool, host_s: float, programs: Path
) -> None:
    engine, ask = users(programs)
    device = Device(engine, step_s=4e-3, host_s=host_s)
    controller = LatencyController(engine, 1e3) if target else None

    def step() -> None:
        if controller is not None:
            controller.adjust()
        outputs = engine.step()
        if controller is not None:
            controller.saw(outputs, device.now)
        for output in outputs:
            if output.finish_reason is not None:
                engine.add(ask())

    for _ in range(12):
        engine.add(ask())
    for _ in range(10):
        step()
    began, first = device.now, len(device.plans)
    for _ in range(40):
        step()
    assert len(device.plans) == first + 40, "every step sent one"
    assert device.now - began == pytest.approx(40 * max(host_s, 4e-3))
    # Before a step is waited for, the next one is there for the device to go on with.
    waits = {number: at for at, (what, number) in enumerate(device.log) if what == "wait"}
    sends = {number: at for at, (what, number) in enumerate(device.log) if what == "send"}
    assert all(sends[number + 1] < at for number, at in waits.items())
    assert len(waits) >= len(sends) - 1 - sum(not any(c.samples for c in plan.chunks) for plan in device.plans)
    late = device.plans[first:]
    if users is mixed:
        assert sum(bool(plan.admitted) for plan in late) > 10
        assert sum(not plan.decodes_only for plan in late) > 20
    else:
        assert all(plan.decodes_only for plan in late)
