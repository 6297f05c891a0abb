"""Qwen2: biases on queries, keys and values; the layers from max_window_layers on may see a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.models.weights import layers
from capibara.models.weights.family import ATTENTION, MLP, Family
from capibara.models.weights.keys import Keys

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["QWEN2", "late_windows"]


def late_windows(keys: Keys, count: int) -> list[int | None]:
    """Each layer's window: none without use_sliding_window, else that of the layers from max_window_layers on."""
    slides = keys.flag("use_sliding_window", False)
    window = keys.whole("sliding_window", 4096, least=0) if slides and _named(keys) else None
    first = keys.whole("max_window_layers", 28, least=0)
    return layers.windows(keys, window, [number >= first for number in range(count)])


def _named(keys: Keys) -> bool:
    return keys.get("sliding_window", 4096) is not None


def _read(keys: Keys) -> dict[str, Any]:
    count = keys.whole("num_hidden_layers")
    keys.get("sliding_window")  # without use_sliding_window it counts for nothing
    mixers = [layers.attention(keys, kv_heads=32, window=window, bias=True) for window in late_windows(keys, count)]
    return layers.decoder(keys, mixers, [layers.feed_forward(keys)] * count)


def _write(model: ModularModelConfig) -> dict[str, Any]:
    return {**layers.decoder_keys(model), **layers.windows_keys(model)}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", {"attention": ATTENTION, "mlp": MLP}, _read, _write)
