"""Meshes for training: five axes in the order of how much they talk.

The last axis of a mesh gets the nearest chips (`grid_order`). From the last to the first:

- model: activations are summed over it twice a layer, forward and backward, and nothing can go on meanwhile;
- sequence: keys and values pass along it once a layer;
- expert: tokens go to their experts and back once in every layer that has them;
- data: gradients are summed over it once a step, behind the backward pass;
- pipeline: one stage hands its output to the next, and each pair of stages talks to nobody else.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, SupportsIndex

from capibara.errors import rule_error
from capibara.mesh.mesh import MeshConfig

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["TRAINING_AXES", "create_training_mesh", "nearest_sizes", "training_mesh_config"]

TRAINING_AXES = ("pipeline", "data", "expert", "sequence", "model")
"""The axes of a training mesh. All five are always there, so that rules and specs name them on any mesh."""

# Which sizes are changed first when several changes are equally small: more copies of the model cost nothing but batch.
_FREEDOM = ("data", "expert", "sequence", "pipeline", "model")

# Beyond the largest pods by far. There the ways to multiply are too many to list, and one axis at a time is changed.
_MANY_CHIPS = 2**14


def training_mesh_config(
    total_chips: int,
    data_parallel_size: int,
    model_parallel_size: int,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    sequence_parallel_size: int = 1,
) -> MeshConfig:
    """The training mesh as a config: needs no devices, and `.build(devices)` makes the mesh.

    Examples:
        >>> training_mesh_config(32, data_parallel_size=8, model_parallel_size=4).axes
        {'pipeline': 1, 'data': 8, 'expert': 1, 'sequence': 1, 'model': 4}
    """
    total_chips = _whole("total_chips", total_chips)
    sizes = {
        "pipeline": _whole("pipeline_parallel_size", pipeline_parallel_size),
        "data": _whole("data_parallel_size", data_parallel_size),
        "expert": _whole("expert_parallel_size", expert_parallel_size),
        "sequence": _whole("sequence_parallel_size", sequence_parallel_size),
        "model": _whole("model_parallel_size", model_parallel_size),
    }
    if math.prod(sizes.values()) != total_chips:
        near = [_changes(sizes, one) for one in nearest_sizes(total_chips, sizes)]
        raise rule_error(
            f"The parallel sizes of a training mesh multiply to total_chips={total_chips}",
            f"{_product(sizes)} = {math.prod(sizes.values())}",
            "use " + ", or ".join(near) if near else f"make them multiply to {total_chips}",
        )
    return MeshConfig(tuple(sizes[axis] for axis in TRAINING_AXES), TRAINING_AXES, target="training")


def create_training_mesh(
    total_chips: int,
    data_parallel_size: int,
    model_parallel_size: int,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    sequence_parallel_size: int = 1,
    devices: Iterable[Any] | None = None,
) -> Mesh:
    """A jax mesh of the five training axes over `devices`, or over the first `total_chips` that are attached.

    The sizes multiply to `total_chips`; an error says the nearest that do. With fewer devices than chips, the error
    says how to simulate them; `training_mesh_config` describes the mesh without any.
    """
    config = training_mesh_config(
        total_chips,
        data_parallel_size,
        model_parallel_size,
        pipeline_parallel_size,
        expert_parallel_size,
        sequence_parallel_size,
    )
    return config.build(devices)


def nearest_sizes(total_chips: int, sizes: dict[str, int], count: int = 2) -> tuple[dict[str, int], ...]:
    """The axis sizes nearest to `sizes` that multiply to `total_chips`, nearest first.

    A change is as large as the factor by which a size grows or shrinks, and the factors of all axes multiply. Axes of
    size 1 stay so (data, when all are 1, is what grows). Equal changes: the one that touches fewer axes, then the one
    that touches data before expert, sequence, pipeline and, last, model. Above 16384 chips only one axis is changed,
    and there may be no answer.
    """
    free = [axis for axis in _FREEDOM if sizes[axis] > 1] or ["data"]
    if total_chips > _MANY_CHIPS:
        others = {axis: math.prod(size for name, size in sizes.items() if name != axis) for axis in free}
        found = [{**sizes, axis: total_chips // rest} for axis, rest in others.items() if total_chips % rest == 0]
        return tuple(sorted(found, key=functools.partial(_distance, sizes))[:count])
    found = [{**sizes, **dict(zip(free, split, strict=True))} for split in _splits(total_chips, len(free))]
    return tuple(sorted(found, key=functools.partial(_distance, sizes))[:count])


def _whole(name: str, size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, SupportsIndex) or operator.index(size) < 1:
        raise rule_error(f"{name} is a whole number from 1 up", repr(size), f"pass {name}=1 or more")
    return operator.index(size)


def _distance(asked: dict[str, int], near: dict[str, int]) -> tuple[Any, ...]:
    factors = {axis: Fraction(max(asked[axis], near[axis]), min(asked[axis], near[axis])) for axis in asked}
    touched = [axis for axis in reversed(_FREEDOM) if factors[axis] > 1]
    # The last component only makes the order total: sizes themselves, the larger data first.
    return (
        math.prod(factors.values(), start=Fraction(1)),
        len(touched),
        [axis in touched for axis in reversed(_FREEDOM)],
        [-near[axis] for axis in _FREEDOM],
    )


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as an ordered product of so many whole numbers."""
    if parts == 1:
        yield (total,)
        return
    for first in (size for size in range(1, total + 1) if total % size == 0):
        yield from ((first, *rest) for rest in _splits(total // first, parts - 1))


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {sizes[axis]}" for axis in ("data", "model", "pipeline", "expert", "sequence"))


def _changes(asked: dict[str, int], near: dict[str, int]) -> str:
    return " and ".join(f"{axis}_parallel_size={near[axis]}" for axis in _FREEDOM if near[axis] != asked[axis])
