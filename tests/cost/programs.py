"""Small programs of one chip, written by hand."""

from __future__ import annotations

import math
from typing import Any

from capibara.program.chip import Buffer, ChipProgram, Collective, Loop, Step

_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4}


class Maker:
    """Buffers get the next number; steps are appended in order."""

    def __init__(self) -> None:
        self.buffers: dict[int, Buffer] = {}
        self.arguments: list[int] = []
        self.steps: list[Step | Loop] = []

    def buffer(self, *shape: int, dtype: str = "float32", name: str = "", argument: bool = False) -> int:
        id = len(self.buffers)
        size = float(math.prod(shape) * _BYTES[dtype])
        place = len(self.arguments) if argument else None
        self.buffers[id] = Buffer(id, size, shape, dtype, name or f"b{id}", argument=place)
        if argument:
            self.arguments.append(id)
        return id

    def step(self, primitive: str, reads: tuple[int, ...], *writes: int, **more: Any) -> Step:
        made = Step(primitive, more.pop("name", primitive), reads, writes, **more)
        self.steps.append(made)
        return made

    def product(self, a: int, b: int, out: int, *sizes: int) -> Step:
        batch, m, n, k = (1, *sizes) if len(sizes) == 3 else sizes
        return self.step(
            "dot_general",
            (a, b),
            out,
            flops=2.0 * batch * m * n * k,
            matrix=True,
            dtype=self.buffers[a].dtype,
            sizes=(batch, m, n, k),
        )

    def collective(self, kind: str, axes: tuple[str, ...], read: int, write: int) -> Step:
        size = self.buffers[write if kind == "all_gather" else read].bytes
        return self.step(kind, (read,), write, collective=Collective(kind, axes, size, why="by hand"))

    def program(self, *outputs: int, donated: tuple[int, ...] = ()) -> ChipProgram:
        return ChipProgram(tuple(self.steps), self.buffers, tuple(self.arguments), outputs, donated)


def layers(trips: int = 4, width: int = 1024, rows: int = 512, exchange: str | None = None) -> ChipProgram:
    """x = gelu-like(x @ w[i]) over stacked weights, the input of each layer kept; optionally w gathered first."""
    m = Maker()
    shards = 4 if exchange == "all_gather" else 1
    x = m.buffer(rows, width, dtype="bfloat16", argument=True, name="x")
    w = m.buffer(trips, width // shards, width, dtype="bfloat16", argument=True, name="w")
    x_in, x_out = m.buffer(rows, width, dtype="bfloat16"), m.buffer(rows, width, dtype="bfloat16")
    slice_w = m.buffer(width // shards, width, dtype="bfloat16")
    whole_w = slice_w
    if exchange == "all_gather":
        whole_w = m.buffer(width, width, dtype="bfloat16", name="gathered")
        m.collective("all_gather", ("data",), slice_w, whole_w)
    made = m.buffer(rows, width, dtype="bfloat16", name="made")
    m.product(x_in, whole_w, made, rows, width, width)
    if exchange == "all_reduce":
        partial, made = made, m.buffer(rows, width, dtype="bfloat16", name="reduced")
        m.collective("all_reduce", ("data",), partial, made)
    m.step("tanh", (made,), x_out, flops=8.0 * rows * width)
    body, m.steps = tuple(m.steps), []
    kept = m.buffer(trips, rows, width, dtype="bfloat16", name="kept")
    result = m.buffer(rows, width, dtype="bfloat16", name="result")
    m.steps.append(
        Loop(
            trips,
            body,
            reads=(x, w),
            writes=(result, kept),
            carried=((x, x_in), (result, x_out)),
            sliced=((w, slice_w),),
            stacked=((x_in, kept),),
            name="layers",
        )
    )
    return m.program(result, kept)
