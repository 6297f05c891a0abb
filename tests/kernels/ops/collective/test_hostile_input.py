"""What no mesh, one device, another mesh, odd types and odd keywords do to the collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from capibara.jax.tpu_v4.backend import TpuV4CollectiveOps
from capibara.kernels.ops import collective


def _mesh(*shape: int) -> jax.sharding.Mesh:
    names = ("a", "b")[: len(shape)]
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def _on_four(fn: Callable[[Any], Any], x: Any) -> Any:
    return jax.jit(jax.shard_map(fn, mesh=_mesh(4), in_specs=P("a"), out_specs=P()))(x)


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_tree_of_complex_numbers_has_no_largest(op: str) -> None:
    with pytest.raises(ValueError, match="Complex numbers have no order"):
        _on_four(lambda x: collective.bucketed_all_reduce({"x": x}, "a", op=op), jnp.ones(8, jnp.complex64))


def test_a_tree_of_booleans_has_no_sum() -> None:
    with pytest.raises(ValueError, match=r"takes numbers. Got bool\[2\]"):
        _on_four(lambda x: collective.bucketed_all_reduce([x], "a"), jnp.ones(8, bool))


X = jnp.arange(12.0)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: collective.all_reduce(X, implementation="rings"), "Unknown implementation of all_reduce 'rings'"),
        (lambda: collective.all_reduce(jnp.arange(3), op="mean"), "The mean of whole numbers is none"),
        (lambda: collective.reduce_scatter(X, axis=1), "axis of reduce_scatter is one of the array's 1 axes"),
        (lambda: collective.all_gather(X, axis=1), "axis of all_gather is one of the array's 1 axes"),
        (lambda: collective.all_to_all(X, concat_axis=-2), "concat_axis of all_to_all is one of the array's 1 axes"),
        (
            lambda: collective.all_reduce_tree([X], op="max", compress=True),
            "compressed all-reduce is a sum or a mean",
        ),
        (lambda: collective.all_reduce_tree([X], bucket_bytes=0), "bucket_bytes is a positive whole number"),
    ],
)
def test_what_a_mesh_would_refuse_is_refused_without_one(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()


def test_a_new_axis_may_be_behind_the_last() -> None:
    assert collective.all_gather(X, axis=1, tiled=False) is X
    assert collective.all_gather(X[0]).shape == ()


def test_a_mesh_given_need_not_be_the_active_one() -> None:
    rows = jnp.arange(8.0).reshape(4, 2)
    with jax.set_mesh(_mesh(2, 2)):
        np.testing.assert_array_equal(collective.all_reduce(rows, mesh=_mesh(4)), rows.sum(0))
        got = collective.all_reduce_tree({"w": rows}, mesh=_mesh(4))
        product = collective.all_gather_matmul(rows, rows.T, mesh=_mesh(4))
    np.testing.assert_array_equal(got["w"], rows.sum(0))
    np.testing.assert_array_equal(product, rows @ rows.T)


def test_global_arrays_are_not_inside_shard_map() -> None:
    with pytest.raises(ValueError, match=r"inside a shard_map over 'a'\. Fix: pass axis_name"):
        _on_four(lambda x: collective.all_reduce(x, mesh=_mesh(4)), jnp.ones(16))


@pytest.mark.parametrize("pairs", [3, [(0, 1, 2)], [(0.5, 1)]])
def test_pairs_are_two_whole_numbers(pairs: Any) -> None:
    with pytest.raises(ValueError, match="pairs are \\(source, target\\)"):
        _on_four(lambda x: collective.permute(x, "a", pairs=pairs), X)


def test_an_axis_that_vmap_names() -> None:
    rows = jnp.array([[1.0, 127.0], [2.0, -127.0], [3.0, 127.0], [4.0, -127.0]])
    got, _ = jax.vmap(lambda x: collective.compressed_all_reduce(x, "v"), axis_name="v")(rows)
    bound = collective.error_bound([127.0] * 4)
    assert jnp.abs(got - rows.sum(0)).max() <= bound
    two = rows.reshape(2, 2, 2)
    for name in ("inner", "outer"):
        other = "outer" if name == "inner" else "inner"

        def both(x: Any, name: str = name, other: str = other) -> Any:
            return collective.hierarchical_all_reduce(x, inner_axis_name=name, outer_axis_name=other)

        summed = jax.vmap(jax.vmap(both, axis_name="inner"), axis_name="outer")(two)
        np.testing.assert_array_equal(summed, jnp.broadcast_to(rows.sum(0), two.shape))


def test_a_state_that_does_not_fit_says_so() -> None:
    rows, mesh = jnp.ones((4, 3)), _mesh(4)
    with pytest.raises(ValueError, match=r"has the same shape: a row a device. Got \(2, 3\)"):
        collective.all_reduce_tree({"w": rows}, compress=True, state={"w": jnp.zeros((2, 3))}, mesh=mesh)
    with pytest.raises(ValueError, match="The state is a tree like the gradients"):
        collective.all_reduce_tree({"w": rows}, compress=True, state={"v": jnp.zeros((4, 3))}, mesh=mesh)


def test_the_codec_takes_whole_blocks_and_keys() -> None:
    with pytest.raises(ValueError, match=r"block_size is a positive whole number.*Got 256.0"):
        collective.encode_int8(X, block_size=256.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key is one JAX key"):
        _on_four(lambda x: collective.compressed_all_reduce(x, "a", key=3)[0], X)


def test_two_names_for_a_gather_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="use_ring_algorithm=True and implementation='xla'"):
        TpuV4CollectiveOps().optimized_all_gather(X, use_ring_algorithm=True, implementation="xla")


def test_nothing_is_exchanged_as_nothing() -> None:
    """XLA's own scatter and gather refuse an axis of no length."""

    def each(x: jax.Array, w: jax.Array, beside: jax.Array) -> Any:
        both = ("a", "b")
        return beside, (
            collective.reduce_scatter(x, both),
            collective.all_gather(x, both),
            collective.all_gather(x, both, axis=1, tiled=False),
            collective.all_gather_matmul(x, w, both),
            collective.matmul_reduce_scatter(x, w, both),
            collective.hierarchical_all_reduce(x, inner_axis_name="a", outer_axis_name="b"),
        )

    for rows in (0, 4):
        run = jax.jit(jax.shard_map(each, mesh=_mesh(2, 2), in_specs=P(), out_specs=P(), check_vma=False))
        # Something is beside them: XLA stops at a shard_map that reads none of its operands.
        _, made = run(jnp.zeros((rows, 0)), jnp.zeros((0, 5)), jnp.ones(3))
        assert [y.shape for y in made] == [
            (rows // 4, 0), (4 * rows, 0), (rows, 4, 0), (4 * rows, 5), (rows // 4, 5), (rows, 0),
        ]  # fmt: skip
        assert all(not y.any() for y in made)
