"""generation_config.json: the ends of a text, and how a request that says nothing is sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.weights import hf_models
from typer.testing import CliRunner

from capibara.cli.main import app
from capibara.models import from_hf
from capibara.models.weights.generation_config import GenerationDefaults, read_generation_config


def _folder(place: Path, said: Any = None, **keys: Any) -> Path:
    config = {**hf_models.CONFIGS["llama"], **keys}
    folder = hf_models.write_folder(place, config, {"model.safetensors": hf_models.random_tensors(config, np.float32)})
    if said is not None:
        (folder / "generation_config.json").write_text(said if isinstance(said, str) else json.dumps(said))
    return folder


@pytest.mark.quick
def test_what_the_file_says_is_the_models_own(tmp_path: Path) -> None:
    said = {"eos_token_id": [5, 9, 5], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "x": None}
    model = from_hf(_folder(tmp_path, said))
    assert model.generation.eos_ids == (5, 9)
    assert dict(model.generation.sampling) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert model.eos_ids == {5, 9, model.tokenizer.eos_id}


def test_without_the_file_the_end_of_text_is_that_of_the_config(tmp_path: Path) -> None:
    assert read_generation_config(_folder(tmp_path / "list"), 64) == GenerationDefaults((2, 3))
    assert read_generation_config(_folder(tmp_path / "one", eos_token_id=7), 64).eos_ids == (7,)
    assert read_generation_config(_folder(tmp_path / "none", eos_token_id=None), 64).eos_ids == ()
    # A file that says nothing of it does not fall back: what it says is all there is.
    assert read_generation_config(_folder(tmp_path / "silent", {"top_k": -1}), 64) == GenerationDefaults(
        (), {"top_k": 0}
    )


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"eos_token_id": 64}, "from 0 to 63"),
        ({"eos_token_id": [1, "2"]}, "'2' in"),
        ({"eos_token_id": True}, "a token id or a list"),
        ({"temperature": -1}, "temperature of generation_config.json is from 0"),
        ({"top_p": "high"}, "top_p of generation_config.json"),
        ("{", "generation_config.json is JSON"),
        ("[]", "generation_config.json is a table of keys"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(said: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        read_generation_config(_folder(tmp_path, said), 64)


def test_generate_ends_and_draws_as_the_file_says(tmp_path: Path) -> None:
    # The byte tokenizer's ids reach 258.
    folder = _folder(tmp_path, {"temperature": 0, "repetition_penalty": 1.1}, vocab_size=259)

    def generated(*options: str) -> dict[str, Any]:
        words = ["generate", str(folder), "--prompt", "abc", "--max-tokens", "8", "--json", *options]
        ran = CliRunner().invoke(app, words)
        assert ran.exit_code == 0, ran.output
        assert "does not know repetition_penalty" in ran.stderr
        return dict(json.loads(ran.stdout))

    greedy = generated()
    assert greedy["tokens"] == generated("--temperature", "0", "--seed", "1")["tokens"]
    assert greedy["finish_reason"] == "length"
    assert generated("--temperature", "5")["tokens"] != greedy["tokens"]
    third = greedy["tokens"][2]
    said = {"temperature": 0, "repetition_penalty": 1.1, "eos_token_id": [third, 200]}
    (folder / "generation_config.json").write_text(json.dumps(said))
    ended = generated()
    assert ended["tokens"] == greedy["tokens"][: greedy["tokens"].index(third) + 1]
    assert ended["finish_reason"] == "stop"
