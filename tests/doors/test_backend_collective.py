"""`TpuV4CollectiveOps`: the documented names and keywords, each of which changes what happens."""

from __future__ import annotations

import asyncio
import inspect
import math
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from capibara.jax.tpu_v4.backend import TpuV4CollectiveOps
from capibara.kernels.ops import collective
from capibara.kernels.ops.collective.over_mesh import each_device
from capibara.mesh.context import tpu_v4_optimization_context


def mesh_of(**sizes: int) -> Mesh:
    devices, kinds = jax.devices("cpu")[: math.prod(sizes.values())], (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def each(fn: Any, mesh: Mesh, check_vma: bool = True) -> Any:
    return jax.jit(each_device(fn, mesh, check_vma))


ops = TpuV4CollectiveOps()
MESH = mesh_of(x=4)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


TREE = {"a": drawn(4, 300), "b": {"c": drawn(4, 3, 5, seed=1)}}


@pytest.mark.quick
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_a_tree_inside_shard_map_and_over_the_active_mesh(op: str) -> None:
    wanted = jax.tree.map(lambda x: getattr(x, op)(0), TREE)

    def local(tree: Any) -> Any:
        return ops.async_all_reduce(jax.tree.map(lambda x: x[0], tree), op, axis_name="x")

    # out_specs without the axis: shard_map knows the result to be the same everywhere.
    inside = jax.jit(jax.shard_map(local, mesh=MESH, in_specs=P("x"), out_specs=P()))(TREE)
    with jax.set_mesh(MESH):
        over_mesh = ops.async_all_reduce(TREE, op)
    for made in (inside, over_mesh):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), made, wanted)


@pytest.mark.quick
def test_one_device_is_the_identity() -> None:
    made = ops.async_all_reduce(TREE, "sum", use_compression=True, overlap_compute=False)
    jax.tree.map(np.testing.assert_array_equal, made, TREE)
    np.testing.assert_array_equal(ops.optimized_all_gather(TREE["a"], use_ring_algorithm=True), TREE["a"])
    np.testing.assert_array_equal(ops.reduce_scatter(TREE["a"]), TREE["a"])
    np.testing.assert_array_equal(ops.all_to_all(TREE["a"]), TREE["a"])


def program(fn: Any, *args: Any) -> str:
    return str(jax.make_jaxpr(fn)(*args))


@pytest.mark.quick
def test_overlap_compute_is_a_program_without_barriers() -> None:
    """Off, every bucket waits for the one before it; on, none does."""
    tree = [drawn(4, 300), drawn(4, 200), drawn(4, 100)]

    def text(overlap: bool) -> str:
        call = partial(
            ops.async_all_reduce, reduction_op="sum", overlap_compute=overlap, axis_name="x", bucket_bytes=256
        )
        return program(each(lambda *xs: call(list(xs)), MESH), *tree)

    assert text(True).count("psum") == text(False).count("psum") == 3
    assert "optimization_barrier" not in text(True)
    assert text(False).count("optimization_barrier") == 2


def test_compression_sends_int8_and_keeps_its_bound() -> None:
    call = partial(ops.async_all_reduce, use_compression=True, axis_name="x")
    assert "i8[" in program(each(call, MESH), TREE["a"])
    assert "i8[" not in program(each(partial(call, use_compression=False), MESH), TREE["a"])
    with jax.set_mesh(MESH):
        made = ops.async_all_reduce(TREE, "sum", use_compression=True)
    # The documented bound of a sum: 1/127 of the devices' largest magnitudes together.
    bound = 4 * 9 / 127
    error = np.abs(np.asarray(made["a"]) - TREE["a"].sum(0)).max()
    assert 0 < error <= bound
    with pytest.raises(ValueError, match="a sum or a mean"):
        ops.async_all_reduce(TREE, "max", use_compression=True, mesh=MESH)


def test_feedback_returns_a_state() -> None:
    one = jax.tree.map(lambda x: x[0], TREE)
    state = collective.feedback_state(one, devices=4)
    made, after = ops.async_all_reduce(TREE, "sum", True, mesh=MESH, state=state)
    assert jax.tree.structure(made) == jax.tree.structure(TREE)
    assert float(jnp.abs(after["a"]).max()) > 0


@pytest.mark.quick
def test_the_ring_algorithm_sends_to_neighbours() -> None:
    x = drawn(4, 3, 5)
    ring = partial(ops.optimized_all_gather, axis=1, use_ring_algorithm=True, axis_name="x")
    plain = partial(ops.optimized_all_gather, axis=1, axis_name="x")
    assert "ppermute" in program(each(ring, MESH), x)
    assert "ppermute" not in program(each(plain, MESH), x)
    wanted = np.concatenate(list(x), axis=1)
    for call in (ring, plain):
        np.testing.assert_array_equal(each(call, MESH)(x), np.broadcast_to(wanted, (4, *wanted.shape)))
    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(ops.optimized_all_gather(x, axis=1, use_ring_algorithm=True), wanted)


def test_the_others() -> None:
    x, w = drawn(4, 8, 4), drawn(4, 4, 3, seed=1)
    scattered = each(partial(ops.reduce_scatter, axis=0, reduction_op="max", axis_name="x"), MESH)(x)
    np.testing.assert_array_equal(scattered, x.max(0).reshape(4, 2, 4))
    exchanged = each(partial(ops.all_to_all, split_axis=1, concat_axis=0, axis_name="x"), MESH)(x)
    np.testing.assert_array_equal(exchanged, np.stack([x[:, :, i : i + 1].reshape(32, 1) for i in range(4)]))
    gathered = each(partial(ops.all_gather_matmul, axis_name="x"), MESH)(x, w)
    np.testing.assert_array_equal(gathered, np.stack([x.reshape(32, 4) @ w[i] for i in range(4)]))
    summed = each(partial(ops.matmul_reduce_scatter, axis_name="x"), MESH)(x, w)
    np.testing.assert_array_equal(summed, np.einsum("dmk,dkn->mn", x, w).reshape(4, 2, 3))


def test_the_mesh_of_a_context_that_a_coroutine_holds() -> None:
    async def reduced() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # entering there says once what a coroutine gets
            with tpu_v4_optimization_context(mesh=MESH):
                return ops.async_all_reduce(TREE)

    np.testing.assert_array_equal(asyncio.run(reduced())["a"], TREE["a"].sum(0))


def test_documented_names() -> None:
    def names(method: Any) -> list[str]:
        return list(inspect.signature(method).parameters)

    documented = ["self", "tree", "reduction_op", "use_compression", "overlap_compute", "axis_name"]
    assert names(TpuV4CollectiveOps.async_all_reduce)[:6] == documented
    gather = ["self", "x", "axis", "use_ring_algorithm", "axis_name"]
    assert names(TpuV4CollectiveOps.optimized_all_gather)[:5] == gather
    with pytest.raises(TypeError, match="no_such"):
        ops.async_all_reduce(TREE, no_such=1)
    with pytest.raises(ValueError, match="product"):
        ops.async_all_reduce(TREE, "product")
