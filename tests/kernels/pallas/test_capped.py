"""Soft caps in Hopper's attention: how far off the hyperbolic tangent is, and that it saturates."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.pallas import hopper


@pytest.mark.quick
@pytest.mark.parametrize("by_newton", [False, True])
def test_it_is_the_tangent_as_far_as_exponents_need_it(by_newton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "reciprocal", lambda x, layout: 1.0 / x)  # the chip's instruction
    cap = 50.0
    x = np.concatenate([np.linspace(-400.0, 400.0, 20001), [-1e30, -np.inf, 1e30, np.inf, 0.0]]).astype(np.float32)
    found = np.asarray(hopper.capped(jnp.asarray(x), 1 / cap, cap, None, by_newton), np.float64)
    wanted = cap * np.tanh(x.astype(np.float64) / cap)
    # Twice what two steps leave of the quotient, 1.5e-3 squared; or rounding, where a power of 2^23 is off by 23 units.
    assert np.abs(found - wanted).max() <= cap * (2 * 1.5e-3**2 + 4e-7 if by_newton else 4e-6)
    assert np.isnan(np.asarray(hopper.capped(jnp.asarray([np.nan], np.float32), 1 / cap, cap, None, by_newton))).all()
