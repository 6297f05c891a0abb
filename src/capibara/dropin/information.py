"""What is attached, what runs on it, and what is switched on now."""

from __future__ import annotations

import math
from typing import Any

import jax

from capibara.dropin.installation import versions
from capibara.errors import ImplementationRefused
from capibara.memory.active import memory_optimized
from capibara.mesh import context

__all__ = ["get_backend_info", "get_optimization_status"]

# The documented keys that stand for a family of kernels.
_FAMILIES = {"flash_attention": "attention", "parallel_scan": "scan", "vq_kernels": "vq"}


def get_backend_info() -> dict[str, Any]:
    """The backend in use and what capibara has for it.

    `tpu_optimized` says whether dispatch is on where this is called; `custom_kernels`, whether it would pick
    a kernel rather than XLA for some listed workload on this platform; `memory_limit_gb`, what programs may
    allocate on a device, nan where the platform does not say.
    """
    from capibara.hardware import devices

    device = devices.default()
    limit = device.memory_limit_bytes
    return {
        "name": "capibara.jax",
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "tpu_optimized": context.active(),
        "custom_kernels": _picks_kernels(),
        "memory_limit_gb": math.nan if limit is None else limit / 2**30,
        "capabilities": _capabilities(),
        "versions": versions(),
    }


def get_optimization_status() -> dict[str, bool]:
    """What is true where this is called: dispatch on, kernels picked by it, memory managed.

    Memory is managed inside of a `TpuMemoryManager`'s context, and while a cache is open or a tensor offloaded.
    """
    return {
        "tpu_optimized": context.active(),
        "custom_kernels_active": context.active() and _picks_kernels(),
        "memory_optimized": memory_optimized(),
    }


def _capabilities() -> dict[str, bool]:
    from capibara.kernels import registry

    ops = registry()
    families = {op.family for op in ops.values()}
    return {**{key: family in families for key, family in _FAMILIES.items()}, **dict.fromkeys(ops, True)}


def _picks_kernels() -> bool:
    """Whether dispatch would take one of our kernels for any of the workloads that ops list."""
    from capibara.kernels import registry
    from capibara.kernels.core.dispatch import select

    for op in registry().values():
        for case in op.cases:
            params: dict[str, Any] = dict(case.params)
            try:
                picked = select(op.call(*case.args(), **params)).implementation
            except ImplementationRefused:  # nothing takes this workload here
                continue
            if op.implementations[picked].kernel:
                return True
    return False
