"""The families' forward pass in float64 numpy, from config.json and the tensors as the file has them.

Written from the definitions of the models, on nothing of capibara's: what our decoder gives is held against it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _act(name: str, x: np.ndarray) -> np.ndarray:
    if name == "silu":
        return x / (1 + np.exp(-x))
    assert name == "gelu"
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def inverse_frequencies(config: dict[str, Any], width: int) -> tuple[np.ndarray, float]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    base = rope.get("rope_theta") or config.get("rope_theta", 1e6 if config["model_type"] == "mixtral" else 1e4)
    plain = 1 / base ** (np.arange(0, width, 2) / width)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / rope["factor"], 1.0
    length = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    factor = rope["factor"]
    if kind == "llama3":
        scaled = []
        for f in plain:
            wavelength = 2 * math.pi / f
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength < length / high:
                scaled.append(f)
            elif wavelength > length / low:
                scaled.append(f / factor)
            else:
                smooth = (length / wavelength - low) / (high - low)
                scaled.append((1 - smooth) * f / factor + smooth * f)
        return np.array(scaled), 1.0
    assert kind == "yarn"

    def dimension(turns: float) -> float:
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(rope.get("beta_fast") or 32)), 0)
    high = min(math.ceil(dimension(rope.get("beta_slow") or 1)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), rope.get("attention_factor") or 0.1 * math.log(factor) + 1


def _turned(x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """x: [heads, length, width]."""
    frequencies, scale = inverse_frequencies(config, x.shape[-1])
    angles = np.arange(x.shape[1])[:, None] * frequencies
    cos, sin = (np.concatenate([f(angles)] * 2, -1) * scale for f in (np.cos, np.sin))
    half = x.shape[-1] // 2
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def _window(config: dict[str, Any], layer: int) -> int | None:
    kind, window = config["model_type"], config.get("sliding_window")
    if kind in ("mistral", "mixtral"):
        return window
    if kind == "llama" or not config.get("use_sliding_window"):
        return None
    if kind == "qwen3_moe":
        return window
    types = config.get("layer_types")
    if types is not None:
        return window if types[layer] == "sliding_attention" else None
    last = config.get("max_window_layers", 28)
    slides = layer % 2 == 0 and layer < last if kind == "qwen2_moe" else layer >= last
    return window if slides else None


def logits(config: dict[str, Any], tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """[length] ids to [length, vocab]."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv = config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    eps, act, length = config["rms_norm_eps"], config["hidden_act"], len(ids)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def mlp(prefix: str, x: np.ndarray, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Any:
        gate, up, down = (f"{prefix}.{name}" for name in names)
        return linear(down, _act(act, linear(gate, x)) * linear(up, x))

    def attend(prefix: str, x: np.ndarray, window: int | None) -> np.ndarray:
        def split(name: str, count: int) -> np.ndarray:
            y = linear(f"{prefix}.{name}_proj", x).reshape(length, count, width).transpose(1, 0, 2)
            norm = w.get(f"{prefix}.{name}_norm.weight")
            return y if norm is None else _rms(y, norm, eps)

        q, k, v = _turned(split("q", heads), config), _turned(split("k", kv), config), split("v", kv)
        k, v = (np.repeat(y, heads // kv, 0) for y in (k, v))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(width)
        row, column = np.arange(length)[:, None], np.arange(length)[None]
        sees = column <= row
        if window is not None:
            sees &= column > row - window
        mixed = _softmax(np.where(sees, scores, -np.inf)) @ v
        return linear(f"{prefix}.o_proj", mixed.transpose(1, 0, 2).reshape(length, heads * width))

    def experts(room: str, x: np.ndarray, names: tuple[str, str, str], normalize: bool) -> np.ndarray:
        chances = _softmax(x @ w[f"{room}.gate.weight"].T)
        out = np.zeros_like(x)
        for token in range(length):
            best = np.argsort(-chances[token], kind="stable")[: config["num_experts_per_tok"]]
            share = chances[token][best]
            if normalize:
                share = share / share.sum()
            for expert, weight in zip(best, share, strict=True):
                out[token] += weight * mlp(f"{room}.experts.{expert}", x[token][None], names)[0]
        return out

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        x = x + attend(
            f"{prefix}.self_attn", _rms(x, w[f"{prefix}.input_layernorm.weight"], eps), _window(config, layer)
        )
        y = _rms(x, w[f"{prefix}.post_attention_layernorm.weight"], eps)
        if f"{prefix}.block_sparse_moe.gate.weight" in w:
            x = x + experts(f"{prefix}.block_sparse_moe", y, ("w1", "w3", "w2"), True)
        elif f"{prefix}.mlp.gate.weight" in w:
            names = ("gate_proj", "up_proj", "down_proj")
            out = experts(f"{prefix}.mlp", y, names, config["norm_topk_prob"])
            if f"{prefix}.mlp.shared_expert_gate.weight" in w:
                shared = mlp(f"{prefix}.mlp.shared_expert", y)
                out = out + shared / (1 + np.exp(-linear(f"{prefix}.mlp.shared_expert_gate", y)))
            x = x + out
        else:
            x = x + mlp(f"{prefix}.mlp", y)
    x = _rms(x, w["model.norm.weight"], eps)
    return x @ w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


def rounding_bound(config: dict[str, Any], length: int, largest: float) -> float:
    """How far float32 may be from exact logits of at most `largest`.

    A sum of n terms is rounded n times, up as often as down: it is off by about the root of n roundings of what it
    adds up. Those of all sums on the way to a logit add up likewise, and a factor of four stands for what norms,
    softmax and gates make of an error before them.
    """
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    inner = max(config.get(key) or 0 for key in ("intermediate_size", "moe_intermediate_size"))
    layer = 4 * config["hidden_size"] + width + length + config["num_attention_heads"] * width + inner
    terms = config["num_hidden_layers"] * layer + 2 * config["hidden_size"]
    return 4 * math.sqrt(terms) * 2.0**-24 * largest
