"""What each device of the ring computes at each step, decided before anything runs.

After shift s, device i holds the keys of device i - s, or of device i - s + n when i < s. Position rules only need the
distance between the two blocks, so each step has two cases that are known beforehand: `near` for the devices with
i >= s and `far` for the others. A case is one rectangle of queries and keys, or nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from capibara.errors import rule_error, unknown_name
from capibara.kernels.ops.attention import inputs
from capibara.kernels.ops.attention.masking import FAR, Window, live_pairs, span

ORDERS = ("contiguous", "zigzag")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows and columns of a device's queries and of the keys it holds, with the op's rules on positions there."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    causal: bool = False
    q_offset: int = 0
    window: Window = None

    @property
    def rules(self) -> dict[str, Any]:
        return {"causal": self.causal, "q_offset": self.q_offset, "window": self.window}

    @property
    def pairs(self) -> int:
        lengths = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        return live_pairs(*lengths, self.causal, self.q_offset, self.window)


@dataclasses.dataclass(frozen=True)
class Step:
    """One stop of the travelling keys: `near` for devices that hold keys of a device before them, `far` for others."""

    shift: int
    near: Piece | None
    far: Piece | None

    def piece(self, device: int) -> Piece | None:
        return self.near if device >= self.shift else self.far


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps at which any device computes anything. The first has shift 0: a query sees its own key in any case."""

    devices: int
    order: str  # of the shards while the ring turns
    exchanged: bool  # whether that is not the caller's order
    steps: tuple[Step, ...]

    @property
    def backward(self) -> Schedule:
        """The same steps, the keys travelling the other way round."""
        return dataclasses.replace(self, steps=(self.steps[0], *self.steps[:0:-1]))

    def hop(self, index: int) -> int:
        """How many devices on the keys travel after a step, 1 to n - 1; 0 after the last."""
        if index + 1 == len(self.steps):
            return 0
        return (self.steps[index + 1].shift - self.steps[index].shift) % self.devices

    def run_from(self, index: int) -> int:
        """How many steps from this one on compute the same with the same hop after all but the last: a loop."""
        first, hop = self.steps[index], self.hop(index)
        end = index + 1
        while end < len(self.steps) and self.hop(end - 1) == hop:
            step = self.steps[end]
            if (step.near, step.far) != (first.near, first.far):
                break
            end += 1
        return end - index


def schedule(length: int, devices: int, order: str, balance: bool | None, causal: bool, window: Window) -> Schedule:
    """The ring's schedule for a sequence of `length` over so many devices; the arguments are checked by the caller."""
    below, above = span(causal, 0, window)
    # A side that reaches beyond the ends of the sequence limits nothing.
    below = -FAR if below <= 1 - length else below
    above = FAR if above >= length - 1 else above
    local = length // devices
    grows = below == -FAR and above == 0  # the work of a query grows with its position
    if balance and not grows:
        raise rule_error(
            "balance=True is for causal attention without a window: zigzag order does not balance other rules",
            f"causal={causal}, window={window}",
            "leave balance at None",
        )
    if balance and local % 2:
        raise rule_error(
            "A balanced ring halves each device's part of the sequence",
            f"a length of {length} over {devices} devices, {local} each",
            f"pad to a multiple of {2 * devices}, or pass balance=False",
        )
    if below == -FAR and above == FAR:  # any order is right
        whole = Piece((0, local), (0, local))
        return Schedule(devices, order, False, tuple(Step(shift, whole, whole) for shift in range(devices)))
    if grows and order == "zigzag" and balance is False:
        raise rule_error("Arrays in zigzag order are balanced as they are", "balance=False", "leave balance at None")
    if grows and (order == "zigzag" or balance or (balance is None and local % 2 == 0)):
        return Schedule(devices, "zigzag", order != "zigzag", _zigzag_steps(local, devices))
    return Schedule(devices, "contiguous", order != "contiguous", _contiguous_steps(local, devices, below, above))


def _zigzag_steps(local: int, devices: int) -> tuple[Step, ...]:
    """Causal attention in zigzag order: half a block of products at every step, whichever device it is.

    Against keys of a device before it, both chunks of queries see the early chunk of keys and not the late one;
    against keys of a device after it, the late chunk of queries sees both and the early one neither. On its own keys
    a device's two chunks lie in the order of their positions, so the rule is the causal one.
    """
    half = local // 2
    own = Piece((0, local), (0, local), causal=True)
    near, far = Piece((0, local), (0, half)), Piece((half, local), (0, local))
    return Step(0, own, None), *(Step(shift, near, far) for shift in range(1, devices))


def _contiguous_steps(local: int, devices: int, below: int, above: int) -> tuple[Step, ...]:
    """Steps in contiguous order, less those where no device has anything to compute."""

    def piece(distance: int) -> Piece | None:
        """The keys lie `distance` positions before the queries: columns - rows is within (below, above) + distance."""
        farthest = local - 1
        if above + distance < -farthest or below + distance > farthest:
            return None
        left = None if below + distance <= -farthest else -below
        right = None if above + distance >= farthest else above
        rows = columns = (0, local)
        if left is None and right is None:
            return Piece(rows, columns)
        causal = right == 0
        window = None if causal and left is None else (left, right)
        return Piece(rows, columns, causal, distance, window)

    made = (Step(s, piece(s * local), None if s == 0 else piece((s - devices) * local)) for s in range(devices))
    return tuple(step for step in made if step.near is not None or step.far is not None)


def ring_load(
    length: int,
    devices: int,
    *,
    order: str = "contiguous",
    balance: bool | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
) -> np.ndarray:
    """Pairs of query and key that each device works on at each step of the ring, as [devices, steps].

    The arguments are those of `sequence_parallel_attention`. A step waits for the slowest device.

    >>> ring_load(8, 2, causal=True)
    array([[10,  8],
           [10,  8]])
    >>> ring_load(8, 2, causal=True, balance=False)
    array([[10,  0],
           [10, 16]])
    """
    check_length(length, devices, order)
    made = schedule(length, devices, order, balance, causal, inputs.window_sides(window))
    pieces = ([step.piece(device) for step in made.steps] for device in range(devices))
    return np.array([[0 if piece is None else piece.pairs for piece in row] for row in pieces])


def check_length(length: int, devices: int, order: str) -> None:
    """Refuse a length that does not split evenly, in the order that it is in."""
    if order not in ORDERS:
        raise unknown_name("order of a split sequence", order, ORDERS)
    parts = 2 * devices if order == "zigzag" else devices
    if length % parts or length < parts:
        each = "two chunks" if order == "zigzag" else "one part"
        raise rule_error(
            f"The sequence is split evenly, {each} a device, here {parts} parts",
            f"a length of {length}",
            f"pad to {max(-(-length // parts), 1) * parts} and give the padding a segment id of its own",
        )
