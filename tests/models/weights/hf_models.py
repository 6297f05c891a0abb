"""Small models of every family as a person who knows transformers would list them: config.json, tensors, shapes.

Written apart from the tables under test: what is listed here comes from the modules of transformers themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

H, F, V = 32, 48, 64
BASE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "initializer_range": 0.02,
    "use_cache": True,
    "transformers_version": "4.51.0",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _config(model_type: str, architecture: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **BASE, **keys}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _config("llama", "LlamaForCausalLM", rope_scaling=LLAMA3, attention_bias=False, mlp_bias=False),
    "llama_biased": _config(
        "llama", "LlamaForCausalLM", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=16
    ),
    "mistral": _config("mistral", "MistralForCausalLM", sliding_window=5),
    "qwen2": _config(
        "qwen2",
        "Qwen2ForCausalLM",
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
        tie_word_embeddings=True,
    ),
    "qwen3": _config("qwen3", "Qwen3ForCausalLM", head_dim=12, attention_bias=False, use_sliding_window=False),
    "mixtral": _config(
        "mixtral", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen2_moe": _config(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
        norm_topk_prob=False,
    ),
    "qwen3_moe": _config(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        head_dim=12,
        num_hidden_layers=3,
        mlp_only_layers=[0],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        norm_topk_prob=True,
    ),
}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a model, from what its modules are."""
    kind, hidden = config["model_type"], config["hidden_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    ffn = config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    qkv_bias = config.get("attention_bias") or kind in ("qwen2", "qwen2_moe")

    def mlp(prefix: str, inner: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        gate, up, down = names
        shapes[f"{prefix}.{gate}.weight"] = shapes[f"{prefix}.{up}.weight"] = (inner, hidden)
        shapes[f"{prefix}.{down}.weight"] = (hidden, inner)

    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for name, out in (("q", heads * width), ("k", kv * width), ("v", kv * width)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (out, hidden)
            if qkv_bias:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (out,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, heads * width)
        if config.get("attention_bias"):
            shapes[f"{layer}.self_attn.o_proj.bias"] = (hidden,)
        if kind.startswith("qwen3"):
            shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (width,)
        if kind == "mixtral":
            shapes[f"{layer}.block_sparse_moe.gate.weight"] = (config["num_local_experts"], hidden)
            for expert in range(config["num_local_experts"]):
                mlp(f"{layer}.block_sparse_moe.experts.{expert}", ffn, ("w1", "w3", "w2"))
            continue
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        if kind.endswith("moe") and (number + 1) % step == 0 and number not in dense:
            shapes[f"{layer}.mlp.gate.weight"] = (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
            if kind == "qwen2_moe":
                mlp(f"{layer}.mlp.shared_expert", config["shared_expert_intermediate_size"])
                shapes[f"{layer}.mlp.shared_expert_gate.weight"] = (1, hidden)
            continue
        mlp(f"{layer}.mlp", ffn)
        if config.get("mlp_bias"):
            shapes[f"{layer}.mlp.gate_proj.bias"] = shapes[f"{layer}.mlp.up_proj.bias"] = (ffn,)
            shapes[f"{layer}.mlp.down_proj.bias"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_tensors(config: dict[str, Any], dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        drawn = rng.standard_normal(shape, np.float32) * (0.5 if len(shape) == 1 else 1 / np.sqrt(shape[-1]))
        tensors[name] = (drawn + ("norm" in name)).astype(dtype)
    return tensors


def write_folder(folder: Path, config: dict[str, Any], files: dict[str, dict[str, np.ndarray]]) -> Path:
    """A folder as `save_pretrained` leaves it, written by the safetensors library; several files have an index."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def in_parts(tensors: dict[str, np.ndarray], parts: int) -> dict[str, dict[str, np.ndarray]]:
    """The tensors dealt out to several files, as a folder has them."""
    names = [f"model-{n + 1:05d}-of-{parts:05d}.safetensors" for n in range(parts)]
    dealt: dict[str, dict[str, np.ndarray]] = {name: {} for name in names}
    for number, (tensor, value) in enumerate(tensors.items()):
        dealt[names[number % parts]][tensor] = value
    return dealt
