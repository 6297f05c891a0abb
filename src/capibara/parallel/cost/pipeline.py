"""What cutting the layers into stages costs: time in which stages wait, and what is sent from one to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from capibara.parallel.cost.fusion import LoopPass, Pass
from capibara.parallel.cost.links import Wiring, exchange
from capibara.parallel.program.chip import ChipProgram, Loop, Step

__all__ = ["bubble_seconds", "send_seconds"]


def bubble_seconds(
    passes: Sequence[Pass | LoopPass], loop_seconds: dict[int, float], total: float, stages: int, microbatches: int
) -> float:
    """Seconds that a stage waits: (stages - 1) microbatches' worth, filling and draining the pipeline.

    The loop over microbatches, where the program has one, is what is pipelined; the optimizer's update after it is not.
    """
    if stages == 1:
        return 0.0
    pipelined = [
        loop_seconds[index]
        for index, one in enumerate(passes)
        if isinstance(one, LoopPass) and microbatches > 1 and one.loop.trips == microbatches
    ]
    return (max(pipelined) if pipelined else total) * (stages - 1) / microbatches


def send_seconds(
    program: ChipProgram, wiring: Wiring, axis: str | None, stages: int, microbatches: int, share: float
) -> float:
    """Seconds of handing each microbatch's activations on, and their gradients back, where the program does not.

    `axis` is the mesh axis of the stages, and `share` what a link reaches of its bandwidth. What is handed on is the
    carry of the loop over layers.
    """
    if stages == 1 or any(step.collective and step.collective.kind == "permute" for step, _ in program.walk()):
        return 0.0
    carry = max((_carry(program, loop) for loop in _loops(program.steps) if not loop.backward), default=0.0)
    if axis is not None:
        taken = exchange(wiring, "permute", (axis,), carry)
        each = taken.seconds / share + taken.latency
    else:
        each = carry / wiring.link_bandwidth / share + wiring.hop_seconds
    return 2 * microbatches * each


def _loops(steps: Iterable[Step | Loop]) -> Iterable[Loop]:
    for step in steps:
        if isinstance(step, Loop):
            inner = list(_loops(step.body))
            # The loop over layers is the innermost that others do not contain.
            yield from inner or [step]


def _carry(program: ChipProgram, loop: Loop) -> float:
    return sum(program.buffers[body].bytes for _, body in loop.carried[0::2])
