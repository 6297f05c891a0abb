"""dispatch and combine: tokens to rows sorted by expert, and the experts' results back to tokens."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.layers.moe.arrange import Permutation, by_group, in_buffers
from capibara.kernels.ops.layers.router.api import Routing

KEEPS = ("order", "weight")


class Dispatched(NamedTuple):
    """Rows sorted by expert, how many each expert has, and the way back for `combine`."""

    rows: Float[Array, "rows width"]
    group_sizes: Int[Array, " experts"]
    permutation: Permutation


class Buffered(NamedTuple):
    """A buffer of rows for each expert, zeros past its size; the way back for `combine`; how many were dropped."""

    rows: Float[Array, "experts capacity width"]
    group_sizes: Int[Array, " experts"]
    permutation: Permutation
    dropped: Int[Array, ""]


def dispatch(x: Float[Array, "tokens width"], routing: Routing, num_experts: int) -> Dispatched:
    """Each token's row once for each of its experts, sorted by expert and then by token; none is dropped.

    Args:
      x: [tokens, width].
      routing: of `route`; indices [tokens, top_k].
      num_experts: how many there are.

    >>> routing = Routing(jnp.ones((2, 2)), jnp.array([[1, 0], [2, 1]]))
    >>> rows, sizes, _ = dispatch(jnp.array([[10.0], [20.0]]), routing, 3)
    >>> rows[:, 0].tolist(), sizes.tolist()
    ([10.0, 10.0, 20.0, 20.0], [1, 2, 1])
    """
    x = as_array("dispatch", "x", x)
    _check(x, routing, num_experts)
    permutation, sizes = by_group(routing.indices, num_experts)
    return Dispatched(take_rows(x, permutation), sizes, permutation)


def dispatch_to_buffers(
    x: Float[Array, "tokens width"],
    routing: Routing,
    num_experts: int,
    *,
    capacity_factor: float,
    keep: str = "order",
) -> Buffered:
    """As `dispatch`, into buffers of one size: `capacity(...)` rows an expert. What does not fit is dropped.

    Args:
      x, routing, num_experts: see `dispatch`.
      capacity_factor: the room of an expert, in multiples of an even share of all choices.
      keep: which choices an expert keeps: "order", those of the first tokens, or "weight", those of the largest
        weight.

    >>> routing = Routing(jnp.array([[0.5], [0.7], [1.0]]), jnp.array([[0], [0], [1]]))
    >>> x = jnp.array([[1.0], [2.0], [3.0]])
    >>> dispatch_to_buffers(x, routing, 3, capacity_factor=1.0).rows[..., 0].tolist()
    [[1.0], [3.0], [0.0]]
    >>> made = dispatch_to_buffers(x, routing, 3, capacity_factor=1.0, keep="weight")
    >>> made.rows[..., 0].tolist(), int(made.dropped)
    ([[2.0], [3.0], [0.0]], 1)
    """
    x = as_array("dispatch_to_buffers", "x", x)
    _check(x, routing, num_experts)
    if keep not in KEEPS:
        raise unknown_name("rule of what to keep", keep, KEEPS)
    tokens, top_k = routing.indices.shape
    room = capacity(tokens, top_k, num_experts, capacity_factor, most=tokens)
    priority = routing.weights if keep == "weight" else None
    permutation, sizes = in_buffers(routing.indices, num_experts, room, priority)
    rows = take_rows(x, permutation).reshape(num_experts, room, x.shape[1])
    return Buffered(rows, sizes, permutation, jnp.int32(tokens * top_k) - sizes.sum())


def capacity(tokens: int, top_k: int, groups: int, capacity_factor: float, most: int) -> int:
    """Rows of a buffer: capacity_factor · tokens · top_k / groups, rounded up, at most the `most` that can come.

    >>> capacity(1024, 2, 8, 1.25, most=1024), capacity(4, 2, 8, 100.0, most=4)
    (320, 4)
    """
    number = isinstance(capacity_factor, int | float | np.number) and not isinstance(capacity_factor, bool)
    if not (number and math.isfinite(capacity_factor) and capacity_factor > 0):
        raise rule_error(
            "The capacity factor is a finite number above 0",
            repr(capacity_factor),
            "pass e.g. 1.25, or leave it out to drop nothing",
        )
    return min(most, math.ceil(capacity_factor * tokens * top_k / groups))


def combine(rows: Float[Array, "*rows width"], routing: Routing, permutation: Permutation) -> Float[Array, "T width"]:
    """Each token's rows, times its weights, added in float32 and rounded to the rows' type.

    Args:
      rows: the experts' results, in the shape that `dispatch` or `dispatch_to_buffers` gave the rows.
      routing: what was dispatched by.
      permutation: of the dispatch. A dropped choice adds nothing.

    >>> routing = Routing(jnp.array([[0.75, 0.25]]), jnp.array([[1, 0]]))
    >>> rows, _, permutation = dispatch(jnp.array([[8.0]]), routing, 2)
    >>> combine(rows * jnp.array([[1.0], [100.0]]), routing, permutation).tolist()
    [[602.0]]
    """
    rows = as_array("combine", "rows", rows)
    flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    if flat.shape[0] != permutation.source.shape[0] or permutation.slot.shape != routing.weights.shape:
        raise rule_error(
            f"The permutation is of the dispatch that made the {permutation.source.shape[0]} rows",
            f"rows of {describe(rows)} and weights of {describe(routing.weights)}",
            "pass what dispatch returned, its rows replaced by the experts' results",
        )
    return _combine(flat, routing.weights, permutation)


def _check(x: Any, routing: Routing, num_experts: int) -> None:
    whole = isinstance(num_experts, int | np.integer) and not isinstance(num_experts, bool)
    if not whole or num_experts < 1:
        raise rule_error(
            "num_experts is a whole number: there is at least one expert",
            repr(num_experts),
            "pass the logits' last axis",
        )
    shape = routing.indices.shape
    if x.ndim != 2 or len(shape) != 2 or x.shape[0] != shape[0]:
        raise rule_error(
            "x is [tokens, width] and the routing's indices are [tokens, top_k]",
            f"{describe(x)} and {describe(routing.indices)}",
            "flatten the leading axes of both",
        )


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of x; zeros for an index past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(jnp.float32, x.dtype))


@jax.custom_vjp
def take_rows(x: Float[Array, "tokens width"], permutation: Permutation) -> Float[Array, "rows width"]:
    """The token of each row; zeros for an empty row. Its gradient is a gather too: a sum over each token's slots."""
    return _gather(x, permutation.source // permutation.slot.shape[1])


def _take_forward(x: jax.Array, permutation: Permutation) -> tuple[Any, Any]:
    return take_rows(x, permutation), permutation


def _take_backward(permutation: Permutation, flow: jax.Array) -> tuple[Any, None]:
    slot = permutation.slot
    total = _wide(_gather(flow, slot[:, 0]))
    for place in range(1, slot.shape[1]):
        total = total + _wide(_gather(flow, slot[:, place]))
    return total.astype(flow.dtype), None


take_rows.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def _combine(rows: jax.Array, weights: jax.Array, permutation: Permutation) -> jax.Array:
    total = jnp.zeros((), jnp.promote_types(jnp.float32, rows.dtype))
    for place in range(weights.shape[1]):
        total = total + weights[:, place, None] * _wide(_gather(rows, permutation.slot[:, place]))
    return total.astype(rows.dtype)


def _combine_forward(rows: jax.Array, weights: jax.Array, permutation: Permutation) -> tuple[Any, Any]:
    return _combine(rows, weights, permutation), (rows, weights, permutation)


def _combine_backward(residuals: Any, flow: jax.Array) -> tuple[Any, Any, None]:
    rows, weights, permutation = residuals
    wide = _wide(flow)
    source, top_k = permutation.source, weights.shape[1]
    of_row = _gather(weights.reshape(-1), source)[:, None] * _wide(_gather(flow, source // top_k))
    of_weight = [(wide * _wide(_gather(rows, permutation.slot[:, place]))).sum(-1) for place in range(top_k)]
    return of_row.astype(rows.dtype), jnp.stack(of_weight, -1).astype(weights.dtype), None


_combine.defvjp(_combine_forward, _combine_backward)
