"""Dtype policies, and what rounding to fp8 values does."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from capibara.errors import UnknownNameError
from capibara.precision import POLICIES, Policy, PrecisionConfig, policy, quantize_fp8, round_fp8


@pytest.mark.quick
def test_policies_are_as_documented() -> None:
    assert list(POLICIES) == ["bfloat16", "float32", "mixed", "fp8"]
    mixed = policy("mixed")
    assert (mixed.param_dtype, mixed.compute_dtype) == ("float32", "bfloat16")
    assert (mixed.accumulate_dtype, mixed.output_dtype) == ("float32", "float32")
    low = policy("bfloat16")
    assert {low.param_dtype, low.compute_dtype, low.output_dtype} == {"bfloat16"}
    assert all(one.accumulate_dtype == "float32" for one in POLICIES.values())
    assert policy("float32").lax_precision is jax.lax.Precision.HIGHEST
    assert policy("mixed").lax_precision is jax.lax.Precision.DEFAULT


@pytest.mark.quick
def test_dtype_names_are_dtypes() -> None:
    for one in POLICIES.values():
        for name in (one.param_dtype, one.compute_dtype, one.output_dtype, one.accumulate_dtype):
            assert jnp.issubdtype(jnp.dtype(name), jnp.floating)


@pytest.mark.quick
def test_an_unknown_policy_names_the_choices() -> None:
    with pytest.raises(UnknownNameError, match=r"precision 'bf16'.*'bfloat16', 'float32', 'mixed', 'fp8'"):
        policy("bf16")


def test_a_policy_or_a_config_is_taken_too() -> None:
    mine = Policy("mine", "float32", "float32", "float32", "float32", "high")
    assert policy(mine) is mine
    assert policy(PrecisionConfig.HIGH) is POLICIES["mixed"]
    assert mine.lax_precision is jax.lax.Precision.HIGH
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.name = "other"  # type: ignore[misc]


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:precision='fp8'")
def test_precision_config() -> None:
    assert [one.name for one in PrecisionConfig] == ["DEFAULT", "HIGH", "HIGHEST", "FP8"]
    names = [one.policy.name for one in PrecisionConfig]
    assert names == ["bfloat16", "mixed", "float32", "fp8"]
    passes = [one.lax_precision for one in PrecisionConfig]
    default = jax.lax.Precision.DEFAULT
    assert passes == [default, jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST, default]


@pytest.mark.quick
@pytest.mark.usefixtures("nothing_said_yet")
def test_fp8_warns_once_that_it_is_experimental() -> None:
    with pytest.warns(UserWarning, match=r"experimental.*emulates fp8") as caught:
        policy("fp8")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy("fp8")
        assert PrecisionConfig.FP8.policy.rounds_to_fp8


@pytest.mark.quick
def test_casting_touches_floats_only() -> None:
    tree = {"w": jnp.ones((2, 3)), "ids": jnp.arange(3), "mask": jnp.array([True]), "host": np.ones(2)}
    cast = policy("bfloat16").cast_to_param(tree)
    assert cast["w"].dtype == cast["host"].dtype == jnp.bfloat16
    assert cast["ids"].dtype == tree["ids"].dtype
    assert cast["mask"].dtype == jnp.bool_
    assert policy("mixed").cast_to_compute(tree)["w"].dtype == jnp.bfloat16
    assert policy("mixed").cast_to_output(cast)["w"].dtype == jnp.float32


@pytest.mark.filterwarnings("ignore:precision='fp8'")
def test_the_fp8_policy_computes_on_fp8_values_held_in_bfloat16() -> None:
    x = jax.random.normal(jax.random.key(0), (64, 64))
    operand = policy("fp8").cast_to_compute(x)
    assert operand.dtype == jnp.bfloat16
    np.testing.assert_array_equal(operand, quantize_fp8(x).dequantize())
    assert not np.array_equal(np.asarray(operand, np.float32), np.asarray(x))


FINITE = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
# One shape, so that the hundred examples compile once; what varies is the values and their range.
TENSORS = hnp.arrays(np.float32, (4, 8), elements=FINITE)
QUANTIZE = jax.jit(quantize_fp8)


@settings(max_examples=100, deadline=None)
@given(x=TENSORS)
def test_rounding_error_is_within_the_documented_bound(x: np.ndarray[Any, Any]) -> None:
    q = QUANTIZE(x)
    scale = float(q.scale)
    assert np.frexp(scale)[0] == 0.5, "a power of two"
    back = np.asarray(q.dequantize("float32"), np.float64)
    # e4m3 has 3 stored bits: half a unit in the last place of a normal value is 1/16 of it at most, and of
    # a subnormal one (below 2**-6) half of 2**-9. Below 1e-37 float32 itself goes subnormal and is flushed.
    bound = np.maximum(np.abs(x.astype(np.float64)) / 16, scale / 1024) + 1e-37
    assert (np.abs(back - x) <= bound).all()


@settings(max_examples=100, deadline=None)
@given(x=TENSORS)
def test_values_are_what_numpy_s_e4m3_gives(x: np.ndarray[Any, Any]) -> None:
    q = QUANTIZE(x)
    largest = float(np.abs(x).max())
    # The rule in other words: the smallest power of two that keeps everything within 448.
    if largest > 1e-30:
        assert largest / float(q.scale) <= 448 < 2 * largest / float(q.scale)
    expected = (x / np.asarray(q.scale)).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(q.values), expected)


@pytest.mark.quick
@pytest.mark.parametrize(("largest", "scale"), [(448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (1.0, 2**-8)])
def test_scale_at_the_edges(largest: float, scale: float) -> None:
    assert float(quantize_fp8(jnp.array([0.0, -largest])).scale) == scale


def test_zeros_empties_and_scalars() -> None:
    for x in (jnp.zeros((3, 3)), jnp.zeros((0, 4)), jnp.float32(0)):
        q = quantize_fp8(x)
        assert float(q.scale) == 1
        assert q.values.shape == jnp.shape(x)
        np.testing.assert_array_equal(q.dequantize(), jnp.zeros_like(x))


@pytest.mark.quick
def test_what_is_not_finite_becomes_nan_and_spares_the_rest() -> None:
    back = quantize_fp8(jnp.array([1.0, jnp.inf, -2.0, jnp.nan])).dequantize("float32")
    np.testing.assert_array_equal(back, [1, np.nan, -2, np.nan])


def test_bfloat16_holds_the_values_exactly() -> None:
    q = quantize_fp8(jax.random.normal(jax.random.key(1), (1000,)) * 1e5)
    np.testing.assert_array_equal(np.asarray(q.dequantize(), np.float32), q.dequantize("float32"))


def test_quantizing_twice_changes_nothing() -> None:
    once = round_fp8(jax.random.normal(jax.random.key(2), (1000,)))
    np.testing.assert_array_equal(round_fp8(once), once)


@pytest.mark.quick
def test_gradients_pass_straight_through() -> None:
    x = jax.random.normal(jax.random.key(3), (8,))
    w = jnp.arange(8.0)
    np.testing.assert_array_equal(jax.grad(lambda t: (round_fp8(t) * w).sum())(x), w)
    assert round_fp8(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_works_under_jit_and_vmap() -> None:
    x = jax.random.normal(jax.random.key(4), (4, 16)) * jnp.array([[1], [10], [100], [1000.0]])
    np.testing.assert_array_equal(jax.jit(round_fp8)(x), round_fp8(x))
    # One scale a tensor: vmapped over rows, each row is a tensor and has its own.
    rows = jnp.stack([round_fp8(row) for row in x])
    np.testing.assert_array_equal(jax.vmap(round_fp8)(x), rows)
