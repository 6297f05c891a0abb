"""gemm itself: shapes, epilogues, precision, bad input, and what dispatch traces."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params
from jaxtyping import jaxtyped

from capibara.errors import ImplementationRefused, UnknownNameError
from capibara.kernels import explain, gemm, interpret, target
from capibara.kernels.core.varying import vary_alike
from capibara.kernels.ops.linalg.gemm import gradient, rules
from capibara.kernels.ops.linalg.gemm.api import GEMM
from capibara.kernels.ops.linalg.gemm.hopper.forward import HopperConfig
from capibara.kernels.ops.linalg.gemm.tpu.forward import TileConfig, tile_bytes
from capibara.kernels.ops.linalg.gemm.xla import xla
from capibara.kernels.pallas import vmem

# The signature's jaxtyping shapes are checked on every call the tests make through this name.
checked_gemm = jaxtyped(typechecker=beartype)(gemm)


def _normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def _float64(a: jax.Array, b: jax.Array) -> np.ndarray:
    return np.matmul(np.asarray(a, np.float64), np.asarray(b, np.float64))


def _close(got: jax.Array, want: np.ndarray, k: int) -> None:
    """Within sqrt(K) float32 roundings of the largest element, times four for an unlucky draw."""
    unit = float(jnp.finfo(jnp.float32).eps) / 2 * 4 * max(k, 1) ** 0.5 + float(jnp.finfo(got.dtype).eps) / 2
    scale = max(np.abs(want).max(initial=0.0), k**0.5)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=unit, atol=unit * scale)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_size_and_transpose(m: int, k: int, n: int, flip_a: bool, flip_b: bool) -> None:
    a, b = _normal(0, m, k), _normal(1, k, n)
    got = checked_gemm(a.T if flip_a else a, b.T if flip_b else b, transpose_a=flip_a, transpose_b=flip_b)
    assert got.shape == (m, n)
    _close(got, _float64(a, b), k)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300), st.sampled_from(["bfloat16", "float32"]))
@settings(max_examples=10, deadline=None)
def test_the_tpu_kernel_at_any_size(m: int, k: int, n: int, dtype: str) -> None:
    """Tiles of 128 leave a tail on every axis; past the edge the emulated memory is NaN, so a leak is seen."""
    a, b = _normal(0, m, k, dtype=dtype), _normal(1, k, n, dtype=dtype)
    with interpret():
        got = gemm(a, b, implementation="pallas_tpu", config=TileConfig(128, 128, 128))
    _close(got, _float64(a, b), k)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("a_lead", "b_lead"),
    [((), ()), ((3,), ()), ((3,), (3,)), ((2, 3), ()), ((2, 3), (2, 3)), ((), (4,)), ((2, 1), (3,))],
)
def test_leading_axes_broadcast_like_matmul(a_lead: tuple[int, ...], b_lead: tuple[int, ...]) -> None:
    a, b = _normal(0, *a_lead, 5, 8), _normal(1, *b_lead, 8, 6)
    got = checked_gemm(a, b)
    want = _float64(a, b)
    assert got.shape == want.shape
    _close(got, want, 8)


def test_leading_axes_with_a_transposed_left_operand() -> None:
    a, b = _normal(0, 2, 3, 8, 5), _normal(1, 8, 6)
    _close(gemm(a, b, transpose_a=True), _float64(a.mT, b), 8)


@pytest.mark.quick
def test_the_epilogue_is_activation_of_product_and_bias_then_residual() -> None:
    a, b, bias, residual = _normal(0, 6, 16), _normal(1, 16, 9), _normal(2, 9), _normal(3, 6, 9)
    z = a @ b + bias
    for activation, fn in (("gelu", jax.nn.gelu), ("silu", jax.nn.silu), (None, lambda x: x)):
        got = checked_gemm(a, b, bias=bias, residual=residual, activation=activation)
        np.testing.assert_allclose(got, fn(z) + residual, rtol=2e-5, atol=2e-5)


def test_precision_policies_choose_types() -> None:
    a, b = _normal(0, 32, 64), _normal(1, 64, 32)
    assert gemm(a, b, precision="bfloat16").dtype == jnp.bfloat16
    assert gemm(a, b, precision="mixed").dtype == jnp.float32
    assert gemm(a, b, precision="float32").dtype == jnp.float32
    assert gemm(a, b, precision="mixed", out_dtype=jnp.bfloat16).dtype == jnp.bfloat16
    exact = _float64(a, b)
    error = {p: np.abs(np.asarray(gemm(a, b, precision=p), np.float64) - exact).max() for p in ("float32", "mixed")}
    assert error["float32"] < 1e-4 < error["mixed"]  # mixed rounds the inputs to eight bits, float32 does not


@pytest.mark.usefixtures("nothing_said_yet")
def test_fp8_rounds_the_inputs_further_than_bfloat16() -> None:
    a, b = _normal(0, 32, 64), _normal(1, 64, 32)
    with pytest.warns(UserWarning, match="experimental"):
        low = gemm(a, b, precision="fp8", out_dtype=jnp.float32)
    exact = _float64(a, b)
    mixed = np.abs(np.asarray(gemm(a, b, precision="mixed")) - exact).max()
    assert mixed < np.abs(np.asarray(low) - exact).max() < 0.2 * np.abs(exact).max()


@pytest.mark.quick
def test_under_jit_nothing_is_added() -> None:
    """The traced program of a plain product is one dot_general and nothing else."""
    x = _normal(0, 16, 16)
    program = jax.make_jaxpr(lambda a, b: gemm(a, b))(x, x)
    assert [e.primitive.name for e in program.eqns] == ["dot_general"]


def test_numpy_operands_are_taken() -> None:
    a = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(gemm(a, a.T), a @ a.T)


def test_second_derivatives() -> None:
    """The kernel's gradient is made of gemm, so it can be differentiated again."""
    a, b = _normal(0, 8, 16), _normal(1, 16, 8)

    def loss(a: jax.Array, implementation: str) -> jax.Array:
        return (gemm(a, b, activation="silu", implementation=implementation) ** 2).sum()

    def curvature(implementation: str) -> jax.Array:
        inner = jax.grad(loss)
        return jax.grad(lambda a: (inner(a, implementation) ** 2).sum())(a)

    with interpret("hlo"):
        np.testing.assert_allclose(curvature("pallas_tpu"), curvature("xla"), rtol=2e-3, atol=2e-2)


@pytest.mark.quick
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_products_that_are_used_transposed_are_not_summed_in_16_bits(transpose_a: bool, transpose_b: bool) -> None:
    """XLA of JAX 0.12 does so on a CPU with bfloat16 operands, ten times as far off as by rounding once."""
    a, b, flow = (_normal(i, *shape, dtype="bfloat16") for i, shape in enumerate(((96, 160), (160, 224), (96, 224))))
    given = a.T if transpose_a else a, b.T if transpose_b else b

    def used(a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        made, pull = jax.vjp(
            lambda a, b: gemm(a, b, transpose_a=transpose_a, transpose_b=transpose_b, implementation="xla"), a, b
        )
        da, db = pull(flow)
        return made, da.T if transpose_a else da, db.T if transpose_b else db

    wants = _float64(a, b), _float64(flow, b.T), _float64(a.T, flow)
    as_made, as_turned = jax.jit(used)(*given), jax.jit(lambda a, b: [x.T for x in used(a, b)])(*given)
    for got, turned, want in zip(as_made, as_turned, wants, strict=True):
        assert got.dtype == turned.dtype == jnp.bfloat16
        for one in (got, turned.T):
            # One rounding to 8 bits is off by at most 2**-9 of each number, so the norm is too.
            assert np.linalg.norm(np.asarray(one, np.float64) - want) < 2.0**-9 * np.linalg.norm(want)


@pytest.mark.quick
@pytest.mark.parametrize("extra", ["residual", "bias", "activation"])
def test_the_gradient_of_an_epilogue_multiplies_in_the_operands_type(extra: str) -> None:
    a, b = _normal(0, 24, 16, dtype="bfloat16"), _normal(1, 16, 32, dtype="bfloat16")
    given = {"residual": a[:, :1] * jnp.ones(32, "bfloat16"), "bias": b[0], "activation": "gelu"}[extra]

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return gemm(a, b, implementation="xla", **{extra: given}).astype(jnp.float32).sum()

    products = [e for e in _equations(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(a, b).jaxpr)
                if e.primitive.name == "dot_general"]  # fmt: skip
    assert len(products) == 3
    assert {x.aval.dtype for e in products for x in e.invars} == {jnp.dtype("bfloat16")}
    # Forward mode too: the two agree on what a step along both operands changes.
    _, along = jax.jvp(loss, (a, b), (a, b))
    back = jax.grad(loss, argnums=(0, 1))(a, b)
    wanted = sum(jnp.vdot(x.astype(jnp.float32), g.astype(jnp.float32)) for x, g in zip((a, b), back, strict=True))
    np.testing.assert_allclose(float(along), float(wanted), rtol=2.0**-6, atol=0.5)


@pytest.mark.quick
@pytest.mark.parametrize("shapes", [((24, 16), (16, 32)), ((3, 24, 16), (3, 16, 32)), ((24, 16), (3, 16, 32))], ids=str)
def test_on_a_gpu_a_residual_alone_is_left_to_the_products_own_sums(
    shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product in the residual's type and a sum are what XLA hands cuBLAS as one call; elsewhere sums are float32."""
    a, b = (_normal(n, *shape, dtype="bfloat16") for n, shape in enumerate(shapes))
    residual = _normal(2, *gemm(a, b).shape, dtype="bfloat16")

    def added(a: Any, b: Any, residual: Any, **more: Any) -> Any:
        return gemm(a, b, residual=residual, implementation="xla", **more)

    def made(**more: Any) -> set[str]:
        jaxpr = jax.make_jaxpr(functools.partial(added, **more))(a, b, residual).jaxpr
        return {x.aval.dtype.name for e in _equations(jaxpr) for x in e.outvars}

    wanted = np.asarray(jax.jit(added)(a, b, residual), np.float64)
    with target("gpu", "NVIDIA H200"):
        assert "float32" in made()  # few numbers
        monkeypatch.setattr(rules, "MANY_NUMBERS", 1)
        assert made() == {"bfloat16"}
        assert "float32" in made(activation="gelu")
        assert "float32" in made(out_dtype="float32")
        found = np.asarray(jax.jit(added)(a, b, residual), np.float64)
    assert "float32" in made()
    # A CPU, unlike cuBLAS, rounds the product before the sum: half a unit of each.
    unit = float(jnp.finfo(jnp.bfloat16).eps) / 2
    product = np.abs(np.asarray(gemm(a, b), np.float64))
    assert np.all(np.abs(found - wanted) <= unit * (product + 2 * np.abs(wanted)) + 1e-6)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shapes", "turned"),
    [
        (((24, 16), (16, 32), (32,)), {}),
        (((16, 24), (32, 16), (32,)), {"transpose_a": True, "transpose_b": True}),
        (((3, 24, 16), (3, 16, 32), (32,)), {}),
        (((3, 16, 24), (16, 32), (32,)), {"transpose_a": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu_a_bias_alone_is_left_to_the_products_own_sums(shapes: Any, turned: Any, dtype: str) -> None:
    """A product in the bias's type and a row are what XLA hands cuBLAS as one call; elsewhere sums are float32."""
    a, b, bias = (_normal(n, *shape, dtype=dtype) for n, shape in enumerate(shapes))

    def added(a: Any, b: Any, bias: Any, **more: Any) -> Any:
        return gemm(a, b, bias=bias, implementation="xla", **turned, **more)

    wanted = np.asarray(jax.jit(added)(a, b, bias), np.float64)
    with target("gpu", "NVIDIA H200"):
        assert _types_of_products(added, a, b, bias) == {dtype}
        others: list[dict[str, Any]] = [
            {"activation": "gelu"}, {"out_dtype": "float32"}, {"residual": jnp.ones(wanted.shape, dtype)}
        ]  # fmt: skip
        for more in others:
            assert _types_of_products(functools.partial(added, **more), a, b, bias) == {"float32"}
        assert _types_of_products(added, a, b, bias.astype("float32")) == {"float32"}  # it is not rounded
        found = np.asarray(jax.jit(added)(a, b, bias), np.float64)
    for other in ("tpu", "cpu"):
        with target(other):
            assert _types_of_products(added, a, b, bias) == {"float32"}
    # A CPU, unlike cuBLAS, rounds the product before the sum: half a unit of each.
    unit = float(jnp.finfo(dtype).eps) / 2
    product = np.abs(wanted - np.asarray(bias, np.float64)) + unit * np.abs(wanted)
    assert np.all(np.abs(found - wanted) <= unit * (product + 2 * np.abs(wanted)) + 1e-6)


@pytest.mark.quick
@pytest.mark.parametrize(
    "shapes", [((3, 24, 16), (3, 16, 32), (3, 32)), ((24, 16), (3, 16, 32), (32,))], ids=["a row each", "shared left"]
)
def test_a_bias_that_is_no_row_to_cublas_is_added_in_float32(shapes: Any) -> None:
    operands = [_normal(n, *shape, dtype="bfloat16") for n, shape in enumerate(shapes)]
    with target("gpu", "NVIDIA H200"):
        assert _types_of_products(xla, *operands) == {"float32"}
        assert rules.tolerance(GEMM.call(*operands)) == pytest.approx(2.0**-8, rel=0.01)


@pytest.mark.quick
def test_the_gradient_of_a_bias_left_to_cublas_is_summed_in_float32() -> None:
    """A sum of ones in bfloat16 stops at 256."""
    a, b, bias = (_normal(n, *s, dtype="bfloat16") for n, s in enumerate(((1024, 16), (16, 32), (32,))))

    def gradients(a: Any, b: Any, bias: Any) -> Any:
        made, pull = jax.vjp(lambda *x: gemm(x[0], x[1], bias=x[2], implementation="xla"), a, b, bias)
        return pull(jnp.ones_like(made))

    with target("gpu", "NVIDIA H200"):
        assert _types_of_products(gradients, a, b, bias) == {"bfloat16"}
        jaxpr = jax.make_jaxpr(gradients)(a, b, bias).jaxpr
        da, db, dbias = jax.jit(gradients)(a, b, bias)
    assert {e.outvars[0].aval.dtype.name for e in _equations(jaxpr) if e.primitive.name == "reduce_sum"} == {"float32"}
    assert dbias.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(dbias, np.float32), np.full(32, 1024.0))
    ones = np.ones((1024, 32))
    for got, want in ((da, ones @ np.asarray(b, np.float64).T), (db, np.asarray(a, np.float64).T @ ones)):
        _close(got, want, 1024)


# Rows, K and N at which the kernel makes the forward pass on an H200, and no product of its gradient.
OF_THE_KERNEL = ((384, 320), (320, 192), (192,))


def _activated(activation: str = "gelu") -> Any:
    return lambda a, b, *bias: gemm(a, b, bias=bias[0] if bias else None, activation=activation)


def _pulled(fn: Any, cotangent: Any, *operands: Any) -> Any:
    made, pull = jax.vjp(fn, *operands)
    return made, pull(cotangent)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("platform", "dtype", "operands", "activation", "barriers"),
    [
        ("gpu", "bfloat16", 3, "gelu", 1),
        ("gpu", "float16", 3, "silu", 1),
        ("gpu", "bfloat16", 2, "gelu", 0),  # nothing sums dz, which two products read
        ("gpu", "bfloat16", 3, None, 0),
        ("gpu", "float32", 3, "gelu", 0),
        ("tpu", "bfloat16", 3, "gelu", 0),
    ],
)
def test_on_a_gpu_dz_is_rounded_before_it_is_summed(
    platform: str, dtype: str, operands: int, activation: str | None, barriers: int
) -> None:
    a, b, *bias = (_normal(n, *s, dtype=dtype) for n, s in enumerate(OF_THE_KERNEL[:operands]))
    residuals = (a, b, bias[0] if bias else None, None, _normal(4, 384, 192, dtype=dtype) if activation else None)
    params = {"transpose_a": False, "transpose_b": False, "activation": activation, "precision": None}

    def backward(z: Any, cotangent: Any) -> Any:
        return gradient.backward(GEMM, (*residuals[:4], z), cotangent, params, "xla")[:3]

    with target(platform, "NVIDIA H200" if platform == "gpu" else None):
        jaxpr = jax.make_jaxpr(backward)(residuals[4], _normal(5, 384, 192, dtype=dtype)).jaxpr
    found = [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    assert len(found) == barriers
    for barrier in found:  # the products and the sum over rows read what is behind it
        readers = {e.primitive.name for e in jaxpr.eqns if barrier.outvars[0] in e.invars}
        assert readers >= {"dot_general", "convert_element_type"}


@pytest.mark.quick
@pytest.mark.parametrize("activation", list(gradient.ACTIVATIONS))
def test_passes_over_z_share_nothing_that_xla_would_keep(activation: str) -> None:
    """What a pass makes of z by an instruction that XLA does not make twice, if the other needs it too."""
    z = jnp.linspace(-30.0, 30.0, 1001)

    def backward(z: Any) -> Any:
        return jax.vjp(gradient.DIFFERENTIATED[activation], z)[1](z)

    passes = [gradient.ACTIVATIONS[activation], gradient.DIFFERENTIATED[activation]]
    values, slopes = zip(*((f(z), jax.vmap(jax.grad(f))(z)) for f in passes), strict=True)
    np.testing.assert_allclose(*values, rtol=0, atol=1e-5)
    np.testing.assert_allclose(*slopes, rtol=0, atol=1e-5)
    made = {e.primitive.name for e in _equations(jax.make_jaxpr(backward)(z).jaxpr)}
    assert "tanh" not in made
    assert "logistic" in made


@pytest.mark.quick
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_gradients_on_a_gpu_are_the_references(activation: str) -> None:
    operands = [_normal(n, *s, dtype="bfloat16") for n, s in enumerate(OF_THE_KERNEL)]
    operands[1] = operands[1] * 320**-0.5
    cotangent = _normal(3, 384, 192, dtype="bfloat16")

    def reference(a: Any, b: Any, bias: Any) -> jax.Array:
        return gemm(a, b, bias=bias, activation=activation, implementation="reference")

    wide = [x.astype("float32") for x in operands]
    wanted = jax.jit(functools.partial(_pulled, reference))(cotangent.astype("float32"), *wide)
    with target("gpu", "NVIDIA H200"):
        assert explain(_activated(activation), *operands).implementation == "hopper"
        found = jax.jit(functools.partial(_pulled, _activated(activation)))(cotangent, *operands)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        error = np.linalg.norm(np.asarray(got, np.float64) - np.asarray(want, np.float64))
        # z, which is kept in 16 bits, dz, and the result are each rounded to 8 bits, z twice on a CPU.
        assert error < 4 * 2.0**-9 * np.linalg.norm(np.asarray(want, np.float64))


@pytest.mark.parametrize("how", ["vmap", "checkpoint", "forward over reverse", "reverse over reverse", "shard_map"])
def test_gradients_on_a_gpu_are_transformed_like_any_other(how: str) -> None:
    """Its barrier too: in values, all of it is what plain JAX gives in float32."""
    operands = [_normal(n, *s, dtype="bfloat16") for n, s in enumerate(((32, 16), (16, 24), (24,)))]
    given = (_normal(3, 32, 24, dtype="bfloat16"), operands[0], operands[1] / 4, operands[2])
    wide = tuple(x.astype("float32") for x in given)

    def transformed(fn: Any, everything: Any) -> Any:
        def slopes(*given: Any) -> Any:
            return _pulled(fn, *given)[1]

        if how == "vmap":
            several = [jnp.stack([x, x * 0.5]) for x in everything]
            some = jax.vmap(slopes, in_axes=(0, 0, None, None))(*several[:2], *everything[2:])
            return jax.vmap(slopes)(*several), some
        if how == "checkpoint":
            return _pulled(jax.checkpoint(fn), *everything)
        if how == "forward over reverse":
            return jax.jvp(slopes, everything, everything)
        if how == "reverse over reverse":
            return _pulled(slopes, slopes(*everything), *everything)
        rows, whole = jax.P("rows"), jax.P()
        mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = {"in_specs": (rows, rows, whole, whole), "out_specs": rows}
        return jax.shard_map(lambda *given: slopes(*given)[0], mesh=mesh, **specs)(*everything)

    wanted = jax.jit(functools.partial(transformed, lambda a, b, bias: jax.nn.gelu(a @ b + bias)))(wide)
    with target("gpu", "NVIDIA H200"):
        found = jax.jit(functools.partial(transformed, _by_its_own_gradient("gelu")))(given)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        error = np.linalg.norm(np.asarray(got, np.float64) - np.asarray(want, np.float64))
        assert error < 2.0**-6 * np.linalg.norm(np.asarray(want, np.float64))


def _by_its_own_gradient(activation: str) -> Any:
    """gemm as it is differentiated where a kernel is its forward pass, of products that any machine runs."""
    params = {
        "transpose_a": False,
        "transpose_b": False,
        "activation": activation,
        "precision": None,
        "out_dtype": None,
    }
    fn = jax.custom_vjp(lambda a, b, bias: gemm(a, b, bias=bias, activation=activation, implementation="xla"))
    fn.defvjp(
        lambda *operands: gradient.forward(GEMM, (*operands, None), params, "xla"),
        lambda residuals, cotangent: gradient.backward(GEMM, residuals, cotangent, params, "xla")[:3],
    )
    return lambda *operands: fn(*vary_alike(operands))  # as dispatch calls it


@pytest.mark.quick
@pytest.mark.parametrize(
    ("platform", "rows", "more", "roundings"),
    [
        ("gpu", 1024, {"residual": True}, 2),
        ("gpu", 512, {"residual": True}, 1),  # few numbers
        ("gpu", 1024, {"residual": True, "activation": "gelu"}, 1),
        ("gpu", 1024, {"residual": True, "bias": True}, 1),
        ("gpu", 64, {"bias": True}, 2),
        ("gpu", 64, {"bias": True, "activation": "gelu"}, 1),
        ("gpu", 64, {"bias": True, "out_dtype": "float32"}, 0),
        ("cpu", 64, {"bias": True}, 1),
        ("cpu", 1024, {"residual": True}, 1),
        ("tpu", 1024, {"residual": True}, 1),
    ],
)
def test_a_second_rounding_is_allowed_where_xla_adds_alone(
    platform: str, rows: int, more: dict[str, Any], roundings: int
) -> None:
    shapes = {"a": (rows, 64), "b": (64, 1024), "bias": (1024,), "residual": (rows, 1024)}
    operands = [jax.ShapeDtypeStruct(s, jnp.bfloat16) if more.get(x, x in "ab") else None for x, s in shapes.items()]
    params = {name: value for name, value in more.items() if name not in shapes}
    with target(platform, "NVIDIA H200" if platform == "gpu" else platform):
        allowed = rules.tolerance(GEMM.call(*operands, **params))
    assert allowed == pytest.approx(roundings * 2.0**-8, abs=2.0**-18)  # float32 sums of 64 products are off by less


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "left"), [("bfloat16", True), ("float16", True), ("float32", False)])
def test_a_bias_is_left_to_xla_in_16_bits(dtype: str, left: bool) -> None:
    a, b, bias = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 32), (32, 48), (48,)))
    assert rules.leaves_bias_to_xla(a, b, bias, jnp.dtype(dtype), "gpu") is left
    assert not rules.leaves_bias_to_xla(a, b, bias, jnp.dtype(dtype), "cpu")


def _types_of_products(fn: Any, *operands: Any) -> set[str]:
    equations = _equations(jax.make_jaxpr(fn)(*operands).jaxpr)
    return {e.outvars[0].aval.dtype.name for e in equations if e.primitive.name == "dot_general"}


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)


def test_nan_stays_in_its_row() -> None:
    a = _normal(0, 5, 200).at[2, 150].set(jnp.nan)
    with interpret():
        got = gemm(a, _normal(1, 200, 7), implementation="pallas_tpu", config=TileConfig(128, 128, 128))
    assert np.isnan(np.asarray(got)).any(axis=1).tolist() == [False, False, True, False, False]


# Bad input: the rule, what arrived, the fix.


@pytest.mark.quick
@pytest.mark.parametrize(
    ("a", "b", "extra", "said"),
    [
        ((3, 4), (5, 6), {}, r"contracted axes.*4 and 5.*transpose"),
        ((4,), (4, 5), {}, r"matrices.*a of f32\[4\].*two or three axes"),
        ((2, 3, 4), (5, 4, 6), {}, r"(?s)broadcast"),
        ((3, 4), (4, 5), {"bias": (4,)}, r"bias is a row of N = 5.*f32\[4\]"),
        ((3, 4), (4, 5), {"residual": (5, 3)}, r"residual has the output's shape \(3, 5\)"),
    ],
)
def test_shapes_that_do_not_fit(a: tuple, b: tuple, extra: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gemm(jnp.ones(a), jnp.ones(b), **{name: jnp.ones(shape) for name, shape in extra.items()})


@pytest.mark.quick
def test_names_that_do_not_exist_list_the_choices() -> None:
    x = jnp.ones((4, 4))
    with pytest.raises(UnknownNameError, match=r"implementation of gemm 'pallas_tpx'.*Did you mean 'pallas_tpu'"):
        gemm(x, x, implementation="pallas_tpx")
    with pytest.raises(UnknownNameError, match=r"activation of gemm 'tanh'.*'gelu', 'silu'"):
        gemm(x, x, activation="tanh")
    with pytest.raises(UnknownNameError, match=r"precision 'float17'.*'bfloat16', 'float32', 'mixed', 'fp8'"):
        gemm(x, x, precision="float17")


def test_types_that_are_not_floats() -> None:
    x = jnp.ones((4, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"gemm takes bfloat16.*a of i32\[4,4\].*astype"):
        gemm(x, x)
    with pytest.raises(ValueError, match=r"gemm takes arrays.*a of type object"):
        gemm(object(), x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out_dtype is a type, or the name of one.*bf16"):
        gemm(jnp.ones((2, 2)), jnp.ones((2, 2)), out_dtype="bf16")


def test_a_forced_implementation_that_refuses_is_an_error() -> None:
    x = jnp.ones((4, 4))
    with pytest.raises(ImplementationRefused, match=r"pallas_tpu.*for tpu; this call is for cpu.*xla, reference"):
        gemm(x, x, implementation="pallas_tpu")


def test_a_config_of_another_implementation() -> None:
    x = jnp.ones((4, 4))
    with interpret(), pytest.raises(ValueError, match="TileConfig"):
        gemm(x, x, implementation="pallas_tpu", config=HopperConfig(128, 128))
    with pytest.raises(ValueError, match="positive multiple of 128"):
        TileConfig(100, 128, 128)


@pytest.mark.quick
def test_explain_says_what_runs_and_why_not_the_others() -> None:
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    told = explain(gemm, x, x)
    assert told.implementation == "xla"
    assert "not pallas_tpu: it is for tpu" in str(told)
    with target("gpu", "NVIDIA H200"):
        fused = explain("gemm", x, x, activation="gelu")
        assert fused.implementation == "hopper"
        odd = explain("gemm", *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 500), (500, 512))))
        (selection,) = odd.selections
        assert any("Mosaic tiles it by" in v.reason or "TMA" in v.reason for v in selection.verdicts)


def test_explain_sees_inside_a_function_that_was_jitted_before() -> None:
    x = jnp.ones((8, 8))
    fn = jax.jit(lambda x: gemm(gemm(x, x), x))
    fn(x)
    assert len(explain(fn, x).selections) == 2


@pytest.mark.usefixtures("nothing_said_yet")
def test_a_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    x = jax.ShapeDtypeStruct((600, 40), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((40, 24), jnp.bfloat16)
    with target("gpu", "NVIDIA H200"), caplog.at_level("WARNING", logger="capibara.kernels"):
        for _ in range(2):
            GEMM.runners.clear()
            assert explain("gemm", x, y, activation="silu").implementation == "xla"
    assert len([r for r in caplog.records if "instead of hopper" in r.getMessage()]) == 1


def test_every_tile_offered_fits_the_core() -> None:
    with target("tpu", "TPU v4"):
        for case in GEMM.cases:
            call = GEMM.call(*case.args(), **case.params)
            offered = GEMM.implementations["pallas_tpu"].candidates(call)
            assert offered
            assert all(tile_bytes(call, tile) <= vmem.limit(call) < 16 * 2**20 for tile in offered)
