"""Mixtral: a Mistral whose every layer has experts; a token's weights are divided by their sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.models.weights import layers
from capibara.models.weights.family import ATTENTION, Family, experts
from capibara.models.weights.keys import Keys

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["MIXTRAL"]


def _read(keys: Keys) -> dict[str, Any]:
    count = keys.whole("num_hidden_layers")
    window = None if keys.get("sliding_window") is None else keys.whole("sliding_window")
    mixer = layers.attention(keys, kv_heads=8, base=1e6, window=window)
    number = keys.whole("num_local_experts", keys.get("num_experts", 8))
    feed = layers.sparse(keys, experts=number, ffn=keys.whole("intermediate_size"), top_k=2, normalize=True)
    return layers.decoder(keys, [mixer] * count, [feed] * count, eps=1e-5, length=131072)


def _write(model: ModularModelConfig) -> dict[str, Any]:
    block, _ = layers.sparse_keys(model)
    return {
        **layers.decoder_keys(model),
        "intermediate_size": block.ffn,
        "sliding_window": layers.pairs(model)[0][0].window,
        "num_local_experts": block.experts,
        "num_experts_per_tok": block.top_k,
        "router_aux_loss_coef": block.balance_loss,
    }


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    {"attention": ATTENTION, "moe": experts("block_sparse_moe", gate="w1", up="w3", down="w2")},
    _read,
    _write,
)
