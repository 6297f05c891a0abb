"""Rotary embeddings against float64, at small positions and at 100,000."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.attention.rope import frequencies, rope, rope_tables

SCALINGS: dict[str, Any] = {
    "none": None,
    "linear": {"type": "linear", "factor": 4.0},
    "ntk": {"type": "ntk", "factor": 4.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_length": 2048},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
}


def _exact(x: Any, positions: np.ndarray, style: str, scaling: Any = None, base: float = 10000.0) -> np.ndarray:
    """[B, H, T, D] turned as complex numbers in float64."""
    x = np.asarray(x, np.float64)
    turn, temperature = frequencies(x.shape[-1], base, scaling)
    turned = np.exp(1j * positions[..., None] * turn) * temperature
    turned = turned[:, None] if turned.ndim == 3 else turned
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:] if style == "half" else x[..., ::2] + 1j * x[..., 1::2]
    made = pairs * turned
    if style == "half":
        return np.concatenate([made.real, made.imag], -1)
    return np.stack([made.real, made.imag], -1).reshape(x.shape)


def _x(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


@pytest.mark.newest
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("name", SCALINGS)
def test_values(style: str, name: str) -> None:
    x = _x(1, 2, 40, 64)
    got = rope(x, style=style, scaling=SCALINGS[name])
    np.testing.assert_allclose(got, _exact(x, np.arange(40), style, SCALINGS[name]), atol=2e-6)


@pytest.mark.newest
@pytest.mark.parametrize("how", ["traced", "tables"])
def test_position_100000_is_as_exact_as_position_1(how: str) -> None:
    positions = np.array([[0, 1, 255, 256, 65535, 65536, 99_999, 100_000]])
    x = _x(1, 2, 8, 128)
    tables = rope_tables(100_001, 128, base=500_000.0) if how == "tables" else None
    got = jax.jit(lambda x, p: rope(x, p, base=500_000.0, tables=tables))(x, positions)
    np.testing.assert_allclose(got, _exact(x, positions, "half", base=500_000.0), atol=3e-6)
    # In bfloat16 the one error is the rounding of the result.
    small = x.astype(jnp.bfloat16)
    exact = _exact(small, positions, "half", base=500_000.0)
    error = np.abs(np.asarray(rope(small, positions, base=500_000.0, tables=tables), np.float64) - exact)
    assert (error <= 2.0**-8 * np.abs(exact) + 1e-5).all()


def test_layouts_positions_and_batches_agree() -> None:
    x = _x(2, 3, 5, 8)
    positions = np.array([[0, 1, 2, 0, 1], [7, 8, 9, 10, 11]])
    got = rope(x, positions)
    np.testing.assert_allclose(got, _exact(x, positions, "half"), atol=2e-6)
    other = rope(x.swapaxes(1, 2), positions, layout="bthd")
    np.testing.assert_allclose(other.swapaxes(1, 2), got, atol=1e-6)
    np.testing.assert_allclose(rope(x, np.arange(5)), rope(x), atol=1e-6)


def test_scores_depend_on_distance_alone() -> None:
    q, k = _x(1, 1, 1, 32), _x(1, 1, 1, 32) + 1
    dots = [float((rope(q, [100 + s]) * rope(k, [90 + s])).sum()) for s in (0, 1000, 50_000)]
    np.testing.assert_allclose(dots, dots[0], rtol=1e-5)


def test_the_gradient_turns_back() -> None:
    x, flow = _x(1, 1, 6, 8), _x(1, 1, 6, 8) + 1
    (got,) = jax.vjp(lambda x: rope(x, style="interleaved"), x)[1](flow)
    np.testing.assert_allclose(got, _exact(flow, -np.arange(6), "interleaved"), atol=2e-6)


def test_scaling_leaves_fast_pairs_and_slows_slow_ones() -> None:
    plain, _ = frequencies(128)
    for name in ("ntk", "yarn", "llama3"):
        scaled, temperature = frequencies(128, scaling=SCALINGS[name])
        factor = SCALINGS[name]["factor"]
        np.testing.assert_allclose(scaled[0], plain[0])
        np.testing.assert_allclose(scaled[-1], plain[-1] / factor)
        assert (np.diff(scaled) < 0).all()
        assert temperature == pytest.approx(0.1 * math.log(4.0) + 1 if name == "yarn" else 1.0)


def test_tables_are_made_once() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    assert rope_tables(64, 32, scaling=scaling) is rope_tables(64, 32, scaling=dict(scaling))
    assert rope_tables(64, 32).cos.dtype == np.float32


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: rope(x, style="quarter"), "interleaved"),
        (lambda x: rope(x, layout="tbhd"), "bthd"),
        (lambda x: rope(x[0]), "four axes"),
        (lambda x: rope(x, np.arange(4)), "positions"),
        (lambda x: rope(x[..., :7]), "even"),
        (lambda x: rope(x, tables=rope_tables(4, 8)), "tables"),
        (lambda x: rope(x, scaling={"type": "cubic"}), "linear"),
        (lambda x: rope(x, scaling={"type": "yarn", "factor": 2.0}), "original_length"),
        (lambda x: rope(x, scaling={"type": "linear", "factor": 2.0, "beta": 1}), "beta"),
        (lambda x: rope(x, scaling={"type": "linear", "factor": 0.5}), "1 or more"),
        (lambda x: rope_tables(0, 8), "1 position"),
        (lambda x: rope(x, base=1.0), "base"),
    ],
)
def test_bad_input(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(_x(1, 2, 5, 8))
