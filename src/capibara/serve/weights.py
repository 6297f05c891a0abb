"""A model's weights as serving holds them: a layer's own, in the type of computation, few products, perhaps 8 bits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from capibara.models import decoder
from capibara.models.blocks.spec import BY_OUTPUT, QUANTIZED_SCALE, Weight, joint_name

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["nbytes_on_one", "prepared", "quantized"]


def quantized(weight: jax.Array, inputs: int = 1) -> tuple[jax.Array, jax.Array]:
    """(8-bit numbers, float32 scales of the outputs) of a weight whose first axes are inputs.

    The largest of an output's weights is 127; each is off by half a step at most.
    """
    wide = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=tuple(range(inputs))) / 127
    scale = jnp.where(scale > 0, scale, 1)
    return jnp.round(wide / scale).astype(jnp.int8), scale


def _by_output(weight: jax.Array, inputs: int) -> jax.Array:
    flat = weight.reshape(-1, *weight.shape[inputs:])
    return jnp.moveaxis(flat, 0, -1)


def _layer(model: ModularModelConfig, names: tuple[str, ...], layer: Any, *, joint: bool, int8: bool) -> Any:
    made = {}
    for number, name in enumerate(names):
        slot, block = decoder.slot_of(names, number), model.blocks[name]
        own, products = dict(layer[slot]), block.products()
        for group in block.joint_products() if joint else ():
            parts = [own.pop(part) for part in group]
            own[joint_name(group)] = jnp.concatenate([x.reshape(x.shape[0], -1) for x in parts], axis=1)
            products = {**{n: i for n, i in products.items() if n not in group}, joint_name(group): 1}
        for weight, inputs in products.items() if int8 else ():
            own[weight], own[weight + QUANTIZED_SCALE] = quantized(own[weight], inputs)
        for weight, inputs in products.items() if joint else ():
            own[weight + BY_OUTPUT] = _by_output(own.pop(weight), inputs)
        made[slot] = own
    return made


def prepared(model: ModularModelConfig, params: Any, dtype: Any, *, joint: bool = True, int8: bool = False) -> Any:
    """The parameters that `decoder.paged` takes, as new arrays.

    Args:
      joint: hold weights of one input side by side, as one product; not over a mesh, where each is split by itself.
      int8: hold the weights of products, and the head, as 8-bit numbers with a scale an output.
    """
    weights = decoder.weights(model)
    period = len(model.period)

    def narrow(weight: Weight, x: jax.Array) -> jax.Array:
        return x.astype(weight.dtype(dtype))

    def is_weight(node: Any) -> bool:
        return isinstance(node, Weight)

    def layer(place: int, one: Any) -> Any:
        one = jax.tree.map(narrow, weights["layers"][place], one, is_leaf=is_weight)
        return _layer(model, model.period[place], one, joint=joint, int8=int8)

    made: dict[str, Any] = {
        name: jax.jit(lambda x, name=name: jax.tree.map(narrow, weights[name], x, is_leaf=is_weight))(params[name])
        for name in params
        if name != "layers"
    }
    if int8 and not model.tied:
        made["head"], made["head" + QUANTIZED_SCALE] = jax.jit(quantized)(made["head"])
    if joint and not model.tied:
        made["head" + BY_OUTPUT] = jax.jit(jnp.transpose)(made.pop("head"))
    # A layer at a time, so that no second copy of all is ever there.
    of_place = [jax.jit(functools.partial(layer, place)) for place in range(period)]
    made["layers"] = [
        of_place[number % period](jax.tree.map(lambda x: x[number // period], params["layers"][number % period]))  # noqa: B023
        for number in range(model.layers)
    ]
    return made


def nbytes_on_one(tree: Any) -> int:
    """Of a tree of arrays, on the device that has most of it."""
    return sum(
        max(shard.data.nbytes for shard in leaf.addressable_shards) if isinstance(leaf, jax.Array) else leaf.nbytes
        for leaf in jax.tree.leaves(tree)
    )
