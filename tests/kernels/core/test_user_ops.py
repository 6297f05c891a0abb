"""A user's function as an op: registered, dispatched, differentiated, checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from capibara.compile import lower_for
from capibara.kernels import Case, Cost, current_interpret, explain, interpret, out_struct, registry, target
from capibara.kernels.core.user_ops import register_tpu_op, unregister
from capibara.kernels.lab.check import check


@pytest.fixture(autouse=True)
def leave_the_registry_as_it_was() -> Iterator[None]:
    before = set(registry())
    yield
    for name in set(registry()) - before:
        unregister(name)


X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)


@pytest.mark.quick
def test_a_bare_decorator() -> None:
    @register_tpu_op
    def swish(x: jax.Array, *, beta: float = 1.0) -> jax.Array:
        """x times its own gate."""
        return x * jax.nn.sigmoid(beta * x)

    assert swish.__name__ == "swish"
    assert swish.__doc__ == "x times its own gate."
    assert registry()["swish"].operands == ("x",)
    assert dict(registry()["swish"].params) == {"beta": 1.0}
    np.testing.assert_allclose(swish(X), X * jax.nn.sigmoid(X), rtol=1e-6)
    np.testing.assert_allclose(swish(X, beta=2.0), X * jax.nn.sigmoid(2 * X), rtol=1e-6)
    np.testing.assert_allclose(swish(np.asarray(X)), swish(X))
    found = explain("swish", X)
    assert found.implementation == "user"
    assert "swish(f32[4,6])" in str(found)
    assert explain(lambda x: swish(x, beta=2.0), X).selections[0].call.signature.endswith("beta=2.0")


@pytest.mark.quick
def test_transformations() -> None:
    @register_tpu_op
    def scaled(x: jax.Array, scale: jax.Array | None = None, power: int = 2) -> jax.Array:
        y = x**power
        return y if scale is None else y * scale

    assert registry()["scaled"].operands == ("x", "scale")
    np.testing.assert_allclose(scaled(X), X**2)
    np.testing.assert_allclose(scaled(X, X), X**3, rtol=1e-6)
    np.testing.assert_allclose(scaled(X, None, 3), X**3, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(scaled)(X, X), X**3, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(scaled)(X), X**2)
    np.testing.assert_allclose(jax.grad(lambda x: scaled(x).sum())(X), 2 * X, rtol=1e-6)


@pytest.mark.quick
def test_with_a_reference_and_a_cost() -> None:
    def plain(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(x * y, axis=-1)

    @register_tpu_op(
        name="row_dot",
        reference=plain,
        cost=lambda call: (2.0 * call.need("x").shape[0], 8.0),
        platforms=("tpu",),
        cases=[Case("rows", ((4, 6), (4, 6)), "float32", tags=frozenset({"test"}))],
    )
    def fast(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("ij,ij->i", x, y)

    assert fast.op is registry()["row_dot"]
    assert fast.op.cost(fast.op.call(X, X)) == Cost(vector_flops=8.0, bytes=8.0)
    # The function is for a TPU, so here the reference runs, and explain says why.
    assert explain(fast, X, X).implementation == "reference"
    assert "it is for tpu" in str(explain(fast, X, X))
    with target("tpu"):
        assert explain(fast, X, X).implementation == "user"
    np.testing.assert_allclose(fast(X, X), plain(X, X), rtol=1e-5)
    with pytest.raises(ValueError, match="'user' was asked for and cannot take this call"):
        fast(X, X, implementation="user")
    case = fast.op.case("rows")
    assert check(fast.op, case.arrays(), case.params, "reference").ok


def test_the_shared_check_finds_a_wrong_implementation() -> None:
    @register_tpu_op(name="wrong", reference=lambda x: x + 1)
    def wrong(x: jax.Array) -> jax.Array:
        return x + 2

    assert not check(wrong.op, (X,), {}, "user").ok
    assert check(wrong.op, (X,), {}, "reference").ok


def test_a_default_cost_is_the_compilers_count() -> None:
    @register_tpu_op
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y

    assert product.op.cost(product.op.call(X, X.T)).flops == pytest.approx(2 * 4 * 6 * 4, rel=0.2)


def test_a_kernel_takes_its_gradient_from_the_reference() -> None:
    def body(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * x_ref[...]

    @register_tpu_op(name="square", reference=lambda x: x * x, kernel=True)
    def square(x: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, out_shape=out, interpret=True)(x)

    assert explain(square, X).implementation == "user"
    np.testing.assert_allclose(square(X), X * X)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: square(x).sum()))(X), 2 * X, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(square)(X), X * X)


def _copying_op(name: str, *, wait_first: bool) -> Any:
    """x doubled by a TPU kernel that fetches x itself, and reads it before or after it has arrived."""

    def body(x_hbm: Any, out_ref: Any, scratch: Any, arrived: Any) -> None:
        copy = pltpu.make_async_copy(x_hbm, scratch, arrived)
        copy.start()
        if wait_first:
            copy.wait()
        out_ref[...] = 2 * scratch[...]
        if not wait_first:
            copy.wait()

    @register_tpu_op(name=name, reference=lambda x: 2 * x, kernel=True, platforms=("tpu",))
    def double(x: jax.Array) -> jax.Array:
        return pl.pallas_call(
            body,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_shape=out_struct(x.shape, x.dtype, x),
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
            interpret=current_interpret().pallas_argument(),
        )(x)

    return double


@pytest.mark.quick
def test_a_users_tpu_kernel_is_emulated_and_lowered() -> None:
    double = _copying_op("doubled", wait_first=True)
    x = jnp.ones((16, 128), jnp.float32)
    assert explain(double, x).implementation == "reference"
    with interpret(detect_races=True) as emulated:
        assert explain(double, x).implementation == "user"
        np.testing.assert_array_equal(double(x), 2 * x)
        assert not emulated.races_found()
    with target("tpu"):
        assert lower_for(double, (x,), "tpu").custom_calls == ("tpu_custom_call",)
    with target("gpu"):
        assert lower_for(double, (x,), "cuda").ok, "the reference stands in"
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    split = jax.jit(jax.shard_map(double, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    with interpret():
        np.testing.assert_array_equal(split(x), 2 * x)


@pytest.mark.quick
def test_a_users_tpu_kernel_that_does_not_wait_is_found_out(capsys: pytest.CaptureFixture[str]) -> None:
    hasty = _copying_op("doubled_too_early", wait_first=False)
    with interpret(detect_races=True) as emulated:
        hasty(X)
        assert emulated.races_found()
    with interpret(detect_races=True) as emulated:
        hasty(X, implementation="reference")
        with pytest.raises(ValueError, match=r"emulated inside of this interpret.*another implementation ran"):
            emulated.races_found()
    with interpret() as emulated, pytest.raises(ValueError, match=r"interpret\(detect_races=True\)"):
        emulated.races_found()


@pytest.mark.quick
def test_more_implementations() -> None:
    @register_tpu_op
    def halve(x: jax.Array) -> jax.Array:
        return x / 2

    @halve.implement("by_product", refuses=lambda call: "one axis only" if len(call.args[0].shape) > 1 else None)  # type: ignore[union-attr]
    def _(x: jax.Array) -> jax.Array:
        return x * 0.5

    assert explain(halve, X[0]).implementation == "by_product"
    assert explain(halve, X).implementation == "user"
    assert "one axis only" in str(explain(halve, X))


@pytest.mark.quick
def test_a_name_is_taken_once_and_can_be_given_back() -> None:
    @register_tpu_op(name="taken")
    def first(x: jax.Array) -> jax.Array:
        return x

    with pytest.raises(ValueError, match=r"registered once.*taken.*unregister"):
        register_tpu_op(name="taken")(lambda x: x)
    with pytest.raises(ValueError, match="registered once"):
        register_tpu_op(name="gemm")(lambda x: x)
    first.unregister()
    assert "taken" not in registry()
    np.testing.assert_array_equal(first(X), X)
    second = register_tpu_op(name="taken")(lambda x: x + 1)
    unregister(second)
    with pytest.raises(ValueError, match="Unknown op 'taken'"):
        unregister("taken")


def variadic(*xs: Any) -> Any: ...
def loose(x: Any, **more: Any) -> Any: ...
def reserved(x: Any, *, config: int = 0) -> Any: ...
def required(x: Any, *, axis: int) -> Any: ...
def arrayless(*, axis: int = 0) -> Any: ...
def behind(eps: float, x: Any) -> Any: ...


@pytest.mark.parametrize(
    ("fn", "options", "said"),
    [
        (variadic, {}, r"arguments of an op are named.*\*xs"),
        (loose, {}, r"arguments of an op are named.*\*more"),
        (reserved, {}, "dispatch's own arguments.*config"),
        (required, {}, "has a default"),
        (arrayless, {}, "one operand or more"),
        (behind, {"operands": ["x"]}, "come first"),
        (behind, {"operands": ["z"]}, "Unknown argument of behind 'z'"),
        (behind, {"kernel": True}, "pass reference="),
        ("gemm", {}, "pass names as name="),
    ],
)
def test_a_mistake_is_named(fn: Any, options: dict[str, Any], said: str) -> None:
    before = set(registry())
    with pytest.raises(ValueError, match=said):
        register_tpu_op(**options)(fn) if options else register_tpu_op(fn)
    assert set(registry()) == before


def test_a_mistake_in_a_call_is_named() -> None:
    @register_tpu_op
    def flat(x: jax.Array, *, axes: Any = (0,)) -> jax.Array:
        return x.sum(axes)

    with pytest.raises(ValueError, match=r"operands of flat are arrays.*x of type dict"):
        flat({"a": X})
    with pytest.raises(ValueError, match=r"static and hash: axes.*a list"):
        flat(X, axes=[0])
    with pytest.raises(ValueError, match="static and hash: axes"):
        jax.jit(lambda x, axes: flat(x, axes=axes))(X, 1)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        flat()
