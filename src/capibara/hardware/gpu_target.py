"""What XLA's compiler for GPUs wants to know of one that is not attached.

The numbers of a chip's row (`chips`) and, below, the limits that all chips of an architecture share. They decide what
is fused and how large tiles are; an attached GPU tells its own.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import NamedTuple

from capibara.errors import rule_error
from capibara.hardware.facts import Chip

__all__ = ["target_config"]

_KIB, _MIB = 1 << 10, 1 << 20
_CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_OLDEST_CUDNN = "9.12"  # that jax's plugin for CUDA 13 takes
_CUDA = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")
_OLDEST_CUDA = "13.0"  # without a version XLA takes it for one that has no fp8 products


class _Architecture(NamedTuple):
    """CUDA C++ Programming Guide, technical specifications by compute capability; L2 by the architecture papers."""

    capability: tuple[int, int]
    shared_bytes: int
    """Of a multiprocessor; a block may have all but 1 KiB of it."""
    l2_bytes: int
    lanes: int


_ARCHITECTURES = {
    "ampere": _Architecture((8, 0), 164 * _KIB, 40 * _MIB, 64),
    "hopper": _Architecture((9, 0), 228 * _KIB, 50 * _MIB, 128),
}


def target_config(chip: Chip) -> str:
    """The chip as `target_config` of `jax.experimental.topologies.get_topology_desc` wants it.

    Examples:
        >>> from capibara.hardware.chips import chip
        >>> "cuda_compute_capability { major: 9 minor: 0 }" in target_config(chip("h200"))
        True
    """
    known = _ARCHITECTURES.get(chip.architecture)
    if known is None:
        raise rule_error(
            f"A GPU that is not attached is one of {', '.join(_ARCHITECTURES)}", chip.name, "name h200 or a100_80gb"
        )
    major, minor = _version_of(_CUDNN, _OLDEST_CUDNN)
    cuda = _version_of(_CUDA, _OLDEST_CUDA)
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * _KIB}
  shared_memory_per_core: {known.shared_bytes}
  shared_memory_per_block_optin: {known.shared_bytes - _KIB}
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: {chip.cores_per_chip}
  fpus_per_core: {known.lanes}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  memory_bandwidth: {int(chip.hbm_bandwidth)}
  device_memory_size: {chip.usable_hbm_bytes}
  l2_cache_size: {known.l2_bytes}
  clock_rate_ghz: {(chip.clock_hz or 0.0) / 1e9}
  cuda_compute_capability {{ major: {known.capability[0]} minor: {known.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {major} minor: {minor} }}
runtime_version {{ major: {cuda[0]} minor: {cuda[1]} }}
device_description_str: "{chip.device_kinds[0]}"
"""


def _version_of(packages: Sequence[str], oldest: str) -> tuple[int, int]:
    """Of the library beside the compiler: what is compiled for it may be asked of it."""
    version = oldest
    for package in packages:
        try:
            version = importlib.metadata.version(package)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
