"""paged_write itself: what it computes, leaves alone and refuses. Each implementation: tests/kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from capibara.kernels import explain, paged_write, rope, rope_tables, target
from capibara.kernels.ops.attention.paged_write.api import PAGED_WRITE
from capibara.kernels.ops.attention.rope import rope_angles

checked = jaxtyped(typechecker=beartype)(paged_write)
HEADS, KV_HEADS, DEPTH, PAGES, PAGE_SIZE = 4, 2, 8, 5, 4


def _normal(seed: int, *shape: int, dtype: Any = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def _step(tokens: int, dtype: Any = "float32", rotary: int = DEPTH) -> tuple[Any, ...]:
    """The operands of a step, its positions among them in place of their angles."""
    pool = (PAGES, PAGE_SIZE, KV_HEADS * DEPTH)
    projected = _normal(0, tokens, HEADS + 2 * KV_HEADS, DEPTH, dtype=dtype)
    positions = jnp.arange(tokens) * 7
    tables = rope_tables(100, rotary)
    angles = (jnp.asarray(table)[positions] for table in tables)
    return projected, _normal(1, *pool, dtype=dtype), _normal(2, *pool, dtype=dtype), *angles, positions


@pytest.mark.quick
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rotary", [DEPTH, 4])
def test_it_is_rope_and_rows_of_the_pools(implementation: str, dtype: str, rotary: int) -> None:
    projected, keys, values, cos, sin, positions = _step(3, dtype, rotary)
    page, slot = jnp.array([4, 0, 4]), jnp.array([3, 0, 1])
    q, k, v = checked(projected, keys, values, cos, sin, page, slot, implementation=implementation)
    turned = rope(projected[None, :, : HEADS + KV_HEADS], positions, rotary_dim=rotary)[0]
    # One rounding of the type apart: a compiler may join a product and a sum, or not.
    close = {"rtol": 2 * float(jnp.finfo(dtype).eps), "atol": 1e-6}
    np.testing.assert_allclose(q.astype("float32"), turned[:, :HEADS].astype("float32"), **close)
    wide = turned[:, HEADS:].reshape(3, -1)
    np.testing.assert_allclose(k[page, slot].astype("float32"), wide.astype("float32"), **close)
    np.testing.assert_array_equal(v[page, slot], projected[:, HEADS + KV_HEADS :].reshape(3, -1))
    others = np.ones((PAGES, PAGE_SIZE), bool)
    others[page, slot] = False
    for before, after in ((keys, k), (values, v)):
        np.testing.assert_array_equal(after[others], before[others])


@pytest.mark.quick
@pytest.mark.parametrize("spare_page", [False, True])
@pytest.mark.parametrize(("page", "slot"), [(-1, 0), (PAGES, 0), (2**31 - 1, 3), (1, PAGE_SIZE), (1, -1)])
@pytest.mark.parametrize("tokens", [1, 2])
def test_what_is_written_nowhere(tokens: int, page: int, slot: int, spare_page: bool) -> None:
    """A spare page, the last, may have anything in it."""
    *given, _ = _step(tokens)
    at = jnp.full(tokens, page), jnp.arange(tokens) + slot if slot == PAGE_SIZE else jnp.full(tokens, slot)
    _, *pools = paged_write(*given, *at, spare_page=spare_page)
    kept = PAGES - 1 if spare_page else PAGES
    for before, after in zip(given[1:3], pools, strict=True):
        np.testing.assert_array_equal(after[:kept], before[:kept])


@pytest.mark.quick
def test_a_spare_page_changes_nothing_of_what_is_written() -> None:
    *given, _ = _step(1)
    at = jnp.array([2]), jnp.array([3])
    for found, wanted in zip(paged_write(*given, *at, spare_page=True), paged_write(*given, *at), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.quick
def test_pools_of_four_axes_are_the_same_bytes() -> None:
    projected, keys, values, cos, sin, _ = _step(2)
    at = jnp.array([1, 3]), jnp.array([0, 2])
    flat = checked(projected, keys, values, cos, sin, *at)
    four = (pool.reshape(PAGES, PAGE_SIZE, KV_HEADS, DEPTH) for pool in (keys, values))
    found = checked(projected, *four, cos, sin, *at)
    for one, other in zip(found, flat, strict=True):
        np.testing.assert_array_equal(one.reshape(other.shape), other)


@pytest.mark.quick
@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 4.0}])
def test_angles_are_those_of_rope(scaling: Any) -> None:
    positions, x = jnp.array([0, 5, 300, 70_000]), _normal(3, 4, 2, DEPTH)
    cos, sin = rope_angles(positions, DEPTH, base=500.0, scaling=scaling)
    pools = jnp.zeros((1, 1, DEPTH)), jnp.zeros((1, 1, DEPTH))
    nowhere = jnp.full(4, -1)
    q, *_ = paged_write(jnp.concatenate((x, x), axis=1), *pools, cos, sin, nowhere, nowhere)
    wanted = rope(x[None], positions, base=500.0, scaling=scaling)[0]
    np.testing.assert_allclose(q[:, :2], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.quick
def test_explain_says_why_a_kernel_does_not_take_a_call() -> None:
    *given, _ = _step(2)
    at = jnp.zeros(2, jnp.int32)
    with target("gpu", "NVIDIA H200"):
        assert "not float32" in str(explain(paged_write, *given, at, at))


@pytest.mark.quick
def test_bytes_are_those_of_the_rows_and_not_of_the_pools() -> None:
    case = PAGED_WRITE.case("llama-1b-32")
    row = 32 * (16 + 8 + 8) * 128 * 2
    assert PAGED_WRITE.cost(PAGED_WRITE.call(*case.args())).bytes == 2 * row + 2 * 32 * 64 * 4 + 2 * 32 * 4


def _with(number: int, x: Any) -> list[Any]:
    *given, _ = _step(2)
    operands = [*given, jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32)]
    operands[number] = x
    return operands


@pytest.mark.quick
@pytest.mark.parametrize(
    ("number", "x", "said"),
    [
        (0, jnp.ones((2, 64)), r"projected is \[tokens, heads"),
        (0, jnp.ones((2, 7, DEPTH)), r"a multiple of the pools'.*7 heads, and 2"),
        (0, jnp.ones((2, 4, DEPTH)), r"a multiple of the pools'"),
        (0, jnp.ones((2, 8, DEPTH), jnp.bfloat16), r"one floating-point type.*bfloat16"),
        (1, jnp.ones((PAGES, PAGE_SIZE, 12)), r"one shape"),
        (2, jnp.ones((PAGES + 1, PAGE_SIZE, KV_HEADS * DEPTH)), r"one shape"),
        (1, jnp.ones((PAGES, 16)), r"or \[pages, page_size, kv_heads \* head_dim\]"),
        (3, jnp.ones((2, DEPTH)), r"cos and sin are float32 \[tokens"),
        (4, jnp.ones((3, DEPTH // 2)), r"cos and sin"),
        (3, jnp.ones((2, DEPTH // 2), jnp.bfloat16), r"float32"),
        (5, jnp.zeros(3, jnp.int32), r"one page a token, here 2"),
        (6, jnp.zeros(2, jnp.int8), r"slot is int32"),
    ],
)
def test_bad_input(number: int, x: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        paged_write(*_with(number, x))


@pytest.mark.quick
def test_it_is_differentiated() -> None:
    """Into the rows that were written, and not into those that they stand in the place of."""
    *given, _ = _step(1)
    at = jnp.array([2]), jnp.array([1])
    grads = jax.grad(lambda x, pool: paged_write(x, pool, *given[2:], *at)[1].sum(), (0, 1))(*given[:2])
    assert float(grads[0][:, :HEADS].sum()) == 0
    np.testing.assert_array_equal(grads[1][2, 1], 0)
    np.testing.assert_array_equal(grads[1][2, 0], 1)
