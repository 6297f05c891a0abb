"""Greedy tokens of Hugging Face transformers, for small models of every family that `capibara.models.weights` reads.

    python tools/hf_tokens.py tests/serve/data/hf_tokens.json

writes, for each model of tests/models/weights/hf_models.py, prompts and the tokens that `generate(do_sample=False)`
gives in float32. The weights are drawn by numpy from a seed and written as safetensors, by the functions that the tests
use: who has the tokens needs neither torch nor transformers.

Two programs that are both right may part where two tokens are as likely to within rounding. So a prompt where the
chosen token's lead over the next is ever too small is drawn anew, and the least lead is kept beside the tokens.

It needs torch, transformers (written for 5.22), safetensors and ml_dtypes, and runs in a minute on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.models.weights import hf_models  # noqa: E402

LENGTHS = (5, 40, 1, 17, 23)
"""Of the prompts: shorter and longer than the tests' chunks, and than the models' windows."""
NEW = 20
SEED = 0
LEAST_LEAD = 1e-3
"""Between the two best logits, which are of the order of one: rounding in float32 moves them by some 1e-5."""


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """The tokens after a prompt, and by how much the choice was the best where it was closest."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, len(prompt) :].tolist()
    best = torch.stack(out.logits)[:, 0].topk(2).values
    assert len(tokens) == NEW, len(tokens)
    return tokens, float((best[:, 0] - best[:, 1]).min())


def case(name: str) -> dict[str, Any]:
    """What is kept of one model."""
    config = hf_models.CONFIGS[name]
    tensors = hf_models.random_tensors(config, np.float32, SEED)
    with tempfile.TemporaryDirectory() as folder:
        hf_models.write_folder(Path(folder), config, {"model.safetensors": tensors})
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    wrong = {kind: names for kind, names in loading.items() if names}
    assert not wrong, f"{name}: {wrong}"
    model.eval()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    draw = np.random.default_rng(SEED)
    prompts, answers, leads = [], [], []
    for length in LENGTHS:
        lead = 0.0
        while lead < LEAST_LEAD:  # a prompt of which a choice hangs on the last bits says nothing
            prompt = draw.integers(0, config["vocab_size"], length).tolist()
            tokens, lead = greedy(model, prompt)
        prompts.append(prompt)
        answers.append(tokens)
        leads.append(lead)
    return {"prompts": prompts, "tokens": answers, "least_lead": round(min(leads), 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    kept: dict[str, Any] = {
        "made_with": {
            "tool": "tools/hf_tokens.py",
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "seed": SEED,
        "models": {},
    }
    for name in hf_models.CONFIGS:
        kept["models"][name] = case(name)
        print(f"{name}: least lead {kept['models'][name]['least_lead']}")
    out.write_text(json.dumps(kept) + "\n")
    print(f"{out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
