"""Where a served model's arrays lie on the chips of one engine, and how many bytes that is on each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from capibara.axes import RULES
from capibara.mesh.layout import Layout
from capibara.mesh.mesh import MeshConfig
from capibara.mesh.rules import partition_spec
from capibara.models import decoder
from capibara.models.blocks.spec import QUANTIZED_SCALE
from capibara.parallel.trainer_step import compute_dtype, param_dtype
from capibara.serve.weights import prepared

if TYPE_CHECKING:
    from capibara.hardware.topology import Slice
    from capibara.models.config import ModularModelConfig
    from capibara.serve.prediction.served import ServedModel

__all__ = ["EnginePlacement", "engine_mesh", "prepared_shapes"]

_WHOLE = PartitionSpec()


def prepared_shapes(model: ModularModelConfig, precision: str, *, joint: bool, int8: bool) -> Any:
    """The weights as an engine holds them, by shape."""
    loaded = decoder.param_shapes(model, param_dtype(precision))
    dtype = compute_dtype(precision)
    return jax.eval_shape(lambda params: prepared(model, params, dtype, joint=joint, int8=int8), loaded)


def engine_mesh(where: Slice, tensor_parallel: int) -> MeshConfig:
    """The slice as engines of so many chips each, side by side: nothing passes between them."""
    return MeshConfig((where.chips // tensor_parallel, tensor_parallel), ("engine", "model"))


class EnginePlacement:
    """How one engine's weights and pages are split over its chips: as `EngineConfig.mesh` has it split them."""

    def __init__(self, served: ServedModel, tensor_parallel: int, *, int8: bool) -> None:
        self.served = served
        self.tensor_parallel = tensor_parallel
        self.int8 = int8
        self.axes = {"model": tensor_parallel}

    @property
    def joint(self) -> bool:
        """Whether weights of one input are one product, which an engine on a mesh does not do."""
        return self.tensor_parallel == 1

    def _spec(self, names: Any, shape: tuple[int, ...]) -> PartitionSpec:
        return partition_spec(names or (), self.axes, shape, RULES)

    def weight_specs(self, model: ModularModelConfig, shapes: Any) -> Any:
        """Of the engine's own weights, in the structure of `shapes`."""
        if self.tensor_parallel == 1:
            return jax.tree.map(lambda _: _WHOLE, shapes)
        axes = decoder.axes(model)

        def leaf(names: Mapping[str, Any], name: str, leaf: Any, leading: int, inputs: Mapping[str, int]) -> Any:
            weight = name.removesuffix(QUANTIZED_SCALE)
            own = tuple(names[weight] or ())[leading:]
            return self._spec(own[inputs.get(weight, 1) :] if weight != name else own, leaf.shape)

        specs: dict[str, Any] = {}
        for name, tree in shapes.items():
            if name == "layers":
                continue
            if isinstance(tree, dict):
                specs[name] = {key: leaf(axes[name], key, one, 0, {}) for key, one in tree.items()}
            else:
                specs[name] = leaf(axes, name, tree, 0, {})
        period = len(model.period)
        specs["layers"] = [
            {
                slot: self._block_specs(model, names, number, axes["layers"][place % period][slot], block, leaf)
                for number, (slot, block) in enumerate(layer.items())
            }
            for place, layer in enumerate(shapes["layers"])
            for names in [model.period[place % period]]
        ]
        return specs

    def _block_specs(
        self, model: ModularModelConfig, names: tuple[str, ...], number: int, axes: Any, block: Any, leaf: Any
    ) -> Any:
        inputs = model.blocks[names[number]].products()
        return {
            name: {key: leaf(axes[name], key, part, 1, {}) for key, part in one.items()}
            if isinstance(one, dict)
            else leaf(axes, name, one, 1, inputs)
            for name, one in block.items()
        }

    def cache_specs(self, model: ModularModelConfig, shapes: Any) -> Any:
        """Of pages and states: a pool's heads are split where they divide; a state is whole on every chip."""

        def of(block: Any, leaf: Any) -> PartitionSpec:
            heads = getattr(block, "kv_heads", None)
            if self.tensor_parallel == 1 or heads is None or block.keeps_state or heads % self.tensor_parallel:
                return _WHOLE
            return PartitionSpec(*[None] * (len(leaf.shape) - 1), "model")

        return [
            {
                slot: jax.tree.map(lambda leaf, block=model.blocks[names[number]]: of(block, leaf), parts)
                for number, (slot, parts) in enumerate(layer.items())
            }
            for names, layer in zip(model.period * model.repeats, shapes, strict=True)
        ]

    def layout(self, model: ModularModelConfig, args: tuple[Any, Any, Any], where: Slice) -> Layout:
        """Of (weights, device state, what the host says) on a slice."""
        params, state, _ = args
        specs = (
            *jax.tree.leaves(self.weight_specs(model, params), is_leaf=_is_spec),
            *jax.tree.leaves(self.cache_specs(model, state.cache), is_leaf=_is_spec),
            _WHOLE,
            _WHOLE,
        )
        rules = {name: axes for name, axes in RULES.items() if axes == "model"}
        return Layout(engine_mesh(where, self.tensor_parallel), specs, rules)

    def weight_bytes(self) -> tuple[int, int]:
        """On one chip: (of the engine's own weights, of those that were loaded and are kept beside them)."""
        model = self.served.config
        own = prepared_shapes(model, self.served.precision, joint=self.joint, int8=self.int8)
        loaded = decoder.param_shapes(model, param_dtype(self.served.precision))
        specs = jax.tree.map(
            lambda shape, names: self._spec(names, shape.shape),
            loaded,
            decoder.axes(model),
            is_leaf=lambda node: hasattr(node, "dtype"),
        )
        return self._bytes(own, self.weight_specs(model, own)), self._bytes(loaded, specs)

    def _bytes(self, shapes: Any, specs: Any) -> int:
        def of(leaf: Any, spec: PartitionSpec) -> int:
            ways = math.prod(self.axes[axis] for axis in spec if axis is not None)
            return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize // ways

        leaves = jax.tree.leaves(shapes)
        return sum(of(*pair) for pair in zip(leaves, jax.tree.leaves(specs, is_leaf=_is_spec), strict=True))


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
