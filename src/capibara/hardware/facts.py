"""What is known of a chip: the row of the table in `chips`, and what `hosts` measures."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from capibara.errors import rule_error

__all__ = ["GIGA", "TERA", "Chip", "Efficiency", "Factor", "GiB", "KiB", "MiB", "SliceFamily", "dtype_key", "squash"]

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


def squash(name: str) -> str:
    """A spelling that "TPU v4", "tpu_v4", "tpu-v4" and "v4" share."""
    bare = re.sub(r"[\s_\-]+", "", name.lower())
    return re.sub(r"^(nvidia|googlecloud|google|cloud)?(tpu)?", "", bare)


@dataclass(frozen=True)
class Factor:
    """A share of a peak, as a range, with where it comes from.

    "measured" was run on that chip by this project (benchmarks/results); "predicted" was not: it is published by
    others, read from the compiler's schedules, or assumed, and says which.
    """

    low: float
    mid: float
    high: float
    source: str
    measured: bool = False


@dataclass(frozen=True)
class Efficiency:
    """What share of its peaks a chip's programs reach, and what starting and waiting cost them.

    What single ops reach beside that, the ops say: `Op.efficiency`. A user's own runs correct what follows from both:
    `capibara.cost.calibration`.
    """

    matrix: Factor
    """Of the matrix peak, after sizes were padded to the units (`capibara.hardware.products.fill`)."""
    memory: Factor
    """Of the memory's bandwidth, for what XLA writes."""
    kernel_memory: Factor
    """The same for this library's own kernels."""
    links: Factor
    """Of the links' bandwidth."""
    hop_seconds: float
    """Latency of one hop between neighbours."""
    launch_seconds: float
    """What starting one pass costs."""
    reserved_bytes: float = 0.0
    """What a program takes beside its buffers: its code, and scratch of the collectives."""
    memory_margin: float = 0.05
    """Share by which predicted bytes may be too low."""
    vector: Factor = Factor(0.35, 0.6, 0.9, "predicted: how well compilers pack vector units; assumed")
    """Of the vector units' peak."""
    overlap: float = 0.85
    """Share of an exchange that can hide behind products which does. Assumed: the first gather of a loop and the last
    reduction have nothing beside them, and both take memory bandwidth from the products."""


@dataclass(frozen=True)
class SliceFamily:
    """How the slices of one TPU generation are shaped and named."""

    prefix: str
    libtpu_prefix: str
    """What libtpu calls it."""
    per_chip: int
    """What one chip adds to the number in the name."""
    small: tuple[tuple[int, ...], ...]
    """Grids below one cube (3-D), or every grid there is (2-D)."""
    max_chips: int
    chip_config: str = "default"
    wrap_length: int | None = None
    """2-D: an axis wraps when it spans the whole pod, which is this long."""
    host_chips: int = 4
    """Chips of the largest slice that is one host."""
    accelerator_prefix: str | None = None
    """What Google's command line calls it, where that is another word."""
    other_prefixes: tuple[str, ...] = ()

    @property
    def cubes(self) -> bool:
        """Whether larger slices are put together from cubes of 4x4x4 chips."""
        return self.wrap_length is None


@dataclass(frozen=True)
class Chip:
    """What one chip can do: the one row that a chip has. Flops and bytes a second, bytes, hertz; None where it is not
    published."""

    name: str
    device_kinds: tuple[str, ...]
    """What jax's `device.device_kind` says for this chip."""
    platform: str
    architecture: str
    """Which kernels are written for it: "tpu", "hopper", "ampere", "cpu"."""
    flops_by_dtype: tuple[tuple[str, float], ...]
    """Pairs rather than a dict, so that a chip hashes and can be a static argument; read `flops`."""
    vector_flops: float
    """Peak of the vector units, flops a second."""
    hbm_bytes: int
    hbm_bandwidth: float
    host_bandwidth: float
    """Bytes a second between the host's memory and one chip. Predicted: its PCIe generation's sixteen lanes."""
    network_bandwidth: float
    """Bytes a second a chip between hosts or slices. Assumed: clouds publish the host's card, not what a program gets
    of it."""
    efficiency: Efficiency
    source: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    usable_hbm_bytes: int | None = None
    """What a program can allocate after the runtime has taken its share."""
    vmem_bytes: int | None = None
    """On-chip vector memory of one TensorCore; for a GPU, shared memory that one block can use."""
    cores_per_chip: int = 1
    """TensorCores of a TPU chip; streaming multiprocessors of a GPU."""
    lanes: int = 1
    """Columns of a TPU's vector register, which arrays are padded to; float32 units of one GPU multiprocessor."""
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
    slices: SliceFamily | None = None
    """The slices that it is rented in; None for what is no TPU."""
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

    @functools.cached_property
    def spellings(self) -> frozenset[str]:
        """Every name of it, squashed."""
        return frozenset(squash(word) for word in (self.name, *self.aliases, *self.device_kinds))

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

    def product_flops(self, dtype: Any = "bfloat16") -> float:
        """Flops a second of a product with operands of this dtype, at jax's default precision.

        A TPU multiplies float32 operands in one bfloat16 pass and a GPU in tfloat32 unless a higher precision is asked
        for. A dtype without matrix units of its own is widened: it runs at the rate of bfloat16.
        """
        key, flops = dtype_key(dtype), self.flops
        if key == "float32":
            key = "bfloat16" if self.platform == "tpu" else "tfloat32" if "tfloat32" in flops else key
        return flops.get(key) or flops.get("bfloat16") or next(iter(flops.values()))

    def roofline_seconds(
        self, flops: float, bytes: float, dtype: Any = "bfloat16", *, vector_flops: float = 0.0
    ) -> float:
        """The least time for this work on one chip: the slowest of the products, the vector work and the memory."""
        vector = vector_flops / self.vector_flops
        return max(flops / self.peak_flops(dtype), vector, bytes / self.hbm_bandwidth)
