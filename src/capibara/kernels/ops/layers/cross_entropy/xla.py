"""Cross-entropy in plain JAX, a chunk of the vocabulary at a time: no more than a chunk's logits are ever in memory.

Forward, one pass over a chunk's logits makes all that is kept of them: a maximum, a sum of exponentials, the label's
logit. Backward, a chunk's logits are computed again and turned, in one pass, into their gradient in the operands'
type; the chunk's gradient of the weights is written into place and that of the hidden states is added up in float32.

With `return_logits` there are no chunks: all logits are made once, and the backward pass is given them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Implementation
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.layers.cross_entropy.reference import capped, vocabulary_axis, wide_type

LANES = 128
CHUNK_BYTES = 256 << 20  # of a chunk's logits in float32
FEWEST = 1024  # columns of a chunk: below it the products are too narrow to run well
# The maximum of nothing. It is finite, so that no difference of two maxima is a NaN.
LOWEST = -1e30


def chunk_columns(tokens: int, vocabulary: int, block: int | None) -> int:
    """`block`, or the size of equal chunks as large as the memory set aside for one.

    >>> chunk_columns(16384, 128256, None), chunk_columns(8, 1000, None), chunk_columns(8, 1000, 300)
    (4096, 1000, 300)
    """
    if block is not None:
        return min(block, vocabulary)
    most = max(FEWEST, CHUNK_BYTES // (4 * max(tokens, 1)))
    chunks = math.ceil(vocabulary / most)
    return min(vocabulary, math.ceil(vocabulary / chunks / LANES) * LANES)


def _over_chunks(vocabulary: int, columns: int, step: Callable[[Any, int, Any], Any], carry: Any) -> Any:
    """`step(start, columns, carry)` over the whole chunks in a loop, then over what is left."""
    whole = vocabulary // columns
    carry = lax.fori_loop(0, whole, lambda i, c: step(i * columns, columns, c), carry)
    left = vocabulary - whole * columns
    return step(whole * columns, left, carry) if left else carry


class Product:
    """The matrix products between hidden states, weights and logits, accumulated in float32.

    `narrow` leaves logits and the gradient of the weights in memory in the operands' type.
    """

    def __init__(self, hidden: Any, transpose_weights: bool, soft_cap: float | None, narrow: bool = False) -> None:
        self.axis = vocabulary_axis(transpose_weights)
        self.wide = wide_type(hidden)
        self.result = jnp.dtype(hidden.dtype) if narrow else self.wide
        self.soft_cap = soft_cap

    def _of(self, a: Any, b: Any, contract: tuple[int, int], result: Any) -> jax.Array:
        dims = (((contract[0],), (contract[1],)), ((), ()))
        return lax.dot_general(a, b, dims, preferred_element_type=result)

    def logits(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        made = self._of(rows, weights, (1, 1 - self.axis), self.result).astype(self.wide)
        return capped(made, self.soft_cap)

    def of_rows(self, flow: jax.Array, weights: jax.Array) -> jax.Array:
        """The gradient of the rows, by that of the logits."""
        return self._of(flow, weights, (1, self.axis), self.wide)

    def of_weights(self, rows: jax.Array, flow: jax.Array, result: Any = None) -> jax.Array:
        """`result`: the operands' own type where nothing is added to it any more, so that it is rounded on its way."""
        operands = (flow, rows) if self.axis == 0 else (rows, flow)
        return self._of(*operands, (0, 0), self.result if result is None else result)


def _merge(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Two parts of a row as one: the maximum, the sum of exponentials below it, and plain sums."""
    highest = jnp.maximum(one[0], other[0])
    # Of the two sums one keeps its maximum: a single exponential for each logit that is read.
    lower, is_one = jnp.exp(-jnp.abs(one[0] - other[0])), one[0] >= other[0]
    total = jnp.where(is_one, one[1], other[1]) + jnp.where(is_one, other[1], one[1]) * lower
    return highest, total, *(a + b for a, b in zip(one[2:], other[2:], strict=True))


def _nothing(wide: Any, return_sum: bool) -> tuple[Any, ...]:
    return tuple(wide.type(value) for value in (LOWEST, 0.0, 0.0, 0.0)[: 4 if return_sum else 3])


def row_sums(
    logits: jax.Array, is_label: jax.Array, return_sum: bool, is_word: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """(maximum, sum of exponentials below it, the label's logit[, the sum of the logits]) of each row.

    Columns that are no word of the vocabulary have no share in the first two.
    """
    nothing = _nothing(logits.dtype, return_sum)
    of_words = logits if is_word is None else jnp.where(is_word, logits, nothing[0])
    terms = (of_words, jnp.ones_like(logits), jnp.where(is_label, logits, 0), logits)[: len(nothing)]
    # One reduction for all of them, so that the logits are read once.
    return tuple(lax.reduce(terms, nothing, _merge, (1,)))


def logit_flow(
    logits: jax.Array, is_label: jax.Array, lse: jax.Array, of_lse: jax.Array, of_picked: jax.Array,
    of_sum: jax.Array | None, soft_cap: float | None,
) -> jax.Array:  # fmt: skip
    """The gradient of the logits before their cap; what belongs to a row is a column here."""
    flow = of_lse * jnp.exp(logits - lse) + jnp.where(is_label, of_picked, 0)
    if of_sum is not None:
        flow = flow + of_sum
    return flow if soft_cap is None else flow * (1 - jnp.square(logits * (1 / soft_cap)))


def _flat(hidden: jax.Array, *numbers: jax.Array | None) -> tuple[Any, ...]:
    """Rows, and what belongs to each."""
    return hidden.reshape(-1, hidden.shape[-1]), *(None if x is None else x.reshape(-1) for x in numbers)


def xla(
    hidden: jax.Array, weights: jax.Array, labels: jax.Array,
    *, transpose_weights: bool, soft_cap: float | None, return_sum: bool, block: int | None,
    keep_logits: bool = False, return_logits: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    product = Product(hidden, transpose_weights, soft_cap)
    rows, labels = _flat(hidden, labels)
    size = weights.shape[product.axis]
    if return_logits:
        logits = product.logits(rows, weights)
        highest, total, *sums = row_sums(logits, _is_label(labels, 0, size), return_sum)
        lead = hidden.shape[:-1]
        return *(x.reshape(lead) for x in (highest + jnp.log(total), *sums)), logits.reshape(*lead, size)

    def step(start: Any, columns: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        logits = product.logits(rows, lax.dynamic_slice_in_dim(weights, start, columns, product.axis))
        return _merge(carry, row_sums(logits, _is_label(labels, start, columns), return_sum))

    empty = (jnp.full(rows.shape[0], value) for value in _nothing(product.wide, return_sum))
    carry = tuple(vary_like(x, hidden) for x in empty)
    made = _over_chunks(size, chunk_columns(rows.shape[0], size, block), step, carry)
    highest, total, *sums = (x.reshape(hidden.shape[:-1]) for x in made)
    return highest + jnp.log(total), *sums


def _is_label(labels: jax.Array, start: Any, columns: int) -> jax.Array:
    return (labels - start)[:, None] == lax.iota(labels.dtype, columns)


def xla_grad(
    hidden: jax.Array, weights: jax.Array, labels: jax.Array, lse: jax.Array, d_lse: jax.Array, d_picked: jax.Array,
    d_sum: jax.Array | None = None, logits: jax.Array | None = None,
    *, transpose_weights: bool, soft_cap: float | None, block: int | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    product = Product(hidden, transpose_weights, soft_cap)
    rows, labels, *numbers = _flat(hidden, labels, lse, d_lse, d_picked, d_sum)
    columns_of: list[Any] = [None if x is None else x.astype(product.wide)[:, None] for x in numbers]
    base, of_lse, of_picked, of_sum = columns_of
    size = weights.shape[product.axis]
    if logits is not None:
        flow = logit_flow(
            logits.reshape(-1, size), _is_label(labels, 0, size), base, of_lse, of_picked, of_sum, soft_cap
        ).astype(hidden.dtype)
        d_rows = product.of_rows(flow, weights).astype(hidden.dtype)
        return d_rows.reshape(hidden.shape), product.of_weights(rows, flow, weights.dtype)

    def step(start: Any, columns: int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_rows, d_weights = carry
        part = lax.dynamic_slice_in_dim(weights, start, columns, product.axis)
        logits = product.logits(rows, part)
        flow = logit_flow(logits, _is_label(labels, start, columns), base, of_lse, of_picked, of_sum, soft_cap)
        flow = flow.astype(hidden.dtype)
        d_part = product.of_weights(rows, flow).astype(weights.dtype)
        d_weights = lax.dynamic_update_slice_in_dim(d_weights, d_part, start, product.axis)
        return d_rows + product.of_rows(flow, part), d_weights

    empty = (jnp.zeros(rows.shape, product.wide), jnp.zeros(weights.shape, weights.dtype))
    carry = tuple(vary_like(x, hidden) for x in empty)
    d_rows, d_weights = _over_chunks(size, chunk_columns(rows.shape[0], size, block), step, carry)
    return d_rows.astype(hidden.dtype).reshape(hidden.shape), d_weights


# A loop over chunks of an axis that the mesh splits would gather them, one by one: the op's own mesh rule has each
# device loop over its part. So to JAX this is a kernel, though it is plain JAX inside.
IMPLEMENTATION = Implementation("xla", xla, kernel=True, hints=("block",))
GRAD_IMPLEMENTATION = Implementation("xla", xla_grad, kernel=True, hints=("block",))
