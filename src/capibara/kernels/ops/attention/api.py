"""attention: the public function, and the two ops behind it."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
from jaxtyping import Array, Bool, Float, Float32, Integer

from capibara.kernels.core import tables
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.spec import Gradient, Implementation
from capibara.kernels.ops.attention import (
    cudnn,
    gradient,
    inputs,
    mesh,
    peers,
    rules,
    times,
    xla,
    xla_grad,
)
from capibara.kernels.ops.attention.block_mask import MaskFn
from capibara.kernels.ops.attention.cases import CASES, GRAD_CASES
from capibara.kernels.ops.attention.efficiency import efficiency
from capibara.kernels.ops.attention.excerpt import first_group
from capibara.kernels.ops.attention.hopper import backward as hopper_backward
from capibara.kernels.ops.attention.hopper import forward as hopper_forward
from capibara.kernels.ops.attention.reference import reference, reference_grad
from capibara.kernels.ops.attention.rope import Rope, rotate_both
from capibara.kernels.ops.attention.tpu import backward as tpu_backward
from capibara.kernels.ops.attention.tpu import forward as tpu_forward

OPERANDS = ("q", "k", "v", "bias", "mask", "q_segments", "kv_segments", "block_mask", "dropout_seed")
PARAMS = {
    "causal": False,
    "q_offset": 0,
    "window": None,
    "scale": None,
    "softcap": None,
    "dropout_rate": 0.0,
    "block_size": None,
    # How the operands lie in memory. They are [batch, heads, length, head_dim] to the op in any case; an implementation
    # that reads [batch, length, heads, head_dim] as it lies undoes the exchange of axes instead of having it made.
    "physical": "bhtd",
}
HINTS = ("physical",)

ATTENTION_GRAD = Op(
    "attention_grad",
    family="attention",
    reference=reference_grad,
    operands=(*OPERANDS, "out", "lse", "d_out", "d_lse"),
    params=PARAMS,
    hints=HINTS,
    exact=rules.tuned_alike,
    check=rules.check_grad,
    cost=rules.cost_grad,
    efficiency=efficiency,
    tolerance=rules.tolerance_grad,
    batch=mesh.batch,
    partition=mesh.PARTITION_GRAD,
    cases=GRAD_CASES,
    excerpt=first_group,
    times=times.backward,
)

ATTENTION = Op(
    "attention",
    family="attention",
    reference=reference,
    operands=OPERANDS,
    params={**PARAMS, "return_lse": False},
    hints=HINTS,
    exact=rules.tuned_alike,
    untuned=("return_lse",),
    check=rules.check,
    cost=rules.cost,
    efficiency=efficiency,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(ATTENTION_GRAD, *args)),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
    peers={"jax.nn": peers.jax_nn},
    stock_tpu=peers.stock_tpu,
    excerpt=first_group,
    times=times.forward,
)

# Every implementation, forward and backward. An implementation that was asked for by name is asked for backward too.
ATTENTION.implement(
    xla.IMPLEMENTATION,
    tpu_forward.IMPLEMENTATION,
    cudnn.IMPLEMENTATION,
    hopper_forward.IMPLEMENTATION,
    Implementation("reference", reference),
)
ATTENTION_GRAD.implement(
    xla_grad.IMPLEMENTATION,
    tpu_backward.IMPLEMENTATION,
    cudnn.GRAD_IMPLEMENTATION,
    hopper_backward.IMPLEMENTATION,
    Implementation("reference", reference_grad),
)


class AttentionOptions(TypedDict, total=False):
    """The keywords of `attention` that do not change the type of its result."""

    layout: str
    causal: bool | None
    is_causal: bool | None
    query_offset: int
    window: int | tuple[int | None, int | None] | None
    mask: Array | None
    bias: Array | None
    block_mask: Array | None
    block_size: int | tuple[int, int] | None
    mask_fn: MaskFn | None
    segment_ids: Array | None
    key_segment_ids: Array | None
    rope: Rope | None
    scale: float | None
    softcap: float | None
    dropout_rate: float
    dropout_key: Any
    implementation: str | None
    config: Any


@overload
def attention(
    query: Array, key: Array, value: Array, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Array: ...


@overload
def attention(
    query: Array, key: Array, value: Array, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Array, Array]: ...


@overload
def attention(
    query: Array, key: Array, value: Array, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Array | tuple[Array, Array]: ...


def attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv D"],
    *,
    layout: str = "bthd",
    causal: bool | None = None,
    is_causal: bool | None = None,
    query_offset: int = 0,
    window: int | tuple[int | None, int | None] | None = None,
    mask: Bool[Array, "#B _ _ _"] | Bool[Array, "_ _"] | None = None,
    bias: Float[Array, "#B _ _ _"] | Float[Array, "_ _"] | None = None,
    block_mask: Bool[Array, "#B _ blocks_T blocks_S"] | Bool[Array, "blocks_T blocks_S"] | None = None,
    block_size: int | tuple[int, int] | None = None,
    mask_fn: MaskFn | None = None,
    segment_ids: Integer[Array, "B _"] | None = None,
    key_segment_ids: Integer[Array, "B _"] | None = None,
    rope: Rope | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    return_lse: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "B T H D"] | tuple[Float[Array, "B T H D"], Float32[Array, "B _ _"]]:
    """softmax(scale · q kᵀ + bias) v over the keys each query may see, by the fastest implementation that takes it.

    The rules on who sees whom (`causal`, `window`, `mask`, `block_mask`, `mask_fn`, segments) hold together. A query
    that may see no key gives zeros and has no gradient; what lies in keys and values that no query may see, NaN
    included, has no effect. Memory is linear in the length, forward and backward, except for a mask or bias that
    the caller passes.

    Args:
      query, key, value: [batch, length, heads, head_dim], as jax.nn has them, or with layout="bhtd" [batch, heads,
        length, head_dim]. The query's heads are a multiple of the key's: head h uses key head h // (heads / key heads).
        Lengths are arbitrary, and the keys' may differ from the queries'.
      causal, is_causal: query i sees keys up to i + `query_offset`. For a chunk of queries at the end of a longer
        context, the offset is the context's length before it. Two spellings of one rule, ours and jax.nn's.
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
      rope: turn queries and keys by their positions before the scores, angles in float32: `Rope(base=..., style=...,
        scaling=..., rotary_dim=..., tables=...)`. Queries are at positions `query_offset` + i and keys at 0, 1, 2, …
        unless the Rope brings positions; segments do not start them over, and positions that it brings do not change
        who sees whom. Inside jit this is one elementwise pass over each, which XLA fuses with what made the queries
        and keys where that is elementwise too (with `rotary_dim`, turned and unturned parts are joined after it);
        outside, it is one program of its own. The turned copies are what the kernels read and what the backward pass
        keeps in place of the originals; beside them only the angles are kept.
      scale: 1 / sqrt(head_dim) by default.
      softcap: c makes each score c · tanh(score / c), after the bias.
      dropout_rate, dropout_key: drop probabilities at this rate by a JAX key. What is dropped depends on the key and
        the position alone: the same on every platform and in the backward pass.
      return_lse: also return the log-sum-exp of the scores, float32 [batch, heads, queries] in either layout, minus
        infinity where a query sees nothing. It may be differentiated.
      implementation: force one by name; a refusal is an error. It is taken for the backward pass too where it has one
        for the call (Hopper's has none with a bias, for one); otherwise dispatch chooses, and says so once.
      config: that implementation's tuning choices; by default from the tuned table or a rule. It holds under
        differentiation, vmap and on a mesh too, in each forward pass; the backward pass has choices of its own.

    >>> import jax.numpy as jnp
    >>> q = jnp.ones((1, 10, 4, 32)); kv = jnp.ones((1, 10, 2, 32))
    >>> attention(q, kv, kv, causal=True).shape
    (1, 10, 4, 32)
    """
    causal = inputs.causal_flag(causal, is_causal)
    q, k, v = inputs.four_axes_in(layout, query=query, key=key, value=value)
    rows, columns = (x.shape[layout.index("t")] for x in (q, k))
    offset = inputs.static_int("query_offset", query_offset)
    if rope is not None:
        q, k = rotate_both(q, k, rope, layout, offset)
    sides = inputs.window_sides(window)
    rate = inputs.static_float("dropout_rate", dropout_rate)
    masked, blocks, size = inputs.sparsity(
        mask_fn, block_mask, block_size, inputs.four_axes("mask", mask), rows, columns, causal, offset, sides
    )
    q_segments, kv_segments = inputs.segments(segment_ids, key_segment_ids, rows, columns)
    given = {
        "causal": causal,
        "q_offset": offset,
        "window": sides,
        "scale": None if scale is None else inputs.static_float("scale", scale),
        "softcap": None if softcap is None else inputs.static_float("softcap", softcap),
        "dropout_rate": rate,
        "block_size": size,
        "return_lse": bool(return_lse),
    }
    seed = inputs.dropout_seed(rate, dropout_key)
    operands = (q, k, v, inputs.four_axes("bias", bias), masked, q_segments, kv_segments, blocks, seed)
    changed = {name: value for name, value in given.items() if value != ATTENTION.params[name]}
    if layout == "bhtd":
        return run(ATTENTION, operands, changed, implementation=implementation, config=config)
    if isinstance(q, jax.core.Tracer) or next(iter(q.devices())).platform != "gpu":
        return _heads_last(operands, {**changed, "physical": "bthd"}, implementation, config)
    # Compiled as one: the exchange of axes here and the one in the implementation then cancel, and none is made.
    compiled = _compiled_heads_last(tuple(changed.items()), implementation, config, tables.generation())
    return compiled(*operands)


def _heads_last(operands: tuple[Any, ...], params: dict[str, Any], implementation: str | None, config: Any) -> Any:
    """The op on arrays [batch, length, heads, head_dim]."""
    q, k, v, *rest = operands
    exchanged = (*(x.swapaxes(1, 2) for x in (q, k, v)), *rest)
    made = run(ATTENTION, exchanged, params, implementation=implementation, config=config)
    out, *lse = made if isinstance(made, tuple) else (made,)
    return (out.swapaxes(1, 2), *lse) if lse else out.swapaxes(1, 2)


@functools.lru_cache(maxsize=256)
def _compiled_heads_last(
    params: tuple[tuple[str, Any], ...], implementation: str | None, config: Any, generation: int
) -> Any:
    """One program for each set of choices; `generation` is the tuned tables', whose change is a new decision."""
    given = {**dict(params), "physical": "bthd"}
    return jax.jit(lambda *operands: _heads_last(operands, given, implementation, config))


ATTENTION.public = attention
register(ATTENTION_GRAD)
register(ATTENTION)
