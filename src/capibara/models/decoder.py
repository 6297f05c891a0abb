"""The one decoder: what a `ModularModelConfig` describes, as plain functions of pytrees of parameters.

`weights` declares every parameter; `shapes`, `axes` and `init` come from it. `hidden_states`, `logits` and `loss` run
it, `decode` goes on from a cache, and `paged` from the pages of many sequences at once. The layers of a pattern are one
body that a scan repeats, with their parameters stacked (but for `paged`); activations are named by logical axes, so
that a layout's rules put them on a mesh.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from capibara.errors import rule_error, say_once
from capibara.kernels.ops.layers.between_attentions.api import between_attentions, kernel_parts, new_board
from capibara.kernels.ops.layers.cross_entropy.api import cross_entropy
from capibara.kernels.ops.layers.few_rows.api import few_rows, has_kernel
from capibara.kernels.ops.layers.norm.api import layer_norm, rms_norm
from capibara.mesh import with_sharding_constraint
from capibara.mesh.rules import is_placing
from capibara.models.blocks import spec
from capibara.models.blocks.spec import (
    BY_OUTPUT,
    FP8,
    LORA_DOWN,
    LORA_SCALE,
    QUANTIZED_SCALE,
    Fp8Group,
    LastProduct,
    PagedBatch,
    Projected,
    Sequences,
    Unsummed,
    Weight,
)
from capibara.parallel.remat import LAYER_INPUT, keeps_everything
from capibara.precision import Fp8Settings

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = [
    "axes",
    "batch_shapes",
    "decode",
    "fp8_history_shapes",
    "hidden_states",
    "init",
    "logits",
    "loss",
    "make_loss",
    "new_cache",
    "new_paged_cache",
    "paged",
    "param_shapes",
    "weights",
]

_log = logging.getLogger(__name__)
IGNORED = -100
_RESIDUAL = ("batch", "sequence", None)


def _norm_weights(model: ModularModelConfig) -> dict[str, Weight]:
    scale = {"scale": Weight((model.hidden,), (None,), "ones")}
    return scale | ({"bias": Weight((model.hidden,), (None,), "zeros")} if model.norm == "layer" else {})


def weights(model: ModularModelConfig) -> dict[str, Any]:
    """Every parameter, as a tree of `Weight`; those of a layer of the pattern are stacked over its repeats.

    `layers` is a list with an entry for each layer of the pattern: block name -> its weights, with its norm's.
    """

    def layer(names: tuple[str, ...]) -> dict[str, Any]:
        of_blocks = {
            slot_of(names, number): {**model.blocks[name].weights(model), "norm_": _norm_weights(model)}
            for number, name in enumerate(names)
        }
        return jax.tree.map(lambda w: w.stacked(model.repeats), of_blocks, is_leaf=lambda w: isinstance(w, Weight))

    tree: dict[str, Any] = {
        # Read row by row and not as a product: a row's numbers start at one, or less where the table is the head too.
        "embed": Weight((model.vocab, model.hidden), ("vocab", None), fan_in=model.hidden if model.tied else 1),
        "layers": [layer(names) for names in model.period],
        "norm": _norm_weights(model),
    }
    if not model.tied:
        tree["head"] = Weight((model.hidden, model.vocab), (None, "vocab"))
    return tree


def slot_of(names: tuple[str, ...], number: int) -> str:
    """A block's key in its layer: its name, with a number where it comes twice."""
    name = names[number]
    return name if names.count(name) == 1 else f"{name}_{names[:number].count(name)}"


def param_shapes(model: ModularModelConfig, dtype: Any = jnp.float32) -> Any:
    """Every parameter's shape and type."""
    return spec.shapes(weights(model), dtype)


def axes(model: ModularModelConfig) -> Any:
    """Every parameter's logical axes."""
    return spec.logical_axes(weights(model))


def init(model: ModularModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Any:
    """Parameters to start from."""
    return spec.initial(weights(model), key, dtype)


def batch_shapes(batch: int, length: int, *, packed: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a training batch; packed ones have segments and positions too."""
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    names = ("inputs", "targets", *(("segment_ids", "positions") if packed else ()))
    return dict.fromkeys(names, ids)


def _norm(model: ModularModelConfig, params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    if model.norm == "layer":
        return layer_norm(x, params["scale"], params["bias"], eps=model.norm_eps)
    return rms_norm(x, params["scale"], eps=model.norm_eps)


def _normed_with(
    model: ModularModelConfig, params: Mapping[str, jax.Array], x: jax.Array, added: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(the norm of x with what is added, their sum), in one pass; backward what comes back to the sum is added in one
    pass with the norm's own gradient, too. With nothing to add that is all it is for."""
    if model.norm == "layer":
        return layer_norm(x, params["scale"], params["bias"], added, eps=model.norm_eps, return_residual=True)
    return rms_norm(x, params["scale"], added, eps=model.norm_eps, return_residual=True)


def _check_mesh() -> None:
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if explicit:
        raise rule_error(
            "The decoder leaves to XLA what its logical axes do not say, on a mesh whose axes are of type Auto",
            f"{', '.join(explicit)} of type Explicit",
            "build the mesh with capibara.mesh.MeshConfig, or give jax.make_mesh axis_types=(AxisType.Auto, ...)",
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows(table: jax.Array, ids: jax.Array, dtype: Any) -> jax.Array:
    """Rows of the table. What a frequent token's row gets is a sum of thousands, which bfloat16 could not hold."""
    # Narrow first: a table that is cut over the mesh then travels narrow.
    return table.astype(dtype)[ids]


def _rows_forward(table: jax.Array, ids: jax.Array, dtype: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # An empty slice keeps the table's type without keeping the table.
    return _rows(table, ids, dtype), (ids, jnp.zeros_like(table, shape=(table.shape[0], 0)))


def _rows_backward(dtype: Any, kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    ids, table = kept
    zeros = jnp.zeros((table.shape[0], gradient.shape[-1]), jnp.float32)
    return zeros.at[ids].add(gradient.astype(jnp.float32)).astype(table.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def _embedded(model: ModularModelConfig, params: Any, inputs: jax.Array, dtype: Any) -> jax.Array:
    _check_mesh()
    if jnp.issubdtype(inputs.dtype, jnp.floating):
        if inputs.ndim != 3 or inputs.shape[-1] != model.hidden:
            raise rule_error(
                f"Embeddings are [batch, length, {model.hidden}]", list(inputs.shape), "pass token ids or embeddings"
            )
        x = inputs.astype(dtype)
    else:
        if inputs.ndim != 2:
            raise rule_error("Token ids are [batch, length]", list(inputs.shape), "add a batch axis: ids[None]")
        x = _rows(params["embed"], inputs, dtype)
        if model.embed_scale != 1:
            x = x * jnp.asarray(model.embed_scale, dtype)
    return with_sharding_constraint(x, _RESIDUAL)


def _layers(
    model: ModularModelConfig, params: Any, x: jax.Array, added: jax.Array | None, sequences: Sequences
) -> tuple[tuple[jax.Array, jax.Array | None], jax.Array, dict[str, jax.Array]]:
    """One pass over the pattern: ((x, what the last block adds to it), the blocks' own losses, their metrics).

    What a block adds, the next one's norm adds up, in its own pass over memory; `added` is of the layer before.
    """
    extra = jnp.float32(0)
    metrics: dict[str, list[jax.Array]] = {}
    for place, (names, layer) in enumerate(zip(model.period, params, strict=True)):
        for number, name in enumerate(names):
            own = dict(layer[slot_of(names, number)])
            norm = own.pop("norm_")
            if added is None and is_placing():
                # With x among this norm's results, too, a search over layouts was seen to miss the better ones with a
                # `model` axis.
                y = _norm(model, norm, x)
            else:
                y, x = _normed_with(model, norm, x, added)
            out = model.blocks[name](model, own, y, sequences.of_block(place, number))
            added = with_sharding_constraint(out.value, _RESIDUAL)
            if out.loss is not None:
                extra = extra + out.loss
            for key, value in (out.metrics or {}).items():
                metrics.setdefault(key, []).append(value)
    return (x, added), extra, {key: jnp.stack(values) for key, values in metrics.items()}


def _sum(x: jax.Array, added: jax.Array | None) -> jax.Array:
    return x if added is None else with_sharding_constraint(x + added, _RESIDUAL)


def hidden_states(
    model: ModularModelConfig,
    params: Any,
    inputs: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    key: jax.Array | None = None,
    dtype: Any = jnp.bfloat16,
    unroll: int | bool = 1,
    fp8: Fp8Settings | None = None,
    fp8_history: Any = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Token ids [batch, length], or embeddings, to what the head reads: (x, the blocks' losses, metrics a layer).

    `unroll` is how many repeats of the pattern are written out in the loop's body, True for all: then there is no loop.
    With `fp8` the products of attention and of the mlp are fp8's, scaled by `fp8_history` where it is kept
    (`fp8_history_shapes`).
    """
    x = _embedded(model, params, inputs, dtype)
    sequences = Sequences(positions, segment_ids, key)
    # A loss and metrics are carried only where a block has them, so that a plain decoder's scan carries x alone.
    plain = not any(block_has_losses(model, name) for layer in model.period for name in layer)

    # Layers that are written out one after another leave their last sum to the next one's norm. A loop, or what
    # computes layers again, would keep both of its terms.
    leaves_sum = unroll is True and keeps_everything() and not is_placing()

    def body(before: Any, layers_and_number: tuple[Any, Any]) -> tuple[Any, Any]:
        layers, number = layers_and_number
        x, added = before
        x = checkpoint_name(x, LAYER_INPUT)
        own = sequences
        if key is not None:
            own = Sequences(positions, segment_ids, jax.random.fold_in(key, number))
        (x, added), extra, metrics = _layers(model, layers, x, added, own)
        after = (x, added) if leaves_sum else (_sum(x, added), None)
        return after, None if plain else (extra, metrics)

    numbers = None if key is None else jnp.arange(model.repeats)
    layers = params["layers"] if fp8 is None else _with_fp8(model, params["layers"], fp8, fp8_history)
    added = jnp.zeros_like(x) if leaves_sum else None
    (x, added), beside = jax.lax.scan(body, (x, added), (layers, numbers), unroll=unroll, length=model.repeats)
    x = _norm(model, params["norm"], x) if added is None else _normed_with(model, params["norm"], x, added)[0]
    if beside is None:
        return x, jnp.float32(0), {}
    extra, metrics = beside
    return x, extra.sum(), {name: value.reshape(-1, *value.shape[2:]) for name, value in metrics.items()}


def _fp8_groups(model: ModularModelConfig) -> list[dict[str, dict[str, int]]]:
    """Of each layer of the pattern: slot -> the joint name of each group of fp8 products and how many they are."""
    layers: list[dict[str, dict[str, int]]] = []
    others = set()
    for names in model.period:
        layers.append({})
        for number, name in enumerate(names):
            block = model.blocks[name]
            if block.takes_fp8:
                groups = {spec.joint_name(group): len(group) for group in block.product_groups()}
                layers[-1][slot_of(names, number)] = groups
            else:
                others.add(name)
    if others:
        said = ", ".join(sorted(others))
        say_once(_log, said, "fp8 is for the products of attention and of an mlp: those of %s stay bfloat16", said)
    return layers


def fp8_history_shapes(model: ModularModelConfig, fp8: Fp8Settings) -> Any:
    """What "delayed" scaling keeps of the last steps, as `fp8_history` takes it; None of one that keeps nothing."""
    if not fp8.steps:
        return None

    def of_group(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((model.repeats, 1 + count, fp8.steps), jnp.float32)

    return jax.tree.map(of_group, _fp8_groups(model))


def _with_fp8(model: ModularModelConfig, layers: Any, fp8: Fp8Settings, history: Any) -> list[Any]:
    """The layers' parameters, with how their products are scaled beside their weights."""
    marked = []
    for number, (layer, groups) in enumerate(zip(layers, _fp8_groups(model), strict=True)):
        blocks = dict(layer)
        for slot, names in groups.items():
            beside = {
                name + FP8: Fp8Group(fp8, None if history is None else history[number][slot][name]) for name in names
            }
            blocks[slot] = {**layer[slot], **beside}
        marked.append(blocks)
    return marked


def block_has_losses(model: ModularModelConfig, name: str) -> bool:
    from capibara.models.blocks import Moe, Vq

    return isinstance(model.blocks[name], Moe | Vq)


def _head(model: ModularModelConfig, params: Any, dtype: Any) -> jax.Array:
    return params["embed"].astype(dtype).T if model.tied else params["head"].astype(dtype)


def _scores(model: ModularModelConfig, params: Any, x: jax.Array) -> jax.Array:
    by_output = params.get("head" + BY_OUTPUT)
    if by_output is None:
        scores = jnp.einsum("...h,hv->...v", x, _head(model, params, x.dtype), preferred_element_type=jnp.float32)
    else:
        operands = spec.few_rows_operands(params, "head", x)
        if operands is not None and has_kernel(**operands, out_dtype="float32"):
            return few_rows(**operands, out_dtype="float32").reshape(*x.shape[:-1], -1)
        scores = jnp.einsum("...h,vh->...v", x, by_output.astype(x.dtype), preferred_element_type=jnp.float32)
    scale = params.get("head" + QUANTIZED_SCALE)
    return scores if scale is None else scores * scale


def logits(model: ModularModelConfig, params: Any, x: jax.Array) -> jax.Array:
    """What the head makes of hidden states: float32 [..., vocab]."""
    scores = _scores(model, params, x)
    if model.softcap is not None:
        scores = model.softcap * jnp.tanh(scores / model.softcap)
    return with_sharding_constraint(scores, ("batch", "sequence", "vocab")) if scores.ndim == 3 else scores


def loss(
    model: ModularModelConfig,
    params: Any,
    batch: Mapping[str, jax.Array],
    *,
    z_loss: float = 0.0,
    key: jax.Array | None = None,
    dtype: Any = jnp.bfloat16,
    unroll: int | bool = 1,
    fp8: Fp8Settings | None = None,
    fp8_history: Any = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(what is minimised, metrics): the mean cross-entropy of the next token, and what blocks add to it.

    `batch` has "inputs" and "targets", and where they count "segment_ids", "positions" and "mask" (a target whose mask
    is 0, or whose segment is 0, has no loss). The metric "loss" is the cross-entropy alone, in nats a token. `fp8` is
    as in `hidden_states`; the head and the loss are in `dtype` either way.
    """
    x, extra, metrics = hidden_states(
        model,
        params,
        batch["inputs"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        key=key,
        dtype=dtype,
        unroll=unroll,
        fp8=fp8,
        fp8_history=fp8_history,
    )
    targets = batch["targets"]
    if "mask" in batch:
        targets = jnp.where(batch["mask"] != 0, targets, IGNORED)
    if "segment_ids" in batch:
        targets = jnp.where(batch["segment_ids"] != 0, targets, IGNORED)
    head = _head(model, params, x.dtype)
    options: dict[str, Any] = {"softcap": model.softcap, "ignore_index": IGNORED}
    if not z_loss:
        entropy = cross_entropy(x, head, targets, **options)
        return entropy + extra, {"loss": entropy, **metrics}
    total, of_z = cross_entropy(x, head, targets, z_loss=z_loss, return_z_loss=True, **options)
    return total + extra, {"loss": total - of_z, **metrics}


def make_loss(model: ModularModelConfig, **options: Any) -> Callable[[Any, Any], jax.Array]:
    """`loss(params, batch)` of one number, as planners take it."""

    def only_loss(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        return loss(model, params, batch, **options)[0]

    return only_loss


def new_cache(model: ModularModelConfig, batch: int, length: int, dtype: Any = jnp.bfloat16) -> list[Any]:
    """Nothing of the past yet, for so many rows of at most so many tokens."""

    def stacked(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (model.repeats, *leaf.shape))

    return [
        {
            slot_of(names, number): jax.tree.map(stacked, model.blocks[name].new_cache(model, batch, length, dtype))
            for number, name in enumerate(names)
        }
        for names in model.period
    ]


def decode(
    model: ModularModelConfig,
    params: Any,
    inputs: jax.Array,
    cache: list[Any],
    start: jax.Array,
    lengths: jax.Array,
    *,
    dtype: Any = jnp.bfloat16,
) -> tuple[jax.Array, list[Any]]:
    """The next tokens [batch, new] after `start` [batch] are in the cache: (hidden states, the cache then).

    Of the new tokens of a row the first `lengths` are there; the rest is padding. The first call, with `start` 0, is
    the prompt's.
    """
    x = _embedded(model, params, inputs, dtype)

    def body(x: jax.Array, layers_and_caches: tuple[Any, Any]) -> tuple[jax.Array, Any]:
        layers, caches = layers_and_caches
        after = []
        for names, layer, kept in zip(model.period, layers, caches, strict=True):
            slots = {}
            for number, name in enumerate(names):
                slot = slot_of(names, number)
                own = dict(layer[slot])
                y = _norm(model, own.pop("norm_"), x)
                out, slots[slot] = model.blocks[name].decode(model, own, y, kept[slot], start, lengths)
                x = x + out
            after.append(slots)
        return x, after

    x, cache = jax.lax.scan(body, x, (params["layers"], cache))
    return _norm(model, params["norm"], x), cache


def new_paged_cache(
    model: ModularModelConfig, pages: int, page_size: int, slots: int, dtype: Any = jnp.bfloat16
) -> list[Any]:
    """Empty pools of so many pages, and states of so many sequences at a time; an entry a layer."""
    return [
        {
            slot_of(names, number): model.blocks[name].new_paged_cache(model, pages, page_size, slots, dtype)
            for number, name in enumerate(names)
        }
        for names in model.period * model.repeats
    ]


def _with_own_changes(block: Mapping[str, Any], batch: PagedBatch) -> dict[str, Any]:
    """A block's parameters, with a row of scales a token for the low-rank changes that lie side by side in it."""
    own = {name: weight for name, weight in block.items() if name != "norm_"}
    if batch.adapters is not None:
        for name, scales in block.items():
            if name.endswith(LORA_SCALE):  # [adapters, ranks]
                chosen = jnp.where(batch.adapters < 0, scales.shape[0], batch.adapters)
                own[name] = scales.at[chosen].get(mode="fill", fill_value=0)[None]
    return own


def _added_and_normed(
    model: ModularModelConfig,
    x: jax.Array,
    out: jax.Array | LastProduct,
    norm: Mapping[str, jax.Array],
    adds_up: Callable[[Unsummed], bool],
) -> tuple[jax.Array, jax.Array | Unsummed]:
    """(x with what a block adds, the norm of that): together with the block's last product where a kernel does so.

    Where the next block adds up the product's parts itself, x is as it was, and what is added comes with the norm.
    """
    if isinstance(out, LastProduct):
        x = x if out.residual is None else out.residual
        if model.norm == "rms":
            left = out.left_in_parts(x, norm["scale"], model.norm_eps, adds_up)
            if left is not None:
                return x, left
            together = out.added_and_normed(x, norm["scale"], model.norm_eps)
            if together is not None:
                return together
        out = out.value()
    x = x + out
    return x, _norm(model, norm, x)


def paged(
    model: ModularModelConfig,
    params: Any,
    tokens: jax.Array,
    cache: list[Any],
    batch: PagedBatch,
    *,
    dtype: Any = jnp.bfloat16,
) -> tuple[jax.Array, list[Any]]:
    """The tokens [tokens] of a ragged batch: (hidden states [tokens, hidden], the cache then).

    `params["layers"]` here has an entry a layer, nothing stacked: a scan would cut each layer's weights and pages out
    of the stacks at every token, and a GPU copies what it cuts out. `cache` is as `new_paged_cache` gives it.
    """
    x = _embedded(model, params, tokens[None], dtype)
    layers = list(zip(model.period * model.repeats, params["layers"], cache, strict=True))
    norms = [layer[slot_of(names, number)]["norm_"] for names, layer, _ in layers for number in range(len(names))]
    y = _norm(model, norms[0], x)
    upcoming = iter([*norms[1:], params["norm"]])
    # A function of its own: layers that are alike are traced once and lowered once, where most of the time before XLA's
    # went into the kernels of each. XLA puts it in wherever it is called, and the program is the same.
    of_layer = functools.cache(lambda *kind: jax.jit(functools.partial(_paged_layer, model, *kind)))
    after = []
    board = _board(model, tokens.shape[0])
    for number, (names, layer, kept) in enumerate(layers):
        # Only kernels of one row add up what the layer before left in parts: others need not be traced for it.
        alone = tokens.shape[0] == 1 and number + 1 < len(layers)
        then, *following = layers[number + 1] if alone else (None, None, None)
        own = [next(upcoming) for _ in names]
        x, y, slots, board = of_layer(names, then)(x, y, layer, kept, own, batch, following, board)
        after.append(slots)
    return y[0], after


def _board(model: ModularModelConfig, tokens: int) -> jax.Array | None:
    """What the kernels of `between_attentions` go by, where any of this model's layers may be theirs."""
    from capibara.models.blocks import Mlp

    widths = [block.ffn for block in model.blocks.values() if isinstance(block, Mlp)]
    return new_board(model.hidden, max(widths)) if tokens == 1 and widths else None


def _paged_layer(
    model: ModularModelConfig,
    names: tuple[str, ...],
    then: tuple[str, ...] | None,
    x: jax.Array,
    y: jax.Array | Unsummed | Projected,
    layer: Mapping[str, Any],
    kept: Mapping[str, Any],
    norms: list[Mapping[str, jax.Array]],
    batch: PagedBatch,
    following: Any,
    board: jax.Array | None,
) -> tuple[jax.Array, Any, dict[str, Any], jax.Array | None]:
    """(x, its norm by what follows, what is kept then, the board); `norms` are those that follow each block.

    `then` and `following` are the blocks, the parameters and the cache of the layer after it, where it may add up what
    this one leaves in parts: they are looked at, and nothing is computed of them.
    """
    slots: dict[str, Any] = {}
    blocks = [(name, layer[slot_of(names, n)], kept[slot_of(names, n)]) for n, name in enumerate(names)]
    if then is not None:
        first = slot_of(then, 0)
        blocks.append((then[0], following[0][first], following[1][first]))
    for number, (name, norm) in enumerate(zip(names, norms, strict=True)):

        def adds_up(left: Unsummed, number: int = number) -> bool:
            if number + 1 == len(blocks):
                return False
            name, own, cache = blocks[number + 1]
            return model.blocks[name].adds_up(model, _with_own_changes(own, batch), left, cache)

        slot = slot_of(names, number)
        own = _with_own_changes(layer[slot], batch)
        out, slots[slot] = model.blocks[name].paged(model, own, y, kept[slot], batch)
        if isinstance(out, LastProduct) and board is not None and number == 0 and len(names) == 2:
            rest = slot_of(names, 1)
            mlp = _with_own_changes(layer[rest], batch)
            made = _until_next_attention(model, x, out, names[1], mlp, norms, blocks[2:], batch, board)
            if made is not None:
                return *made[:2], {**slots, rest: dict(kept[rest])}, made[2]
        x, y = _added_and_normed(model, x, out, norm, adds_up)
    return x, y, slots, board


def _until_next_attention(
    model: ModularModelConfig,
    x: jax.Array,
    out: LastProduct,
    name: str,
    own: Mapping[str, Any],
    norms: list[Mapping[str, jax.Array]],
    then: list[Any],
    batch: PagedBatch,
    board: jax.Array,
) -> tuple[jax.Array, jax.Array | Projected, jax.Array] | None:
    """(x after the layer, what the next one is given, the board), where one kernel does all of it; else None.

    `name` and `own` are of the block that follows the attention, `then` of the next layer's first where there is one.
    """
    mlp = model.blocks[name].as_gated_mlp(own)
    if mlp is None or model.norm != "rms" or out.name + LORA_DOWN in out.params:
        return None
    residual = x if out.residual is None else out.residual
    of: list[tuple[Mapping[str, Any], str]] = [(out.params, out.name), (own, mlp.up), (own, mlp.down)]
    held = [spec.held_by_output(params, weight, x.dtype) for params, weight in of]
    for following, params, cache in then:
        after = _with_own_changes(params, batch)
        tokens = jax.ShapeDtypeStruct((1, x.shape[1]), x.dtype)
        projection = model.blocks[following].projected_by(model, after, tokens, cache)
        held.append(None if projection is None else spec.held_by_output(after, projection, x.dtype))
    known = [one for one in held if one is not None]
    if len(known) < len(held):
        return None
    known += [] if then else [{}]
    (first, up, down, last), eps = known, model.norm_eps
    operands = (
        out.x.reshape(x.shape[1], -1), residual.reshape(-1, residual.shape[-1]), first["weight"], norms[0]["scale"],
        up["weight"], down["weight"], norms[1]["scale"], last.get("weight"),
        *(one.get("weight_scale") for one in known), board,
    )  # fmt: skip
    parts = kernel_parts(*operands, gate=mlp.gate, eps=eps)
    if parts is None:
        return None
    total, made, board = between_attentions(*operands, gate=mlp.gate, eps=eps, out_parts=parts if then else None)
    return total.reshape(residual.shape), Projected(made, x.dtype) if then else made.reshape(residual.shape), board
