"""Collectives on global arrays: over the active mesh, where a leading axis has one row a device."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels.ops import collective


def mesh_of(**sizes: int) -> Mesh:
    devices, kinds = jax.devices("cpu")[: math.prod(sizes.values())], (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


MESH = mesh_of(a=2, b=2)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


@pytest.mark.quick
def test_rows_are_reduced_and_gathered() -> None:
    x = drawn(4, 3, 8)
    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(collective.all_reduce(x), x.sum(0))
        np.testing.assert_array_equal(collective.all_reduce(x, op="max", implementation="xla_ring"), x.max(0))
        np.testing.assert_array_equal(collective.all_gather(x, axis=1), np.concatenate(list(x), axis=1))
        np.testing.assert_array_equal(jax.jit(collective.all_gather)(x), x.reshape(12, 8))
        scattered = collective.reduce_scatter(x, axis=1)
        np.testing.assert_array_equal(scattered, x.sum(0))
        assert scattered.sharding.is_equivalent_to(NamedSharding(MESH, P(None, ("a", "b"))), 2)
        exchanged = collective.all_to_all(x, split_axis=1, concat_axis=0)
        wanted = [np.concatenate(list(x[:, :, 2 * i : 2 * i + 2])) for i in range(4)]
        np.testing.assert_array_equal(exchanged, np.stack(wanted))


@pytest.mark.quick
def test_without_rows_an_array_is_the_same_everywhere() -> None:
    x = drawn(3, 8)
    for op in ("sum", "mean", "max"):
        np.testing.assert_array_equal(collective.all_reduce(x, op=op, mesh=MESH), x)
    np.testing.assert_array_equal(collective.all_gather(x, mesh=MESH), x)
    split = collective.reduce_scatter(x, axis=-1, mesh=MESH)
    np.testing.assert_array_equal(split, x)
    assert split.sharding.is_equivalent_to(NamedSharding(MESH, P(None, ("a", "b"))), 2)
    np.testing.assert_array_equal(jax.jit(lambda x: collective.all_reduce(x, mesh=MESH))(x), x)
    with jax.set_mesh(MESH):
        for call in (collective.all_reduce, jax.jit(collective.all_gather), partial(collective.reduce_scatter, axis=1)):
            np.testing.assert_array_equal(call(x), x)
        np.testing.assert_array_equal(collective.all_reduce_tree([x])[0], x)


def test_no_mesh_and_one_device_are_the_identity() -> None:
    x = drawn(1, 3)
    for mesh in (None, mesh_of(a=1)):
        for call in (collective.all_reduce, collective.all_gather, collective.reduce_scatter, collective.all_to_all):
            np.testing.assert_array_equal(call(x, mesh=mesh), x)
        np.testing.assert_array_equal(collective.all_gather_matmul(x, x.T, mesh=mesh), x @ x.T)


@pytest.mark.parametrize("form", ["xla", "xla_ring_two_way"])
def test_products_of_global_arrays(form: str) -> None:
    x, w = drawn(8, 12), drawn(12, 4, seed=1)
    with jax.set_mesh(MESH):
        gathered = collective.all_gather_matmul(x, w, implementation=form)
        scattered = collective.matmul_reduce_scatter(x, w, implementation=form)
    np.testing.assert_array_equal(gathered, x @ w)
    np.testing.assert_array_equal(scattered, x @ w)
    assert gathered.sharding.is_equivalent_to(NamedSharding(MESH, P(None, ("a", "b"))), 2)
    assert scattered.sharding.is_equivalent_to(NamedSharding(MESH, P(("a", "b"))), 2)


def test_on_a_mesh_with_explicit_axes() -> None:
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:4])
    x = drawn(4, 8)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(collective.all_reduce(jnp.asarray(x)), x.sum(0))
        np.testing.assert_array_equal(jax.jit(collective.all_reduce)(x), x.sum(0))


@pytest.mark.quick
@pytest.mark.parametrize("compress", [False, True])
def test_a_tree_with_and_without_rows(compress: bool) -> None:
    tree = {"rows": drawn(4, 300), "same": drawn(3), "more": drawn(4, 2, 5, seed=1)}
    with jax.set_mesh(MESH):
        made = collective.all_reduce_tree(tree, op="mean", compress=compress)
    np.testing.assert_array_equal(made["same"], tree["same"])
    # The mean of the devices' errors; a code is off by half of a step, max / 127, here and again when it is summed.
    tolerance = 2 * 9 / 127 if compress else 1e-6
    for name in ("rows", "more"):
        np.testing.assert_allclose(made[name], tree[name].mean(0), atol=tolerance)
    if compress:
        assert np.abs(made["rows"] - tree["rows"].mean(0)).max() > 1e-4, "nothing was compressed"


def test_a_tree_with_feedback() -> None:
    tree = {"w": drawn(4, 300)}
    state = collective.feedback_state({"w": tree["w"][0]}, devices=4)
    made, after = collective.all_reduce_tree(tree, compress=True, state=state, mesh=MESH)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert float(jnp.abs(after["w"]).max()) > 0
    # What was sent and what was kept are all that there was.
    np.testing.assert_allclose(made["w"] + np.asarray(after["w"]).sum(0), tree["w"].sum(0), atol=1e-3)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"rows of a leading axis, one a device of 4.*f32\[3,8\]"):
        collective.all_to_all(drawn(3, 8), mesh=MESH)
    with pytest.raises(ValueError, match=r"evenly over the 4 devices.*pad it to 8"):
        collective.reduce_scatter(drawn(7), mesh=MESH)
    with pytest.raises(ValueError, match=r"splits axis 1 of w evenly"):
        collective.all_gather_matmul(drawn(8, 4), drawn(4, 3), mesh=MESH)
    with pytest.raises(ValueError, match="mesh is a jax Mesh"):
        collective.all_reduce(drawn(4), mesh="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave state out"):
        collective.all_reduce_tree({"w": drawn(4)}, state={"w": drawn(4)}, mesh=MESH)
