"""What is said of a primitive's dimensions is true: computed on parts, it gives parts of the whole, or partial sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.program import trace
from capibara.program.primitives.rule import made_of

IDS = np.array([[3], [0], [5], [3]], np.int32)
TWOS = np.stack([2 * np.eye(3, dtype=np.float32)] * 4)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32))


def rows_added(table: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    dims = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return jax.lax.scatter_add(table, ids, rows, dims, mode="drop")


def looked_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    dims = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    # A row that this part of the table does not hold is zero, as the partitioner masks it.
    return jax.lax.gather(table, ids, dims, (1, table.shape[1]), mode="fill", fill_value=0)


def by_group(x: jax.Array, y: jax.Array, summed: tuple[tuple[int], tuple[int]], groups: list[int]) -> jax.Array:
    """The grouped product's other two forms: matrices that lie turned, and the matrices' own gradient."""
    numbers = jax.lax.RaggedDotDimensionNumbers((summed, ((), ())), [0], groups)
    return jax.lax.ragged_dot_general(x, y, jnp.array([1, 3]), numbers)


def convolved(image: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME")


# The primitive, a function of it alone, its operands, and how many factors can be split.
CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...], int]] = [
    ("add", lambda x, y: jax.lax.add(x, y), (draw(4, 6), draw(4, 6)), 2),
    ("transpose", lambda x: x.transpose(2, 0, 1), (draw(4, 6, 2),), 3),
    ("reshape", lambda x: x.reshape(x.shape[0] * 6, x.shape[2]), (draw(4, 6, 2),), 2),
    ("reshape", lambda x: x.reshape(x.shape[0] // 3, 3, 1, x.shape[1]), (draw(12, 4),), 2),
    ("broadcast_in_dim", lambda x: jnp.broadcast_to(x, (3, *x.shape)), (draw(4, 6),), 2),
    ("dot_general", lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (draw(2, 4, 6), draw(2, 8, 6)), 4),
    ("ragged_dot_general", lambda x, y: jax.lax.ragged_dot(x, y, jnp.array([1, 3])), (draw(4, 6), draw(2, 6, 8)), 2),
    ("ragged_dot_general", lambda x, y: by_group(x, y, ((1,), (2,)), [0]), (draw(4, 6), draw(2, 8, 6)), 2),
    ("ragged_dot_general", lambda x, y: by_group(x, y, ((0,), (0,)), []), (draw(4, 6), draw(4, 8)), 2),
    ("conv_general_dilated", convolved, (draw(2, 4, 5, 5), draw(6, 4, 3, 3)), 3),
    ("cholesky", lambda x: jnp.linalg.cholesky(x, symmetrize_input=False), (TWOS,), 1),
    ("reduce_sum", lambda x: jnp.sum(x, axis=1), (draw(4, 6, 2),), 3),
    ("reduce_max", lambda x: jax.lax.reduce_max_p.bind(x, axes=(0,), out_sharding=None), (draw(4, 6),), 2),
    ("cumsum", lambda x: jax.lax.cumsum(x, axis=1), (draw(4, 6),), 1),
    ("sort", lambda x: jax.lax.sort(x, dimension=0), (draw(4, 6),), 1),
    ("top_k", lambda x: jax.lax.top_k(x, 2)[0], (draw(4, 6),), 1),
    ("fft", lambda x: jnp.fft.rfft(x), (draw(4, 6),), 1),
    ("reduce_window_sum", lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2), (1, 2), "VALID"),
     (draw(4, 6),), 1),
    ("concatenate", lambda x, y: jax.lax.concatenate([x, y], 1), (draw(4, 6), draw(4, 2)), 1),
    ("split", lambda x: jax.lax.split(x, (2, 4), axis=1)[1], (draw(4, 6),), 1),
    ("slice", lambda x: x[:, 1:3], (draw(4, 6),), 1),
    ("rev", lambda x: jax.lax.rev(x, (0,)), (draw(4, 6),), 1),
    ("pad", lambda x: jnp.pad(x, ((0, 0), (1, 0))), (draw(4, 6),), 1),
    ("dynamic_slice", lambda x: jax.lax.dynamic_slice(x, (0, 1), (x.shape[0], 2)), (draw(4, 6),), 1),
    ("gather", looked_up, (draw(6, 4), IDS), 3),
    ("scatter-add", rows_added, (np.zeros((6, 4), np.float32), IDS, draw(4, 4)), 2),
]  # fmt: skip


def node_of(name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    program = trace(fn, args)
    (node,) = [node for node in program.nodes if node.primitive.replace("_", "-") == name.replace("_", "-")]
    return node, [program.arguments[i].value for i in range(len(args))]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "fn", "args", "count"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_parts_make_the_whole(name: str, fn: Callable[..., Any], args: tuple[Any, ...], count: int) -> None:
    node, values = node_of(name, fn, args)
    factors = node.factors
    where = {value: side for value, side in zip(node.inputs, factors.operands, strict=True) if value in values}
    held = {factor for side in where.values() for factor in side if factor >= 0}
    if name == "scatter-add":
        held -= {0}  # the rows of the table: each chip drops what it does not hold, which the partitioner adds
    assert len(held) == count
    whole = jax.tree.leaves(fn(*args))[-1]
    for factor in sorted(held):
        halves = []
        for half in (0, 1):
            cut = []
            for value, array in zip(values, args, strict=True):
                side = where.get(value, ())
                start = half * 3 if name == "gather" and factor in factors.reduced else 0
                if start and array.dtype == jnp.int32:
                    cut.append(array - start)  # rows are counted from the part's first
                elif factor in side:
                    cut.append(jnp.split(array, 2, axis=side.index(factor))[half])
                else:
                    cut.append(array)
            halves.append(jax.tree.leaves(fn(*cut))[-1])
        if factor in factors.reduced:
            made = jnp.maximum(*halves) if name == "reduce_max" else halves[0] + halves[1]
        else:
            made = jnp.concatenate(halves, axis=factors.results[-1].index(factor))
        # Sums of at most 36 standard normal products in another order: a few roundings of numbers below 32.
        np.testing.assert_allclose(made, whole, atol=36 * 32 * 2.0**-24)


def test_operands_that_are_one_long_are_not_split_with_the_others() -> None:
    factors = made_of("mul", [(4, 6), (4, 1)], [(4, 6)], {}).factors
    assert factors.operands == ((0, 1), (0, -1))


def test_vendor_attention_counts_its_products() -> None:
    q, k = (2, 128, 4, 64), (2, 256, 4, 64)
    forward = made_of("dot_product_attention_fwd_wrapper", [q, k, k], [q], {"mask_type": "NO_MASK"})
    assert forward.flops == 2 * 2 * 2 * 4 * 128 * 256 * 64
    assert forward.factors.operands == ((0, -1, 1, -1),) * 3
    shared = made_of("dot_product_attention_bwd_wrapper", [q, (*k[:2], 2, 64)], [q, k, k], {"mask_type": "CAUSAL"})
    assert shared.flops == forward.flops * 2.5 / 2
    assert shared.factors.operands == ((0, -1, -1, -1),) * 2


def test_a_gradient_by_groups_multiplies_all_rows_for_each() -> None:
    """As XLA computes it, by zeros; what it has to do is one group's part of the rows for each."""
    program = trace(lambda x, y: by_group(x, y, ((0,), (0,)), []), (draw(4, 6), draw(4, 8)))
    assert program.flops == 2 * (2 * 4 * 6 * 8)
    assert program.model_flops == 2 * 4 * 6 * 8
