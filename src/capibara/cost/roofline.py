"""Seconds of one pass on one chip: the slowest of its matrix units, its vector units and its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from capibara.cost.efficiency import Efficiency
from capibara.cost.fusion import Pass, is_kernel
from capibara.hardware.facts import Chip, dtype_key
from capibara.program.chip import Buffer, Step

__all__ = ["HOST", "Work", "attention_factors", "fill", "matrix_peak", "on_matrix_units", "pass_work", "whole_tiles"]

HOST = ("host_to_device", "device_to_host")
"""Steps that move an array between the host's memory and the chip."""
# Rows of queries that one block of a flash attention kernel takes.
_ATTENTION_ROWS = 128
# The shortest part that a reduction is split into, where there are few tiles.
_SPLIT = 512
# Tiles of a Hopper product: rows, columns, and how near the best of them it runs when all units are busy.
_HOPPER_TILES = ((128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.6))


# Ops whose flops are products; the others' are vector work whatever dtype their cost names.
MATRIX_OPS = ("attention", "gemm", "ssd", "conv2d", "cross_entropy", "nearest")


def on_matrix_units(step: Step) -> bool:
    """Whether a step's flops run on the matrix units. A kernel's body does not always show it; its op's name does."""
    return step.matrix or (is_kernel(step) and any(word in (step.op or "") for word in MATRIX_OPS))


class Work(NamedTuple):
    """A pass as seconds at the chip's full peaks, with what to divide each by."""

    matrix: float
    vector: float
    memory: float
    fixed: float
    """Seconds that no efficiency changes: launches, fills and drains."""
    kernel: bool
    """Whether the bytes are moved by a kernel of this library."""
    own_matrix: float | None
    """A kernel's own share of the matrix peak, where it is known."""
    flops: float
    bytes: float
    host: float = 0.0
    """Seconds between the host's memory and the chip."""

    def seconds(self, table: Efficiency, level: str = "mid") -> float:
        """At the table's "low", "mid" or "high" factors."""
        return max(self._units(table, level)) + self.fixed

    def parts(self, table: Efficiency, level: str = "mid") -> dict[str, float]:
        """Seconds of each unit alone."""
        return dict(zip(("matrix", "vector", "memory", "host"), self._units(table, level), strict=True))

    def _units(self, table: Efficiency, level: str) -> tuple[float, float, float, float]:
        memory = getattr(table.kernel_memory if self.kernel else table.memory, level)
        matrix = getattr(table.matrix, level)
        if self.own_matrix is not None:
            matrix = self.own_matrix * matrix / table.matrix.mid
        return self.matrix / matrix, self.vector / getattr(table.vector, level), self.memory / memory, self.host


def matrix_peak(chip: Chip, dtype: str) -> float:
    """Flops a second of a product with operands of this dtype, at jax's default precision.

    A TPU multiplies float32 operands in one bfloat16 pass and a GPU in tfloat32 unless a higher precision is asked
    for. A dtype without matrix units of its own is widened: it runs at the rate of bfloat16.
    """
    key = dtype_key(dtype)
    flops = chip.flops
    if key == "float32":
        if chip.platform == "tpu":
            key = "bfloat16"
        elif "tfloat32" in flops:
            key = "tfloat32"
    if key in flops:
        return flops[key]
    return flops.get("bfloat16") or next(iter(flops.values()))


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def fill(chip: Chip, sizes: tuple[int, ...]) -> float:
    """The share of the matrix units' work that is not padding, for a product of (batch, m, n, k)."""
    if len(sizes) != 4 or min(sizes) < 1:
        return 1.0
    batch, m, n, k = sizes
    if chip.platform == "gpu":
        return _fill_gpu(chip.cores_per_chip, batch, m, n, k)
    if chip.platform != "tpu":
        return 1.0
    unit = (chip.mxu_shape or (128, 128))[0]
    # The unit holds a block of k by n and streams rows through it; the compiler may swap the operands.
    rows_m = _up(m, 8) * _up(n, unit)
    rows_n = _up(n, 8) * _up(m, unit)
    return (m * n * k) / (min(rows_m, rows_n) * _up(k, unit))


def _fill_gpu(units: int, batch: int, m: int, n: int, k: int) -> float:
    best = 0.0
    useful = float(batch * m * n * k)
    for rows, columns, speed in _HOPPER_TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        # Few tiles: the reduction is split so that every unit has some of it.
        splits = max(1, min(units // tiles, -(-k // _SPLIT)))
        depth = max(_up(-(-k // splits), 64), min(_SPLIT, _up(k, 64)))
        waves = -(-tiles * splits // units)
        work = waves * units * rows * columns * depth
        best = max(best, min(1.0, speed * useful / work))
    return best


def _attention(step: Step, buffers: Mapping[int, Buffer], chip: Chip, table: Efficiency) -> tuple[float, float, float]:
    """(share of the peak, fixed seconds, flops more than counted) of a flash attention step, from its operands."""
    shapes = [buffers[read].shape for read in step.reads[:2]]
    if len(shapes) < 2 or len(shapes[0]) != 4 or len(shapes[1]) != 4:
        return table.attention[0][1], 0.0, 1.0
    batch, heads, rows, head = shapes[0]
    columns = shapes[1][2]
    whole = (10.0 if step.backward else 4.0) * batch * heads * rows * columns * head
    share, fixed = attention_factors(batch * heads * rows, head, step.backward, chip, table)
    # Half of the pairs: a causal mask.
    return share, fixed, whole_tiles(columns) if step.flops < 0.75 * whole else 1.0


def whole_tiles(columns: int) -> float:
    """A causal mask cuts blocks in half along the diagonal, and the halves are computed whole: flops more."""
    return 1 + _ATTENTION_ROWS / max(columns, _ATTENTION_ROWS)


def attention_factors(rows: int, head: int, backward: bool, chip: Chip, table: Efficiency) -> tuple[float, float]:
    """(share of the peak, fixed seconds) for so many rows of queries over batch and heads, of one head size."""
    nearest = min(table.attention, key=lambda row: abs(math.log2(max(head, 1) / row[0])))
    tiles = rows / _ATTENTION_ROWS
    each = table.attention_tile_seconds[1 if backward else 0] * max(1.0, head / 128)
    # A GPU runs one block a unit at a time; a TPU's two cores take blocks in turn.
    return nearest[2 if backward else 1], each * tiles / max(chip.cores_per_chip, 1)


def pass_work(one: Pass, buffers: Mapping[int, Buffer], chip: Chip, table: Efficiency) -> Work:
    """What a pass costs each unit of the chip. A collective costs nothing here: `links` has its time."""
    if one.kind == "collective":
        return Work(0.0, 0.0, 0.0, 0.0, False, None, 0.0, 0.0)
    matrix = vector = flops = host = 0.0
    own: float | None = None
    fixed = table.launch_seconds
    for step in one.steps:
        flops += step.flops
        if step.primitive in HOST:
            host += sum(buffers[written].bytes for written in step.writes) / table.host_bandwidth
        if not on_matrix_units(step):
            vector += step.flops / table.vector_flops
            continue
        seconds = step.flops / matrix_peak(chip, step.dtype)
        if is_kernel(step) and "attention" in (step.op or ""):
            own, extra, more = _attention(step, buffers, chip, table)
            fixed += extra
            seconds *= more
        else:
            seconds /= fill(chip, step.sizes)
            if step.primitive == "conv_general_dilated":
                # One of few channels a group is not worth the matrix units, and is computed like any sum.
                seconds = min(seconds, step.flops / table.vector_flops)
        matrix += seconds
    return Work(matrix, vector, one.bytes / chip.hbm_bandwidth, fixed, one.kind == "op", own, flops, one.bytes, host)
