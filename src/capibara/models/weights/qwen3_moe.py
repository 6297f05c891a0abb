"""Qwen3-MoE: the attention of Qwen3, experts in all layers or some, none shared; a window is every layer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.models.weights import layers
from capibara.models.weights.family import ATTENTION, MLP, Family, experts
from capibara.models.weights.keys import Keys

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["QWEN3_MOE"]


def _read(keys: Keys) -> dict[str, Any]:
    count, biased = keys.whole("num_hidden_layers"), keys.flag("attention_bias", False)
    slides = keys.flag("use_sliding_window", False)
    # Without use_sliding_window it counts for nothing, and max_window_layers never does in this family.
    named = keys.get("sliding_window", 4096) is not None
    keys.get("max_window_layers")
    window = keys.whole("sliding_window", 4096) if slides and named else None
    mixer = layers.attention(keys, kv_heads=4, window=window, bias=biased, out_bias=biased, qk_norm=True)
    number = keys.whole("num_experts", keys.get("num_local_experts", 128))
    sparse = layers.sparse(
        keys,
        experts=number,
        ffn=keys.whole("moe_intermediate_size", 768),
        top_k=8,
        normalize=keys.flag("norm_topk_prob", False),
    )
    feeds = layers.mixed(keys, sparse, layers.sparse_layers(keys, count, number))
    return layers.decoder(keys, [mixer] * count, feeds)


def _write(model: ModularModelConfig) -> dict[str, Any]:
    block, where = layers.sparse_keys(model)
    keys = layers.decoder_keys(model)
    mixer = layers.pairs(model)[0][0]
    return {
        **keys,
        "intermediate_size": keys.get("intermediate_size", block.ffn * block.top_k),
        **where,
        "use_sliding_window": mixer.window is not None,
        "sliding_window": mixer.window,
        "attention_bias": mixer.bias,
        "moe_intermediate_size": block.ffn,
        "num_experts": block.experts,
        "num_experts_per_tok": block.top_k,
        "norm_topk_prob": block.normalize,
        "router_aux_loss_coef": block.balance_loss,
    }


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {"attention": ATTENTION, "mlp": MLP, "moe": experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")},
    _read,
    _write,
)
