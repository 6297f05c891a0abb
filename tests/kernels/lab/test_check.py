"""Checking: the error is measured against float64, and nothing wrong passes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.core.op import Op, lookup
from capibara.kernels.core.spec import Implementation
from capibara.kernels.lab import check as checks
from capibara.kernels.lab.check import check, check_output, expected


def _op(reference: Any, **implementations: Any) -> Op:
    op = Op("temporary", family="test", reference=reference, operands=("x", "y"))
    op.implement(Implementation("reference", reference))
    for name, fn in implementations.items():
        op.implement(Implementation(name, fn))
    return op


def _double(x: Any, y: Any = None) -> Any:
    return 2 * x


X = np.linspace(-1, 1, 64, dtype=np.float32)


@pytest.mark.quick
def test_right_and_wrong() -> None:
    op = _op(_double, right=lambda x, y=None: x + x, wrong=lambda x, y=None: 2.001 * x)
    assert check(op, (jnp.asarray(X),), {}, "right").ok
    verdict = check(op, (jnp.asarray(X),), {}, "wrong")
    assert not verdict.ok
    assert verdict.error == pytest.approx(0.001 / 2, rel=1e-2)
    assert "tolerance" in verdict.why


@pytest.mark.quick
def test_the_reference_runs_in_float64() -> None:
    # In float32 both come out as 0; only a float64 reference tells that the sum is not.
    op = _op(lambda x, y=None: (x + 1e-9) - x + 1e-9 * x)
    wanted = expected(op, (jnp.ones(4, jnp.float32),), {})
    assert wanted.how == "float64 on the host"
    assert wanted.values[0].dtype == np.float64
    np.testing.assert_allclose(wanted.values[0], 2e-9, rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_never_passes(bad: float) -> None:
    op = _op(_double, broken=lambda x, y=None: (2 * x).at[3].set(bad))
    verdict = check(op, (jnp.asarray(X),), {}, "broken")
    assert not verdict.ok
    assert verdict.error == float("inf")
    assert "1 elements" in verdict.why


def test_infinities_of_the_reference_must_be_met() -> None:
    def masked(x: Any, y: Any = None) -> Any:
        return jnp.where(x > 0, 2 * x, -jnp.inf)

    op = _op(
        masked,
        same=masked,
        finite=lambda x, y=None: jnp.where(x > 0, 2 * x, -1e30),
        other=lambda x, y=None: jnp.where(x > 0, 2 * x, jnp.inf),
    )
    assert check(op, (jnp.asarray(X),), {}, "same").ok
    assert not check(op, (jnp.asarray(X),), {}, "finite").ok
    assert not check(op, (jnp.asarray(X),), {}, "other").ok


def test_shape_type_and_number_of_outputs_must_agree() -> None:
    op = _op(
        _double,
        shape=lambda x, y=None: 2 * x[None],
        dtype=lambda x, y=None: (2 * x).astype(jnp.bfloat16),
        pair=lambda x, y=None: (2 * x, x),
    )
    for name, text in (("shape", "f32[1,64]"), ("dtype", "bf16[64]"), ("pair", "2 arrays")):
        verdict = check(op, (jnp.asarray(X),), {}, name)
        assert not verdict.ok
        assert text in verdict.why


def test_an_empty_output_passes() -> None:
    op = _op(_double, right=lambda x, y=None: x + x)
    assert check(op, (jnp.zeros((0, 8)),), {}, "right").ok


def test_a_reference_of_zeros_is_held_against_the_absolute_error() -> None:
    op = _op(lambda x, y=None: 0 * x, zero=lambda x, y=None: x - x, one=lambda x, y=None: 0 * x + 1)
    assert check(op, (jnp.asarray(X),), {}, "zero").ok
    verdict = check(op, (jnp.asarray(X),), {}, "one")
    assert not verdict.ok
    assert verdict.error == pytest.approx(1.0)


def test_every_output_of_several_counts() -> None:
    op = _op(
        lambda x, y=None: (2 * x, jnp.argsort(x)),
        right=lambda x, y=None: (x + x, jnp.argsort(x)),
        wrong=lambda x, y=None: (x + x, jnp.argsort(x)[::-1]),
    )
    assert check(op, (jnp.asarray(X),), {}, "right").ok
    assert check(op, (jnp.asarray(X),), {}, "wrong").error > 0.9


def test_complex_numbers() -> None:
    op = _op(lambda x, y=None: x * 1j, wrong=lambda x, y=None: x * 1.1j)
    z = jnp.asarray(X + 1j * X[::-1], jnp.complex64)
    assert check(op, (z,), {}, "reference").ok
    assert not check(op, (z,), {}, "wrong").ok


@pytest.mark.parametrize("how", ["float64 on the host", "float32 at highest precision on the device"])
@pytest.mark.parametrize("elements", [1 << 22, 8])
def test_large_outputs_are_compared_on_the_device(how: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "HOST_ELEMENTS", elements)
    gemm = lookup("gemm")
    case = gemm.case("wide-output")
    arrays = case.arrays()
    wanted = expected(gemm, arrays, case.params, host_seconds=4.0 if how.startswith("float64") else -1.0)
    assert wanted.how == how
    out = gemm(*arrays, **case.params)
    assert check_output(out, wanted).ok
    assert not check_output(out * 1.01, wanted).ok
    assert not check_output(out.at[5, 7].set(jnp.nan), wanted).ok


def test_an_output_type_that_was_asked_for_does_not_round_the_reference() -> None:
    gemm = lookup("gemm")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16)), jnp.float32)
    wanted = expected(gemm, (x, x), {"out_dtype": "bfloat16"})
    exact = np.asarray(x, np.float64) @ np.asarray(x, np.float64)
    np.testing.assert_allclose(wanted.values[0], exact, rtol=1e-12)
    assert wanted.structs[0].dtype == jnp.bfloat16


@pytest.mark.quick
def test_gradients() -> None:
    gemm = lookup("gemm")
    case = gemm.case("prime")
    arrays = case.arrays()
    wanted = expected(gemm, arrays, case.params, grad=True)
    assert len(wanted.structs) == 4  # the output, and gradients of a, b and the bias
    both = jax.jit(checks.with_gradient(lambda *xs: gemm(*xs, **case.params)))
    out, gradients = both(checks.cotangents(gemm, arrays, case.params), *arrays)
    assert check_output((out, gradients), wanted).ok
    wrong = (gradients[0], gradients[1] * 1.2, *gradients[2:])
    assert not check_output((out, wrong), wanted).ok


def test_integer_operands_have_no_gradient() -> None:
    op = _op(lambda x, y: (x[y], y + 1))
    arrays = (jnp.asarray(X), jnp.arange(8))
    wanted = expected(op, arrays, {}, grad=True)
    both = jax.jit(checks.with_gradient(lambda *xs: op(*xs)))
    out = both(checks.cotangents(op, arrays, {}), *arrays)
    assert len(out[1]) == 1
    assert check_output(out, wanted).ok
