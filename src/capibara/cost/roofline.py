"""Seconds of one pass on one chip: the slowest of its matrix units, its vector units and its memory.

What an op's kernel takes, its op says: the work (`Op.cost`) and what of the chip's peaks it reaches (`Op.efficiency`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from capibara.cost.fusion import Pass
from capibara.hardware.facts import Chip
from capibara.hardware.products import fill
from capibara.kernels.core.spec import Call, CallEfficiency
from capibara.program.chip import Buffer

__all__ = ["HOST", "Work", "call_work", "pass_work"]

HOST = ("host_to_device", "device_to_host")
"""Steps that move an array between the host's memory and the chip."""


class Work(NamedTuple):
    """Work as seconds at the chip's full peaks, with what to divide each by."""

    chip: Chip
    matrix: float = 0.0
    vector: float = 0.0
    memory: float = 0.0
    fixed: float = 0.0
    """Seconds that no efficiency changes: launches, fills and drains."""
    kernel: bool = False
    """Whether the bytes are moved by a kernel of this library."""
    own_matrix: float | None = None
    """A kernel's own share of the matrix peak, where it is known."""
    flops: float = 0.0
    bytes: float = 0.0
    host: float = 0.0
    """Seconds between the host's memory and the chip."""

    def seconds(self, level: str = "mid") -> float:
        """At the chip's "low", "mid" or "high" factors."""
        return max(self._units(level)) + self.fixed

    def parts(self, level: str = "mid") -> dict[str, float]:
        """Seconds of each unit alone."""
        return dict(zip(("matrix", "vector", "memory", "host"), self._units(level), strict=True))

    def _units(self, level: str) -> tuple[float, float, float, float]:
        reached = self.chip.efficiency
        memory = getattr(reached.kernel_memory if self.kernel else reached.memory, level)
        matrix = getattr(reached.matrix, level)
        if self.own_matrix is not None:
            matrix = self.own_matrix * matrix / reached.matrix.mid
        return self.matrix / matrix, self.vector / getattr(reached.vector, level), self.memory / memory, self.host


def call_work(call: Call, chip: Chip) -> Work:
    """What one call of an op costs each unit of the chip."""
    cost, reached = call.op.cost(call), call.op.efficiency(call, chip)
    return Work(
        chip,
        matrix=cost.matrix_flops / chip.product_flops(cost.dtype) / reached.filled,
        vector=cost.vector_flops / chip.vector_flops,
        memory=cost.bytes / chip.hbm_bandwidth / reached.memory,
        fixed=chip.efficiency.launch_seconds + reached.seconds,
        kernel=True,
        own_matrix=reached.matrix,
        flops=cost.flops,
        bytes=cost.bytes,
    )


def pass_work(one: Pass, buffers: Mapping[int, Buffer], chip: Chip) -> Work:
    """What a pass costs each unit of the chip. A collective costs nothing here: `links` has its time."""
    if one.kind == "collective":
        return Work(chip)
    matrix = vector = flops = host = 0.0
    reached = CallEfficiency()
    for step in one.steps:
        flops += step.flops
        vector += (step.flops - step.matrix_flops) / chip.vector_flops
        if step.primitive in HOST:
            host += sum(buffers[written].bytes for written in step.writes) / chip.host_bandwidth
        if step.call is not None:
            reached = step.call.op.efficiency(step.call, chip)
        if step.matrix:
            filled = fill(chip, step.sizes) if step.call is None else reached.filled
            seconds = step.matrix_flops / chip.product_flops(step.dtype) / filled
            if step.primitive == "conv_general_dilated":
                # One of few channels a group is not worth the matrix units, and is computed like any sum.
                seconds = min(seconds, step.flops / chip.vector_flops)
            matrix += seconds
    return Work(
        chip,
        matrix,
        vector,
        one.bytes / chip.hbm_bandwidth / reached.memory,
        chip.efficiency.launch_seconds + reached.seconds,
        one.kind == "op",
        reached.matrix,
        flops,
        one.bytes,
        host,
    )
