"""Small random models of every Hugging Face family that `capibara.models.weights` reads, with transformers' logits.

    python tools/hf_logits.py OUT

writes OUT/hf_logits.tar.gz with, for each case, `config.json` and `model.safetensors` exactly as transformers saved
them, and `logits.npz`: the ids and the float32 logits that transformers computes from the saved files. The tests hold
our decoder against them; tests/models/weights/data/ has the archive.

It needs torch and transformers (written for 5.17) and nothing else, and runs in a minute on a CPU. Weights are drawn
large enough that every part counts: a key of config.json that is passed over shows in the logits.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

VOCAB, LENGTH, ROWS = 64, 24, 2
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
# name -> (model_type, dtype of the file, keys over SMALL). Windows are shorter than the text.
CASES = {
    "llama": ("llama", "float32", {"rope_parameters": LLAMA3}),
    "llama_biased_tied": (
        "llama",
        "bfloat16",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16, "hidden_act": "gelu"},
    ),
    "llama_linear": (
        "llama",
        "float16",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("mistral", "bfloat16", {"sliding_window": 7, "rms_norm_eps": 1e-5}),
    "mistral_full": ("mistral", "bfloat16", {"sliding_window": None, "num_key_value_heads": 4, "head_dim": 12}),
    "qwen2": (
        "qwen2",
        "bfloat16",
        {
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "qwen2_yarn": ("qwen2", "bfloat16", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "bfloat16", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_windows": (
        "qwen3",
        "bfloat16",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("mixtral", "bfloat16", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_window": (
        "mixtral",
        "float32",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 8, "intermediate_size": 24},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        "bfloat16",
        {
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": False,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen2_moe_windows": (
        "qwen2_moe",
        "bfloat16",
        {
            **EXPERTS,
            "num_experts": 3,
            "shared_expert_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        "bfloat16",
        {
            **EXPERTS,
            "num_experts": 4,
            "head_dim": 12,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
        },
    ),
    "qwen3_moe_window": (
        "qwen3_moe",
        "bfloat16",
        {
            **EXPERTS,
            "num_experts": 3,
            "head_dim": 8,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
}


def weights_of(model: torch.nn.Module, seed: int) -> None:
    """Every parameter drawn anew: products at about the root of their inputs, norms around one, biases around zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * drawn)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * drawn)
            elif "embed_tokens" in name:
                parameter.copy_(drawn)
            else:
                parameter.copy_(drawn * parameter.shape[-1] ** -0.5)


def case(name: str, seed: int) -> dict[str, bytes]:
    """The files of one case."""
    model_type, dtype, keys = CASES[name]
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **keys})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    weights_of(model, seed)
    model.to(getattr(torch, dtype))
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (ROWS, LENGTH))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # From the files, so that the logits are of what was saved and nothing else.
        again = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        if hasattr(again.config, "num_experts_per_tok"):
            again.set_experts_implementation("eager")
        with torch.no_grad():
            logits = again(input_ids=torch.from_numpy(ids), use_cache=False).logits.numpy()
        files = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    packed = io.BytesIO()
    np.savez(packed, ids=ids.astype(np.int32), logits=logits.astype(np.float32))
    kept = {"config.json": files["config.json"], "model.safetensors": files["model.safetensors"]}
    json.loads(kept["config.json"])
    return kept | {"logits.npz": packed.getvalue()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:

        def add(name: str, data: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))

        for seed, name in enumerate(CASES):
            files = case(name, seed)
            for file, data in files.items():
                add(f"{name}/{file}", data)
            print(f"{name}: {', '.join(f'{file} {len(data)}' for file, data in files.items())}")
        versions = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        }
        add("versions.json", json.dumps(versions, indent=2).encode())
    # Without a time in it: the same models give the same bytes.
    with gzip.GzipFile(out / "hf_logits.tar.gz", "wb", mtime=0) as packed:
        packed.write(archive.getvalue())
    print(f"{(out / 'hf_logits.tar.gz').stat().st_size} bytes; {versions}")


if __name__ == "__main__":
    main()
