"""attention: the public function, and the two ops behind it."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from capibara.kernels.attention import (
    cudnn,
    gradient,
    inputs,
    mesh,
    pallas_gpu,
    pallas_tpu,
    pallas_tpu_grad,
    peers,
    rules,
    xla_chunked,
    xla_chunked_grad,
)
from capibara.kernels.attention.block_mask import MaskFn
from capibara.kernels.attention.cases import CASES, GRAD_CASES
from capibara.kernels.attention.reference import reference, reference_grad
from capibara.kernels.dispatch import run
from capibara.kernels.op import Gradient, Implementation, Op, register

OPERANDS = ("q", "k", "v", "bias", "mask", "q_segments", "kv_segments", "block_mask", "dropout_seed")
PARAMS = {
    "causal": False,
    "q_offset": 0,
    "window": None,
    "scale": None,
    "softcap": None,
    "dropout_rate": 0.0,
    "block_size": None,
}

ATTENTION_GRAD = Op(
    "attention_grad",
    family="attention",
    reference=reference_grad,
    operands=(*OPERANDS, "out", "lse", "d_out", "d_lse"),
    params=PARAMS,
    check=rules.check_grad,
    cost=rules.cost_grad,
    tolerance=rules.tolerance_grad,
    batch=mesh.batch,
    partition=mesh.PARTITION_GRAD,
    cases=GRAD_CASES,
)

ATTENTION = Op(
    "attention",
    family="attention",
    reference=reference,
    operands=OPERANDS,
    params={**PARAMS, "return_lse": False},
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(ATTENTION_GRAD, *args)),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
    peers={"jax.nn": peers.jax_nn},
    stock_tpu=peers.stock_tpu,
)

# Every implementation, forward and backward. The backward pass prefers the one that has the forward's name.
IMPLEMENTATIONS = (
    xla_chunked.IMPLEMENTATION,
    pallas_tpu.IMPLEMENTATION,
    pallas_gpu.IMPLEMENTATION,
    cudnn.IMPLEMENTATION,
    Implementation("reference", reference, rank=lambda call: -1),
)
GRAD_IMPLEMENTATIONS = (
    xla_chunked_grad.IMPLEMENTATION,
    pallas_tpu_grad.IMPLEMENTATION,
    Implementation("reference", reference_grad, rank=lambda call: -1),
)

for _made in IMPLEMENTATIONS:
    ATTENTION.implement(_made)
for _made in GRAD_IMPLEMENTATIONS:
    ATTENTION_GRAD.implement(_made)


def attention(
    query: Float[Array, "B H T D"],
    key: Float[Array, "B Hkv S D"],
    value: Float[Array, "B Hkv S D"],
    *,
    layout: str = "bhtd",
    causal: bool = False,
    query_offset: int = 0,
    window: int | tuple[int | None, int | None] | None = None,
    mask: Bool[Array, "#B #H #T S"] | None = None,
    bias: Float[Array, "#B #H #T S"] | None = None,
    block_mask: Bool[Array, "#B #H blocks_T blocks_S"] | None = None,
    block_size: int | tuple[int, int] | None = None,
    mask_fn: MaskFn | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    return_lse: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Any:
    """softmax(scale · q kᵀ + bias) v over the keys each query may see, by the fastest implementation that takes it.

    The rules on who sees whom (`causal`, `window`, `mask`, `block_mask`, `mask_fn`, segments) hold together. A query
    that may see no key gives zeros and has no gradient; what lies in keys and values that no query may see, NaN
    included, has no effect. Memory is linear in the length, forward and backward, except for a mask or bias that
    the caller passes.

    Args:
      query, key, value: with layout "bhtd" [batch, heads, length, head_dim], with "bthd" [batch, length, heads,
        head_dim]. The query's heads are a multiple of the key's: head h uses key head h // (heads / key heads).
        Lengths are arbitrary, and the keys' may differ from the queries'.
      causal: query i sees keys up to i + `query_offset`. For a chunk of queries at the end of a longer context, the
        offset is the context's length before it.
      window: a number w: the query's own key and the w - 1 before it; (left, right): so many keys before and after
        its own, None for no limit.
      mask: True where a query may see a key; [T, S], or four axes of which the first three may be 1.
      bias: added to the scaled scores; shaped as the mask, and differentiated.
      block_mask, block_size: True for each block of block_size = (queries, keys) to compute; dead blocks cost
        nothing where the kernel's tiles allow.
      mask_fn: a function of query positions [n, 1] and key positions [1, m], called with numpy arrays on the host
        block by block; blocks it empties are skipped. Where it cuts through blocks beyond what `causal` and
        `window` say, a mask of one byte a pair is made. Define it once, outside of the training step: results are
        kept for each function object.
      segment_ids, key_segment_ids: queries see keys of an equal id; one array is enough for equal lengths.
      scale: 1 / sqrt(head_dim) by default.
      softcap: c makes each score c · tanh(score / c), after the bias.
      dropout_rate, dropout_rng: drop probabilities at this rate by a JAX key. What is dropped depends on the key and
        the position alone: the same on every platform and in the backward pass.
      return_lse: also return the log-sum-exp of the scores, float32 [batch, heads, queries] in either layout, minus
        infinity where a query sees nothing. It may be differentiated.
      implementation: force one by name; a refusal is an error.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    >>> import jax.numpy as jnp
    >>> q = jnp.ones((1, 4, 10, 32)); kv = jnp.ones((1, 2, 10, 32))
    >>> attention(q, kv, kv, causal=True).shape
    (1, 4, 10, 32)
    """
    q, k, v = inputs.heads_first(layout, query=query, key=key, value=value)
    rows, columns = q.shape[2], k.shape[2]
    offset = inputs.static_int("query_offset", query_offset)
    sides = inputs.window_sides(window)
    rate = inputs.static_float("dropout_rate", dropout_rate)
    masked, blocks, size = inputs.sparsity(
        mask_fn, block_mask, block_size, inputs.four_axes("mask", mask), rows, columns, bool(causal), offset, sides
    )
    q_segments, kv_segments = inputs.segments(segment_ids, key_segment_ids, rows, columns)
    given = {
        "causal": bool(causal),
        "q_offset": offset,
        "window": sides,
        "scale": None if scale is None else inputs.static_float("scale", scale),
        "softcap": None if softcap is None else inputs.static_float("softcap", softcap),
        "dropout_rate": rate,
        "block_size": size,
        "return_lse": bool(return_lse),
    }
    seed = inputs.dropout_seed(rate, dropout_rng)
    operands = (q, k, v, inputs.four_axes("bias", bias), masked, q_segments, kv_segments, blocks, seed)
    changed = {name: value for name, value in given.items() if value != ATTENTION.params[name]}
    made = run(ATTENTION, operands, changed, implementation=implementation, config=config)
    if layout == "bhtd":
        return made
    if return_lse:
        return made[0].swapaxes(1, 2), made[1]
    return made.swapaxes(1, 2)


ATTENTION.public = attention
register(ATTENTION_GRAD)
register(ATTENTION)
