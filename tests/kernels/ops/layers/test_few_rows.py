"""few_rows itself: what it computes, its derivative, and what it refuses. Each implementation: tests/kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from capibara.errors import UnknownNameError
from capibara.kernels import explain, few_rows, gated_activation, rms_norm, target
from capibara.kernels.ops.layers.few_rows.api import FEW_ROWS

checked = jaxtyped(typechecker=beartype)(few_rows)


def _normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


@pytest.mark.quick
def test_the_xla_form_has_the_bits_of_its_steps() -> None:
    x, weight, residual, scale = _normal(0, 3, 32), _normal(1, 24, 32), _normal(2, 3, 24), _normal(3, 24)
    product = jnp.tensordot(x, weight, ((1,), (1,)))
    np.testing.assert_array_equal(checked(x, weight), product)
    gated = gated_activation(product[:, :12], product[:, 12:], kind="gelu")
    np.testing.assert_array_equal(checked(x, weight, gate="gelu"), gated)
    total, normal = checked(x, weight, residual, scale, eps=1e-2)
    np.testing.assert_array_equal(total, residual + product)
    np.testing.assert_array_equal(normal, rms_norm(residual + product, scale, eps=1e-2))


@pytest.mark.quick
def test_it_is_differentiated() -> None:
    x, weight = _normal(0, 2, 8), _normal(1, 6, 8)
    found = jax.grad(lambda w: few_rows(x, w).sum())(weight)
    np.testing.assert_allclose(found, np.broadcast_to(np.asarray(x).sum(0), (6, 8)), rtol=1e-6)


@pytest.mark.quick
def test_explain_says_why_a_kernel_does_not_take_a_call() -> None:
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((80, 256), (256, 256)))
    with target("gpu", "NVIDIA H200"):
        assert "1 to 64 rows, not 80" in str(explain(few_rows, x, weight))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shapes", "params", "said"),
    [
        (((4,), (4, 4)), {}, r"x \[rows, K\]"),
        (((2, 8), (8, 4)), {}, r"held by output.*8 and 4.*transpose"),
        (((2, 8), (5, 8)), {"gate": "silu"}, r"as many of up"),
        (((2, 8), (4, 8), (2, 4)), {}, r"come together"),
        (((2, 8), (4, 8), (2, 8), (4,)), {}, r"product's shape \(2, 4\)"),
        (((2, 8), (4, 8), (2, 4), (8,)), {}, r"one number an output, \(4,\)"),
        (((2, 8), (4, 8), (2, 4), (4,)), {"eps": -1.0}, r"above 0"),
    ],
)
def test_bad_input(shapes: Any, params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        few_rows(*(jnp.ones(shape) for shape in shapes), **params)


@pytest.mark.quick
def test_an_unknown_gate() -> None:
    with pytest.raises(UnknownNameError, match="silu"):
        few_rows(jnp.ones((2, 8)), jnp.ones((4, 8)), gate="silo")


@pytest.mark.quick
def test_types_are_one() -> None:
    with pytest.raises(ValueError, match="one type"):
        few_rows(jnp.ones((2, 8)), jnp.ones((4, 8), jnp.bfloat16))


def _eight_bits(outputs: int, inner: int) -> Any:
    return jnp.asarray(np.random.default_rng(0).integers(-128, 128, (outputs, inner), np.int8))


@pytest.mark.quick
def test_eight_bits_are_scaled_in_float32_before_anything_else() -> None:
    x, weight, scale = _normal(0, 3, 32, dtype="bfloat16"), _eight_bits(24, 32), jnp.linspace(0.001, 0.003, 24)
    wide = jnp.tensordot(x, weight.astype(jnp.bfloat16), ((1,), (1,)), preferred_element_type=jnp.float32) * scale
    np.testing.assert_array_equal(few_rows(x, weight, weight_scale=scale, out_dtype="float32"), wide)
    narrow = wide.astype(jnp.bfloat16)
    np.testing.assert_array_equal(checked(x, weight, weight_scale=scale), narrow)
    gated = gated_activation(narrow[:, :12], narrow[:, 12:], kind="silu")
    np.testing.assert_array_equal(checked(x, weight, weight_scale=scale, gate="silu"), gated)
    x, residual, norm = _normal(1, 3, 32), _normal(2, 3, 24), _normal(3, 24)
    wide = jnp.tensordot(x, weight.astype(jnp.float32), ((1,), (1,))) * scale
    total, normal = checked(x, weight, residual, norm, scale)
    np.testing.assert_array_equal(total, residual + wide)
    np.testing.assert_array_equal(normal, rms_norm(residual + wide, norm, eps=1e-6))


@pytest.mark.quick
def test_a_result_of_another_type() -> None:
    x, weight = _normal(0, 3, 32, dtype="bfloat16"), _normal(1, 24, 32, dtype="bfloat16")
    y = checked(x, weight, out_dtype=jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y.astype(jnp.bfloat16), few_rows(x, weight))


@pytest.mark.quick
def test_bytes_are_counted_by_the_weights_own() -> None:
    def moved(dtype: Any, *scale: Any) -> float:
        x, weight = jax.ShapeDtypeStruct((1, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 2048), dtype)
        return FEW_ROWS.cost(FEW_ROWS.call(x, weight, None, None, *scale)).bytes

    beside = 2 * 2048 + 2 * 4096  # x and the result
    assert moved(jnp.bfloat16) == 2 * 4096 * 2048 + beside
    assert moved(jnp.int8, jax.ShapeDtypeStruct((4096,), jnp.float32)) == 4096 * 2048 + 4 * 4096 + beside


@pytest.mark.quick
def test_what_eight_bits_come_with() -> None:
    x, weight, scale = jnp.ones((2, 8)), jnp.ones((4, 8), jnp.int8), jnp.ones(4)
    with pytest.raises(ValueError, match="come together"):
        few_rows(x, weight)
    with pytest.raises(ValueError, match="come together"):
        few_rows(x, jnp.ones((4, 8)), weight_scale=scale)
    with pytest.raises(ValueError, match=r"one number an output of the weight, \(4,\)"):
        few_rows(x, weight, weight_scale=jnp.ones(2), gate="silu")
    with pytest.raises(ValueError, match="weights of int8"):
        few_rows(x, weight.astype(jnp.int16), weight_scale=scale)
    with pytest.raises(ValueError, match="without a residual"):
        few_rows(x, weight, jnp.ones((2, 4)), jnp.ones(4), scale, out_dtype="float32")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="out_dtype"):
        few_rows(x, jnp.ones((4, 8)), out_dtype="int8")
