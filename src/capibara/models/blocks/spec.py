"""What a block is: its weights (shape, logical axes, how they start) and what it computes.

A block is one residual branch of a layer: the decoder norms its input and adds its output. Weights are declared once,
as a tree of `Weight`; shapes, logical axes and initial values all come from it.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from capibara.kernels.core.context import current_target
from capibara.kernels.ops.layers.few_rows.api import few_rows, has_kernel, parts_to_leave
from capibara.kernels.ops.layers.summed_row import api as summed_row_api
from capibara.kernels.ops.linalg.fp8 import fp8_products
from capibara.kernels.pallas.prng import normal_by_place
from capibara.mesh.rules import is_placing
from capibara.models.blocks.joint_gradients import products_of_heads
from capibara.parallel.remat import keeps_products
from capibara.precision import Fp8Settings

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = [
    "BY_OUTPUT",
    "FP8",
    "LORA_DOWN",
    "LORA_SCALE",
    "LORA_UP",
    "QUANTIZED_SCALE",
    "Block",
    "BlockOutput",
    "Fp8Group",
    "GatedMlp",
    "LastProduct",
    "PagedBatch",
    "Projected",
    "Sequences",
    "Unsummed",
    "Weight",
    "few_rows_operands",
    "gated_products",
    "held_by_output",
    "initial",
    "joint_name",
    "logical_axes",
    "product",
    "products",
    "shapes",
]

Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]


@dataclass(frozen=True)
class Weight:
    """One parameter: its shape, a logical axis name (or None) a dimension, and how it starts."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str | Init = "normal"
    """ "normal" (deviation `gain` over the root of `fan_in`), "zeros", "ones", or a function of a key and the shape
    that gives float32."""
    fan_in: int = 0
    """Inputs of each output; the first dimension where 0."""
    gain: float = 1.0
    """What a normal deviation is multiplied by."""
    keep_float32: bool = False
    """Stays float32 whatever the others are: decays and routers hang on their last bits."""

    def stacked(self, layers: int) -> Weight:
        """This weight of so many layers, along a leading axis that pipelines cut into stages."""
        single = self.init
        if callable(single):
            one_layer = single

            def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
                return jax.vmap(lambda k: one_layer(k, shape[1:]))(jax.random.split(key, shape[0]))

            single = init
        return replace(self, shape=(layers, *self.shape), axes=("stage", *self.axes), init=single, fan_in=self._inputs)

    @property
    def _inputs(self) -> int:
        return self.fan_in or self.shape[0]

    def dtype(self, dtype: Any) -> Any:
        return jnp.dtype(jnp.float32) if self.keep_float32 else jnp.dtype(dtype)

    def draw(self, seed: jax.Array, dtype: Any) -> jax.Array:
        if callable(self.init):
            return self.init(jax.random.wrap_key_data(seed), self.shape).astype(self.dtype(dtype))
        if self.init == "normal":
            drawn = normal_by_place(seed, self.shape) * (self.gain / math.sqrt(self._inputs))
            return drawn.astype(self.dtype(dtype))
        return jnp.full(self.shape, {"zeros": 0, "ones": 1}[self.init], self.dtype(dtype))


def _is_weight(node: Any) -> bool:
    return isinstance(node, Weight)


def shapes(weights: Any, dtype: Any) -> Any:
    """The tree of weights as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype(dtype)), weights, is_leaf=_is_weight)


def logical_axes(weights: Any) -> Any:
    """The tree of weights as tuples of logical axis names."""
    return jax.tree.map(lambda w: w.axes, weights, is_leaf=_is_weight)


def initial(weights: Any, key: jax.Array, dtype: Any) -> Any:
    """The tree of weights as arrays; each is drawn by a key of its own place, so that no other weight changes it."""
    leaves, tree = jax.tree.flatten_with_path(weights, is_leaf=_is_weight)
    seed = jax.random.key_data(key).astype(jnp.uint32).reshape(-1)[-2:]

    def drawn(path: Any, weight: Weight) -> jax.Array:
        place = jnp.uint32(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return weight.draw(seed + place * jnp.array([1, 0x9E3779B9], jnp.uint32), dtype)

    return jax.tree.unflatten(tree, [drawn(path, weight) for path, weight in leaves])


LORA_DOWN, LORA_UP, LORA_SCALE = "_lora_down", "_lora_up", "_lora_scale"
"""What a weight's name is followed by in its block for the two factors of a low-rank change of it, and its scale."""


QUANTIZED_SCALE = "_quantized_scale"
"""What a weight's name is followed by for the scales of its outputs, where the weight is held in 8-bit numbers."""


BY_OUTPUT = "_by_output"
"""What a weight's name is followed by where it is held [*outputs, inputs], its inputs as one axis: an output's weights
lie together. A product of a few rows reads every weight once and is done, and reads them in the order they lie in."""


FP8 = "_fp8"
"""What the joint name of the weights of one input is followed by where their products are fp8's."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["history"], meta_fields=["settings"])
@dataclass(frozen=True)
class Fp8Group:
    """How the products of one input are scaled: stands beside its weights, under their joint name."""

    settings: Fp8Settings
    history: jax.Array | None = None
    """As `fp8_products` takes it, where scaling is "delayed"."""


def joint_name(names: Sequence[str]) -> str:
    """The name of several weights of one input side by side, as one product takes them."""
    return "+".join(names)


def product(params: Mapping[str, jax.Array], name: str, x: jax.Array, inputs: int = 1) -> jax.Array:
    """x times a weight, over so many of x's last axes; with the weight's low-rank change where the block has one."""
    group: Any = params.get(name + FP8)
    if group is None:
        y = _plain_product(params, name, x, inputs)
    else:
        (y,) = fp8_products(x, [params[name]], group.settings, inputs=inputs, history=group.history)
    return _with_change(params, name, x, inputs, y)


def products(params: Mapping[str, jax.Array], shapes: Mapping[str, tuple[int, ...]], x: jax.Array) -> list[jax.Array]:
    """x times several weights, whose outputs have these shapes: as one product where they are held side by side."""
    joint = joint_name(tuple(shapes))
    group: Any = params.get(joint + FP8)
    if group is not None:
        narrow = fp8_products(x, [params[name] for name in shapes], group.settings, history=group.history)
        return [_with_change(params, name, x, 1, y) for name, y in zip(shapes, narrow, strict=True)]
    if joint not in params and joint + BY_OUTPUT not in params:
        if not _joins_gradients(params, tuple(shapes), x):
            return [product(params, name, x) for name in shapes]
        plain = products_of_heads(x, [params[name].astype(x.dtype) for name in shapes])
        return [_with_change(params, name, x, 1, y) for name, y in zip(shapes, plain, strict=True)]
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes.values()))
    parts = jnp.split(_plain_product(params, joint, x, 1), ends[:-1], axis=-1)
    return [
        _with_change(params, name, x, 1, part.reshape(*part.shape[:-1], *shape))
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    ]


def _joins_gradients(params: Mapping[str, jax.Array], names: tuple[str, ...], x: jax.Array) -> bool:
    """Whether `products_of_heads` takes them: weights of heads, 16 bits, one GPU. Over a mesh heads are cut, and what
    other compilers make of the join is not known."""
    if current_target().platform != "gpu" or x.dtype.itemsize != 2 or is_placing() or keeps_products():
        return False
    held = all(name in params and name + QUANTIZED_SCALE not in params for name in names)
    return held and all(params[name].ndim == 3 for name in names)


def held_together(params: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Whether x times these weights is one product, `joint_product`, with nothing to change in it."""
    joint = joint_name(names)
    held = joint in params or joint + BY_OUTPUT in params
    return held and joint + FP8 not in params and not any(name + LORA_DOWN in params for name in names)


def joint_product(params: Mapping[str, jax.Array], names: tuple[str, ...], x: jax.Array) -> jax.Array:
    """x times weights that are `held_together`: [..., all of their outputs]."""
    return _plain_product(params, joint_name(names), x, 1)


def _plain_product(params: Mapping[str, jax.Array], name: str, x: jax.Array, inputs: int) -> jax.Array:
    by_output = params.get(name + BY_OUTPUT)
    if by_output is None:
        y = jnp.tensordot(x, params[name].astype(x.dtype), inputs)
    else:
        rows = x.reshape(*x.shape[: x.ndim - inputs], -1)
        operands = few_rows_operands(params, name, x, inputs)
        if operands is not None and has_kernel(**operands):
            return few_rows(**operands).reshape(*rows.shape[:-1], *by_output.shape[:-1])
        y = jnp.tensordot(rows, by_output.astype(x.dtype), ((rows.ndim - 1,), (by_output.ndim - 1,)))
    scale = params.get(name + QUANTIZED_SCALE)
    return y if scale is None else y * scale.astype(y.dtype)


def few_rows_operands(params: Mapping[str, Any], name: str, x: jax.Array, inputs: int = 1) -> dict[str, Any] | None:
    """x [rows, K], the weight [outputs, K] and its scales where it has 8 bits, by the names that `few_rows` has for
    them; None of a weight that is held in another way."""
    held = held_by_output(params, name, x.dtype)
    return None if held is None else {"x": x.reshape(math.prod(x.shape[: x.ndim - inputs]), -1), **held}


def held_by_output(params: Mapping[str, Any], name: str, dtype: Any) -> dict[str, Any] | None:
    """The weight [outputs, K] that rows of that type are multiplied with, and its scales where it has 8 bits."""
    weight, scale = params.get(name + BY_OUTPUT), params.get(name + QUANTIZED_SCALE)
    if weight is None or (scale is None and weight.dtype != dtype):
        return None
    held = {"weight": weight.reshape(-1, weight.shape[-1])}
    return held if scale is None else {**held, "weight_scale": scale.reshape(-1)}


def gated_products(
    params: Mapping[str, jax.Array], names: tuple[str, str], x: jax.Array, gate: str
) -> jax.Array | None:
    """gate(x times the first weight) · (x times the second) in one pass, where there is a kernel for it; else None."""
    operands = few_rows_operands(params, joint_name(names), x)
    changed = any(name + LORA_DOWN in params for name in names)
    if operands is None or changed or not has_kernel(**operands, gate=gate):
        return None
    return few_rows(**operands, gate=gate).reshape(*x.shape[:-1], -1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts", "residual", "scale"], meta_fields=["eps"])
@dataclass(frozen=True)
class Unsummed:
    """What a block is given where the product before it was left in parts: it adds them up, and norms them, itself."""

    parts: jax.Array
    """[parts, tokens, hidden] in float32."""
    residual: jax.Array
    """[1, tokens, hidden], what they are added to."""
    scale: jax.Array
    """Of the RMS norm of the sum."""
    eps: float

    @property
    def dtype(self) -> Any:
        """Of the row that comes of it."""
        return self.residual.dtype

    def _operands(self, params: Mapping[str, Any], name: str) -> tuple[Any, ...] | None:
        """As `summed_row` takes them; None of a weight that is held in another way."""
        weight = few_rows_operands(params, name, self.residual)
        if weight is None:
            return None
        return self.parts, weight["x"], self.scale, weight["weight"], weight.get("weight_scale")

    def has_kernel(self, params: Mapping[str, Any], name: str, *, gate: str | None = None, parts: bool = False) -> bool:
        """Whether there is a kernel for `times`, which has all arguments alike."""
        operands = self._operands(params, name)
        if operands is None:
            return False
        out_parts = summed_row_api.parts_to_leave(*operands) if parts else None
        if parts and out_parts is None:
            return False
        return summed_row_api.has_kernel(*operands, gate=gate, eps=self.eps, out_parts=out_parts)

    def times(
        self, params: Mapping[str, Any], name: str, *, gate: str | None = None, parts: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """(the sum, its norm times a weight: [1, tokens, outputs], or [parts, tokens, outputs] in float32)."""
        operands = self._operands(params, name)
        assert operands is not None
        out_parts = summed_row_api.parts_to_leave(*operands) if parts else None
        total, made = summed_row_api.summed_row(*operands, gate=gate, eps=self.eps, out_parts=out_parts)
        return total.reshape(self.residual.shape), made if parts else made[None]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["dtype"])
@dataclass(frozen=True)
class Projected:
    """What an attention is given where its first product was taken together with the layer's before it."""

    parts: jax.Array
    """[parts, tokens, all outputs] in float32, which are added up."""
    dtype: Any
    """Of the row that it is a product of."""


class GatedMlp(NamedTuple):
    """The weights of a block that is a gated mlp and nothing else, by their names, and the activation."""

    up: str
    down: str
    gate: str


@dataclass(frozen=True)
class LastProduct:
    """What a block adds, as the product that it ends in: not taken yet, so that what follows can be taken with it."""

    params: Mapping[str, jax.Array]
    name: str
    x: jax.Array
    inputs: int = 1
    residual: jax.Array | None = None
    """What it is added to, where the block was given that `Unsummed`."""

    def value(self) -> jax.Array:
        return product(self.params, self.name, self.x, self.inputs)

    def left_in_parts(
        self, residual: jax.Array, scale: jax.Array, eps: float, adds_up: Callable[[Unsummed], bool]
    ) -> Unsummed | None:
        """The product in parts, where the block that follows says of shapes like these that it adds them up."""
        operands = few_rows_operands(self.params, self.name, self.x, self.inputs)
        if operands is None or self.name + LORA_DOWN in self.params:
            return None
        (tokens, _), weight = operands["x"].shape, operands["weight"]
        parts = parts_to_leave(operands["x"], weight)
        if parts is None:
            return None
        like: Any = jax.ShapeDtypeStruct((parts, tokens, weight.shape[0]), jnp.float32)
        if not adds_up(Unsummed(like, residual, scale, eps)):
            return None
        return Unsummed(few_rows(**operands, out_parts=parts), residual, scale, eps)

    def added_and_normed(self, residual: jax.Array, scale: jax.Array, eps: float) -> tuple[jax.Array, jax.Array] | None:
        """(the residual with this added, the RMS norm of that), where there is a kernel for all of it; else None."""
        operands = few_rows_operands(self.params, self.name, self.x, self.inputs)
        if operands is None or self.name + LORA_DOWN in self.params:
            return None
        operands |= {"residual": residual.reshape(-1, residual.shape[-1]), "scale": scale}
        if not has_kernel(**operands, eps=eps):
            return None
        total, normal = few_rows(**operands, eps=eps)
        return total.reshape(residual.shape), normal.reshape(residual.shape)


def _with_change(params: Mapping[str, jax.Array], name: str, x: jax.Array, inputs: int, y: jax.Array) -> jax.Array:
    down = params.get(name + LORA_DOWN)
    if down is not None:
        low = jnp.tensordot(x, down.astype(x.dtype), inputs) * params[name + LORA_SCALE].astype(x.dtype)
        y = y + jnp.tensordot(low, params[name + LORA_UP].astype(x.dtype), 1)
    return y


@dataclass(frozen=True)
class Sequences:
    """What a block knows of the rows that it works on beside their numbers."""

    positions: jax.Array | None = None
    """[batch, length] of each token in its document; 0, 1, 2, … where None."""
    segment_ids: jax.Array | None = None
    """[batch, length]: tokens of different documents do not see each other."""
    key: jax.Array | None = None
    """For dropout and jitter; None outside of training."""

    def of_block(self, layer: int, number: int) -> Sequences:
        """The same with a key of this block's own."""
        if self.key is None:
            return self
        return replace(self, key=jax.random.fold_in(jax.random.fold_in(self.key, layer), number))


_STATIC = {"static": True}
"""Of a field of a pytree: part of what a program is traced for, and no array."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedBatch:
    """A ragged batch of serving: prompts, pieces of prompts and single tokens of many sequences, one after another.

    Rows of padding have a context of 0 and no tokens.
    """

    positions: jax.Array
    """[tokens] of each in its sequence; -1 for padding."""
    rows: jax.Array
    """[tokens]: the sequence of each, as a row of the arrays below."""
    page_table: jax.Array
    """[sequences, pages]: where each sequence's keys lie in the pools; any number past the pool where they do not."""
    context_lengths: jax.Array
    """[sequences]: tokens of each, these included."""
    query_starts: jax.Array | None
    """[sequences + 1]: where each sequence's tokens start; None where each has one."""
    slots: jax.Array
    """[sequences]: which state each goes on from, for blocks that keep one; past the last for padding."""
    longest: int = field(default=1, metadata=_STATIC)
    """No sequence has more tokens here."""
    key_splits: int | None = field(default=None, metadata=_STATIC)
    """Into how many parts attention cuts the keys; what is fastest when None."""
    attention: str | None = field(default=None, metadata=_STATIC)
    """The implementation of attention, by name; the fastest when None."""
    adapters: jax.Array | None = None
    """[tokens]: the number of the low-rank change that each takes, -1 for none; None where the weights have none."""


@dataclass(frozen=True)
class BlockOutput:
    """What a block adds, losses of its own, and what is worth logging."""

    value: jax.Array
    loss: jax.Array | None = None
    """Added to the training loss, weighted already."""
    metrics: Mapping[str, jax.Array] | None = None


class Block:
    """One kind of block, by its config. Subclasses are frozen dataclasses of the keys that TOML may set."""

    def weights(self, model: ModularModelConfig) -> dict[str, Weight]:
        """Every parameter."""
        raise NotImplementedError

    def products(self) -> dict[str, int]:
        """Weights that `product` multiplies with, and how many of their first axes are inputs: LoRA can change them."""
        return {}

    def joint_products(self) -> tuple[tuple[str, ...], ...]:
        """Weights of one input that `products` multiplies with, which serving may hold side by side."""
        return ()

    takes_fp8 = False
    """Whether the products of this block are fp8's where training asks for them."""

    def product_groups(self) -> tuple[tuple[str, ...], ...]:
        """All of `products`, those of one input together."""
        joint = self.joint_products()
        return (*joint, *((name,) for name in self.products() if not any(name in names for names in joint)))

    def __call__(
        self, model: ModularModelConfig, params: Mapping[str, jax.Array], x: jax.Array, sequences: Sequences
    ) -> BlockOutput:
        """[batch, length, hidden] to the same."""
        raise NotImplementedError

    def new_cache(self, model: ModularModelConfig, batch: int, length: int, dtype: Any) -> dict[str, jax.Array]:
        """What decoding keeps of the past, for so many rows of at most so many tokens; nothing by default."""
        return {}

    def decode(
        self,
        model: ModularModelConfig,
        params: Mapping[str, jax.Array],
        x: jax.Array,
        cache: Mapping[str, jax.Array],
        start: jax.Array,
        lengths: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The next tokens, [batch, new, hidden], after `start` [batch] of them are in the cache; and the cache then.

        Of the new tokens the first `lengths` [batch] are there, the rest padding that leaves no trace.
        """
        return self(model, params, x, Sequences()).value, dict(cache)

    keeps_state = False
    """Whether what it keeps of the past is one state a sequence, of which nothing can be shared or taken back."""

    def new_paged_cache(
        self, model: ModularModelConfig, pages: int, page_size: int, slots: int, dtype: Any
    ) -> dict[str, jax.Array]:
        """What serving keeps of the past: pools of pages, or a state a slot; nothing by default."""
        return {}

    def paged(
        self,
        model: ModularModelConfig,
        params: Mapping[str, jax.Array],
        x: jax.Array | Unsummed | Projected,
        cache: Mapping[str, jax.Array],
        batch: PagedBatch,
    ) -> tuple[jax.Array | LastProduct, dict[str, jax.Array]]:
        """The tokens of a ragged batch, [1, tokens, hidden] or the last product to it, and what is kept then.

        It is given x `Unsummed` only where it `adds_up`, and then returns its last product, with what that is added to.
        It is given x `Projected` only where it is `projected_by` a weight.
        """
        assert not isinstance(x, Unsummed | Projected)
        return self(model, params, x, Sequences()).value, dict(cache)

    def adds_up(
        self, model: ModularModelConfig, params: Mapping[str, Any], x: Unsummed, cache: Mapping[str, Any]
    ) -> bool:
        """Whether `paged` takes x like this, and would run faster for it; shapes and types will do."""
        return False

    def projected_by(
        self, model: ModularModelConfig, params: Mapping[str, Any], tokens: Any, cache: Mapping[str, Any]
    ) -> str | None:
        """The weight that x is multiplied with before anything else, where `paged` takes that product in x's place, in
        parts of it [parts, tokens]."""
        return None

    def as_gated_mlp(self, params: Mapping[str, Any]) -> GatedMlp | None:
        """Where this block is two products held as one, a gate, and a third one."""
        return None

    def check(self, model: ModularModelConfig, where: str) -> None:
        """What has to hold between this block and the model."""

    def flops_per_token(self, model: ModularModelConfig, length: int) -> float:
        """Operations of a forward pass beyond two a parameter: scores of attention, states of a scan."""
        return 0.0

    def active_parameters(self, model: ModularModelConfig) -> int:
        """Parameters that one token meets."""
        return sum(math.prod(w.shape) for w in self.weights(model).values())
