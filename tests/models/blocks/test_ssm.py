"""State spaces against their recurrence, a step and a channel at a time in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.blocks.single import BATCH, HIDDEN, LENGTH, Weights, drawn, inputs, model_with, run, sigmoid

from capibara.models.blocks import Sequences, Ssm

# Documents of 5, 1, 4 and 2 tokens, the last is padding; and a whole row.
SEGMENTS = np.array([[1] * 5 + [2] + [3] * 4 + [0] * 2, [1] * LENGTH])


def _silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def _convolved(x: np.ndarray, taps: np.ndarray, bias: np.ndarray, segments: np.ndarray) -> np.ndarray:
    y = np.zeros(x.shape)
    for b, t in np.ndindex(x.shape[:2]):
        for back in range(min(t + 1, len(taps))):
            if segments[b, t - back] == segments[b, t]:
                y[b, t] += taps[-1 - back] * x[b, t - back]
    return _silu(y + bias)


def _starts(segments: np.ndarray, b: int, t: int) -> bool:
    return t == 0 or segments[b, t] != segments[b, t - 1]


def _dual(block: Ssm, w: Weights, x: np.ndarray, segments: np.ndarray) -> np.ndarray:
    z = _convolved(x @ w["in"], w["conv"], w["conv_bias"], segments)
    mixed = _convolved(x @ w["mix"], w["mix_conv"], w["mix_conv_bias"], segments)
    B, C = (part.reshape(*x.shape[:2], block.groups, block.state) for part in np.split(mixed, 2, axis=-1))
    dt = np.log1p(np.exp(x @ w["step"] + w["step_bias"]))
    heads = dt.shape[-1]
    z = z.reshape(*x.shape[:2], heads, block.head_dim)
    y, h = np.zeros(z.shape), np.zeros((BATCH, heads, block.head_dim, block.state))
    for t, b, head in np.ndindex(x.shape[1], BATCH, heads):
        group = head // (heads // block.groups)
        if _starts(segments, b, t):
            h[b, head] = 0
        kept = np.exp(-dt[b, t, head] * np.exp(w["decay"][head]))
        h[b, head] = kept * h[b, head] + dt[b, t, head] * np.outer(z[b, t, head], B[b, t, group])
        y[b, t, head] = h[b, head] @ C[b, t, group] + w["skip"][head] * z[b, t, head]
    y = y.reshape(*x.shape[:2], -1) * _silu(x @ w["gate"])
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5) * w["norm"]
    return y @ w["out"]


def _selective(block: Ssm, w: Weights, x: np.ndarray) -> np.ndarray:
    z = _convolved(x @ w["in"], w["conv"], w["conv_bias"], np.ones(x.shape[:2]))
    rank = w["step"].shape[0]
    low, B, C = np.split(z @ w["mix"], (rank, rank + block.state), axis=-1)
    dt = np.log1p(np.exp(low @ w["step"] + w["step_bias"]))
    y, h = np.zeros(z.shape), np.zeros((BATCH, z.shape[-1], block.state))
    for t in range(x.shape[1]):
        h = np.exp(-dt[:, t, :, None] * np.exp(w["decay"])) * h + (dt * z)[:, t, :, None] * B[:, t, None, :]
        y[:, t] = np.einsum("bin,bn->bi", h, C[:, t]) + w["skip"] * z[:, t]
    return (y * _silu(x @ w["gate"])) @ w["out"]


DUAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "expand": {"expand": 3},
    "state": {"state": 3},
    "head_dim": {"head_dim": 4},
    "groups": {"groups": 2},
    "conv": {"conv": 2},
    "one tap": {"conv": 1},
}
SELECTIVE: dict[str, dict[str, Any]] = {
    "plain": {},
    "expand": {"expand": 1},
    "state": {"state": 3},
    "conv": {"conv": 2},
    "dt_rank": {"dt_rank": 5},
}


def test_every_key_is_changed() -> None:
    assert {field.name for field in dataclasses.fields(Ssm)} == {"form", *DUAL, *SELECTIVE} - {"plain", "one tap"}


@pytest.mark.quick
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("changed", DUAL)
def test_the_dual_form_against_its_steps(changed: str, packed: bool) -> None:
    model = model_with("ssm", **{"state": 5, "head_dim": 8, **DUAL[changed]})
    block, w, x = model.blocks["ssm"], drawn(model), inputs()
    sequences = Sequences(segment_ids=jnp.asarray(SEGMENTS)) if packed else Sequences()
    wanted = _dual(block, w, x, SEGMENTS if packed else np.ones(x.shape[:2]))
    # Float32 sums along 12 steps; the norm brings all to about 1.
    np.testing.assert_allclose(run(model, w, x, sequences)[0], wanted, atol=3e-5, rtol=3e-5)


@pytest.mark.quick
@pytest.mark.parametrize("changed", SELECTIVE)
def test_the_selective_form_against_its_steps(changed: str) -> None:
    model = model_with("ssm", **{"form": "selective", "state": 5, **SELECTIVE[changed]})
    block, w, x = model.blocks["ssm"], drawn(model), inputs()
    np.testing.assert_allclose(run(model, w, x)[0], _selective(block, w, x), atol=3e-5, rtol=3e-5)


def test_the_selective_form_says_that_it_takes_no_packed_rows() -> None:
    model = model_with("ssm", form="selective", state=5)
    with pytest.raises(ValueError, match=r'no way to start over inside of a row.*use form = "dual"'):
        run(model, drawn(model), inputs(), Sequences(segment_ids=jnp.asarray(SEGMENTS)))


def test_step_sizes_and_decays_start_over_their_range() -> None:
    model = model_with("ssm", hidden=256, state=4, head_dim=2)
    w = drawn(model)
    step = np.log1p(np.exp(w["step_bias"]))
    assert 1e-3 * 0.999 <= step.min() < 2e-3
    assert 5e-2 < step.max() <= 1e-1 * 1.001
    assert 1 <= np.exp(w["decay"]).min() < 2
    assert 14 < np.exp(w["decay"]).max() <= 16.001
    model = model_with("ssm", form="selective", state=4)
    np.testing.assert_allclose(np.exp(drawn(model)["decay"]), np.tile([1, 2, 3, 4], (2 * HIDDEN, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"form": "s4"}, "Choices: 'dual', 'selective'"),
        ({"state": 0}, "state of a state space is 1 or more"),
        ({"head_dim": 7}, "head_dim divides the inner width.*32 and blocks.ssm.head_dim = 7.*use head_dim = 32"),
        ({"head_dim": 8, "groups": 3}, "groups divide the heads. Got 4 heads, blocks.ssm.groups = 3"),
        ({"form": "selective", "dt_rank": -1}, "dt_rank"),
    ],
)
def test_bad_keys(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model_with("ssm", **keys)
