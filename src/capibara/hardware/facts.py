"""What is known of a chip: the row of the table in `chips`, and what `hosts` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from capibara.errors import rule_error

__all__ = ["GIGA", "TERA", "Chip", "GiB", "KiB", "MiB", "dtype_key"]

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TERA = 1e12
GIGA = 1e9

_DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "f32": "float32",
    "fp32": "float32",
    "f16": "float16",
    "fp16": "float16",
    "f64": "float64",
    "fp64": "float64",
    "tf32": "tfloat32",
    "s8": "int8",
    "uint8": "int8",
    "s4": "int4",
    "uint4": "int4",
    "fp8": "float8",
    "f8": "float8",
}


def dtype_key(dtype: Any) -> str:
    """The key a dtype has in `Chip.flops`: any of jax's fp8 formats is "float8", "bf16" is "bfloat16"."""
    name = dtype
    if not isinstance(dtype, str):
        # A scalar type such as jnp.bfloat16 carries a dtype; a numpy scalar class has only its own name.
        inner = getattr(dtype, "dtype", dtype)
        name = getattr(inner, "name", None) or getattr(dtype, "__name__", None)
    if not isinstance(name, str):
        rule = "A dtype is a name such as 'bfloat16' or a numpy or jax dtype"
        raise rule_error(rule, repr(dtype), "pass one of those")
    name = name.lower()
    return "float8" if name.startswith("float8") else _DTYPE_ALIASES.get(name, name)


@dataclass(frozen=True)
class Chip:
    """What one chip can do. Flops and bytes a second, bytes, hertz; None where it is not published."""

    name: str
    device_kinds: tuple[str, ...]
    """What jax's `device.device_kind` says for this chip."""
    platform: str
    flops_by_dtype: tuple[tuple[str, float], ...]
    """Pairs rather than a dict, so that a chip hashes and can be a static argument; read `flops`."""
    hbm_bytes: int
    hbm_bandwidth: float
    source: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    usable_hbm_bytes: int | None = None
    """What a program can allocate after the runtime has taken its share."""
    vmem_bytes: int | None = None
    """On-chip vector memory of one TensorCore; for a GPU, shared memory that one block can use."""
    cores_per_chip: int = 1
    """TensorCores of a TPU chip; streaming multiprocessors of a GPU."""
    devices_per_chip: int = 1
    """jax devices that one chip shows up as: one for each TensorCore where the two cannot be fused."""
    mxu_shape: tuple[int, int] | None = None
    mxus_per_core: int | None = None
    matrix_flops_per_cycle: int | None = None
    """bfloat16 flops a cycle of one core; None where units and clock do not give the published peak."""
    clock_hz: float | None = None
    ici_link_bandwidth: float | None = None
    """Bytes a second one way over one chip-to-chip link (for a GPU: all NVLink links together)."""
    ici_links: int | None = None
    torus_dims: int | None = None
    measured: bool = False
    """True for the host CPU, whose figures come from a short run and not from a publication."""

    @property
    def flops(self) -> Mapping[str, float]:
        """Peak flops a second by dtype; a dtype without matrix units has no key."""
        return MappingProxyType(dict(self.flops_by_dtype))

    @property
    def capacity_bytes(self) -> int:
        """Bytes to plan with: what is usable where that is known, all of it otherwise."""
        return self.hbm_bytes if self.usable_hbm_bytes is None else self.usable_hbm_bytes

    @property
    def ridge(self) -> float:
        """Flops a byte of memory traffic above which bfloat16 matrix work is bound by compute."""
        return self.peak_flops("bfloat16") / self.hbm_bandwidth

    def supports(self, dtype: Any) -> bool:
        """Whether the chip has units for matrix products in this dtype."""
        return dtype_key(dtype) in self.flops

    def peak_flops(self, dtype: Any = "bfloat16") -> float:
        """Peak flops a second in this dtype; a ValueError where the chip has no units for it."""
        key = dtype_key(dtype)
        if key not in self.flops:
            raise rule_error(
                f"{self.name} has matrix units for {', '.join(self.flops)} only",
                key,
                f"compute in {next(iter(self.flops))}, or ask `supports` first",
            )
        return self.flops[key]

    def roofline_seconds(self, flops: float, bytes: float, dtype: Any = "bfloat16") -> float:
        """The least time for this work on one chip: the slower of the arithmetic and the memory traffic."""
        return max(flops / self.peak_flops(dtype), bytes / self.hbm_bandwidth)
