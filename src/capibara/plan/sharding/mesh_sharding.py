"""`create_mesh_sharding`: a mesh over chosen devices, and a model's arrays put on it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.errors import rule_error, unknown_name
from capibara.hardware.chips import chip_for
from capibara.mesh.mesh import MeshConfig, create_tpu_mesh_config
from capibara.plan.search.search import TARGETS
from capibara.plan.search.space import Point, Space, partition
from capibara.plan.sharding.by_parameters import ProductsModel, parameter_job
from capibara.plan.sharding.strategy import ShardingStrategy, optimize_sharding_strategy
from capibara.program.anatomy import Leaf

__all__ = ["WORDS", "MeshSharding", "create_mesh_sharding"]

WORDS = (*TARGETS, "data", "fully_sharded", "tensor")
"""Strategies by word: the planner's targets, or one plain way for every array."""

# A batch to plan with where only parameters are known: enough tokens a chip that products and not messages dominate.
_TOKENS_A_CHIP = 4096


@dataclass(frozen=True)
class MeshSharding:
    """A mesh, and how models are put on it."""

    mesh: Mesh
    config: MeshConfig
    optimization_target: str = "throughput"

    def shard_model(self, model: Any, strategy: ShardingStrategy | str | None = None) -> Any:
        """The model with its arrays on the mesh: same structure, same values.

        `model` is a pytree of arrays, or an object whose `params` are one: then a copy of it with those on the mesh.
        `strategy` is from `optimize_sharding_strategy`, or one of `WORDS`: "data" keeps every array whole on every
        device, "fully_sharded" cuts each matrix over all devices or as many as divide it, "tensor" cuts matrices over
        the model axis; a target plans training by the parameters alone, with 4096 tokens a chip. With none it is this
        mesh's target. Plain numbers become scalars on every device.
        """
        if not isinstance(model, dict) and hasattr(model, "params"):
            return _with_params(model, self._put(model.params, strategy))
        return self._put(model, strategy)

    def specs(self, params: Any, strategy: ShardingStrategy | str | None = None) -> Any:
        """The PartitionSpecs that `shard_model` uses."""
        chosen = self.optimization_target if strategy is None else strategy
        if isinstance(chosen, ShardingStrategy):
            return _checked(chosen, params, self.mesh)
        if chosen not in WORDS:
            raise unknown_name("sharding strategy", chosen, WORDS)
        if chosen in TARGETS:
            found = chip_for(self.mesh.devices.flat[0].device_kind)
            return optimize_sharding_strategy(
                params,
                (self.config.size, _TOKENS_A_CHIP, 1),
                self.config,
                optimization_target=chosen,
                chip="v4" if found is None or found.measured else found.name,
            ).specs
        return _plain(params, self.config, chosen)

    def _put(self, params: Any, strategy: ShardingStrategy | str | None) -> Any:
        specs = self.specs(params, strategy)
        return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(self.mesh, spec)), params, specs)


def create_mesh_sharding(
    mesh_shape: Sequence[int],
    device_ids: Sequence[int] | None = None,
    optimization_target: str = "throughput",
) -> MeshSharding:
    """A mesh of this shape over these devices, in this order; over the attached ones, by their wiring, when none.

    Axes are called data, model, expert as far as they go. `optimization_target` is what `shard_model` plans for when
    it is given no strategy: "throughput", "latency" or "memory".

    Examples:
        >>> import jax.numpy as jnp
        >>> sharding = create_mesh_sharding((1, 1), device_ids=[0])
        >>> model = sharding.shard_model({"w": jnp.ones((4, 4))}, "tensor")
        >>> model["w"].sharding.mesh.axis_names
        ('data', 'model')
    """
    if optimization_target not in TARGETS:
        raise unknown_name("optimization_target", optimization_target, TARGETS)
    config = create_tpu_mesh_config(mesh_shape)
    if device_ids is None:
        return MeshSharding(config.build(), config, optimization_target)
    attached = {device.id: device for device in jax.devices()}
    whole = isinstance(device_ids, Iterable) and not isinstance(device_ids, str)
    ids = list(device_ids) if whole else []
    if not whole or not all(isinstance(one, SupportsIndex) for one in ids):
        raise rule_error("device_ids are whole numbers, the ids of devices", repr(device_ids), "use range(32)")
    if len(set(ids)) != len(ids):
        raise rule_error("device_ids names each device once", repr(ids), "drop the repeated ones")
    missing = [one for one in ids if one not in attached]
    if len(ids) != config.size or missing:
        got = f"{len(ids)} ids" + (f", of which {missing[:8]} are not attached" if missing else "")
        simulate = (
            f", or set XLA_FLAGS=--xla_force_host_platform_device_count={config.size} before jax is first used to "
            "simulate them"
        )
        raise rule_error(
            f"A mesh of {'x'.join(map(str, config.shape))} takes the ids of {config.size} attached devices",
            got,
            f"choose {config.size} of the {len(attached)} attached{simulate if len(attached) < config.size else ''}",
        )
    grid = np.empty(config.shape, dtype=object)
    grid.flat[:] = [attached[one] for one in ids]
    return MeshSharding(config.build(grid), config, optimization_target)


def _plain(params: Any, config: MeshConfig, word: str) -> Any:
    """One plain way for every array, by the rules of `by_parameters`."""
    job = parameter_job(params, (config.size, _TOKENS_A_CHIP, 1), 0, True)
    axes = config.axes
    if word == "fully_sharded":
        # Every axis is one of data: what it cuts is gathered when used.
        axes = {"data": config.size}
    space = Space(ProductsModel(job, None, float("inf")).anatomy(), config.size, {})
    cut: tuple[int, ...] = ()
    if word == "tensor":
        if "model" not in axes:
            raise rule_error(
                '"tensor" cuts over a model axis', f"a mesh with axes {axes}", "make a mesh such as (4, 8)"
            )
        # What does not divide stays whole, as in any layout.
        mesh = tuple(axes.items())
        cut = next(iter(space.cuts(mesh)), ())
    point = Point(tuple(axes.items()), cut, "full" if word == "fully_sharded" else "replicated")
    leaves, tree = jax.tree.flatten(params)
    specs = space.layout(point).specs[: len(leaves)]
    if word == "fully_sharded":
        every = tuple(config.axis_names)
        specs = tuple(
            PartitionSpec(*(every if entry == "data" else entry for entry in spec))
            if spec
            else _as_many_as_divide(leaf, config.axes)
            for leaf, spec in zip(space.anatomy.of_role("params"), specs, strict=True)
        )
    return jax.tree.unflatten(tree, specs)


def _as_many_as_divide(leaf: Leaf, axes: dict[str, int]) -> PartitionSpec:
    """Mesh axes on a matrix that all of them together do not divide: the largest first, each where most is left."""
    left = list(leaf.shape)
    entries: list[tuple[str, ...]] = [()] * len(left)
    for name, size in sorted(axes.items(), key=lambda axis: -axis[1]) if len(left) > 1 else ():
        able = [position for position, rest in enumerate(left) if size > 1 and rest and rest % size == 0]
        if able:
            best = max(able, key=lambda position: left[position])
            left[best] //= size
            entries[best] = (*entries[best], name)
    return partition(entries)


def _checked(strategy: ShardingStrategy, params: Any, mesh: Mesh) -> Any:
    here, there = str(jax.tree.structure(params)), str(jax.tree.structure(strategy.specs))
    if here != there:
        raise rule_error(
            "A strategy is for parameters of the structure it was made for",
            f"{here} where it has {there}",
            "call optimize_sharding_strategy with this model's parameters",
        )
    if strategy.mesh.axes != dict(mesh.shape):
        raise rule_error(
            "A strategy is for the mesh it was made for",
            f"{dict(mesh.shape)} where it has {strategy.mesh.axes}",
            f"call optimize_sharding_strategy with mesh_shape={tuple(mesh.shape.values())}",
        )
    return strategy.specs


def _with_params(model: Any, params: Any) -> Any:
    if dataclasses.is_dataclass(model) and not isinstance(model, type):
        return dataclasses.replace(model, params=params)
    if isinstance(model, tuple) and hasattr(model, "_replace"):
        return model._replace(params=params)
    other = copy.copy(model)
    try:
        other.params = params
    except AttributeError as error:
        raise rule_error(
            "A model's params can be set on a copy of it",
            f"{type(model).__name__}, whose params cannot",
            "pass model.params, and make the model of what comes back",
        ) from error
    return other
