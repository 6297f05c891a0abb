"""The loss and its gradient in one go, for a loss that is a weighted sum over tokens.

Where each token's weight is known beforehand, its gradient needs no backward pass: a chunk of tokens has all its
logits in memory once, and they give the loss, then the gradient of the hidden states and of the weights. That is three
matrix products where the recomputing form has four. It takes more memory: the weights' gradient is added up in
float32, and a chunk's rows are as wide as the vocabulary. The backward pass multiplies by one number.

`narrow` keeps both in the operands' type: a chunk's logits take half as much, and the sum of the weights' gradient is
the result itself. A bfloat16 gradient is then rounded once for each chunk of tokens, and not once.

On a mesh tokens and vocabulary are split as they like. Where the vocabulary is, the devices that share a token combine
a few numbers of it a chunk, and the gradient of its hidden state.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Implementation, Partition, Prefer, unit_roundoff
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.layers.cross_entropy import hopper, rules
from capibara.kernels.ops.layers.cross_entropy.cases import AND_GRAD_CASES
from capibara.kernels.ops.layers.cross_entropy.explicit_mesh import on_one_device
from capibara.kernels.ops.layers.cross_entropy.loss import token_flows, token_losses
from capibara.kernels.ops.layers.cross_entropy.mesh import LOGICAL, Axes, own_labels
from capibara.kernels.ops.layers.cross_entropy.reference import reference, vocabulary_axis
from capibara.kernels.ops.layers.cross_entropy.xla import Product, logit_flow, row_sums

CHUNK_BYTES = 512 << 20  # of a chunk's logits in float32; in 16 bits three quarters of it, since they need it twice
STEP = 128  # tokens that a matrix unit takes at a time
ALIGNED = 8  # numbers of 16 bits that fast products want a row to be a multiple of
Params = dict[str, Any]


def reference_and_grad(
    hidden: jax.Array, weights: jax.Array, labels: jax.Array, token_weights: jax.Array, *,
    transpose_weights: bool = False, soft_cap: float | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    narrow: bool = False, return_lse: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """(each token's loss times its weight, and the gradients of their sum by hidden and by weights[, each lse]).

    `narrow` is about memory and rounding, and changes nothing here.
    """
    size = weights.shape[vocabulary_axis(transpose_weights)]

    def total(hidden: Any, weights: Any) -> Any:
        sums = reference(
            hidden, weights, labels, transpose_weights=transpose_weights, soft_cap=soft_cap, return_sum=True
        )
        each = token_weights * token_losses(sums, size, label_smoothing, z_loss)
        return each.sum(), (each, sums[0])

    (d_hidden, d_weights), (each, lse) = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, weights)
    return (each, d_hidden, d_weights, lse) if return_lse else (each, d_hidden, d_weights)


def chunk_tokens(tokens: int, depth: int, vocabulary: int, itemsize: int, block: int | None) -> int:
    """`block`, or as many tokens as the memory set aside for a chunk holds, a multiple of 128.

    Each chunk reads and writes the weights' gradient, which in float32 takes as long as the products of 250 tokens on
    an H200. So there a chunk's logits may take as much memory as that gradient, up to four times what is set aside.

    Half as many are taken where that divides the tokens: a chunk of what is left is a program of its own, with memory
    of its own and products to compile.

    >>> chunk_tokens(16384, 4096, 128256, 2, None), chunk_tokens(16000, 4096, 128256, 2, None)
    (1024, 1536)
    >>> chunk_tokens(16384, 1024, 32000, 4, None), chunk_tokens(16384, 4096, 128256, 4, None)
    (4096, 4096)
    """
    if block is None:
        most = max(CHUNK_BYTES, min(4 * CHUNK_BYTES, 4 * depth * vocabulary)) if itemsize >= 4 else CHUNK_BYTES * 3 // 4
        block = max(STEP, most // (itemsize * vocabulary) // STEP * STEP)
        dividing = [size for size in range(block, block // 2, -STEP) if tokens % size == 0]
        block = dividing[0] if dividing else block
    return max(1, min(block, tokens))


def fits_at_once(call: Call) -> bool:
    """Whether keeping all logits for the backward pass takes no more memory than chunks of tokens do.

    Both hold logits in float32 and their gradient in the operands' type; chunks also hold the weights' gradient in
    float32, which takes its time to write and to read again. Products of unaligned rows are slow, and `xla` pads them.
    """
    n, narrow = rules.sizes_of(call), call.need("hidden").dtype.itemsize
    wide = max(4, narrow)
    chunk = chunk_tokens(n.tokens, n.depth, n.vocabulary, wide, None)
    return n.vocabulary % ALIGNED == 0 and (wide + narrow) * (n.tokens - chunk) <= wide * n.depth


def chunks(call: Call) -> int:
    """How many chunks of tokens the narrow form takes: so often it rounds the gradient of the weights."""
    n, block = rules.sizes_of(call), cast(int | None, call.params["block"])
    itemsize = call.need("hidden").dtype.itemsize
    return math.ceil(n.tokens / chunk_tokens(n.tokens, n.depth, n.vocabulary, itemsize, block)) or 1


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What the rows of a chunk are turned into their gradient by.

    Attributes:
      vocabulary: its size, over all devices.
      columns: the number of each column here; `is_word` says which are words, None for all.
      over: mesh axes that split the vocabulary.
      dtype: of the logits' gradient.
    """

    vocabulary: int
    columns: jax.Array
    is_word: jax.Array | None
    over: tuple[str, ...]
    soft_cap: float | None
    label_smoothing: float
    z_loss: float
    dtype: Any


RowsOfAChunk = Callable[[jax.Array, jax.Array, jax.Array, Chunk], tuple[jax.Array, ...]]
"""(logits, labels, factors, how) -> (each row's lse, its label's logit[, the sum of its logits], the gradient)."""


def _rows_by_xla(logits: jax.Array, label: jax.Array, factor: jax.Array, how: Chunk) -> tuple[jax.Array, ...]:
    is_label = label[:, None] == how.columns
    # A word that is none has a logit of 0, which adds nothing to their sum.
    highest, total, *sums = row_sums(logits, is_label, bool(how.label_smoothing), how.is_word)
    if how.over:
        own, highest = highest, lax.pmax(highest, how.over)
        total, *sums = (lax.psum(x, how.over) for x in (total * jnp.exp(own - highest), *sums))
    lse = highest + jnp.log(total)
    of_lse, of_picked, of_sum = token_flows(lse, how.vocabulary, how.label_smoothing, how.z_loss)
    flow = logit_flow(
        logits, is_label, lse[:, None], (factor * of_lse)[:, None], (factor * of_picked)[:, None],
        None if of_sum is None else (factor * of_sum)[:, None], how.soft_cap,
    )  # fmt: skip
    return lse, *sums, (flow if how.is_word is None else jnp.where(how.is_word, flow, 0)).astype(how.dtype)


def _rows_by_kernel(logits: jax.Array, label: jax.Array, factor: jax.Array, how: Chunk) -> tuple[jax.Array, ...]:
    return hopper.logit_rows(
        logits, label, factor, words=how.vocabulary, label_smoothing=how.label_smoothing, z_loss=how.z_loss,
        dtype=how.dtype,
    )  # fmt: skip


def by_chunks(
    rows_of_a_chunk: RowsOfAChunk, hidden: jax.Array, weights: jax.Array, labels: jax.Array, token_weights: jax.Array,
    *, transpose_weights: bool, soft_cap: float | None, label_smoothing: float, z_loss: float, narrow: bool,
    return_lse: bool, block: int | None, over: tuple[str, ...] = (),
) -> tuple[jax.Array, ...]:  # fmt: skip
    """`over`: mesh axes that split the vocabulary; `weights` is then this device's part, and labels count from it."""
    product = Product(hidden, transpose_weights, soft_cap, narrow)
    rows, flat_labels, scale = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), token_weights.reshape(-1)
    tokens, size = rows.shape[0], weights.shape[product.axis]
    vocabulary = size * math.prod(map(lax.axis_size, over))
    # Rows of 50,257 numbers begin anywhere in memory, and products of them run at a half to a third of the rate of
    # aligned ones: there the vocabulary is made longer by words that no token has a share in.
    padded = size if size % ALIGNED == 0 else -(-size // STEP) * STEP
    weights = lax.pad(weights, weights.dtype.type(0), [(0, (padded - size) * (a == product.axis), 0) for a in (0, 1)])
    columns = lax.iota(labels.dtype, padded)
    is_word = None if padded == size else columns < size
    how = Chunk(vocabulary, columns, is_word, over, soft_cap, label_smoothing, z_loss, hidden.dtype)

    def step(start: Any, count: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        each, d_rows, d_weights, *kept = carry
        here, label, factor = (lax.dynamic_slice_in_dim(x, start, count) for x in (rows, flat_labels, scale))
        lse, *sums, flow = rows_of_a_chunk(product.logits(here, weights), label, factor, how)
        loss = factor * token_losses((lse, *sums), vocabulary, label_smoothing, z_loss)
        part = product.of_rows(flow, weights)
        part = (lax.psum(part, over) if over else part).astype(hidden.dtype)
        update = lax.dynamic_update_slice_in_dim
        kept = [update(x, lse, start, 0) for x in kept]
        # The only chunk's gradient of the weights is the result, and rounded on its way out of the product.
        of_chunk = product.of_weights(here, flow, weights.dtype if count == tokens else None)
        d_weights = of_chunk if d_weights is None else d_weights + of_chunk
        return update(each, loss, start, 0), update(d_rows, part, start, 0), d_weights, *kept

    summed = product.result
    of_tokens = vary_like(jnp.zeros(tokens, product.wide), hidden)
    carry: tuple[Any, ...] = (of_tokens, vary_like(jnp.zeros_like(rows), hidden), None)
    carry += (of_tokens,) if return_lse else ()
    count = chunk_tokens(tokens, rows.shape[1], padded, summed.itemsize, block)
    whole = tokens // count
    # What is left comes first: the sum of the weights' gradient then begins with it, and not with zeros to add to.
    if count == tokens:
        carry = step(0, count, carry)
    else:
        if tokens - whole * count:
            carry = step(whole * count, tokens - whole * count, carry)
        else:
            carry = (*carry[:2], vary_like(jnp.zeros(weights.shape, summed), hidden), *carry[3:])
        if whole:  # a loop is traced even where it takes no step, and a chunk is larger than no tokens
            carry = lax.fori_loop(0, whole, lambda i, c: step(i * count, count, c), carry)
    each, d_rows, d_weights, *kept = carry
    d_weights = lax.slice_in_dim(d_weights, 0, size, axis=product.axis).astype(weights.dtype)
    lse = [x.reshape(labels.shape) for x in kept]
    return each.reshape(labels.shape), d_rows.reshape(hidden.shape), d_weights, *lse


xla = functools.partial(by_chunks, _rows_by_xla)


def mesh_rule(call: Call) -> str:
    """r0, r1, ... are the axes of the tokens, d the depth, v the vocabulary."""
    tokens = " ".join(f"r{axis}" for axis in range(len(call.need("hidden").shape) - 1))
    hidden, weights = f"{tokens} d".strip(), "v d" if call.params["transpose_weights"] else "d v"
    lse = f", {tokens}" if call.params["return_lse"] else ""
    return f"{hidden}, {weights}, {tokens}, {tokens} -> {tokens}, {hidden}, {weights}{lse}"


@on_one_device
def local(op: Op, arrays: tuple[Any, ...], params: Params, axes: Axes, prefer: Prefer) -> Any:
    """One device's tokens against its columns; the weights' gradient is summed over all tokens, in float32."""
    over = axes.get("v", ())
    arrays = own_labels(arrays, params, axes)
    if over:
        each, d_hidden, d_weights, *lse = xla(*arrays, **params, over=over)
    else:
        each, d_hidden, d_weights, *lse = run(op, arrays, params, prefer=prefer, local=True)
    rows = tuple(name for factor, names in axes.items() if factor.startswith("r") for name in names)
    if rows:
        wide = jnp.promote_types(jnp.float32, d_weights.dtype)
        d_weights = lax.psum(d_weights.astype(wide), rows).astype(d_weights.dtype)
    return each, d_hidden, d_weights, *lse


def _tolerance(call: Call) -> float:
    """Of the forward and the backward pass; where the sum is narrow, a rounding for each chunk, and of the logits."""
    wide = rules.tolerance(call) + rules.tolerance_grad(call)
    if not call.params["narrow"]:
        return wide
    # A logit rounds by a share of itself, and e to that power by as much as the logit is large: 8 is large for one.
    return wide + (chunks(call) + 8) * unit_roundoff(call.need("hidden").dtype)


CROSS_ENTROPY_AND_GRAD = Op(
    "cross_entropy_and_grad",
    family="layers",
    reference=reference_and_grad,
    operands=("hidden", "weights", "labels", "token_weights"),
    params={
        "transpose_weights": False,
        "soft_cap": None,
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "narrow": False,
        "return_lse": False,
        "block": None,
    },
    hints=("block",),
    untuned=("soft_cap", "label_smoothing", "z_loss", "return_lse"),
    check=rules.check,
    cost=rules.cost_grad,
    tolerance=_tolerance,
    partition=Partition(mesh_rule, replicated=lambda call: ("d",), local=local, logical=LOGICAL),
    cases=AND_GRAD_CASES,
)
# As in the module xla: a loop over what the mesh splits is each device's own, so to JAX it is a kernel.
CROSS_ENTROPY_AND_GRAD.implement(
    Implementation("xla", xla, kernel=True, hints=("block",)),
    Implementation(
        "hopper",
        functools.partial(by_chunks, _rows_by_kernel),
        platforms=("gpu",),
        refuses=hopper.refuses,
        ahead_of=("xla",),
        kernel=True,
        hints=("block",),
    ),
    Implementation("reference", reference_and_grad, refuses=rules.refuses_block),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def weighted_sum(
    undifferentiated: Any, params: tuple[tuple[str, Any], ...], implementation: str | None, hidden: jax.Array,
    weights: jax.Array, labels: jax.Array, token_weights: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """(the sum of the tokens' losses, each times its weight; with `return_lse` what of it is z_loss, else None).

    Where nothing is differentiated, no gradient is made: `undifferentiated(hidden, weights, labels)` then gives each
    token's (loss, lse).
    """
    losses, lse = undifferentiated(hidden, weights, labels)
    return jnp.where(token_weights == 0, 0, token_weights * losses).sum(), _z_part(dict(params), token_weights, lse)


def _z_part(params: Params, token_weights: jax.Array, lse: Any) -> jax.Array | None:
    """It is told, and not minimised by itself: it has no gradient of its own."""
    if not params.get("return_lse"):
        return None
    return jnp.where(token_weights == 0, 0, token_weights * params.get("z_loss", 0.0) * jnp.square(lse)).sum()


def _forward(_: Any, params: Any, implementation: Any, *arrays: Any) -> tuple[Any, Any]:
    each, *grads = run(CROSS_ENTROPY_AND_GRAD, arrays, dict(params), implementation=implementation)
    lse = grads.pop() if dict(params).get("return_lse") else None
    return (each.sum(), _z_part(dict(params), arrays[-1], lse)), tuple(grads)


def _backward(_: Any, params: Any, implementation: Any, grads: Any, cotangents: Any) -> tuple[Any, ...]:
    def scaled(x: Any) -> Any:
        return (x.astype(cotangents[0].dtype) * cotangents[0]).astype(x.dtype)

    return *map(scaled, grads), None, None


weighted_sum.defvjp(_forward, _backward)
