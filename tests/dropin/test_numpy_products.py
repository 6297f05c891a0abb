"""matmul, dot and einsum give jnp's result, by gemm where the call is a matrix product."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.dropin import numpy_products as numpy_api
from capibara.kernels.core.dispatch import recording
from capibara.kernels.core.spec import unit_roundoff

QUICK = settings(max_examples=20, deadline=None, derandomize=True, database=None)
DTYPES = ("float32", "bfloat16", "float16")


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("jnp's own function was called")


def draw(seed: int, shape: tuple[int, ...], dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def close(got: Any, exact: np.ndarray, summed: int) -> None:
    """Four times the roundings that a product of exact inputs has: the output's, and sqrt(K) of float32."""
    narrow = max(unit_roundoff(got.dtype), unit_roundoff(jnp.float32))
    tolerance = 4 * (narrow + unit_roundoff(jnp.float32) * max(summed, 1) ** 0.5)
    error = np.linalg.norm(np.asarray(got, np.float64) - exact)
    assert error <= tolerance * max(np.linalg.norm(exact), 1e-30), error


def agrees(mine: Callable[..., Any], theirs: Callable[..., Any], a: jax.Array, b: jax.Array, **options: Any) -> None:
    want = jax.eval_shape(functools.partial(theirs, **options), a, b)
    exact = getattr(np, theirs.__name__)  # numpy has the same two functions
    for call in (mine, jax.jit(mine, static_argnums=0, static_argnames=tuple(options))):
        got = call(theirs, a, b, **options)
        assert (got.shape, got.dtype, got.weak_type) == (want.shape, want.dtype, want.weak_type)
        close(got, exact(np.asarray(a, np.float64), np.asarray(b, np.float64)), a.shape[-1])


sizes = st.sampled_from([0, 1, 2, 3, 5])


@st.composite
def matmul_shapes(draw_from: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes whose leading axes broadcast; either operand may be a vector."""
    k = draw_from(sizes)
    lead = draw_from(st.lists(sizes, max_size=3))

    def own() -> tuple[int, ...]:
        kept = lead[draw_from(st.integers(0, len(lead))) :]
        return tuple(1 if draw_from(st.booleans()) else n for n in kept)

    a = (*own(), draw_from(sizes), k) if draw_from(st.booleans()) else (k,)
    b = (*own(), k, draw_from(sizes)) if draw_from(st.booleans()) else (k,)
    return a, b


@st.composite
def dot_shapes(draw_from: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    k = draw_from(sizes)
    a = (*draw_from(st.lists(sizes, max_size=2)), k)
    b = (*draw_from(st.lists(sizes, max_size=2)), k, draw_from(sizes)) if draw_from(st.booleans()) else (k,)
    return a, b


@QUICK
@given(matmul_shapes(), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_matmul_is_jnps_for_any_shapes(shapes: Any, left: str, right: str) -> None:
    agrees(numpy_api.matmul, jnp.matmul, draw(0, shapes[0], left), draw(1, shapes[1], right))


@QUICK
@given(dot_shapes(), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_dot_is_jnps_for_any_shapes(shapes: Any, left: str, right: str) -> None:
    agrees(numpy_api.dot, jnp.dot, draw(0, shapes[0], left), draw(1, shapes[1], right))


EQUATIONS = [
    ("ij,jk->ik", (3, 4), (4, 5)),
    ("ij,jk", (3, 4), (4, 5)),
    ("bhnd,bhkd->bhnk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("...ij,...jk", (2, 1, 3, 4), (7, 4, 5)),
    ("ij,kj->ki", (3, 4), (5, 4)),
    ("iij,jk->ik", (3, 3, 4), (4, 5)),
    ("ij,jk,kl->il", (3, 4), (4, 5), (5, 6)),
    ("ij,jk->ik", (0, 4), (4, 5)),
]


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize(("equation", "shapes"), [(e, s) for e, *s in EQUATIONS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_einsum_is_jnps(equation: str, shapes: list[tuple[int, ...]], dtype: str) -> None:
    operands = [draw(i, shape, dtype) for i, shape in enumerate(shapes)]
    want = jax.eval_shape(functools.partial(jnp.einsum, equation), *operands)
    exact = np.einsum(equation, *(np.asarray(x, np.float64) for x in operands))
    for call in (numpy_api.einsum, jax.jit(numpy_api.einsum, static_argnums=(0, 1))):
        with recording() as found:
            got = call(never, equation, *operands)
        assert found
        assert (got.shape, got.dtype, got.weak_type) == (want.shape, want.dtype, want.weak_type)
        # One rounding to the output's type a step.
        close(got, exact, 5 * len(operands) ** 2)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("a", "b"),
    [((8, 4), (4, 6)), ((4,), (4, 6)), ((8, 4), (4,)), ((2, 3, 8, 4), (3, 4, 6)), ((5, 8, 4), (4, 6))],
)
def test_products_go_through_dispatch(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = draw(0, a), draw(1, b)
    with recording() as found:
        numpy_api.matmul(never, x, y)
        numpy_api.matmul(lambda a, b: None, b=y, a=x)
        numpy_api.dot(never, x, y)
        numpy_api.matmul(never, np.asarray(x), np.asarray(y))
    assert [s.call.op.name for s in found] == ["gemm"] * 4
    # Nothing but a transpose is asked for: the call is one that a tuned table knows.
    assert all(set(s.call.changed_params) <= {"transpose_a", "transpose_b"} for s in found)


def test_what_is_not_gemms_is_jnps_own_call() -> None:
    """The very arguments arrive, and what jnp's function returns comes back."""
    f, i = draw(0, (4, 4)), jnp.ones((4, 4), jnp.int32)
    weak = jnp.broadcast_to(2.0, (4, 4))
    assert weak.weak_type
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((i, i), {}),
        ((f, i), {}),
        ((f, f.astype(jnp.complex64)), {}),
        ((f, weak), {}),
        ((f, jnp.ones((4, 4), jnp.float8_e4m3fn)), {}),
        ((f[0], f[0]), {}),
        ((f, f), {"out_sharding": P()}),
        ((f, f), {"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32}),
        ((f, f), {"precision": ("high", "default")}),
        ((f, f), {"precision": "no such"}),
        ((f, f), {"preferred_element_type": jnp.bfloat16}),
        ((f, f), {"preferred_element_type": jnp.int32}),
        ((f, f), {"some_new_keyword": 1}),
        ((f, [[1.0]]), {}),
        ((f, 2.0), {}),
        ((f,), {}),
        ((f, f, f), {}),
    ]
    for function in (numpy_api.matmul, numpy_api.dot):
        for args, kwargs in calls:
            seen: list[Any] = []

            def original(*got: Any, seen: list[Any] = seen, **keywords: Any) -> str:
                seen += [got, keywords]
                return "jnp's"

            assert function(original, *args, **kwargs) == "jnp's", (function, args, kwargs)
            assert all(x is y for x, y in zip(seen[0], args, strict=True))
            assert seen[1] == kwargs
    for args, kwargs in [
        ((f, (0, 1), f, (1, 2)), {}),
        (("ij->ji", f), {}),
        (("i,j->ij", f[0], f[0]), {}),
        (("ij,jk", f, i), {}),
        (("ij,jk", f, f), {"optimize": [(0, 1)]}),
        (("ij,jk", f, f), {"_dot_general": jax.lax.dot_general}),
        (("ij,jk", f, f), {"out_sharding": P()}),
        (("ijk,jk", f, f), {}),
        ((), {}),
    ]:
        assert numpy_api.einsum(lambda *a, **k: "jnp's", *args, **kwargs) == "jnp's", args


@pytest.mark.quick
def test_a_mistake_is_told_in_jnps_words() -> None:
    a, b = draw(0, (3, 4)), draw(1, (5, 6))
    for mine, theirs, args in [
        (numpy_api.matmul, jnp.matmul, (a, b)),
        (numpy_api.matmul, jnp.matmul, (draw(0, (2, 3, 4)), draw(0, (3, 4, 5)))),
        (numpy_api.dot, jnp.dot, (a, b)),
        (numpy_api.einsum, jnp.einsum, ("ij,jk->ik", a, b)),
        (numpy_api.einsum, jnp.einsum, ("ij,jk->ii", a, a.T)),
    ]:
        with pytest.raises((TypeError, ValueError)) as want:
            theirs(*args)
        with pytest.raises(want.type) as got:
            mine(theirs, *args)
        assert str(got.value) == str(want.value)


@pytest.mark.parametrize(
    "precision",
    [
        None,
        "default",
        "fastest",
        "high",
        "float32",
        "tensorfloat32",
        jax.lax.Precision.HIGHEST,
        ("high", "high"),
    ],
)
def test_a_precision_means_what_it_means_to_jnp(precision: Any) -> None:
    x = jax.ShapeDtypeStruct((4, 4), "float32")

    def told(fn: Callable[..., Any], *first: Any) -> list[Any]:
        with recording() as found:
            traced = jax.make_jaxpr(lambda a, b: fn(*first, a, b, precision=precision))(x, x)
        assert len(found) == len(first)
        return [e.params["precision"] for e in traced.eqns if e.primitive.name == "dot_general"]

    assert told(numpy_api.matmul, never) == told(jnp.matmul)
    assert told(numpy_api.dot, never) == told(jnp.dot)


def test_a_preferred_type_is_the_results() -> None:
    a, b = draw(0, (4, 7), "bfloat16"), draw(1, (7, 5), "bfloat16")
    for mine, theirs in ((numpy_api.matmul, jnp.matmul), (numpy_api.dot, jnp.dot)):
        with recording() as found:
            agrees(mine, theirs, a, b, preferred_element_type=np.dtype("float32"))
        assert found
    out = numpy_api.einsum(never, "ij,jk->ik", a, b, preferred_element_type="float32")
    assert out.dtype == jnp.float32


def test_in_double_precision() -> None:
    with jax.enable_x64(True):
        a, b = draw(0, (3, 4), "float64"), draw(1, (4, 5), "float64")
        got = numpy_api.matmul(never, a, b)
        assert got.dtype == jnp.float64
        # K = 4: a few units of 2**-53.
        np.testing.assert_allclose(got, np.asarray(a) @ np.asarray(b), rtol=1e-14)


@pytest.mark.quick
def test_gradients_and_vmap() -> None:
    a, b = draw(0, (2, 3, 4)), draw(1, (2, 4, 5))

    def loss(matmul: Callable[..., Any]) -> Callable[..., Any]:
        return lambda a, b: jnp.sum(jnp.sin(matmul(a, b)))

    mine = lambda a, b: numpy_api.matmul(never, a, b)  # noqa: E731
    for got, want in zip(jax.grad(loss(mine), (0, 1))(a, b), jax.grad(loss(jnp.matmul), (0, 1))(a, b), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    mapped = jax.vmap(mine, in_axes=(0, None))(a, b[0])
    np.testing.assert_allclose(mapped, jnp.matmul(a, b[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_axes_split_over_a_mesh_are_not_moved() -> None:
    """Batch over one mesh axis, heads over the other, as in attention: no device talks to another."""
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    split = NamedSharding(mesh, P("data", "model"))
    q, k = (jax.device_put(np.asarray(draw(i, (4, 8, 6, 5))), split) for i in range(2))

    def scores(q: jax.Array, k: jax.Array) -> jax.Array:
        return numpy_api.einsum(never, "bhnd,bhkd->bhnk", q, k)

    compiled = jax.jit(scores).lower(q, k).compile()
    assert not any(
        word in compiled.as_text() for word in ("all-gather", "all-reduce", "collective-permute", "all-to-all")
    )
    got = compiled(q, k)
    assert got.sharding.is_equivalent_to(split, 4)
    close(got, np.einsum("bhnd,bhkd->bhnk", np.asarray(q, np.float64), np.asarray(k, np.float64)), 5)


def test_types_that_carry_a_layout_are_jnps() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(draw(0, (8, 8)), NamedSharding(mesh, P("data", None)))
        w = jax.device_put(draw(1, (8, 8)), NamedSharding(mesh, P(None, "model")))
        assert numpy_api.matmul(lambda a, b: "jnp's", x, w) == "jnp's"
        whole = jax.device_put(draw(1, (8, 8)), NamedSharding(mesh, P()))
        assert numpy_api.matmul(never, whole, whole).shape == (8, 8)


def test_symbolic_sizes_are_jnps() -> None:
    n = jax.export.symbolic_shape("n, 4")
    shape = jax.ShapeDtypeStruct(n, jnp.float32)
    fn = jax.jit(lambda a, b: numpy_api.matmul(jnp.matmul, a, b.T))
    assert str(jax.export.export(fn)(shape, shape).out_avals[0].shape) == "(n, n)"
