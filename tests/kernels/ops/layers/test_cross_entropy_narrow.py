"""cross_entropy(gradient="in_forward_narrow"): less memory for one more rounding a chunk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.ops.layers import cross_entropy

TOKENS, DEPTH, WORDS = 96, 32, 640


def operands(dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (TOKENS, DEPTH)) / DEPTH**0.5
    labels = jax.random.randint(keys[2], (TOKENS,), 0, WORDS).at[3].set(-100)
    return hidden.astype(dtype), jax.random.normal(keys[1], (DEPTH, WORDS)).astype(dtype), labels


def loss_and_grads(how: str, block: int | None, arrays: tuple[jax.Array, ...], **more: object):
    def loss(hidden: jax.Array, weights: jax.Array) -> jax.Array:
        return cross_entropy(hidden, weights, arrays[2], gradient=how, block_size=block, z_loss=1e-3, **more)

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def wanted(arrays: tuple[jax.Array, ...]) -> tuple[np.ndarray, ...]:
    wide = tuple(x.astype(jnp.float32) for x in arrays[:2])
    value, grads = loss_and_grads("recompute", None, (*wide, arrays[2]))(*wide)
    return tuple(np.asarray(x, np.float64) for x in (value, *grads))


@pytest.mark.parametrize("block", [96, 40, 16])
def test_each_chunk_of_tokens_rounds_the_sum_once(block: int) -> None:
    arrays = operands(jnp.bfloat16)
    value, (d_hidden, d_weights) = loss_and_grads("in_forward_narrow", block, arrays)(*arrays[:2])
    assert d_weights.dtype == jnp.bfloat16
    right = wanted(arrays)
    # Half an epsilon: of the logits, which are about 1 here and at most 5; of what flows back; and of the sum, a chunk.
    chunks, unit = -(-TOKENS // block), float(jnp.finfo(jnp.bfloat16).eps) / 2
    for made, exact, roundings in ((value, right[0], 2), (d_hidden, right[1], 4), (d_weights, right[2], 4 + chunks)):
        error = np.linalg.norm(np.asarray(made, np.float64) - exact) / np.linalg.norm(exact)
        assert error <= roundings * unit, (error, roundings * unit)


def test_in_float32_it_is_the_wide_form() -> None:
    arrays = operands(jnp.float32)
    narrow = loss_and_grads("in_forward_narrow", 32, arrays)(*arrays[:2])
    wide = loss_and_grads("in_forward", 32, arrays)(*arrays[:2])
    for a, b in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_sum_in_float32_is_in_memory() -> None:
    arrays = operands(jnp.bfloat16)
    text = {
        how: loss_and_grads(how, 16, arrays).lower(*arrays[:2]).as_text() for how in ("in_forward", "in_forward_narrow")
    }
    kind = f"tensor<{DEPTH}x{WORDS}xf32>"
    sums = {how: [x for x in t.splitlines() if "stablehlo.add" in x and kind in x] for how, t in text.items()}
    assert sums["in_forward"]
    assert not sums["in_forward_narrow"]


def test_a_loss_for_each_token_is_refused() -> None:
    hidden, weights, labels = operands(jnp.float32)
    with pytest.raises(ValueError, match=r"in_forward_narrow.*what becomes of each token"):
        cross_entropy(hidden, weights, labels, gradient="in_forward_narrow", reduction="none")
