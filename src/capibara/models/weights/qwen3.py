"""Qwen3: norms of queries and keys, heads of a width of their own; windows as in Qwen2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.models.weights import layers
from capibara.models.weights.family import ATTENTION, MLP, Family
from capibara.models.weights.keys import Keys
from capibara.models.weights.qwen2 import late_windows

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["QWEN3"]


def _read(keys: Keys) -> dict[str, Any]:
    count, biased = keys.whole("num_hidden_layers"), keys.flag("attention_bias", False)
    keys.get("sliding_window")  # without use_sliding_window it counts for nothing
    mixers = [
        layers.attention(keys, kv_heads=32, head_dim=128, window=window, bias=biased, out_bias=biased, qk_norm=True)
        for window in late_windows(keys, count)
    ]
    return layers.decoder(keys, mixers, [layers.feed_forward(keys)] * count)


def _write(model: ModularModelConfig) -> dict[str, Any]:
    mixer = layers.pairs(model)[0][0]
    return {**layers.decoder_keys(model), **layers.windows_keys(model), "attention_bias": mixer.bias}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", {"attention": ATTENTION, "mlp": MLP}, _read, _write)
