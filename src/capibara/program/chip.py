"""What one chip of a mesh does when a program runs: its steps, its buffers, and what it sends over the links.

This is what `spread` makes of a traced program and a layout, and what the cost model reads: time from the steps, memory
from the buffers' lifetimes. Sizes are one chip's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Buffer", "ChipProgram", "Collective", "Loop", "Step"]


@dataclass(frozen=True)
class Buffer:
    """An array that some step writes, or that the program is given."""

    id: int
    bytes: float
    """Of one chip's part."""
    shape: tuple[int, ...]
    """Of one chip's part."""
    dtype: str
    name: str = ""
    """What a person would look for: an argument's path, or the primitive and the line that made it."""
    argument: int | None = None
    """Which flat argument it is."""
    output: bool = False
    host: bool = False
    """In the host's memory: it does not count against the chip's."""


@dataclass(frozen=True)
class Collective:
    """One exchange among the chips along some mesh axes."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or permute."""
    axes: tuple[str, ...]
    """Mesh axes it runs along."""
    bytes: float
    """Of one chip's operand (all_reduce, reduce_scatter, all_to_all, permute) or of its result (all_gather)."""
    why: str = ""
    """What forced it: the line, the two layouts that met."""


@dataclass(frozen=True)
class Step:
    """One operation. A collective has no flops; a computation has no collective."""

    primitive: str
    name: str
    """The scope and line it comes from."""
    reads: tuple[int, ...]
    """Buffers, by id."""
    writes: tuple[int, ...]
    flops: float = 0.0
    """On the matrix units when `matrix` is true, else on the vector units."""
    matrix: bool = False
    dtype: str = "float32"
    """Of the operands of a matrix product, which decides its peak."""
    sizes: tuple[int, ...] = ()
    """Of a matrix product on one chip: batch, m, n, k. Small ones fill the units badly."""
    bytes: float | None = None
    """Bytes moved, where they are not those of all buffers read and written (a gather, a kernel with its own cost)."""
    op: str | None = None
    """The capibara op it belongs to, whose own cost was used."""
    collective: Collective | None = None
    backward: bool = False
    recompute: bool = False
    """Done again in the backward pass because it was not kept: it does not count as the model's own work."""
    vector_flops: float = 0.0
    """Of the flops of a kernel that multiplies matrices, what is other work."""
    call: Any = field(default=None, compare=False, repr=False)
    """Of an op's kernel: the `Call` that it computes, on one chip's part."""

    @property
    def matrix_flops(self) -> float:
        return self.flops - self.vector_flops if self.matrix else 0.0


@dataclass(frozen=True)
class Loop:
    """Steps that run `trips` times, one after another: a scan or a while loop.

    `carried` pairs (outer buffer, body buffer) that are one memory, two pairs for each value that is carried: (what it
    starts from, what a trip begins with), (what is left, what a trip ends with). A value that only enters is used by
    its own id. `sliced` pairs (outer, body) where the body sees
    a slice of the outer one each trip; `stacked` pairs (body, outer) where each trip writes a slice of the outer one.
    """

    trips: int
    body: tuple[Step | Loop, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    carried: tuple[tuple[int, int], ...] = ()
    sliced: tuple[tuple[int, int], ...] = ()
    stacked: tuple[tuple[int, int], ...] = ()
    name: str = ""
    backward: bool = False


@dataclass(frozen=True)
class ChipProgram:
    """The whole program of one chip, in the order in which it was traced."""

    steps: tuple[Step | Loop, ...]
    buffers: dict[int, Buffer]
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...] = ()
    """Positions in `arguments` whose memory outputs of the same shape and type take over."""
    notes: tuple[str, ...] = field(default=())
    """What was guessed: a primitive without a rule, a loop of unknown length."""
    constants: tuple[int, ...] = ()
    """Buffers that are part of the program: arrays that the function closes over."""
    loose: bool = False
    """Whether the compiler, which nothing tells how activations lie, may hold the whole batch on every chip."""

    def walk(self) -> Iterator[tuple[Step, int]]:
        """Every step with how often it runs."""
        yield from _walk(self.steps, 1)


def _walk(steps: tuple[Step | Loop, ...], times: int) -> Iterator[tuple[Step, int]]:
    for step in steps:
        if isinstance(step, Loop):
            yield from _walk(step.body, times * step.trips)
        else:
            yield step, times
