"""fp8 products: values and gradients against float64, scales, what is not finite, and what runs where."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import target
from capibara.kernels.ops.linalg.fp8 import BLOCK, fp8_products, has_fp8_units
from capibara.kernels.ops.linalg.gemm.api import gemm
from capibara.precision import FP8_LARGEST, Fp8Settings, fp8_scale

SETTINGS = {
    "current": Fp8Settings(),
    "delayed": Fp8Settings(scaling="delayed", history=4),
    "block": Fp8Settings(scales="block"),
}
ROWS, WIDE, OUT = (3, 40), 192, 80


@functools.cache
def operands() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """x, two weights, and a gradient of a product."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (*ROWS, WIDE), jnp.bfloat16)
    first, second = (jax.random.normal(key, (WIDE, OUT)) / WIDE**0.5 for key in keys[1:3])
    return x, first, second, jax.random.normal(keys[3], (*ROWS, OUT), jnp.bfloat16) / 128


def history_for(settings: Fp8Settings, weights: int) -> jax.Array | None:
    return jnp.zeros((1 + weights, settings.steps)) if settings.steps else None


@functools.cache
def pulled(name: str) -> tuple[Any, Any]:
    """(the two products, gradients of x, the weights and the history) of one setting."""
    settings = SETTINGS[name]
    x, first, second, dy = operands()

    @jax.jit
    def run(x: Any, weights: Any, history: Any) -> Any:
        y, pull = jax.vjp(lambda x, w, h: fp8_products(x, w, settings, history=h), x, weights, history)
        return y, pull([dy, 2 * dy])

    return run(x, (first, second), history_for(settings, 2))


def rounding(values: np.ndarray, other: np.ndarray, steps: tuple[float, float], small: float) -> np.ndarray:
    """How far a product may be off where its operands are off by so much of themselves, and by `small` of the largest.

    |a'b' - ab| <= |a||b| (sa + sb + sa sb), summed; and 1/256 of the result, which is rounded to bfloat16.
    """
    size = np.abs(values) @ np.abs(other)
    floor = small * (np.abs(values).max() * np.abs(other).sum(0) + np.abs(other).max() * np.abs(values).sum(1)[:, None])
    return size * (steps[0] + steps[1] + steps[0] * steps[1]) * (1 + 2**-7) + floor + np.abs(values @ other) * 2**-8


@pytest.mark.quick
@pytest.mark.parametrize("name", SETTINGS)
def test_products_and_gradients_are_those_of_rounded_operands(name: str) -> None:
    x, first, second, dy = (np.asarray(a, np.float64) for a in operands())
    (y, other), (dx, dw, _) = pulled(name)
    rows, flat = x.reshape(-1, WIDE), dy.reshape(-1, OUT)
    # e4m3 has 4 significant bits, e5m2 3: half a step of the last is 1/16 and 1/8 of a value. Below their normal
    # numbers the step stays: 2^-10 / 448 of the largest in e4m3 and 2^-17 / 57344 in e5m2, twice that for the scale's
    # power of two; 64 times for a first history that expects more than comes.
    value, gradient, small = 2**-4, 2**-3, 64 * 2**-9 / 448
    for got, weight in ((y, first), (other, second)):
        off = np.abs(np.asarray(got, np.float64).reshape(-1, OUT) - rows @ weight)
        assert (off <= rounding(rows, weight, (value, value), small)).all()
        assert off.max() > 0
    right = flat @ first.T + 2 * flat @ second.T
    bound = rounding(flat, first.T, (gradient, value), small) + 2 * rounding(flat, second.T, (gradient, value), small)
    assert (np.abs(np.asarray(dx, np.float64).reshape(-1, WIDE) - right) <= bound + np.abs(right) * 2**-7).all()
    for got, factor in zip(dw, (1, 2), strict=True):
        bound = rounding(rows.T, factor * flat, (value, gradient), small)
        assert (np.abs(np.asarray(got, np.float64) - factor * rows.T @ flat) <= bound).all()
    assert [y.dtype, dx.dtype, dw[0].dtype] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]


def test_emulated_products_sum_the_very_fp8_numbers() -> None:
    x, weight, _, _ = operands()
    (y, _), _ = pulled("current")

    def rounded(a: jax.Array) -> np.ndarray:
        scale = float(fp8_scale(jnp.abs(a).max()))
        return np.asarray((a / scale).astype(jnp.float8_e4m3fn), np.float64) * scale

    exact = rounded(x) @ rounded(weight)
    # Sums of float32, in any order: so many times its last bit of the sum of magnitudes; then bfloat16.
    bound = WIDE * 2**-23 * (np.abs(rounded(x)) @ np.abs(rounded(weight))) + np.abs(exact) * 2**-8
    assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()


@pytest.mark.quick
def test_a_power_of_two_changes_nothing_but_the_scale() -> None:
    x, weight, _, _ = operands()
    run = jax.jit(lambda x, w: fp8_products(x, [w])[0])
    y = run(x, weight)
    for power in (-40, 30):
        assert (run(x * 2.0**power, weight) == y * 2.0**power).all()
        assert (run(x, weight * 2.0**power) == y * 2.0**power).all()


def test_an_outlier_costs_a_tensor_its_small_numbers_and_a_block_only_its_own() -> None:
    x = jnp.full((1, 2 * BLOCK), 2.0**-12, jnp.float32).at[0, 0].set(448.0)
    weight = jnp.concatenate([jnp.zeros((BLOCK, 16)), jnp.ones((BLOCK, 16))])
    by_tensor, by_block = (fp8_products(x, [weight], Fp8Settings(scales=kind))[0] for kind in ("tensor", "block"))
    # 2^-12 is below half of e4m3's smallest, 2^-9, where the scale is 1.
    assert (by_tensor == 0).all()
    assert (by_block == BLOCK * 2.0**-12).all()


def test_zeros_are_zeros() -> None:
    x, weight, _, dy = operands()
    for settings in SETTINGS.values():
        history = history_for(settings, 1)
        run = functools.partial(fp8_products, settings=settings)
        y, pull = jax.vjp(lambda x, w, h, run=run: run(x, [w], history=h)[0], x * 0, weight, history)
        dx, dw, seen = pull(dy * 0)
        assert not any(np.asarray(a, np.float32).any() for a in (y, dx, dw))
        assert seen is None or not seen.any()


@pytest.mark.quick
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    x, weight, _, dy = operands()
    for settings in SETTINGS.values():

        def run(x: Any, w: Any, dy: Any, h: Any, settings: Any = settings) -> Any:
            y, pull = jax.vjp(lambda x, w, h: fp8_products(x, [w], settings, history=h)[0], x, w, h)
            return y, *pull(dy)

        run = jax.jit(run)
        history = history_for(settings, 1)
        y, _, dw, seen = run(x.at[1, 2, 3].set(bad), weight, dy, history)
        assert np.isnan(np.asarray(y[1, 2], np.float32)).all()
        assert np.isnan(np.asarray(dw[3])).any()
        # A history of what is not finite would scale every later step by it.
        assert seen is None or np.isfinite(seen).all()
        y, dx, _, _ = run(x, weight.at[3, 4].set(bad), dy, history)
        assert np.isnan(np.asarray(y[..., 4], np.float32)).all()
        y, dx, dw, seen = run(x, weight, dy.at[0, 0, 0].set(bad), history)
        assert np.isnan(np.asarray(dx[0, 0], np.float32)).any()
        assert np.isnan(np.asarray(dw[:, 0])).any()
        assert seen is None or np.isfinite(seen).all()


def test_a_history_scales_the_next_step_and_what_outgrew_it_is_cut_off() -> None:
    x, first, second, dy = operands()
    _, (_, _, seen) = pulled("delayed")
    largest = [np.abs(np.asarray(a, np.float32)).max() for a in (x, dy, 2 * dy)]
    np.testing.assert_array_equal(seen[:, 0], largest)
    assert not np.asarray(seen[:, 1:]).any()
    settings = SETTINGS["delayed"]
    run = jax.jit(lambda x, h: fp8_products(x, [first, second], settings, history=h)[0])
    same = jax.jit(lambda x: fp8_products(x, [first, second])[0])(x)
    assert (run(x, seen) == same).all()
    # Any step of the history counts, and the gradients' rows do not.
    assert (run(x, jnp.roll(seen, 2, axis=1).at[1:].set(1e6)) == same).all()
    scale = float(fp8_scale(seen[0, 0]))
    cut = jnp.clip(2.0**8 * x, -448 * scale, 448 * scale)
    history = seen[:1].repeat(3, axis=0)
    assert (run(2.0**8 * x, history) == jax.jit(lambda x: fp8_products(x, [first])[0])(cut)).all()


@pytest.mark.quick
def test_scales_are_the_smallest_powers_of_two_that_fit() -> None:
    for dtype, top in FP8_LARGEST.items():
        magnitudes = np.array([top, np.nextafter(np.float32(top), np.float32(np.inf)), top / 2, 1e-3, 3e38], np.float32)
        scale = np.asarray(fp8_scale(magnitudes, dtype), np.float64)
        assert (np.log2(scale) % 1 == 0).all()
        assert (magnitudes / scale <= top).all()
        assert (magnitudes / scale > top / 2).all()
        assert fp8_scale(0.0, dtype) == 1
        assert np.isnan(fp8_scale(np.inf, dtype))


def test_several_axes_are_summed_over() -> None:
    x, _, _, _ = operands()
    weight = jax.random.normal(jax.random.key(9), (8, 24, 4, 2))
    (y,) = fp8_products(x.reshape(*ROWS, 8, 24), [weight], inputs=2)
    (flat,) = fp8_products(x, [weight.reshape(WIDE, 8)])
    assert y.shape == (*ROWS, 4, 2)
    assert (y.reshape(flat.shape) == flat).all()


@pytest.mark.quick
def test_refusals() -> None:
    x, weight, _, _ = operands()
    with pytest.raises(ValueError, match="summed over 1 axes of the same sizes"):
        fp8_products(x, [weight.T])
    with pytest.raises(ValueError, match=r"a row of x and one of each of 1 weights"):
        fp8_products(x, [weight], SETTINGS["delayed"], history=jnp.zeros((3, 4)))
    for wrong, says in (
        ({"scaling": "late"}, "fp8.scaling"),
        ({"scales": "row"}, "fp8.scales"),
        ({"history": 4}, 'kept for scaling = "delayed"'),
        ({"scaling": "delayed", "history": -1}, "fp8.history is a whole number"),
        ({"scaling": "delayed", "scales": "block"}, "Scales of blocks are those of the tensor itself"),
    ):
        with pytest.raises(ValueError, match=says):
            Fp8Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("nothing_said_yet")
def test_it_is_said_once_what_is_emulated(caplog: pytest.LogCaptureFixture) -> None:
    x, weight, _, _ = operands()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jax.eval_shape(lambda x, w: fp8_products(x, [w]), x, weight)
        with target("gpu", "NVIDIA H200"):
            assert has_fp8_units()
            jax.eval_shape(lambda x, w: fp8_products(x, [w]), x, weight)
            jax.eval_shape(lambda x, w: fp8_products(x, [w], Fp8Settings(scales="block")), x, weight)
        for platform, kind in (("gpu", "NVIDIA A100-SXM4-80GB"), ("tpu", "TPU v4")):
            with target(platform, kind):
                assert not has_fp8_units()
    assert len(caplog.records) == 2
    assert "emulated on cpu" in caplog.text
    assert "no product with scales of blocks there" in caplog.text


def _dots(name: str, fn: Any, *args: Any) -> list[tuple[str, str]]:
    """The types of the operands of each product that is traced for an H200, gradients too."""
    with target("gpu", "NVIDIA H200"):
        jaxpr = jax.make_jaxpr(fn)(*args)

    def walk(jaxpr: Any) -> Any:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                yield tuple(str(v.aval.dtype) for v in equation.invars)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                if hasattr(inner, "eqns"):
                    yield from walk(inner)
                elif hasattr(inner, "jaxpr"):
                    yield from walk(inner.jaxpr)

    return list(walk(jaxpr.jaxpr))


def test_what_runs_on_hopper_is_fp8_forward_and_backward() -> None:
    x, weight, _, dy = operands()

    def both(settings: Fp8Settings) -> list[tuple[str, str]]:
        history = history_for(settings, 1)

        def run(x: Any, w: Any, dy: Any, h: Any) -> Any:
            return jax.vjp(lambda x, w, h: fp8_products(x, [w], settings, history=h)[0], x, w, h)[1](dy)

        return _dots("fp8", run, x, weight, dy, history)

    values, gradients = "float8_e4m3fn", "float8_e5m2"
    for name in ("current", "delayed"):
        assert both(SETTINGS[name]) == [(values, values), (values, gradients), (gradients, values)]
    assert set(both(SETTINGS["block"])) == {("bfloat16", "bfloat16")}
    assert _dots("gemm", lambda a, b: gemm(a, b, precision="fp8"), x, weight) == [(values, values)]


@pytest.mark.filterwarnings("ignore:precision='fp8'")
def test_gemm_rounds_to_the_same_values_where_it_is_emulated() -> None:
    x, weight, _, _ = operands()
    same = fp8_products(x, [weight])[0]
    got = gemm(x, weight, precision="fp8")
    assert got.dtype == jnp.bfloat16
    off = np.abs(np.asarray(got, np.float64) - np.asarray(same, np.float64))
    # The same fp8 operands; what is summed in another order is rounded to bfloat16, a step of 1/128 at the most.
    assert (off <= np.abs(np.asarray(same, np.float64)) * 2**-7 + 1e-6).all()
