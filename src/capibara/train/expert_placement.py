"""Experts placed anew: where a few devices of the experts' axis do most of the work, busy and idle ones change places.

A router's columns and its experts' weights, and all that an optimizer keeps of them, are put into another order
together: the model computes what it did, each token meets the experts that it did, and another device has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.models.blocks import Moe
from capibara.models.config import ModularModelConfig

__all__ = ["busiest", "moe_slots", "new_orders", "reordered"]

_EXPERT_AXIS = {"router": -1, "gate": 1, "up": 1, "down": 1}
"""Of a mixture's weights, stacked over the repeats, the axis that counts the experts: also where an optimizer keeps
means over a later one, as Adafactor does."""


def moe_slots(model: ModularModelConfig) -> list[tuple[int, str]]:
    """(layer of the pattern, key of the block) of each mixture of experts, in the order of their metrics."""
    from capibara.models.decoder import slot_of

    return [
        (number, slot_of(names, place))
        for number, names in enumerate(model.period)
        for place, name in enumerate(names)
        if isinstance(model.blocks[name], Moe)
    ]


def busiest(share: np.ndarray, devices: int) -> float:
    """How much more than an even part the busiest device does, over all layers: 1 is even.

    `share` is [layers, experts], each expert's part of its layer's tokens.

    >>> busiest(np.array([[0.4, 0.4, 0.1, 0.1]]), devices=2)
    1.6
    """
    layers, experts = share.shape
    return float(share.reshape(layers, devices, experts // devices).sum(-1).max() * devices)


def new_orders(share: np.ndarray, devices: int) -> np.ndarray:
    """[layers, experts]: which expert comes where, so that each device's experts have about as much to do.

    The busiest expert goes to the device with the least so far that has room.

    >>> new_orders(np.array([[0.4, 0.4, 0.1, 0.1]]), devices=2).tolist()
    [[0, 2, 1, 3]]
    """
    room = share.shape[1] // devices
    orders = []
    for layer in share:
        held: list[list[int]] = [[] for _ in range(devices)]
        load = np.zeros(devices)
        for expert in np.argsort(-layer, kind="stable"):
            open_devices = [device for device in range(devices) if len(held[device]) < room]
            device = min(open_devices, key=lambda d: (load[d], d))
            held[device].append(int(expert))
            load[device] += layer[expert]
        orders.append([expert for experts in held for expert in sorted(experts)])
    return np.array(orders)


def reordered(tree: Any, slots: Sequence[tuple[int, str]], orders: np.ndarray) -> Any:
    """A tree of parameters, or one that has such trees inside as an optimizer's state, with its experts in this order.

    `orders` has the layers as the metrics have them: for each repeat of the pattern its mixtures in turn.
    """
    by_slot = {slot: jnp.asarray(orders[number :: len(slots)]) for number, slot in enumerate(slots)}

    def leaf(path: Any, x: Any) -> Any:
        keys = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path]
        for slot, order in by_slot.items():
            for at in range(len(keys) - 3):
                inside = keys[at] == "layers" and (keys[at + 1], keys[at + 2]) == slot
                axis = _EXPERT_AXIS.get(str(keys[-1])) if inside and len(keys) == at + 4 else None
                # Means over the experts themselves have no such axis, and stay.
                if axis is not None and x.ndim > 1 and x.shape[axis] == orders.shape[1]:
                    return _taken(x, order, axis % x.ndim)
        return x

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _taken(x: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    """Each repeat's experts in its own order; x is stacked over the repeats."""
    shape = [1] * x.ndim
    shape[0], shape[axis] = order.shape
    moved = jax.jit(lambda x, order: jnp.take_along_axis(x, order.reshape(shape), axis=axis), out_shardings=x.sharding)
    return moved(x, order)
