"""Mistral: a Llama without biases whose layers may all see a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.models.weights import layers
from capibara.models.weights.family import ATTENTION, MLP, Family
from capibara.models.weights.keys import Keys

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["MISTRAL"]

# What its config has where config.json does not name a window, unlike null.
_WINDOW = 4096


def _read(keys: Keys) -> dict[str, Any]:
    count = keys.whole("num_hidden_layers")
    window = None if keys.get("sliding_window", _WINDOW) is None else keys.whole("sliding_window", _WINDOW)
    mixer = layers.attention(keys, kv_heads=8, window=window)
    return layers.decoder(keys, [mixer] * count, [layers.feed_forward(keys)] * count, length=131072)


def _write(model: ModularModelConfig) -> dict[str, Any]:
    return {**layers.decoder_keys(model), "sliding_window": layers.pairs(model)[0][0].window}


MISTRAL = Family("mistral", "MistralForCausalLM", {"attention": ATTENTION, "mlp": MLP}, _read, _write)
