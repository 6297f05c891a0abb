"""capibara.jax.nn.standardize inside a context is the norm op; what the op does not have stays jax's."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import capibara.jax as cjax
from capibara.dropin import nn_norm as nn_api
from capibara.jax._src.core import tpu_v4_optimization_context
from capibara.kernels import explain

X = jnp.asarray(np.random.default_rng(0).normal(1, 3, (5, 64)), "float32")


def in_context(*args: object, **kwargs: object) -> jax.Array:
    with tpu_v4_optimization_context():
        return cjax.nn.standardize(*args, **kwargs)


@pytest.mark.quick
def test_inside_a_context_it_is_dispatched() -> None:
    def call(x: jax.Array) -> jax.Array:
        return in_context(x, axis=-1, epsilon=1e-3)

    assert [s.call.op.name for s in explain(call, X).selections] == ["norm"]
    assert explain(cjax.nn.standardize, X).selections == ()
    # Sums of 64 float32 numbers about 3 in size, in another order, over a deviation of about 3.
    np.testing.assert_allclose(in_context(X, epsilon=1e-3), jax.nn.standardize(X, epsilon=1e-3), rtol=1e-5, atol=1e-5)


def test_epsilon_changes_the_result() -> None:
    small, large = in_context(X, epsilon=1e-5), in_context(X, epsilon=10.0)
    assert float(jnp.abs(small - large).max()) > 0.1


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"axis": 0}, "axis 0 of 2"),
        ({"mean": jnp.zeros((5, 1))}, "mean is given"),
        ({"variance": jnp.ones((5, 1))}, "variance is given"),
        ({"where": jnp.ones((5, 64), bool)}, "where is given"),
        ({"epsilon": 0.0}, "epsilon is not a number above zero"),
    ],
)
@pytest.mark.usefixtures("nothing_said_yet")
def test_what_the_op_does_not_have_is_jaxs(kwargs: dict, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    assert reason in (nn_api.why_not(X, **kwargs) or "")
    with caplog.at_level(logging.WARNING, "capibara.kernels"):
        made = in_context(X, **kwargs)
        in_context(X, **kwargs)
    np.testing.assert_array_equal(made, jax.nn.standardize(X, **kwargs))
    assert [reason in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("x", "reason"),
    [(X[:, :0], "the axis is empty"), (X.astype("float8_e4m3fn"), "x is float8_e4m3fn; the norm takes")],
)
def test_arrays_that_the_op_refuses_are_jaxs(x: jax.Array, reason: str) -> None:
    assert reason in (nn_api.why_not(x) or "")
    made, wanted = in_context(x), jax.nn.standardize(x)
    assert made.dtype == wanted.dtype
    # numpy knows no NaN of float8, which is what jax makes of it.
    np.testing.assert_array_equal(made.astype("float32"), wanted.astype("float32"))


def test_integers_and_mistakes_are_jaxs() -> None:
    whole = jnp.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(in_context(whole), jax.nn.standardize(whole))
    with pytest.raises(TypeError, match="unexpected keyword"):
        in_context(X, eps=1.0)
