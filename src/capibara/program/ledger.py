"""Buffers of one chip, and the exchanges that bring a value from one layout to another."""

from __future__ import annotations

from typing import Any

from capibara.mesh.layout import Layout
from capibara.program.chip import Buffer, Collective, Loop, Step
from capibara.program.choice import Sharding
from capibara.program.graph import Node, Program
from capibara.program.propagate import Placement, place

__all__ = ["Ledger"]


class Ledger:
    """What has been written so far: steps, buffers, which buffer holds which value."""

    def __init__(self, program: Program, layout: Layout) -> None:
        self.program = program
        self.layout = layout
        self.at: Placement = place(program, layout)
        self.buffers: dict[int, Buffer] = {}
        self.next = len(program.values)
        self.notes: dict[str, None] = dict.fromkeys((*program.notes, *self.at.notes))
        self.held: dict[int, int] = {}  # value -> the buffer that holds it
        self.copies: dict[tuple[int, Sharding], int] = {}
        self.pending: dict[int, tuple[Sharding, tuple[int, ...]]] = {}  # value -> its sharding, axes still to be summed
        self.steps: list[Step | Loop] = []
        self.uses = program.uses
        # One chip's part of a value, made for another layout on a mesh of the same sizes.
        self._known: dict[tuple[int, Sharding], Buffer] = program.memo.setdefault(("buffers", self.at.sizes), {})

    def own(self, value: int, sharding: Sharding | None = None, argument: int | None = None, host: bool = False) -> int:
        """The buffer of a value, with the value's own id."""
        sharding = self.at.of[value] if sharding is None else sharding
        if argument is None and not host:
            made = self._known.get((value, sharding))
            if made is None:
                self.buffer(value, value, sharding)
                self._known[value, sharding] = self.buffers[value]
            else:
                self.buffers[value] = made
        else:
            self.buffer(value, value, sharding, argument=argument, host=host)
        self.held[value] = value
        return value

    def buffer(self, number: int, value: int, sharding: Sharding, prefix: str = "", **more: Any) -> None:
        made = self.program.values[value]
        shape = self.at.local(made.shape, sharding)
        size = made.itemsize
        for length in shape:
            size *= length
        self.buffers[number] = Buffer(number, size, shape, made.dtype, f"{prefix}{made.name}", **more)

    def fresh(self, value: int, sharding: Sharding, prefix: str) -> int:
        number = self.next
        self.next += 1
        self.buffer(number, value, sharding, prefix)
        return number

    def fetch(self, value: int) -> None:
        number = self.fresh(value, self.at.of[value], "fetched ")
        self.steps.append(Step("host_to_device", f"fetching {self.program.values[value].name}", (value,), (number,)))
        self.held[value] = number

    def store(self, buffer: int) -> int:
        number, made = self.next, self.buffers[buffer]
        self.next += 1
        self.buffers[number] = Buffer(number, made.bytes, made.shape, made.dtype, made.name, host=True)
        self.steps.append(Step("device_to_host", f"storing {made.name}", (buffer,), (number,)))
        return number

    def moved(self, value: int, wanted: Sharding, why: str, node: Node | None = None) -> int:
        """The buffer that holds a value laid out as wanted, after the exchanges that it takes."""
        if value in self.pending:
            self.settle(value, node)
        mine = self.at.of[value]
        if mine == wanted or all(have in (-1, want) for have, want in zip(mine, wanted, strict=True)):
            return self.held[value]  # as it is, or a part of what the chip has
        key = (value, wanted)
        if key not in self.copies:
            self.copies[key] = self.exchange(value, self.held[value], mine, wanted, (), why, node)
        return self.copies[key]

    def exchange(
        self, value: int, buffer: int, have: Sharding, want: Sharding, summed: tuple[int, ...], why: str,
        node: Node | None, into: int | None = None,
    ) -> int:  # fmt: skip
        """Write the exchanges that take a buffer from one sharding to another; `summed` axes hold partial sums."""
        plan: list[tuple[str, tuple[int, ...]]] = []
        scatter = tuple(axis for axis in summed if want[axis] >= 0)
        reduce = tuple(axis for axis in summed if want[axis] < 0)
        cross = tuple(a for a, (h, w) in enumerate(zip(have, want, strict=True)) if h >= 0 and w >= 0 and h != w)
        gather = tuple(a for a, (h, w) in enumerate(zip(have, want, strict=True)) if h >= 0 and w < 0)
        for kind, axes in (
            ("reduce_scatter", scatter), ("all_reduce", reduce), ("all_to_all", cross), ("all_gather", gather),
        ):  # fmt: skip
            if axes:
                plan.append((kind, axes))
        now = list(have)
        for position, (kind, axes) in enumerate(plan):
            for axis in axes:
                now[axis] = want[axis] if kind in ("reduce_scatter", "all_to_all") else now[axis]
                if kind == "all_gather":
                    now[axis] = -1
            last = position == len(plan) - 1
            # A slice of the result that the chip has anyway comes with the last exchange, and costs nothing.
            target = want if last else tuple(now)
            if last and into is not None:
                number = into
            else:
                number = self.fresh(value, target, f"{kind} of ")
            size = self.buffers[number if kind == "all_gather" else buffer].bytes
            names = tuple(self.at.axes[axis] for axis in axes)
            back = node is not None and node.backward
            again = node is not None and node.recompute
            self.steps.append(
                Step(
                    kind,
                    node.name if node is not None else why,
                    (buffer,),
                    (number,),
                    dtype=self.program.values[value].dtype,
                    collective=Collective(kind, names, size, why),
                    backward=back,
                    recompute=again,
                )
            )
            buffer = number
        return buffer

    def settle(self, value: int, node: Node | None) -> None:
        """Sum the parts of a value whose exchange had waited."""
        have, axes = self.pending.pop(value)
        why = f"partial sums of {self.program.values[value].name}"
        buffer = self.held[value]
        self.own(value)
        self.exchange(value, buffer, have, self.at.of[value], axes, why, node, into=value)
