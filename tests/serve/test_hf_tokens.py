"""Greedy tokens of imported models are those of Hugging Face transformers, one for one."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.weights import hf_models, numpy_decoder
from tests.serve.engines import answers

from capibara.models import ModularCapibaraModel, from_hf
from capibara.serve import Engine, EngineConfig

TOKENS = Path(__file__).parent / "data" / "hf_tokens.json"


@functools.cache
def _of_transformers() -> dict[str, Any]:
    """What tools/hf_tokens.py wrote, where torch and transformers are."""
    return json.loads(TOKENS.read_text())


def _imported(name: str, folder: Path) -> ModularCapibaraModel:
    config = hf_models.CONFIGS[name]
    tensors = hf_models.random_tensors(config, np.float32, _of_transformers()["seed"])
    return from_hf(hf_models.write_folder(folder, config, {"model.safetensors": tensors}), precision="float32")


def test_every_family_was_asked() -> None:
    assert _of_transformers()["models"].keys() == hf_models.CONFIGS.keys()
    assert all(model["least_lead"] > 1e-3 for model in _of_transformers()["models"].values())


SEVERAL_SHAPES = ("llama", "mistral", "mixtral")
"""Dense, with a window, with experts: of these single tokens have programs of their own; the others run in one."""


@pytest.mark.spread(4)
@pytest.mark.quick
@pytest.mark.parametrize("name", [*sorted(set(hf_models.CONFIGS) - {"llama"}), "llama"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of five requests three run at a time; prompts come in pieces of 8 and tokens between them."""
    model, kept = _imported(name, tmp_path), _of_transformers()["models"][name]
    config = EngineConfig(
        max_sequences=3,
        max_batch_tokens=16,
        prefill_chunk=8,
        page_size=8,
        pages=32,
        decode_steps=1,
        batch_invariant=name not in SEVERAL_SHAPES,
    )
    engine = Engine(model, config=config)
    new = len(kept["tokens"][0])
    assert answers(engine, kept["prompts"], new, every=2) == kept["tokens"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rope_theta": 20000.0}),
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {"max_window_layers": 1}),
        ("qwen2_moe", {"norm_topk_prob": True}),
    ],
)
def test_a_key_that_is_read_wrong_shows(name: str, change: dict[str, Any]) -> None:
    """The float64 definition agrees with every token, and parts from them when one key changes."""
    config, kept = hf_models.CONFIGS[name], _of_transformers()["models"][name]
    tensors = hf_models.random_tensors(config, np.float32, _of_transformers()["seed"])
    prompt, tokens = kept["prompts"][1], kept["tokens"][1]
    ids = np.array([*prompt, *tokens[:-1]])

    def chosen(config: dict[str, Any]) -> list[int]:
        return numpy_decoder.logits(config, tensors, ids)[len(prompt) - 1 :].argmax(-1).tolist()

    assert chosen(config) == tokens
    assert chosen({**config, **change}) != tokens
