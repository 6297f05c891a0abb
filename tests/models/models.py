"""Small models of every kind, which the tests of the decoder share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.models import decoder
from capibara.models.config import ModularModelConfig

VOCAB = 48
_MOE = {"experts": 4, "top_k": 2, "ffn": 12, "shared_ffn": 8, "shared_gate": True}
_COMMON: dict[str, Any] = {"hidden": 16, "vocab": VOCAB, "max_length": 64}

MODELS = {
    "dense": ModularModelConfig(
        **_COMMON,
        layers=4,
        pattern="local+mlp : global+mlp",
        blocks={
            "local": {"kind": "attention", "heads": 4, "kv_heads": 2, "window": 4, "qk_norm": True, "bias": True},
            "global": {"kind": "attention", "heads": 2, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "mlp": {"ffn": 24},
        },
    ),
    "hybrid": ModularModelConfig(
        **_COMMON,
        layers=6,
        pattern="2 ssm+mlp : attention+moe",
        blocks={
            "ssm": {"state": 4, "head_dim": 8},
            "attention": {"heads": 2, "softcap": 5.0, "out_bias": True},
            "mlp": {"ffn": 24, "activation": "gelu", "bias": True},
            "moe": _MOE,
        },
    ),
    "selective": ModularModelConfig(
        **_COMMON, layers=2, pattern="ssm", blocks={"ssm": {"form": "selective", "state": 4}}, norm="layer"
    ),
    "codes": ModularModelConfig(
        **_COMMON, layers=2, pattern="attention+vq", blocks={"attention": {"heads": 2}, "vq": {"codes": 8, "dim": 4}}
    ),
    "twice": ModularModelConfig(
        **_COMMON,
        layers=3,
        pattern=("attention+mlp+mlp",),
        blocks={"attention": {"heads": 2, "rotary_dim": 4}, "mlp": {"ffn": 8, "activation": "geglu"}},
        norm="layer",
        tied=True,
        embed_scale=4.0,
        softcap=3.0,
    ),
}


def params_of(model: ModularModelConfig, seed: int = 0) -> Any:
    """Weights as they start; what starts at a number is moved a little, so that it does not hide."""
    params = jax.jit(lambda key: decoder.init(model, key))(jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def moved(leaf: jax.Array) -> jax.Array:
        value = np.asarray(leaf)
        constant = np.std(value) < 1e-6
        return jnp.asarray(value + 0.2 * rng.standard_normal(value.shape) if constant else value, leaf.dtype)

    return jax.tree.map(moved, params)


def ids_of(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (batch, length)), jnp.int32)
