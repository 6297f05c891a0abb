"""The figures that the kernel object gives of itself, each measured when it is asked for."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from capibara.surface import workloads
from capibara.surface.figures import LastKernel, memory_in_use
from capibara.surface.products import Settings


class Figures:
    """Memory in use, the rate of the last kernel, and a benchmark of named ones."""

    settings: Settings
    last: LastKernel

    def get_memory_usage(self) -> float:
        """GiB in use on this process's devices; on a CPU, which does not say, the size of the live arrays."""
        return memory_in_use()

    def get_tflops(self) -> float:
        """TFLOP/s of the last kernel that this object ran, outside of jit; nan before any.

        Measured when asked, on operands of the same shapes, drawn anew: the kernel's time, warmed up and waited for.
        """
        return self.last.tflops()

    def benchmark_kernels(self, names: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
        """{name: {throughput, latency_ms, memory_efficiency}} by the object's choices, measured now.

        Throughput is in TFLOP/s, and memory_efficiency a fraction of the chip's bandwidth. Sizes are for the attached
        platform. None measures every kernel.
        """
        return workloads.benchmark(copy.deepcopy(self), self.settings.precision, names)
