"""The attention block against sums over pairs of tokens in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.blocks.single import BATCH, HIDDEN, LENGTH, Weights, drawn, inputs, model_with, run, softmax

from capibara.models.blocks import Attention, Sequences

# Two documents and padding in the first row, one in the second.
SEGMENTS = np.array([[1] * 5 + [2] * 5 + [0] * 2, [3] * LENGTH])
POSITIONS = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0], [*range(7, 7 + LENGTH)]])


def _turned(x: np.ndarray, positions: np.ndarray, base: float, rotary: int, factor: float) -> np.ndarray:
    """Pairs (i, i + rotary / 2) of each head turned by position · base^(-2i / rotary) / factor."""
    half = rotary // 2
    turn = base ** (-np.arange(half) / half) / factor
    angle = (positions[..., None] * turn)[..., None, :]
    first, second, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def _wanted(
    block: Attention, w: Weights, x: np.ndarray, positions: np.ndarray | None, segments: np.ndarray | None
) -> np.ndarray:
    heads, kv, wide = block.heads, block.kv_heads, w["query"].shape[-1]
    q, k, v = (
        np.einsum("bth,hnd->btnd", x, w[name]) + w.get(f"{name}_bias", 0.0) for name in ("query", "key", "value")
    )
    if block.qk_norm:
        q, k = _normed(q, w["query_norm"]), _normed(k, w["key_norm"])
    places = np.broadcast_to(np.arange(x.shape[1]), x.shape[:2]) if positions is None else positions
    factor = block.rope_scaling["factor"] if block.rope_scaling else 1.0
    q, k = (_turned(y, places, block.rope_base, block.rotary_dim or wide, factor) for y in (q, k))
    k, v = (np.repeat(y, heads // kv, axis=2) for y in (k, v))
    scores = np.einsum("btnd,bsnd->bnts", q, k) * (block.scale or 1 / math.sqrt(wide))
    if block.softcap is not None:
        scores = block.softcap * np.tanh(scores / block.softcap)
    rows = np.arange(x.shape[1])
    sees = rows[None, :] <= rows[:, None]
    if block.window is not None:
        sees &= rows[None, :] > rows[:, None] - block.window
    sees = np.broadcast_to(sees, (x.shape[0], 1, *sees.shape))
    if segments is not None:
        sees = sees & (segments[:, None, :, None] == segments[:, None, None, :])
    mixed = np.einsum("bnts,bsnd->btnd", softmax(np.where(sees, scores, -1e30)), v)
    return np.einsum("btnd,ndh->bth", mixed, w["out"]) + w.get("out_bias", 0.0)


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads": {"heads": 2, "kv_heads": 2},
    "kv_heads": {"kv_heads": 1},
    "head_dim": {"head_dim": 6},
    "rope_base": {"rope_base": 50.0},
    "rope_scaling": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "rotary_dim": {"rotary_dim": 2},
    "window": {"window": 3},
    "qk_norm": {"qk_norm": True},
    "softcap": {"softcap": 0.5},
    "bias": {"bias": True},
    "out_bias": {"out_bias": True},
    "scale": {"scale": 1.5},
    "all": {
        "head_dim": 6, "rope_base": 50.0, "rotary_dim": 4, "window": 4, "qk_norm": True, "softcap": 2.0, "bias": True,
        "out_bias": True, "scale": 1.5,
    },
}  # fmt: skip


def test_every_key_is_changed_below() -> None:
    assert {field.name for field in dataclasses.fields(Attention)} == CHANGES.keys() - {"plain", "all"}


@pytest.mark.quick
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("changed", CHANGES)
def test_against_sums_over_pairs(changed: str, packed: bool) -> None:
    model = model_with("attention", **{"heads": 4, "kv_heads": 2, **CHANGES[changed]})
    block, weights, x = model.blocks["attention"], drawn(model), inputs()
    positions, segments = (POSITIONS, SEGMENTS) if packed else (None, None)
    sequences = Sequences(jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS)) if packed else Sequences()
    got = np.asarray(run(model, weights, x, sequences)[0])
    # Float32 through products of 16 and sums over 12 keys.
    np.testing.assert_allclose(got, _wanted(block, weights, x, positions, segments), atol=2e-5, rtol=2e-5)
    if changed not in ("plain", "heads", "kv_heads", "head_dim"):
        plain = dataclasses.replace(block, **{key: _default(key) for key in CHANGES[changed]})
        without = _wanted(plain, {n: v for n, v in weights.items() if "bias" not in n}, x, positions, segments)
        assert changed == "all" or np.abs(got - without).max() > 1e-3, "the key changes the result"


def _default(key: str) -> Any:
    return next(field.default for field in dataclasses.fields(Attention) if field.name == key)


def test_longer_contexts_take_every_scaling() -> None:
    """The angles themselves are held against formulas with `rope`; here, that each reaches the block."""
    results = []
    for scaling in (
        None,
        {"type": "ntk"},
        {"type": "yarn", "original_length": 8},
        {"type": "llama3", "original_length": 8},
    ):
        scaling = scaling and {**scaling, "factor": 8.0}
        model = model_with("attention", heads=2, rope_scaling=scaling)
        results.append(np.asarray(run(model, drawn(model), inputs())[0]))
    for i, one in enumerate(results):
        assert all(np.abs(one - other).max() > 1e-3 for other in results[:i])


def test_positions_alone_turn_and_do_not_hide() -> None:
    model = model_with("attention", heads=2)
    weights, x = drawn(model), inputs()
    later = Sequences(jnp.broadcast_to(jnp.arange(LENGTH) + 100, (BATCH, LENGTH)))
    # Only differences of positions are in the scores.
    np.testing.assert_allclose(run(model, weights, x, later)[0], run(model, weights, x)[0], atol=2e-5)
    twice = Sequences(jnp.broadcast_to(jnp.arange(LENGTH) * 2, (BATCH, LENGTH)))
    assert np.abs(np.asarray(run(model, weights, x, twice)[0] - run(model, weights, x)[0])).max() > 1e-3


def test_the_work_beside_the_products_is_the_pairs_that_are_seen() -> None:
    for window in (None, 5, 20):
        model = model_with("attention", heads=2, window=window)
        block = model.blocks["attention"]
        seen = [min(t + 1, window or LENGTH) for t in range(LENGTH)]
        exact = 4 * HIDDEN * sum(seen) / LENGTH
        # Half of the length, where a token's own key is one of them: within half a pair.
        assert abs(block.flops_per_token(model, LENGTH) - exact) <= 4 * HIDDEN


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"heads": 0}, "heads of attention is 1 or more"),
        ({"heads": 4, "kv_heads": -1}, "kv_heads of attention is 1 or more"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads must divide heads.*use kv_heads = 2"),
        ({"heads": 5}, "heads must divide hidden where head_dim is not set.*use heads = 4, or set head_dim"),
        ({"heads": 2, "head_dim": 5}, "even number wide"),
        ({"heads": 2, "rotary_dim": 3}, "even number wide"),
        ({"heads": 2, "rotary_dim": 32}, "rotary_dim is at most"),
        ({"heads": 2, "head_dim": -2}, "head_dim"),
        ({"heads": 2, "window": 0}, "window is 1 or more"),
        ({"heads": 2, "rope_scaling": {"type": "cubic", "factor": 2.0}}, "cubic"),
    ],
)
def test_bad_keys(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model_with("attention", **keys)
