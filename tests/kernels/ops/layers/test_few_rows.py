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
