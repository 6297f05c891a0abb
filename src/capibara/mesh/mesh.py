"""Mesh configurations: a shape, names for its axes, and what it is meant for; built on request."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, SupportsIndex

from capibara.errors import rule_error, unknown_name
from capibara.hardware.chips import chip
from capibara.hardware.facts import GiB
from capibara.hardware.topology import slice_for, slice_names
from capibara.mesh.device_order import in_mesh_order

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh

__all__ = ["DEFAULT_LIMIT_GB", "TARGETS", "MeshConfig", "TPUv4MeshConfigurations", "create_tpu_mesh_config"]

TARGETS = ("inference", "training", "balanced")
"""What a mesh may be meant for."""

# What the axes are called when only a shape is given, in the order the documents name them.
_DEFAULT_AXES = ("data", "model", "expert")
DEFAULT_LIMIT_GB = chip("v4").hbm_bytes / GiB


def _sizes(shape: Any) -> tuple[int, ...]:
    given = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    whole = all(isinstance(size, SupportsIndex) and not isinstance(size, bool) for size in given)
    sizes = tuple(operator.index(size) for size in given) if whole else ()
    if not sizes or min(sizes) < 1:
        raise rule_error("A mesh shape is one or more whole numbers from 1 up", repr(shape), "use (4, 8)")
    return sizes


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above 0, of Python's or numpy's types."""
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and 0 < float(value) < math.inf


def _names(names: Any, shape: tuple[int, ...]) -> tuple[str, ...]:
    given = tuple(names) if isinstance(names, Sequence) and not isinstance(names, str) else ()
    if (
        len(given) != len(shape)
        or len(set(given)) != len(given)
        or not all(isinstance(one, str) and one for one in given)
    ):
        raise rule_error(
            "A mesh has one name an axis, and no two alike",
            f"axis_names={names!r} for shape {shape}",
            f"pass {len(shape)} different names",
        )
    return given


@dataclass(frozen=True)
class MeshConfig:
    """A mesh that is described and not built yet.

    Examples:
        >>> MeshConfig((4, 8)).size
        32
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] = ("data", "model")
    target: str = "balanced"
    """One of `TARGETS`."""
    memory_limit_gb: float = DEFAULT_LIMIT_GB
    """GiB of one device that a planner may use on this mesh; the default, a v4's, leaves it to the chip."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _sizes(self.shape))
        object.__setattr__(self, "axis_names", _names(self.axis_names, self.shape))
        if self.target not in TARGETS:
            raise unknown_name("optimization_target", self.target, TARGETS)
        if not is_positive(self.memory_limit_gb):
            raise rule_error(
                "memory_limit_gb is a positive number of GiB a device", repr(self.memory_limit_gb), "use 32.0"
            )

    @property
    def size(self) -> int:
        """How many devices it takes."""
        return math.prod(self.shape)

    @property
    def axes(self) -> dict[str, int]:
        """Axis name -> size."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    def build(self, devices: Iterable[Any] | None = None) -> Mesh:
        """The jax mesh, over `devices` or over the first that are attached.

        A flat list of devices is ordered so that neighbours on the mesh are neighbours in the hardware; an
        array of devices that already has the mesh's shape is taken as it is.
        """
        from jax.sharding import AxisType, Mesh

        grid = _arranged(self, devices)
        return Mesh(grid, self.axis_names, axis_types=(AxisType.Auto,) * len(self.shape))


@dataclass(frozen=True)
class TPUv4MeshConfigurations:
    """The documented meshes of 32 chips, by name."""

    CULTURAL_ANALYSIS: MeshConfig = MeshConfig((4, 8))
    QUANTUM_CLASSICAL: MeshConfig = MeshConfig((8, 4))
    SPIKING_NEURAL: MeshConfig = MeshConfig((16, 2))

    def __iter__(self) -> Iterator[tuple[str, MeshConfig]]:
        """(name, config), one after another."""
        return ((one.name, getattr(self, one.name)) for one in fields(self))


def create_tpu_mesh_config(
    mesh_shape: Sequence[int],
    optimization_target: str = "balanced",
    memory_limit_gb: float = DEFAULT_LIMIT_GB,
    axis_names: Sequence[str] | None = None,
) -> MeshConfig:
    """A mesh config; with no axis names, the axes are called data, model, expert as far as they go."""
    shape = _sizes(mesh_shape)
    if axis_names is None:
        if len(shape) > len(_DEFAULT_AXES):
            raise rule_error(
                f"A mesh of more than {len(_DEFAULT_AXES)} axes has no default names",
                f"mesh_shape={shape} and no axis_names",
                "pass axis_names, one a mesh axis",
            )
        axis_names = _DEFAULT_AXES[: len(shape)]
    return MeshConfig(shape, tuple(axis_names), optimization_target, memory_limit_gb)


def _arranged(config: MeshConfig, devices: Iterable[Any] | None) -> np.ndarray:
    import jax
    import numpy as np

    given = np.asarray(jax.devices() if devices is None else devices, dtype=object)
    if given.size < config.size:
        raise _too_few(config, given.ravel())
    if devices is not None and given.shape == config.shape:
        return given
    if devices is not None and given.size > config.size:
        raise rule_error(
            f"A mesh of shape {_text(config.shape)} takes exactly {config.size} devices",
            f"{given.size}",
            f"pass devices[:{config.size}]",
        )
    return in_mesh_order(config.shape, list(given.ravel()[: config.size]))


def _too_few(config: MeshConfig, devices: np.ndarray) -> ValueError:
    platform = f" {devices[0].platform}" if len(devices) else ""
    return rule_error(
        f"A mesh of shape {_text(config.shape)} needs {config.size} devices",
        f"{len(devices)}{platform} device{'' if len(devices) == 1 else 's'}",
        f"{_slice_hint(config.size)}set XLA_FLAGS=--xla_force_host_platform_device_count={config.size} "
        "before jax is first used to try it on a CPU, or make a smaller mesh with create_tpu_mesh_config",
    )


def _slice_hint(chips: int) -> str:
    names = set(slice_names("v4"))
    if f"v4-{2 * chips}" not in names:
        return ""
    # The commonest surprise: the number in a slice's name counts TensorCores, two a chip.
    surprise = f"; Google's v4-{chips} is {chips // 2} chips" if f"v4-{chips}" in names else ""
    return f"run on a {slice_for('v4', chips).name} slice ({chips} chips{surprise}), "


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
