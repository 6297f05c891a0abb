"""Block masks from functions of positions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from capibara import kernels
from capibara.kernels import block_mask_from

attention = functools.partial(kernels.attention, layout="bhtd")


@pytest.mark.quick
def test_live_blocks_and_exact_pairs() -> None:
    calls = []

    def near(i: Any, j: Any) -> Any:
        calls.append((i.shape, j.shape))
        return abs(i - j) < 3

    found = block_mask_from(near, 10, 12, (4, 4))
    i, j = np.arange(10)[:, None], np.arange(12)[None, :]
    wanted = abs(i - j) < 3
    assert found.blocks.shape == (1, 1, 3, 3)
    for row in range(3):
        for column in range(3):
            part = wanted[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4]
            assert found.blocks[0, 0, row, column] == part.any()
    live = np.repeat(np.repeat(found.blocks, 4, 2), 4, 3)[:, :, :10, :12]
    np.testing.assert_array_equal((found.pairs & live)[0, 0], wanted)
    assert calls[-1] == ((2, 1), (1, 4))  # the last block of queries is cut off by their number


@pytest.mark.quick
def test_only_the_blocks_that_position_leaves_are_evaluated() -> None:
    calls = []

    def everything(i: Any, j: Any) -> Any:
        calls.append((int(i[0, 0]), int(j[0, 0])))
        return np.ones(np.broadcast_shapes(i.shape, j.shape), bool)

    found = block_mask_from(everything, 64, 64, (8, 8), causal=True, window=(7, 0))
    assert len(calls) == 15  # the diagonal, and the block before it
    assert found.pairs is None  # the function cuts nothing that the call does not
    assert found.live == 15 / 64


def test_attention_with_a_mask_function_is_attention_with_its_mask() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 40, 8)).astype(np.float32) for _ in range(3))
    i, j = np.arange(40)[:, None], np.arange(40)[None, :]

    def document_or_sink(i: Any, j: Any) -> Any:
        return (i // 16 == j // 16) | (j < 2)

    got = attention(q, k, v, causal=True, mask_fn=document_or_sink, block_size=8)
    wanted = attention(q, k, v, mask=document_or_sink(i, j) & (j <= i), implementation="reference")
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    # A further mask holds too.
    other = rng.random((1, 1, 40, 40)) < 0.8
    got = attention(q, k, v, causal=True, mask_fn=document_or_sink, block_size=8, mask=other)
    wanted = attention(q, k, v, mask=document_or_sink(i, j) & (j <= i) & other, implementation="reference")
    np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_work_is_proportional_to_the_live_blocks() -> None:
    """Dead blocks are never multiplied: the loop's body is behind a condition on the block mask."""
    from capibara.kernels.ops.attention.api import ATTENTION

    call_args = [jax.ShapeDtypeStruct((1, 1, 1024, 32), np.float32)] * 3
    blocks = jax.ShapeDtypeStruct((1, 1, 8, 8), np.bool_)

    def run(q: Any, k: Any, v: Any, blocks: Any) -> Any:
        return ATTENTION(q, k, v, *(None,) * 4, blocks, block_size=(128, 128), implementation="xla")

    text = str(jax.make_jaxpr(run)(*call_args, blocks))
    assert text.count("cond[") == 1
    assert text.index("cond[") < text.index("dot_general")
