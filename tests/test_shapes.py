"""The check of shapes in signatures: after the call, by the function's own words before it."""

from __future__ import annotations

import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int, TypeCheckError, jaxtyped
from tests import shapes

import capibara.kernels


def _checked(fn):  # type: ignore[no-untyped-def]
    return jaxtyped(typechecker=shapes.after_the_call)(fn)


def rows(x: Float[Array, "n d"], take: Int[Array, " m"] | None = None, flag: bool = False) -> Float[Array, "n d"]:
    if x.ndim != 2:
        raise ValueError("x has two axes")
    x = jnp.asarray(x)
    return x[:-1] if flag else x


def test_what_is_taken_agrees_with_the_signature() -> None:
    checked = _checked(rows)
    assert checked(jnp.ones((3, 2))).shape == (3, 2)
    assert checked(np.ones((3, 2)), take=[1, 2], flag=0).shape == (3, 2), "what becomes an array counts as one"
    with pytest.raises(ValueError, match="two axes"):
        checked(jnp.ones(3))
    with pytest.raises(TypeCheckError, match="rows"):
        checked(jnp.ones((3, 2)), flag=True)
    with pytest.raises(TypeCheckError, match="rows"):
        checked(jnp.ones((3, 2)), take=jnp.ones((2, 2), int))


@pytest.mark.quick
def test_annotations_can_be_read() -> None:
    """jaxtyping passes over what cannot: a linter that takes the quotes from "n+1" would switch the check off."""
    for name in capibara.kernels.__all__:
        fn = getattr(capibara.kernels, name)
        if not inspect.isclass(fn):
            assert typing.get_type_hints(inspect.unwrap(fn)), name


def test_every_module_that_names_shapes_is_checked() -> None:
    modules = shapes.modules()
    assert {"capibara.kernels.ops.attention.api", "capibara.surface.multihead", "vishwamai.kernels.tpu"} <= set(modules)
    x = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    assert jax.eval_shape(capibara.kernels.attention, x, x, x).shape == x.shape
