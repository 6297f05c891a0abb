"""Products overlapped with a gather or a scatter equal the plain ones, and each is the other's gradient."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from capibara.kernels import explain
from capibara.kernels.core.context import target
from capibara.kernels.ops import collective
from capibara.kernels.ops.collective.matmul import gathered_contraction
from capibara.kernels.ops.collective.over_mesh import each_device


def mesh_of(**sizes: int) -> Mesh:
    devices, kinds = jax.devices("cpu")[: math.prod(sizes.values())], (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def each(fn: Any, mesh: Mesh, check_vma: bool = True) -> Any:
    return jax.jit(each_device(fn, mesh, check_vma))


FORMS = ("xla", "xla_ring", "xla_ring_two_way")
FOUR = mesh_of(x=4)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Small whole numbers, whose products and sums are exact in float32 in any order."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_all_gather_matmul(form: str) -> None:
    # One row, and odd rows, which have no equal halves; and a batch.
    xs, w = [drawn(4, 1, 5), drawn(4, 3, 5), drawn(4, 2, 4, 5)], drawn(4, 5, 2, seed=1)
    call = partial(collective.all_gather_matmul, axis_name="x", implementation=form)
    everyone = each(lambda w, *shards: [call(one, w) for one in shards], FOUR)(w, *xs)
    for x, made in zip(xs, everyone, strict=True):
        whole = np.concatenate(list(x), axis=-2)
        np.testing.assert_array_equal(made, np.stack([whole @ w[i] for i in range(4)]))


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_matmul_reduce_scatter(form: str) -> None:
    xs, w = [drawn(4, 4, 5), drawn(4, 12, 5), drawn(4, 2, 8, 5)], drawn(4, 5, 2, seed=1)
    call = partial(collective.matmul_reduce_scatter, axis_name="x", implementation=form)
    everyone = each(lambda w, *shards: [call(one, w) for one in shards], FOUR)(w, *xs)
    for x, made in zip(xs, everyone, strict=True):
        total = sum(x[i] @ w[i] for i in range(4))
        np.testing.assert_array_equal(made, np.stack(np.split(total, 4, axis=-2)))


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_gradients(name: str, form: str) -> None:
    """Against the same function of whole arrays, differentiated by JAX."""
    gathers = name == "all_gather_matmul"
    x, w = drawn(4, 3 if gathers else 12, 5), drawn(4, 5, 2, seed=1)
    weights = drawn(4, 12 if gathers else 3, 2, seed=2)

    def whole(x: Any, w: Any) -> Any:
        if gathers:
            return (jnp.einsum("rk,dkn->drn", x.reshape(12, 5), w) * weights).sum()
        return (jnp.einsum("drk,dkn->rn", x, w).reshape(4, 3, 2) * weights).sum()

    def split(x: Any, w: Any) -> Any:
        call = partial(getattr(collective, name), axis_name="x", implementation=form)
        return (each(call, FOUR)(x, w) * weights).sum()

    got, right = (jax.jit(jax.grad(fn, (0, 1)))(x, w) for fn in (split, whole))
    for made, wanted in zip(got, right, strict=True):
        np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("form", ["xla", "xla_ring"])
def test_the_gradient_of_weights_that_all_devices_share(form: str) -> None:
    """Replicated weights, as data parallel training has them: their gradient is the sum over the devices."""
    x, w = drawn(4, 2, 5), drawn(5, 3, seed=1)

    def loss(x: Any, w: Any) -> Any:
        call = partial(collective.all_gather_matmul, axis_name="x", implementation=form)
        mapped = jax.shard_map(lambda x, w: call(x[0], w)[None], mesh=FOUR, in_specs=(P("x"), P()), out_specs=P("x"))
        return jax.jit(mapped)(x, w).sum()

    made = jax.jit(jax.grad(loss, 1))(x, w)
    # Each of the four devices multiplies all rows.
    np.testing.assert_array_equal(made, 4 * np.repeat(x.reshape(8, 5).sum(0)[:, None], 3, axis=1))


@pytest.mark.parametrize("form", ["xla", "xla_ring_two_way"])
def test_bfloat16(form: str) -> None:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((4, 8, 32), (4, 32, 4)))
    made = each(partial(collective.matmul_reduce_scatter, axis_name="x", implementation=form), FOUR)(x, w)
    assert made.dtype == jnp.bfloat16
    wide = [np.asarray(a, np.float64) for a in (x, w)]
    right = np.einsum("drk,dkn->rn", *wide).reshape(4, 2, 4)
    # Every partial sum is rounded to bfloat16 once a hop; float32's roundings inside are far below.
    bound = 5 * 2.0**-9 * np.einsum("drk,dkn->rn", *map(np.abs, wide)).reshape(4, 2, 4)
    assert (np.abs(np.asarray(made, np.float64) - right) <= bound).all()


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_the_choice_goes_by_cost_and_says_so(name: str) -> None:
    call = partial(getattr(collective, name), axis_name="x")

    def told(rows: int, k: int, columns: int) -> Any:
        x, w = jax.ShapeDtypeStruct((4, rows, k), "bfloat16"), jax.ShapeDtypeStruct((4, k, columns), "bfloat16")
        return explain(each(call, FOUR), x, w)

    with target("tpu", "TPU v4"):
        wide = told(1024, 4096, 8192)
        narrow = told(1024, 64 if name == "matmul_reduce_scatter" else 4096, 64)
    assert wide.implementation == "xla_ring_two_way"
    assert "covers its trip" in str(wide)
    assert "predicted" in str(wide)
    assert narrow.implementation == "xla"
    assert "does not cover its trip" in str(narrow)
    assert told(1024, 4096, 8192).implementation == "xla"  # a CPU has no links in the table


def test_the_ring_sends_before_it_multiplies() -> None:
    """So that the product has a trip to hide: read from the program."""
    call = partial(collective.all_gather_matmul, axis_name="x", implementation="xla_ring")
    text = str(jax.make_jaxpr(each(call, FOUR))(drawn(4, 2, 5), drawn(4, 5, 3)))
    steps = [word for line in text.splitlines() for word in ("ppermute", "dot_general") if word in line]
    assert steps == ["ppermute", "dot_general"] * 3 + ["dot_general"]


def test_bad_input() -> None:
    gather = partial(collective.all_gather_matmul, axis_name="x")
    with pytest.raises(ValueError, match="so that k agrees"):
        each(gather, FOUR)(drawn(4, 2, 5), drawn(4, 6, 3))
    with pytest.raises(ValueError, match=r"evenly over the 4 .*length of 6.*pad it to 8"):
        each(partial(collective.matmul_reduce_scatter, axis_name="x"), FOUR)(drawn(4, 6, 5), drawn(4, 5, 3))


def test_the_gradient_of_weights_is_summed_wide() -> None:
    """What the devices' bfloat16 rows give is added up in float32: 256 + 1 is no bfloat16."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    rows = jnp.array([[256.0], [1.0], [1.0], [2.0]], jnp.bfloat16)

    def contracted(own: Any) -> Any:
        ones = jax.lax.pcast(jnp.ones((4, 1), jnp.bfloat16), "x", to="varying")
        return gathered_contraction(own, ones, axis_name=("x",), devices=4, two_way=False)

    got = jax.jit(jax.shard_map(contracted, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(rows)
    assert got.dtype == jnp.float32
    assert got.tolist() == [[260.0]] * 4
