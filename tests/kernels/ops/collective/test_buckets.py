"""Gradient buckets: an exact inverse, the last leaves first, one collective each, in order where that is asked for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from capibara.kernels.ops.collective.buckets import bucketed, bucketed_all_reduce, plan_buckets
from capibara.kernels.ops.collective.compressed import compressed_all_reduce

TREE = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": [np.arange(5, dtype=np.int32), np.float32(2.5)],
    "c": np.linspace(0, 1, 7).astype(jnp.bfloat16),
    "d": np.zeros((0, 3), np.float32),
    "e": np.full((4, 4), -0.0, np.float32),
}


def _mapped(fn: Any) -> Any:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:8])
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("data"), out_specs=P()))


@pytest.mark.parametrize("bucket_bytes", [1, 70, 1 << 20])
def test_the_inverse_is_exact(bucket_bytes: int) -> None:
    buckets, restore = bucketed(TREE, bucket_bytes)
    back = restore(buckets)
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    for mine, given in zip(jax.tree.leaves(back), jax.tree.leaves(TREE), strict=True):
        assert (mine.shape, mine.dtype) == (np.shape(given), given.dtype)
        assert np.asarray(mine).tobytes() == np.asarray(given).tobytes()


def test_leaves_are_joined_by_type_the_last_first_up_to_the_limit() -> None:
    members = [bucket.members for bucket in plan_buckets(TREE, 1 << 20).buckets]
    assert members == [(3,), (1,), (5, 4, 2, 0)]  # a bucket is complete, and can go, with its earliest leaf
    # 16 and 1 values of float32 are 68 bytes; the 12 of the first leaf are too many.
    assert [bucket.members for bucket in plan_buckets(TREE, 70).buckets] == [(3,), (5, 4, 2), (1,), (0,)]
    assert [bucket.members for bucket in plan_buckets(TREE, 1).buckets] == [(5,), (4,), (3,), (2,), (1,), (0,)]
    aligned = plan_buckets(TREE, 1 << 20, align=8).buckets[-1]
    assert aligned.starts == (0, 16, 16, 24)
    assert aligned.length == 40


@pytest.mark.quick
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_every_reduction_equals_the_leaf_by_leaf_one(op: str, overlap: bool) -> None:
    generator = np.random.default_rng(0)
    tree = {name: generator.integers(-9, 9, (8, *shape)).astype(np.float32) for name, shape in
            {"a": (3, 5), "b": (7,), "c": (), "d": (2, 2)}.items()}  # fmt: skip
    tree["half"] = jnp.asarray(generator.integers(-9, 9, (8, 6)), jnp.bfloat16)
    if op != "mean":
        tree["whole"] = generator.integers(-9, 9, (8, 3)).astype(np.int32)

    def local(tree: Any) -> Any:
        mine = jax.tree.map(lambda x: x[0], tree)
        return bucketed_all_reduce(mine, "data", op=op, bucket_bytes=48, overlap=overlap)

    got = _mapped(local)(tree)
    for name, x in tree.items():
        # Small whole numbers: sums, and means over 8, are exact in every type here but for bfloat16's 8 bits.
        wanted = getattr(np, op)(np.asarray(x, np.float64), 0).astype(x.dtype)
        np.testing.assert_array_equal(np.asarray(got[name]), wanted)


def _program(fn: Any, **how: Any) -> str:
    tree = {name: jax.ShapeDtypeStruct((8, 100), "float32") for name in "abc"}

    def local(tree: Any) -> Any:
        made = fn(jax.tree.map(lambda x: x[0], tree), "data", bucket_bytes=400, **how)
        return made[0] if isinstance(made, tuple) else made

    return _mapped(local).lower(tree)


@pytest.mark.quick
@pytest.mark.parametrize("fn", [bucketed_all_reduce, compressed_all_reduce])
def test_without_overlap_each_bucket_waits_for_the_one_before(fn: Any) -> None:
    """Shown in the program: a barrier between each two of the three buckets, which the next operand hangs on."""
    free, chained = _program(fn, overlap=True).as_text(), _program(fn, overlap=False).as_text()
    assert free.count("stablehlo.optimization_barrier") == 0
    assert chained.count("stablehlo.optimization_barrier") == 2
    collective = "stablehlo.all_reduce" if fn is bucketed_all_reduce else "stablehlo.all_to_all"
    each = 1 if fn is bucketed_all_reduce else 2  # codes and scales
    assert free.count(collective) == chained.count(collective) == 3 * each
    # In the text, which is in order of use, a barrier stands between the collectives of two buckets.
    kinds = [
        "B" if "optimization_barrier" in line else "C"
        for line in chained.splitlines()
        if "optimization_barrier" in line or collective in line
    ]
    assert "".join(kinds) == "B".join(["C" * each] * 3)


def test_fewer_collectives_than_leaves() -> None:
    tree = {str(i): jax.ShapeDtypeStruct((8, 10), "float32") for i in range(6)}

    def local(tree: Any) -> Any:
        return bucketed_all_reduce(jax.tree.map(lambda x: x[0], tree), "data", bucket_bytes=120)

    assert _mapped(local).lower(tree).as_text().count("stablehlo.all_reduce") == 2


def test_bad_input_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="bucket_bytes is a positive whole number"):
        bucketed(TREE, 0)
    with pytest.raises(ValueError, match="The mean of whole numbers is none"):
        _mapped(lambda x: bucketed_all_reduce(x[0], "data", op="mean"))(np.ones((8, 2), np.int32))
    with pytest.raises(ValueError, match="reduction"):
        _mapped(lambda x: bucketed_all_reduce(x[0], "data", op="product"))(np.ones((8, 2), np.float32))
    with pytest.raises(ValueError, match="takes arrays"):
        bucketed({"a": "text"})
