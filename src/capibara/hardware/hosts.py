"""The host CPU as a chip: measured once a process, because no table can know the machine it runs on."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

from capibara.hardware.facts import Chip, Efficiency, Factor, MiB

__all__ = ["host", "host_memory_bytes"]

# Large enough to keep every core of a small machine busy, small enough to finish in tens of milliseconds.
_MATMUL_SIZE = 768
# Larger than the last-level cache of most hosts, so that the copy reaches memory.
_COPY_BYTES = 64 * MiB
_REPEATS = 3
# The host's figures are measured rates already, so most of them is what programs get.
_TOLD = Factor(0.3, 0.6, 1.0, "predicted: the host's own short measurement; XLA's CPU code varies")


def _best_seconds(work: Callable[[], object]) -> float:
    """The fastest of a few runs: what other processes take away is not a property of the machine."""
    work()
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def host_memory_bytes() -> int:
    """Physical memory of this host, from the operating system (Linux and macOS both answer this)."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def host() -> Chip:
    """This host's CPU, all cores together: numpy matrix products and a large copy, timed (`measured=True`).

    bfloat16 carries the float32 rate, since XLA widens it on a CPU. The figures are what numpy reaches
    here now, an estimate of the peak from below, and not a publication's.
    """
    import numpy as np

    flops: list[tuple[str, float]] = []
    for name in ("float32", "float64"):
        a = np.full((_MATMUL_SIZE, _MATMUL_SIZE), 0.5, dtype=name)
        out = np.empty_like(a)
        seconds = _best_seconds(functools.partial(np.matmul, a, a, out))
        flops.append((name, 2 * _MATMUL_SIZE**3 / seconds))
    flops.append(("bfloat16", flops[0][1]))

    source = np.ones(_COPY_BYTES // 8)
    target = np.empty_like(source)
    # A copy reads every byte and writes every byte.
    bandwidth = 2 * _COPY_BYTES / _best_seconds(functools.partial(np.copyto, target, source))

    return Chip(
        name="cpu",
        device_kinds=("cpu",),
        aliases=("host",),
        platform="cpu",
        architecture="cpu",
        flops_by_dtype=tuple(flops),
        vector_flops=flops[0][1] / 4,
        hbm_bytes=host_memory_bytes(),
        hbm_bandwidth=bandwidth,
        host_bandwidth=16e9,
        network_bandwidth=1e9,
        efficiency=Efficiency(_TOLD, _TOLD, _TOLD, _TOLD, hop_seconds=20e-6, launch_seconds=5e-6),
        cores_per_chip=os.cpu_count() or 1,
        source=(f"measured here with numpy: matmul of {_MATMUL_SIZE}, copy of {_COPY_BYTES // MiB} MiB",),
        measured=True,
    )
