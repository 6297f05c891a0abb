"""Qwen2-MoE: experts beside a shared one behind a gate, in all layers or some; every other layer may see a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.models.weights import layers
from capibara.models.weights.family import ATTENTION, MLP, TRANSPOSED, Family, Row, experts
from capibara.models.weights.keys import Keys

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["QWEN2_MOE"]


def _read(keys: Keys) -> dict[str, Any]:
    count, biased = keys.whole("num_hidden_layers"), keys.flag("qkv_bias", True)
    slides, last = keys.flag("use_sliding_window", False), keys.whole("max_window_layers", 28, least=0)
    keys.get("sliding_window")  # without use_sliding_window it counts for nothing
    window = keys.whole("sliding_window", 4096) if slides else None
    each = layers.windows(keys, window, [number % 2 == 0 and number < last for number in range(count)])
    mixers = [layers.attention(keys, kv_heads=16, window=window, bias=biased) for window in each]
    number = keys.whole("num_experts", 60)
    sparse = {
        **layers.sparse(
            keys,
            experts=number,
            ffn=keys.whole("moe_intermediate_size", 1408),
            top_k=4,
            normalize=keys.flag("norm_topk_prob", False),
        ),
        "shared_ffn": keys.whole("shared_expert_intermediate_size", 5632),
        "shared_gate": True,
    }
    feeds = layers.mixed(keys, sparse, layers.sparse_layers(keys, count, number))
    return layers.decoder(keys, mixers, feeds)


def _write(model: ModularModelConfig) -> dict[str, Any]:
    block, where = layers.sparse_keys(model)
    keys = layers.decoder_keys(model)
    return {
        **keys,
        "intermediate_size": keys.get("intermediate_size", block.shared_ffn),
        **layers.windows_keys(model),
        **where,
        "qkv_bias": layers.pairs(model)[0][0].bias,
        "moe_intermediate_size": block.ffn,
        "shared_expert_intermediate_size": block.shared_ffn,
        "num_experts": block.experts,
        "num_experts_per_tok": block.top_k,
        "norm_topk_prob": block.normalize,
        "router_aux_loss_coef": block.balance_loss,
    }


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    {
        "attention": ATTENTION,
        "mlp": MLP,
        "moe": {
            **experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
            "shared_gate": Row("mlp.shared_expert.gate_proj.weight", TRANSPOSED),
            "shared_up": Row("mlp.shared_expert.up_proj.weight", TRANSPOSED),
            "shared_down": Row("mlp.shared_expert.down_proj.weight", TRANSPOSED),
            "shared_gating": Row("mlp.shared_expert_gate.weight", TRANSPOSED),
        },
    },
    _read,
    _write,
)
