"""What the families have in common: how a decoder of theirs reads from config.json, and is written to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error
from capibara.models.weights.keys import Keys
from capibara.models.weights.rope_keys import read_rope, write_rope

if TYPE_CHECKING:
    from capibara.models.blocks import Attention, Mlp, Moe
    from capibara.models.config import ModularModelConfig

__all__ = [
    "activation", "attention", "attention_keys", "decoder", "decoder_keys", "feed_forward", "mixed", "pairs",
    "pattern_of", "sparse", "sparse_keys", "sparse_layers", "windows", "windows_keys",
]  # fmt: skip

_GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu",
}
_UNGATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh", "reglu": "relu"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def activation(keys: Keys) -> str:
    return keys.word("hidden_act", _GATED, "silu")


def attention(
    keys: Keys,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    base: float = 10000.0,
    window: int | None = None,
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
) -> dict[str, Any]:
    """An attention block's keys; `kv_heads`, `head_dim` and `base` are what the family takes where none is named."""
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    if kv_heads is None or "num_key_value_heads" in keys.values:
        kv_heads = heads  # where it is null there are as many as heads, whatever is taken where it is absent
    if head_dim is None and keys.get("head_dim") is None and hidden % heads:
        raise rule_error(
            "num_attention_heads divides hidden_size where head_dim is not named",
            f"hidden_size = {hidden}, num_attention_heads = {heads}",
            "mend config.json",
        )
    return {
        "kind": "attention",
        "heads": heads,
        # Where it is null there are as many as heads, whatever a family takes where it is absent.
        "kv_heads": keys.whole(
            "num_key_value_heads", heads if "num_key_value_heads" in keys.values else kv_heads or heads
        ),
        "head_dim": keys.whole("head_dim", head_dim or hidden // heads),
        "window": window,
        "bias": bias,
        "out_bias": out_bias,
        "qk_norm": qk_norm,
        **read_rope(keys, base),
    }


def windows(keys: Keys, window: int | None, default: Sequence[bool]) -> list[int | None]:
    """Each layer's window, by layer_types where there are any and else by the family's own default."""
    types = keys.get("layer_types")
    if types is None:
        return [window if slides else None for slides in default]
    if not isinstance(types, list) or len(types) != len(default):
        raise rule_error("layer_types has a word a layer", f"{types!r} for {len(default)} layers", "mend config.json")
    for word in types:
        if word not in (_FULL, _SLIDING):
            raise rule_error(f"layer_types are {_FULL} and {_SLIDING}", repr(word), "there is no such layer here")
    if window is None and _SLIDING in types:
        raise rule_error(
            f"Layers of {_SLIDING} have a window", "use_sliding_window or sliding_window unset", "set both"
        )
    return [window if word == _SLIDING else None for word in types]


def windows_keys(model: ModularModelConfig) -> dict[str, Any]:
    """use_sliding_window, sliding_window and layer_types of a model whose layers differ by their windows."""
    each = [block.window for block, _ in pairs(model)]
    window = next((one for one in each if one is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [_FULL if one is None else _SLIDING for one in each],
    }


def feed_forward(keys: Keys, *, bias: bool = False) -> dict[str, Any]:
    """An mlp block's keys."""
    return {"kind": "mlp", "ffn": keys.whole("intermediate_size"), "activation": activation(keys), "bias": bias}


def sparse(keys: Keys, *, experts: int, ffn: int, top_k: int, normalize: bool) -> dict[str, Any]:
    """A mixture of experts' keys. The losses of its router count while training alone."""
    coefficient = keys.get("router_aux_loss_coef", 0.001)
    return {
        "kind": "moe",
        "experts": experts,
        "top_k": keys.whole("num_experts_per_tok", top_k),
        "ffn": ffn,
        "activation": activation(keys),
        "gate": "softmax",
        "normalize": normalize,
        "balance_loss": float(coefficient or 0.0),
        "z_loss": 0.0,
    }


def sparse_layers(keys: Keys, layers: int, experts: int) -> list[bool]:
    """Which layers have experts: every decoder_sparse_step-th, but for those of mlp_only_layers."""
    step, dense = keys.whole("decoder_sparse_step", 1), keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(one, int) for one in dense):
        raise rule_error("mlp_only_layers is a list of layers' numbers", repr(dense), "mend config.json")
    return [number not in dense and experts > 0 and (number + 1) % step == 0 for number in range(layers)]


def mixed(keys: Keys, sparse: Mapping[str, Any], where: Sequence[bool]) -> list[Mapping[str, Any]]:
    """The feed-forward blocks of layers of which some have experts."""
    keys.get("intermediate_size")  # without a dense layer it counts for nothing
    dense = {} if all(where) else feed_forward(keys)
    return [sparse if has_experts else dense for has_experts in where]


def decoder(
    keys: Keys,
    attentions: Sequence[Mapping[str, Any]],
    feeds: Sequence[Mapping[str, Any]],
    *,
    eps: float = 1e-6,
    length: int = 32768,
) -> dict[str, Any]:
    """What `ModularModelConfig` takes, of a decoder with these blocks in its layers.

    `eps` and `length` are what the family takes where its config.json names none.
    """
    blocks: dict[str, Mapping[str, Any]] = {}

    def named(block: Mapping[str, Any]) -> str:
        for name, known in blocks.items():
            if known == block:
                return name
        name = "window" if block.get("window") is not None and "attention" in blocks else str(block["kind"])
        if name in blocks:
            name = f"full_{name}"
        blocks[name] = block
        return name

    layers = [f"{named(mixer)}+{named(feed)}" for mixer, feed in zip(attentions, feeds, strict=True)]
    return {
        "hidden": keys.whole("hidden_size"),
        "layers": len(layers),
        "vocab": keys.whole("vocab_size"),
        "max_length": keys.whole("max_position_embeddings", length),
        "tied": keys.flag("tie_word_embeddings", False),
        "norm_eps": keys.number("rms_norm_eps", eps),
        "blocks": blocks,
        "pattern": pattern_of(layers),
    }


def pattern_of(layers: Sequence[str]) -> str:
    """The shortest pattern that is these layers when it is gone through again and again.

    >>> pattern_of(["a+m", "a+m", "a+e", "a+m", "a+m", "a+e"])
    '2 a+m : 1 a+e'
    """
    count = len(layers)
    for period in range(1, count + 1):
        if count % period == 0 and all(layers[i] == layers[i % period] for i in range(count)):
            break
    runs = [(layer, len(list(run))) for layer, run in groupby(layers[:period])]
    return runs[0][0] if period == 1 else " : ".join(f"{length} {layer}" for layer, length in runs)


def pairs(model: ModularModelConfig) -> list[tuple[Attention, Mlp | Moe]]:
    """Each layer's attention and what follows it; an error where a layer is anything else."""
    from capibara.models.blocks import Attention, Mlp, Moe

    listed = []
    for number in range(model.layers):
        blocks = [model.blocks[name] for name in model.period[number % len(model.period)]]
        if len(blocks) != 2 or not isinstance(blocks[0], Attention) or not isinstance(blocks[1], Mlp | Moe):
            raise rule_error(
                "A layer in the Hugging Face layout is attention, then an mlp or experts",
                f"layer {number} of {', '.join(type(block).__name__.lower() for block in blocks)}",
                "keep such a model in capibara's own checkpoints",
            )
        listed.append((blocks[0], blocks[1]))
    return listed


def attention_keys(model: ModularModelConfig) -> dict[str, Any]:
    """The keys of a model's first attention block; how the others differ is the family's."""
    block = pairs(model)[0][0]
    return {
        "num_attention_heads": block.heads,
        "num_key_value_heads": block.kv_heads,
        "head_dim": block.width(model),
        **write_rope(block.rope_base, block.rope_scaling),
    }


def decoder_keys(model: ModularModelConfig) -> dict[str, Any]:
    """The keys that every family has."""
    from capibara.models.blocks import Mlp

    feeds = [feed for _, feed in pairs(model)]
    dense = [feed.ffn for feed in feeds if isinstance(feed, Mlp)]
    act = _UNGATED.get(feeds[0].activation)
    if act is None:
        raise rule_error(
            f"Feed-forward blocks in the Hugging Face layout are gated: {', '.join(_UNGATED)}",
            feeds[0].activation,
            "keep such a model in capibara's own checkpoints",
        )
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "max_position_embeddings": model.max_length,
        "tie_word_embeddings": model.tied,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": act,
        **({"intermediate_size": dense[0]} if dense else {}),
        **attention_keys(model),
    }


def sparse_keys(model: ModularModelConfig) -> tuple[Moe, dict[str, Any]]:
    """The first mixture of experts and which layers have one, as mlp_only_layers; an error where there is none."""
    from capibara.models.blocks import Moe

    feeds = [feed for _, feed in pairs(model)]
    block = next((feed for feed in feeds if isinstance(feed, Moe)), None)
    if block is None:
        raise rule_error("This family has experts", "none", "write it as a dense family")
    dense = [number for number, feed in enumerate(feeds) if not isinstance(feed, Moe)]
    return block, {"decoder_sparse_step": 1, "mlp_only_layers": dense}
