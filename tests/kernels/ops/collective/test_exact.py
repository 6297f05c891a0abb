"""Every form of a collective equals the plain one: values, types and gradients, over one axis and several."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from capibara.kernels import explain
from capibara.kernels.ops import collective
from capibara.kernels.ops.collective.over_mesh import each_device


def mesh_of(**sizes: int) -> Mesh:
    devices, kinds = jax.devices("cpu")[: math.prod(sizes.values())], (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def each(fn: Any, mesh: Mesh, check_vma: bool = True) -> Any:
    return jax.jit(each_device(fn, mesh, check_vma))


FORMS = ("xla", "xla_ring", "xla_ring_two_way")
FOUR, EIGHT = mesh_of(x=4), mesh_of(x=8)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Small whole numbers: sums of them are exact in any order, also in bfloat16 (below 256)."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


REDUCED: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
}


def of_all(calls: list[Callable[[Any], Any]], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Each call of its array on four devices, as one program."""
    made = each(lambda *xs: [call(x) for call, x in zip(calls, xs, strict=True)], FOUR)(*arrays)
    return [np.asarray(x) for x in made]


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_all_reduce(form: str) -> None:
    shapes = ((), (1,), (3, 5), (8, 2))  # a scalar, odd shapes that are padded, one that divides
    ops = [*(("sum", shape) for shape in shapes), ("mean", (3, 5)), ("max", (3, 5)), ("min", (8, 2))]
    calls = [partial(collective.all_reduce, axis_name="x", op=op, implementation=form) for op, _ in ops]
    arrays = [drawn(4, *shape) for _, shape in ops]
    for (op, _), x, made in zip(ops, arrays, of_all(calls, arrays), strict=True):
        np.testing.assert_array_equal(made, np.broadcast_to(REDUCED[op](x), x.shape))


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_reduce_scatter(form: str) -> None:
    given = [("sum", (4,), 0), ("sum", (3, 12), -1), ("mean", (8, 1), 0), ("max", (3, 12), 1), ("min", (8, 1), 0)]
    calls = [
        partial(collective.reduce_scatter, axis_name="x", axis=axis, op=op, implementation=form)
        for op, _, axis in given
    ]
    arrays = [drawn(4, *shape) for _, shape, _ in given]
    for (op, _, axis), x, made in zip(given, arrays, of_all(calls, arrays), strict=True):
        np.testing.assert_array_equal(made, np.stack(np.split(REDUCED[op](x), 4, axis)))


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_all_gather(form: str) -> None:
    given = [((), 0, False), ((1,), 0, True), ((3, 5), 1, True), ((3, 5), -1, False), ((2, 0), 0, True)]
    calls = [
        partial(collective.all_gather, axis_name="x", axis=axis, tiled=tiled, implementation=form)
        for _, axis, tiled in given
    ]
    arrays = [drawn(4, *shape) for shape, _, _ in given]
    for (_, axis, tiled), x, made in zip(given, arrays, of_all(calls, arrays), strict=True):
        wanted = np.concatenate(list(x), axis) if tiled else np.stack(list(x), axis)
        np.testing.assert_array_equal(made, np.broadcast_to(wanted, (4, *wanted.shape)))


def test_all_to_all_and_permute() -> None:
    x = drawn(8, 16, 3)
    made = each(partial(collective.all_to_all, axis_name="x", split_axis=0, concat_axis=1), EIGHT)(x)
    parts = x.reshape(8, 8, 2, 3)  # [from, to, ...]
    np.testing.assert_array_equal(made, np.stack([np.concatenate(list(parts[:, to]), axis=1) for to in range(8)]))

    moved = each(partial(collective.permute, axis_name="x", shift=-2), EIGHT)(x)
    np.testing.assert_array_equal(moved, np.roll(x, -2, axis=0))
    few = each(partial(collective.permute, axis_name="x", pairs=[(0, 7), (3, 1)]), EIGHT)(x)
    wanted = np.zeros_like(x)
    wanted[7], wanted[1] = x[0], x[3]
    np.testing.assert_array_equal(few, wanted)


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_over_several_axes_and_one_of_two(form: str) -> None:
    mesh = mesh_of(a=2, b=4)
    x = drawn(8, 4, 8)
    both = each(partial(collective.all_reduce, axis_name=("a", "b"), implementation=form), mesh)(x)
    np.testing.assert_array_equal(both, np.broadcast_to(x.sum(0), x.shape))
    inner = each(partial(collective.all_gather, axis_name="b", implementation=form), mesh)(x)
    groups = x.reshape(2, 4 * 4, 8)
    np.testing.assert_array_equal(inner, np.repeat(groups, 4, axis=0))


@pytest.mark.parametrize("form", ["xla", "xla_ring_two_way"])
def test_bfloat16_is_added_in_float32_and_sent_as_bfloat16(form: str) -> None:
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 64)), jnp.bfloat16)
    made = each(partial(collective.all_reduce, axis_name="x", implementation=form), EIGHT)(x)
    assert made.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    # At most n partial sums are rounded, each by half a unit of at most the sum of absolute values.
    bound = 8 * 2.0**-9 * np.abs(wide).sum(0)
    assert (np.abs(np.asarray(made, np.float64) - wide.sum(0)) <= bound).all()


def gradient(fn: Callable[[Any], Any], x: Any, weights: Any, check_vma: bool = True) -> Any:
    """Of the sum over devices of weights · fn(x)."""
    return jax.grad(lambda x: (each(fn, FOUR, check_vma)(x) * weights).sum())(x)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("form", "check_vma"),
    [("xla", True), ("xla", False), ("xla_ring", True), ("xla_ring_two_way", True), ("xla_ring", False)],
)
def test_gradients(form: str, check_vma: bool) -> None:
    x = drawn(4, 4, 3)
    weights = {"sum": drawn(4, 4, 3, seed=1), "part": drawn(4, 1, 3, seed=2), "whole": drawn(4, 16, 3, seed=3)}

    def all_of_them(x: Any) -> dict[str, Any]:
        return {
            "sum": collective.all_reduce(x, "x", implementation=form),
            "mean": collective.all_reduce(x, "x", op="mean", implementation=form),
            "part": collective.reduce_scatter(x, "x", implementation=form),
            "whole": collective.all_gather(x, "x", implementation=form),
        }

    _, pull = jax.vjp(each(all_of_them, FOUR, check_vma), x)
    pull = jax.jit(pull)
    flow = {"sum": weights["sum"], "mean": weights["sum"], "part": weights["part"], "whole": weights["whole"]}
    none = jax.tree.map(np.zeros_like, flow)
    pulled = {name: pull({**none, name: flow[name]})[0] for name in flow}
    # Each x is once in the sum of every device; in a part of one device's; and in one place of every gather.
    np.testing.assert_array_equal(pulled["sum"], np.broadcast_to(weights["sum"].sum(0), x.shape))
    np.testing.assert_array_equal(pulled["mean"], np.broadcast_to(weights["sum"].mean(0), x.shape))
    np.testing.assert_array_equal(pulled["part"], np.broadcast_to(weights["part"].reshape(4, 3), x.shape))
    np.testing.assert_array_equal(pulled["whole"], weights["whole"].sum(0).reshape(4, 4, 3))


@pytest.mark.quick
def test_the_gradient_of_a_maximum_goes_to_those_that_attain_it() -> None:
    x = np.zeros((4, 3), np.float32)
    x[2, 0] = x[0, 1] = x[1, 1] = 4.0  # one device, two devices, all devices
    weights = np.ones((4, 3), np.float32)
    made = gradient(partial(collective.all_reduce, axis_name="x", op="max"), x, weights)
    wanted = np.zeros((4, 3))
    wanted[2, 0], wanted[:2, 1], wanted[:, 2] = 4, 2, 1
    np.testing.assert_array_equal(made, wanted)


def test_shard_map_knows_that_a_sum_is_the_same_everywhere() -> None:
    mesh = mesh_of(dcn=2, ici=4)
    x = drawn(8, 5, 3)
    for op, right in REDUCED.items():
        call = partial(collective.hierarchical_all_reduce, inner_axis_name="ici", outer_axis_name="dcn", op=op)
        rows = P(("dcn", "ici"))
        made = jax.jit(jax.shard_map(lambda x, f=call: f(x[0]), mesh=mesh, in_specs=rows, out_specs=P()))(x)
        np.testing.assert_allclose(made, right(x), rtol=1e-6)  # the mean divides twice


@pytest.mark.parametrize("form", ["xla_ring_two_way"])
def test_hierarchical_with_rings_inside(form: str) -> None:
    mesh = mesh_of(dcn=2, ici=4)
    x = drawn(8, 5, 3)
    call = partial(
        collective.hierarchical_all_reduce, inner_axis_name="ici", outer_axis_name="dcn", implementation=form
    )
    np.testing.assert_array_equal(each(call, mesh)(x), np.broadcast_to(x.sum(0), x.shape))


def test_hierarchical_sends_one_part_across() -> None:
    """Between the groups goes 1 / inner of the array: read from the program."""
    mesh = mesh_of(dcn=2, ici=4)
    call = partial(collective.hierarchical_all_reduce, inner_axis_name="ici", outer_axis_name="dcn")
    text = str(jax.make_jaxpr(each(call, mesh))(drawn(8, 16, 4)))
    across = [line for line in text.splitlines() if "psum" in line and "'dcn'" in line and "scatter" not in line]
    assert across, text
    assert all("f32[4,4]" in line for line in across), across


@pytest.mark.parametrize("form", ["xla_ring", "xla_ring_two_way"])
def test_rings_send_to_neighbours_alone(form: str) -> None:
    call = partial(collective.all_gather, axis_name="x", implementation=form)
    text = str(jax.make_jaxpr(each(call, EIGHT))(drawn(8, 4, 3)))
    assert "all_gather" not in text.replace("name=all_gather", "")
    assert text.count("ppermute") == {"xla_ring": 7, "xla_ring_two_way": 14}[form]
    sent = "f32[4,3]" if form == "xla_ring" else "f32[2,3]"
    assert all(sent in line for line in text.splitlines() if "ppermute" in line)


def test_on_32_devices_and_under_vmap() -> None:
    mesh = mesh_of(a=8, b=4)
    x = drawn(32, 3, 32)
    for form in ("xla", "xla_ring"):
        call = partial(collective.reduce_scatter, axis_name=("a", "b"), implementation=form)
        made = each(jax.vmap(call), mesh)(x)
        np.testing.assert_array_equal(made[:, :, 0].T, x.sum(0))


def test_over_an_axis_that_vmap_names() -> None:
    x = drawn(4, 8, 3)
    for form in FORMS:
        made = jax.vmap(partial(collective.all_reduce, axis_name="i", implementation=form), axis_name="i")(x)
        np.testing.assert_array_equal(made, np.broadcast_to(x.sum(0), x.shape))


def test_gradients_of_an_exchange_and_a_move() -> None:
    """Each is undone by its own inverse."""
    x = drawn(4, 8, 3)
    exchange = partial(collective.all_to_all, axis_name="x", split_axis=0, concat_axis=1)
    back = partial(collective.all_to_all, axis_name="x", split_axis=1, concat_axis=0)
    weights = drawn(4, 2, 12, seed=1)
    np.testing.assert_array_equal(gradient(exchange, x, weights), each(back, FOUR)(weights))
    moved = gradient(partial(collective.permute, axis_name="x", pairs=[(0, 3)]), x, drawn(4, 8, 3, seed=2))
    np.testing.assert_array_equal(moved[0], drawn(4, 8, 3, seed=2)[3])
    assert not moved[1:].any()


def test_explain_names_what_runs() -> None:
    x = jax.ShapeDtypeStruct((8, 16), "float32")
    told = explain(each(partial(collective.all_reduce, axis_name="x"), EIGHT), x)
    assert told.implementation == "xla"
    assert "xla_ring_two_way" in str(told)
    asked = explain(each(partial(collective.ring_all_gather, axis_name="x", directions=1), EIGHT), x)
    assert asked.implementation == "xla_ring"


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "does not divide": (partial(collective.reduce_scatter, axis_name="x"), r"over the 8 .*length of 12.*pad it to 16"),
    "no such axis": (partial(collective.all_reduce, axis_name="y"), r"inside jax.shard_map .*'x'.*axis_name='y'"),
    "a repeated axis": (partial(collective.all_reduce, axis_name=("x", "x")), "different names"),
    "a reduction": (partial(collective.all_reduce, axis_name="x", op="product"), "product"),
    "a dimension": (partial(collective.all_gather, axis_name="x", axis=3), r"one of the array's 2 axes.*3"),
    "an implementation": (partial(collective.all_gather, axis_name="x", implementation="rings"), "rings"),
    "directions": (partial(collective.ring_all_gather, axis_name="x", directions=3), "1 direction or 2"),
    "no axis_name": (collective.all_reduce, "pass axis_name"),
    "a mesh too": (partial(collective.all_reduce, axis_name="x", mesh=EIGHT), "pass one of them"),
    "a pair": (partial(collective.permute, axis_name="x", pairs=[(0, 1), (2, 1)]), "each target once"),
    "neither": (partial(collective.permute, axis_name="x"), "shift or pairs"),
    "two groups": (
        partial(collective.hierarchical_all_reduce, inner_axis_name="x", outer_axis_name="x"),
        "inside the groups or between them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        each(call, EIGHT)(drawn(8, 12, 3))


def test_outside_of_shard_map_and_of_numbers() -> None:
    with pytest.raises(ValueError, match=r"called inside jax\.shard_map"):
        collective.all_gather(jnp.ones(3), "x")
    with pytest.raises(ValueError, match="mean of whole numbers"):
        each(partial(collective.all_reduce, axis_name="x", op="mean"), EIGHT)(np.ones((8, 2), np.int32))
    with pytest.raises(ValueError, match="takes numbers"):
        each(partial(collective.all_reduce, axis_name="x"), EIGHT)(np.ones((8, 2), bool))


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_the_gradient_that_kernels_have_is_that_of_the_reference(op: str) -> None:
    """A kernel's own rule for reduce_scatter, against JAX's derivative of what it stands for."""
    from capibara.kernels.ops.collective import reference
    from capibara.kernels.ops.collective.ops import REDUCE_SCATTER

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:4])
    params: dict[str, Any] = {"axis_name": ("x",), "devices": 4, "axis": 0, "op": op}

    def both(cotangent: Any) -> Any:
        primal = jax.lax.pcast(jnp.zeros(8), "x", to="varying")
        _, pull = jax.vjp(lambda x: reference.reduce_scatter(x, **params), primal)
        assert REDUCE_SCATTER.gradient is not None
        return pull(cotangent)[0], REDUCE_SCATTER.gradient.backward((), cotangent, params, None)[0]

    spec = jax.sharding.PartitionSpec("x")
    wanted, got = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.arange(8.0))
    np.testing.assert_array_equal(got, wanted)  # a quarter, where it is a mean, is exact
    assert float(got.max()) > 0
