"""A family of models: how its config.json reads, and the table of its tensors.

A table has a row for every weight of a block: the tensor's name inside of its layer, and which axes of ours each of its
dimensions is. torch keeps a product's weight [out, in], ours are [in, out], with heads as an axis of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.tree_util import DictKey

from capibara.errors import rule_error
from capibara.models.weights.keys import Keys

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["ATTENTION", "LM_HEAD", "MLP", "Family", "Place", "Row", "experts", "key_path", "places"]

LM_HEAD = "lm_head.weight"

AS_IT_IS = ((0,),)
TABLE = ((0,), (1,))
TRANSPOSED = ((1,), (0,))
INTO_HEADS = ((1, 2), (0,))
"""[heads · width, hidden] there, [hidden, heads, width] here."""
OUT_OF_HEADS = ((2,), (0, 1))
"""[hidden, heads · width] there, [heads, width, hidden] here."""
BIAS_OF_HEADS = ((0, 1),)


@dataclass(frozen=True)
class Row:
    """One weight of a block: its tensor's name, and for each dimension of the tensor the axes of ours that it is."""

    name: str
    """With {expert} where every expert has a tensor of its own."""
    axes: tuple[tuple[int, ...], ...]

    @property
    def by_expert(self) -> bool:
        return "{expert}" in self.name

    def shape_there(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape where ours is `shape`.

        >>> Row("self_attn.q_proj.weight", INTO_HEADS).shape_there((64, 4, 16))
        (64, 64)
        """
        return tuple(math.prod(shape[axis] for axis in group) for group in self.axes)

    def here(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A view of the file's tensor in our shape."""
        order = [axis for group in self.axes for axis in group]
        return tensor.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))

    def there(self, weight: np.ndarray) -> np.ndarray:
        """Our weight as the file has it."""
        order = [axis for group in self.axes for axis in group]
        return weight.transpose(order).reshape(self.shape_there(weight.shape))


_NORM = "norm_.scale"

ATTENTION: Mapping[str, Row] = {
    _NORM: Row("input_layernorm.weight", AS_IT_IS),
    "query": Row("self_attn.q_proj.weight", INTO_HEADS),
    "key": Row("self_attn.k_proj.weight", INTO_HEADS),
    "value": Row("self_attn.v_proj.weight", INTO_HEADS),
    "out": Row("self_attn.o_proj.weight", OUT_OF_HEADS),
    "query_bias": Row("self_attn.q_proj.bias", BIAS_OF_HEADS),
    "key_bias": Row("self_attn.k_proj.bias", BIAS_OF_HEADS),
    "value_bias": Row("self_attn.v_proj.bias", BIAS_OF_HEADS),
    "out_bias": Row("self_attn.o_proj.bias", AS_IT_IS),
    "query_norm": Row("self_attn.q_norm.weight", AS_IT_IS),
    "key_norm": Row("self_attn.k_norm.weight", AS_IT_IS),
}
MLP: Mapping[str, Row] = {
    _NORM: Row("post_attention_layernorm.weight", AS_IT_IS),
    "gate": Row("mlp.gate_proj.weight", TRANSPOSED),
    "up": Row("mlp.up_proj.weight", TRANSPOSED),
    "down": Row("mlp.down_proj.weight", TRANSPOSED),
    "gate_bias": Row("mlp.gate_proj.bias", AS_IT_IS),
    "up_bias": Row("mlp.up_proj.bias", AS_IT_IS),
    "down_bias": Row("mlp.down_proj.bias", AS_IT_IS),
}


def experts(room: str, gate: str, up: str, down: str) -> dict[str, Row]:
    """The rows of a router and its experts, by the names that a family gives them."""
    return {
        _NORM: MLP[_NORM],
        "router": Row(f"{room}.gate.weight", TRANSPOSED),
        "gate": Row(f"{room}.experts.{{expert}}.{gate}.weight", TRANSPOSED),
        "up": Row(f"{room}.experts.{{expert}}.{up}.weight", TRANSPOSED),
        "down": Row(f"{room}.experts.{{expert}}.{down}.weight", TRANSPOSED),
    }


@dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    model_type: str
    architecture: str
    tensors: Mapping[str, Mapping[str, Row]]
    """Kind of block ("attention", "mlp", "moe") -> its weights' rows."""
    read: Callable[[Keys], dict[str, Any]]
    """What `ModularModelConfig` takes, from config.json."""
    write: Callable[[ModularModelConfig], dict[str, Any]]
    """The keys of config.json that say the same."""


@dataclass(frozen=True)
class Place:
    """One tensor of a file and where it lies in our tree."""

    name: str
    row: Row
    path: tuple[str | int, ...]
    """Of the leaf."""
    index: tuple[int, ...]
    """In the leaf: which repeat of the pattern, and which expert."""
    shape: tuple[int, ...]
    """Of that part of the leaf."""

    @property
    def shape_there(self) -> tuple[int, ...]:
        return self.row.shape_there(self.shape)


def places(model: ModularModelConfig, family: Family) -> list[Place]:
    """Every tensor of a model, in the order that its layers come; a tied head has none of its own."""
    from capibara.models import decoder

    tree = decoder.weights(model)
    listed = [Place("model.embed_tokens.weight", Row("", TABLE), ("embed",), (), tree["embed"].shape)]
    for number in range(model.layers):
        repeat, position = divmod(number, len(model.period))
        for slot, weights in tree["layers"][position].items():
            rows = family.tensors.get(_kind(model, position, slot))
            if rows is None:
                raise _no_such_part(family, f"a block {slot!r}")
            for weight, leaf, path in _flat(weights, ("layers", position, slot)):
                row = rows.get(weight)
                if row is None:
                    raise _no_such_part(family, f"{weight} of {slot!r}")
                prefix = f"model.layers.{number}."
                if not row.by_expert:
                    listed.append(Place(prefix + row.name, row, path, (repeat,), leaf.shape[1:]))
                    continue
                for expert in range(leaf.shape[1]):
                    name = prefix + row.name.format(expert=expert)
                    listed.append(Place(name, row, path, (repeat, expert), leaf.shape[2:]))
    if model.norm != "rms":
        raise _no_such_part(family, f"{model.norm} norms")
    listed.append(Place("model.norm.weight", Row("", AS_IT_IS), ("norm", "scale"), (), tree["norm"]["scale"].shape))
    if not model.tied:
        listed.append(Place(LM_HEAD, Row("", TRANSPOSED), ("head",), (), tree["head"].shape))
    return listed


def _kind(model: ModularModelConfig, position: int, slot: str) -> str:
    from capibara.models.blocks import KINDS

    names = {name: name for name in model.period[position]} | {
        f"{name}_{count}": name
        for name in model.period[position]
        for count in range(model.period[position].count(name))
    }
    block = model.blocks[names[slot]]
    return next(kind for kind, known in KINDS.items() if type(block) is known)


def key_path(path: Any) -> tuple[str | int, ...]:
    """A path of jax's as the keys and numbers that it goes by."""
    return tuple(key.key if isinstance(key, DictKey) else key.idx for key in path)


def _flat(weights: Mapping[str, Any], path: tuple[str | int, ...]) -> list[tuple[str, Any, tuple[str | int, ...]]]:
    flat = []
    for name, leaf in weights.items():
        if isinstance(leaf, Mapping):
            flat += [(f"{name}.{inner}", one, (*path, name, inner)) for inner, one in leaf.items()]
        else:
            flat.append((name, leaf, (*path, name)))
    return flat


def _no_such_part(family: Family, what: str) -> ValueError:
    return rule_error(
        f"Layers of a {family.model_type} model are attention and a feed-forward block",
        what,
        "keep it in capibara's form",
    )
