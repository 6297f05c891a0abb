"""vishwamai.kernels.tpu: attention by its documented names, and what the decorator does to jax's own."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import capibara.jax.nn as nn
from capibara.kernels import explain
from capibara.kernels.ops.attention.api import attention
from vishwamai.kernels.tpu import (
    block_sparse_attention,
    flash_attention,
    rope,
    rope_tables,
    sliding_window_attention,
    tpu_kernel,
)

RNG = np.random.default_rng(0)
Q, K, V = (jnp.asarray(RNG.normal(size=(2, 4, 40, 16)), jnp.float32) for _ in range(3))
# Two products, of 16 and of 40 terms, in float32; four for an unlucky draw.
FLOAT32 = 4 * (16**0.5 + 40**0.5) * 2**-24


def exact(**options: Any) -> Any:
    return attention(Q, K, V, layout="bhtd", implementation="reference", **options)


def error(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@tpu_kernel(use_efficient_attention=True)
def self_attention_layer(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None) -> Any:
    return flash_attention(query, key, value, mask=mask, block_size=128, use_flash=True)


@pytest.mark.quick
def test_used_as_documented() -> None:
    assert error(self_attention_layer(Q, K, V), exact()) < FLOAT32
    mask = jnp.asarray(RNG.random((40, 40)) < 0.5)
    assert error(self_attention_layer(Q, K, V, mask), exact(mask=mask)) < FLOAT32
    assert list(inspect.signature(flash_attention).parameters)[:6] == [
        "query", "key", "value", "mask", "block_size", "use_flash",
    ]  # fmt: skip


@pytest.mark.quick
def test_each_keyword_of_flash_attention() -> None:
    def chosen(**options: Any) -> Any:
        (found,) = explain(lambda *x: flash_attention(*x, **options), Q, K, V).selections
        return found

    assert chosen().implementation == "xla"
    assert chosen(use_flash=False).implementation == "reference"
    assert (chosen(block_size=8).config.block_q, chosen(block_size=8).config.block_k) == (8, 8)
    assert chosen(block_size=None).config.block_q > 128
    padding = np.arange(40) < np.asarray([40, 7])[:, None]
    want = exact(mask=jnp.asarray(padding[:, None, None]))
    for mask in (padding, np.where(padding, 0, -np.inf).astype(np.float32)):
        for use_flash in (True, False):
            assert error(flash_attention(Q, K, V, mask, 16, use_flash), want) < FLOAT32
    assert error(flash_attention(Q, K, V, causal=True, bias=jnp.ones((40, 40))), exact(causal=True)) < FLOAT32
    assert flash_attention(Q, K, V, precision="bfloat16").dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="use_flash=False runs the reference"):
        flash_attention(Q, K, V, use_flash=False, implementation="xla")
    with pytest.raises(ValueError, match="A mask of floats is added to the scores, as a bias is"):
        flash_attention(Q, K, V, jnp.ones((40, 40)), bias=jnp.ones((40, 40)))


@pytest.mark.quick
@pytest.mark.parametrize("window", [5, (3, 2)])
def test_a_sliding_window(window: Any) -> None:
    mask = np.arange(40) < np.asarray([40, 30])[:, None]
    want = exact(window=window, mask=jnp.asarray(mask[:, None, None]))
    got = sliding_window_attention(Q, K, V, window_size=window, mask=mask, block_size=16)
    assert error(got, want) < FLOAT32


def test_a_window_costs_what_it_sees() -> None:
    """The call that dispatch sees has the window, so its cost, which the planner reads, is the window's."""

    def flops(width: int) -> float:
        x = jax.ShapeDtypeStruct((1, 1, 2048, 16), "float32")
        (found,) = explain(lambda *x: sliding_window_attention(*x, width), x, x, x).selections
        return found.call.op.cost(found.call).flops

    assert flops(64) * 8 < flops(2048)


@pytest.mark.quick
def test_blocks() -> None:
    blocks = jnp.asarray(RNG.random((5, 5)) < 0.5).at[:, 0].set(True)
    want = exact(block_mask=blocks, block_size=8)
    assert error(block_sparse_attention(Q, K, V, blocks, 8), want) < FLOAT32
    assert error(block_sparse_attention(Q, K, V, block_mask=blocks[None, None], block_size=(8, 8)), want) < FLOAT32
    local = lambda i, j: i // 10 == j // 10  # noqa: E731
    got = block_sparse_attention(Q, K, V, local, 10)
    assert error(got, exact(segment_ids=jnp.broadcast_to(jnp.arange(40) // 10, (2, 40)))) < FLOAT32
    with pytest.raises(ValueError, match=r"one entry a block of 16 queries and 16 keys"):
        block_sparse_attention(Q, K, V, blocks, 16)
    with pytest.raises(ValueError, match="takes a block mask or a function of positions"):
        block_sparse_attention(Q, K, V, None)


@pytest.mark.quick
def test_rope_with_cached_tables() -> None:
    tables = rope_tables(64, 16)
    assert rope_tables(64, 16) is tables
    positions = np.arange(40) + 7
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, 16, 2) / 16)
    first, second = np.split(np.asarray(Q, np.float64), 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    want = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    # Two products and a sum of float32 numbers of order one, and a table entry rounded once.
    for got in (rope(Q, positions), rope(Q, positions, tables=tables)):
        assert error(got, want) < 4 * 2**-24
    # Scores depend on distances alone.
    from_0, from_7 = (
        jax.jit(lambda q, k, v, at=at: flash_attention(rope(q, *at), rope(k, *at), v))(Q, K, V)
        for at in ((), (positions,))
    )
    assert error(from_0, from_7) < 20 * FLOAT32


@pytest.mark.quick
def test_the_decorator_sends_jax_s_attention_through_dispatch_or_not() -> None:
    turned = tuple(x.swapaxes(1, 2) for x in (Q, K, V))

    def layer(q: Any, k: Any, v: Any) -> Any:
        return nn.dot_product_attention(q, k, v, is_causal=True)

    efficient = tpu_kernel(layer, use_efficient_attention=True)
    plain, unsaid = tpu_kernel(layer, use_efficient_attention=False), tpu_kernel(layer)
    assert [s.call.op.name for s in explain(efficient, *turned).selections] == ["attention"]
    assert not explain(plain, *turned).selections
    assert not explain(unsaid, *turned).selections
    program = lambda fn: fn.lower(*turned).as_text()  # noqa: E731
    # jax's own has all pairs of query and key at once, for every head.
    assert "2x4x40x40" in program(plain)
    assert program(efficient) != program(plain)
    for kernel in (efficient, plain):
        assert error(kernel(*turned).swapaxes(1, 2), exact(causal=True)) < FLOAT32
    # The innermost word counts, and nothing stays behind.
    nested = tpu_kernel(lambda *x: plain(*x) + layer(*x), use_efficient_attention=True)
    assert [s.call.op.name for s in explain(nested, *turned).selections] == ["attention"]
    assert not explain(layer, *turned).selections
