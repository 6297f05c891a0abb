"""What cutting the layers into stages costs, as `capibara.parallel.pipelined` runs them.

The program that is looked at is one stage's, with a loop over microbatches in which each passes this stage's layers
forward and back. The pipeline runs the same passes in another order: all microbatches forward, the rest of the loss for
a share of them, all of them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from capibara.cost.fusion import LoopPass, Pass
from capibara.cost.lifetime import Peak
from capibara.cost.links import Wiring, exchange
from capibara.cost.timing import Timer
from capibara.program.chip import ChipProgram, Loop, Step

__all__ = ["Staged", "send_seconds", "staged"]

# What follows the layers is not kept, and so its forward pass, a third of it, is done once more.
_TAIL_TWICE = 4 / 3


@dataclass(frozen=True)
class Staged:
    """What a pipeline adds to one stage's program, and what it saves of it."""

    bubble: float = 0.0
    """Seconds in which a stage works on what is not its own: (stages - 1) microbatches through its layers."""
    saved: float = 0.0
    """Seconds of what follows the layers, which a stage does for its share of the microbatches only."""
    held: float = 0.0
    """Bytes beside those of one microbatch: what layers keep of every other tick, and what enters and leaves them."""


def staged(
    program: ChipProgram,
    passes: Sequence[Pass | LoopPass],
    timer: Timer,
    total: float,
    peak: Peak,
    stages: int,
    microbatches: int,
) -> Staged:
    """`total` is the program's seconds without stages. With no loop over microbatches all of it is pipelined."""
    if stages == 1:
        return Staged()
    loops = [one for one in passes if isinstance(one, LoopPass) and microbatches > 1 and one.loop.trips == microbatches]
    carry = _activation(program)
    # Every tick keeps what its layers keep, work of its own or not. Of all microbatches there is what goes in or its
    # gradient, and what came out of every tick or its gradient.
    held = (microbatches + stages - 2) * peak.stashed + (2 * microbatches + stages - 1) * carry
    if not loops:
        return Staged(total * (stages - 1) / microbatches, 0.0, held)
    body = max(loops, key=lambda one: len(one.body)).body
    layers = [one for one in body if isinstance(one, LoopPass)]
    bubble = (stages - 1) * _seconds(timer, layers or body)
    saved = _seconds(timer, _between(body)) * microbatches * max(0.0, 1 - _TAIL_TWICE / stages)
    return Staged(bubble, saved, held)


def _seconds(timer: Timer, passes: Sequence[Pass | LoopPass]) -> float:
    """One trip of these alone."""
    return Timer(timer.buffers, timer.chip, timer.wiring).level(passes).mid


def _between(body: Sequence[Pass | LoopPass]) -> list[Pass | LoopPass]:
    """What comes after the layers forward and before the layers back: the head and the loss."""
    forward = [n for n, one in enumerate(body) if isinstance(one, LoopPass) and not one.loop.backward]
    back = [n for n, one in enumerate(body) if isinstance(one, LoopPass) and one.loop.backward]
    return list(body[forward[-1] + 1 : back[0]]) if forward and back else []


def send_seconds(
    program: ChipProgram, wiring: Wiring, axis: str | None, stages: int, microbatches: int, share: float
) -> float:
    """Seconds of handing on microbatches' activations, and their gradients back, that the program does not count.

    `axis` is the mesh axis of the stages, and `share` what a link reaches of its bandwidth. What is handed on is the
    carry of the loop over layers: at every tick, and once from where it is made to the first stage and from the last to
    where it is used.
    """
    if stages == 1:
        return 0.0
    carry = _activation(program)
    if axis is not None:
        taken = exchange(wiring, "permute", (axis,), carry)
        each = taken.seconds / share + taken.latency
    else:
        each = carry / wiring.link_bandwidth / share + wiring.hop_seconds
    counted = any(step.collective and step.collective.kind == "permute" for step, _ in program.walk())
    ticks = 0 if counted else microbatches
    return 2 * each * (ticks + 2 * microbatches * (stages - 1) / stages)


def _activation(program: ChipProgram) -> float:
    return max((_carry(program, loop) for loop in _loops(program.steps) if not loop.backward), default=0.0)


def _loops(steps: Iterable[Step | Loop]) -> Iterable[Loop]:
    for step in steps:
        if isinstance(step, Loop):
            inner = list(_loops(step.body))
            # The loop over layers is the innermost that others do not contain.
            yield from inner or [step]


def _carry(program: ChipProgram, loop: Loop) -> float:
    return sum(program.buffers[body].bytes for _, body in loop.carried[0::2])
