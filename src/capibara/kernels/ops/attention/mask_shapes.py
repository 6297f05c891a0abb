"""One `attention_mask` argument for the forms in which programs carry masks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.attention import inputs


def mask_and_bias(
    attention_mask: Any, batch: int, heads: int, rows: int, columns: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """(mask, bias) for attention(), each with four axes or None.

    | shape | meaning |
    |---|---|
    | [batch, keys] | which keys of each example are real: a padding mask |
    | [queries, keys] | one mask for all examples and heads |
    | [batch, queries, keys] | one mask an example |
    | [batch or 1, heads or 1, queries or 1, keys] | as it is |

    Booleans and integers are True, or not 0, where a query may see a key. Floats are added to the scores, and minus
    infinity hides a key altogether.
    """
    x = inputs.array("attention_mask", attention_mask)
    if x is None:
        return None, None
    shaped = _four_axes(x, batch, heads, rows, columns)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return (shaped if x.dtype == jnp.bool_ else shaped != 0), None
    # A pair that is hidden has no score: as a mask it costs no arithmetic with infinities, here and in the gradient.
    hidden = jnp.isneginf(shaped)
    return ~hidden, jnp.where(hidden, 0, shaped)


def _four_axes(x: jax.Array, batch: int, heads: int, rows: int, columns: int) -> jax.Array:
    by_example, by_pair = x.shape == (batch, columns), x.shape == (rows, columns)
    if by_example and by_pair and batch > 1:
        raise rule_error(
            "A mask of two axes is [batch, keys] or [queries, keys], and here both fit",
            f"{describe(x)} for {batch} examples of {rows} queries",
            "pass mask[:, None, None, :] for the first, mask[None, None] for the second",
        )
    if by_example:
        return x[:, None, None, :]
    if by_pair:
        return x[None, None]
    if x.shape == (batch, rows, columns):
        return x[:, None]
    wanted = ((1, batch), (1, heads), (1, rows), (columns,))
    if x.ndim == 4 and all(n in choices for n, choices in zip(x.shape, wanted, strict=True)):
        return x
    raise rule_error(
        f"attention_mask is [batch, keys], [queries, keys], [batch, queries, keys] or [batch|1, heads|1, queries|1, "
        f"keys], here of {batch} examples, {heads} heads, {rows} queries and {columns} keys",
        describe(x),
        "add axes of 1 with mask[:, None]",
    )
