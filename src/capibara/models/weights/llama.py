"""Llama: attention with or without biases everywhere, a gated mlp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.models.weights import layers
from capibara.models.weights.family import ATTENTION, MLP, Family
from capibara.models.weights.keys import Keys

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["LLAMA"]


def _read(keys: Keys) -> dict[str, Any]:
    count, biased = keys.whole("num_hidden_layers"), keys.flag("attention_bias", False)
    mixer = layers.attention(keys, bias=biased, out_bias=biased)
    feed = layers.feed_forward(keys, bias=keys.flag("mlp_bias", False))
    return layers.decoder(keys, [mixer] * count, [feed] * count, length=2048)


def _write(model: ModularModelConfig) -> dict[str, Any]:
    mixer, feed = layers.pairs(model)[0]
    return {
        **layers.decoder_keys(model),
        "attention_bias": mixer.bias,
        "mlp_bias": getattr(feed, "bias", False),
    }


LLAMA = Family("llama", "LlamaForCausalLM", {"attention": ATTENTION, "mlp": MLP}, _read, _write)
