"""TPUConfig: a pod in figures, the layouts that follow from them, and what is hot on it."""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex

from capibara.errors import rule_error, unknown_name
from capibara.hardware.chips import chip
from capibara.hardware.facts import GiB
from capibara.mesh.mesh import MeshConfig, create_tpu_mesh_config
from capibara.precision import POLICIES

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

__all__ = ["DTYPES", "ScalingConfig", "TPUConfig"]

DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""What parameters and products may be held in, and its bytes."""
_V4 = chip("v4")


@dataclass(frozen=True)
class ScalingConfig:
    """When a place counts as hot."""

    load_threshold: float = 0.8
    """A load above it is a hotspot. Loads may have any unit, fractions of a chip being the usual one."""

    def __post_init__(self) -> None:
        _positive("load_threshold", self.load_threshold, "use 0.8")


@dataclass(frozen=True)
class TPUConfig:
    """So many chips in a mesh, what each can hold and do, and the types a model has on them.

    Examples:
        >>> config = TPUConfig(num_chips=32, topology="4x8")
        >>> tuple(config.get_sharding_spec((64, 128, 512)))
        ('data', None, 'model')
        >>> config.detect_hotspots([[0.5, 0.95], [0.85, 0.1]])
        [(0, 1), (1, 0)]
    """

    num_chips: int = 32
    topology: str = "4x8"
    """Sizes of the mesh axes data, model and, where there is a third, expert; they multiply to `num_chips`."""
    memory_per_chip: float = _V4.hbm_bytes
    """Bytes."""
    flops_per_chip: float = _V4.peak_flops("bfloat16")
    """A second, in `compute_dtype`."""
    compute_dtype: str = "bfloat16"
    param_dtype: str = "float32"
    scaling_config: ScalingConfig = field(default_factory=ScalingConfig)

    def __post_init__(self) -> None:
        if isinstance(self.num_chips, bool) or not isinstance(self.num_chips, SupportsIndex) or self.num_chips < 1:
            raise rule_error("num_chips is a whole number from 1 up", repr(self.num_chips), "use num_chips=32")
        object.__setattr__(self, "num_chips", operator.index(self.num_chips))
        if not isinstance(self.topology, str) or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", self.topology):
            raise rule_error("topology is one to three sizes joined by x", repr(self.topology), 'use "4x8"')
        if math.prod(self.mesh_shape) != self.num_chips:
            raise rule_error(
                f"The sizes of a topology multiply to num_chips={self.num_chips}",
                f"{self.topology!r} = {math.prod(self.mesh_shape)}",
                f"use topology={_squarest(self.num_chips)!r}, or num_chips={math.prod(self.mesh_shape)}",
            )
        _positive("memory_per_chip", self.memory_per_chip, "give bytes, such as 32 * 1024**3")
        _positive("flops_per_chip", self.flops_per_chip, "give flops a second, such as 275e12")
        for name in ("compute_dtype", "param_dtype"):
            object.__setattr__(self, name, _dtype_name(name, getattr(self, name)))
        if not isinstance(self.scaling_config, ScalingConfig):
            raise rule_error(
                "scaling_config is a ScalingConfig", repr(self.scaling_config), "use ScalingConfig(load_threshold=0.8)"
            )

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The topology as numbers."""
        return tuple(map(int, self.topology.split("x")))

    @property
    def use_mixed_precision(self) -> bool:
        """Whether products are computed in a narrower type than parameters are kept in."""
        return DTYPES[self.compute_dtype] < DTYPES[self.param_dtype]

    @property
    def precision(self) -> str:
        """The precision policy with these types, for `tpu_v4_optimization_context(precision=...)`."""
        types = (self.param_dtype, self.compute_dtype)
        found = [one for one in POLICIES.values() if (one.param_dtype, one.compute_dtype) == types]
        if not found:
            raise rule_error(
                "A precision policy has parameters and products both in bfloat16, both in float32, or mixed",
                f"param_dtype={self.param_dtype!r} and compute_dtype={self.compute_dtype!r}",
                "use float32 parameters and bfloat16 products",
            )
        return next(one.name for one in found if not one.rounds_to_fp8)

    @property
    def total_flops(self) -> float:
        """A second, of all chips."""
        return self.num_chips * self.flops_per_chip

    def mfu(self, flops: float, seconds: float) -> float:
        """The part of these chips' peak that a step of so many flops in so many seconds reaches."""
        _positive("seconds", seconds, "give the measured time of a step")
        if flops:  # A step may compute nothing.
            _positive("flops", flops, "give what all chips compute in a step")
        return flops / (seconds * self.total_flops)

    def mesh_config(self, optimization_target: str = "balanced") -> MeshConfig:
        """The mesh of this topology, with the memory of these chips; `.build()` makes it."""
        limit: float = self.get_memory_config()["memory_limit_gb"]
        return create_tpu_mesh_config(self.mesh_shape, optimization_target, limit)

    def get_sharding_spec(self, tensor_shape: Sequence[int]) -> PartitionSpec:
        """The layout of a tensor on this mesh: its first axis over data, its last over model, the rest whole.

        A tensor of one axis is over data. An axis that does not divide over its mesh axis is left whole.
        """
        from jax.sharding import PartitionSpec

        shape = tuple(tensor_shape) if isinstance(tensor_shape, Iterable) else (None,)
        if any(isinstance(n, bool) or not isinstance(n, SupportsIndex) or operator.index(n) < 0 for n in shape):
            raise rule_error("A tensor's shape is whole numbers from 0 up", repr(tensor_shape), "pass array.shape")
        axes = self.mesh_config().axes
        wanted: list[str | None] = [None] * len(shape)
        if shape:
            wanted[0] = "data"
        if len(shape) > 1:
            wanted[-1] = "model"
        fits = [name in axes and size % axes[name] == 0 for name, size in zip(wanted, shape, strict=True)]
        return PartitionSpec(*(name if fit else None for name, fit in zip(wanted, fits, strict=True)))

    def get_memory_config(self) -> dict[str, Any]:
        """What memory there is and what types fill it: a description, from which `mesh_config` takes its limit.

        use_mixed_precision, compute_dtype, param_dtype; memory_per_chip and total_memory in bytes; memory_limit_gb, a
        chip's memory in GiB; max_params, the parameters that fill all chips when nothing else is on them.
        """
        return {
            "use_mixed_precision": self.use_mixed_precision,
            "compute_dtype": self.compute_dtype,
            "param_dtype": self.param_dtype,
            "memory_per_chip": self.memory_per_chip,
            "memory_limit_gb": self.memory_per_chip / GiB,
            "total_memory": self.memory_per_chip * self.num_chips,
            "max_params": int(self.memory_per_chip * self.num_chips // DTYPES[self.param_dtype]),
        }

    def detect_hotspots(self, load: Any) -> list[tuple[int, int]]:
        """The places (i, j) of a load [rows, columns] that are above `scaling_config.load_threshold`, row by row."""
        import numpy as np

        try:
            values = np.asarray(load)
        except ValueError:  # rows of different lengths
            values = np.asarray(load, dtype=object)
        real = np.issubdtype(values.dtype, np.number) and not np.iscomplexobj(values)
        if values.ndim != 2 or not (real or values.dtype.name == "bfloat16"):
            raise rule_error(
                "A load is a table of numbers with two axes",
                f"{values.dtype.name} of shape {values.shape}",
                "pass the load of each place, [rows, columns]",
            )
        # In float64, so that a threshold of 0.8 means the same to a load in bfloat16.
        hot = np.argwhere(values.astype(np.float64) > self.scaling_config.load_threshold)
        return [(i, j) for i, j in hot.tolist()]

    def optimize_sharding(self, load: Any = None) -> PartitionSpec:
        """A layout for arrays [batch, hidden] that relieves what is hot in a load [batch, hidden].

        The axis along which more places are hot is split over both mesh axes, and the other is left whole; as many on
        both: the hidden one. With no load, or nothing hot in it, it is the usual layout, batch over data and hidden
        over model.
        """
        from jax.sharding import PartitionSpec

        axes = tuple(name for name in ("data", "model") if name in self.mesh_config().axes)
        hot = [] if load is None else self.detect_hotspots(load)
        if not hot:
            return PartitionSpec(*axes)
        batch, hidden = ({place[axis] for place in hot} for axis in (0, 1))
        return PartitionSpec(axes, None) if len(batch) > len(hidden) else PartitionSpec(None, axes)

    def profile_tpu_usage(self) -> dict[str, Any]:
        """What the attached devices use now: four figures, each measured at the call.

        - memory_allocated: bytes in use on this process's devices, by their allocators; on a CPU, which keeps no
          count, the bytes of the live arrays.
        - memory_peak: the most bytes that were in use; nan on a CPU.
        - device_count: attached devices, over all processes. It may differ from `num_chips`, which is what was planned.
        - device_utilization: the part of the time in which this host's devices computed, 0 to 1; nan where there is no
          sensor (a CPU; a TPU without libtpu's sdk; a GPU without nvidia-ml-py).
        """
        import jax

        from capibara.mesh.device_usage import device_utilization, peak_memory
        from capibara.surface.figures import memory_in_use

        return {
            "memory_allocated": round(memory_in_use() * GiB),
            "memory_peak": peak_memory(),
            "device_count": jax.device_count(),
            "device_utilization": device_utilization(),
        }


def _positive(name: str, value: Any, fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise rule_error(f"{name} is a positive number", repr(value), fix)


def _dtype_name(field_name: str, dtype: Any) -> str:
    # A scalar type such as jnp.bfloat16 has a dtype; a numpy scalar class only a name.
    named = getattr(getattr(dtype, "dtype", dtype), "name", None) or getattr(dtype, "__name__", dtype)
    if not isinstance(named, str) or named not in DTYPES:
        raise unknown_name(field_name, dtype, DTYPES)
    return named


def _squarest(chips: int) -> str:
    # Enough for any pod, and no count is so large that looking takes long.
    rows = max(size for size in range(1, min(math.isqrt(chips), 2**16) + 1) if chips % size == 0)
    return f"{rows}x{chips // rows}"
