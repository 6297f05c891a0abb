"""A model of one block, with weights that are all drawn, so that nothing that starts at zero or one hides a mistake."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.models.blocks import spec
from capibara.models.blocks.spec import Sequences
from capibara.models.config import ModularModelConfig

HIDDEN, BATCH, LENGTH = 16, 2, 12

Weights = dict[str, np.ndarray]


def model_with(kind: str, hidden: int = HIDDEN, **keys: Any) -> ModularModelConfig:
    """A decoder whose layers are this block alone."""
    return ModularModelConfig(hidden=hidden, layers=1, vocab=32, blocks={kind: keys}, pattern=kind)


def drawn(model: ModularModelConfig, seed: int = 0) -> Weights:
    """Weights of its block in float64, as they start; those that start at a number are drawn around it."""
    (block,) = model.blocks.values()
    rng = np.random.default_rng(seed)
    start = jax.jit(lambda key: spec.initial(block.weights(model), key, jnp.float32))(jax.random.key(seed))
    made = {name: np.asarray(value, np.float64) for name, value in start.items()}
    return {name: v + 0.3 * rng.standard_normal(v.shape) * (np.std(v) < 1e-6) for name, v in made.items()}


def inputs(hidden: int = HIDDEN, length: int = LENGTH, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((BATCH, length, hidden))


def run(model: ModularModelConfig, weights: Weights, x: np.ndarray, sequences: Sequences | None = None) -> Any:
    """The block in float32, as one program."""
    (block,) = model.blocks.values()
    params = {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}

    sequences = sequences or Sequences()

    def forward(params: Any, x: jax.Array, positions: Any, segments: Any, key: Any) -> Any:
        out = block(model, params, x, Sequences(positions, segments, key))
        return out.value, out.loss, out.metrics

    return jax.jit(forward)(
        params, jnp.asarray(x, jnp.float32), sequences.positions, sequences.segment_ids, sequences.key
    )


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
