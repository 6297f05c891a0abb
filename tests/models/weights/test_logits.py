"""Logits of loaded weights: those of the families' definitions in float64, and those of transformers."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from tests.models.weights import hf_models, numpy_decoder

from capibara.models import decoder
from capibara.models.weights import FAMILIES, load_hf, save_hf
from capibara.models.weights.tensor_file import TensorFile

ARCHIVE = Path(__file__).parent / "data" / "hf_logits.tar.gz"


def _ours(folder: Path, ids: np.ndarray, **options: Any) -> np.ndarray:
    model, params = load_hf(folder, dtype="float32", **options)

    @jax.jit
    def run(params: Any, ids: jax.Array) -> jax.Array:
        x, _, _ = decoder.hidden_states(model, params, ids, dtype=jnp.float32)
        return decoder.logits(model, params, x)

    with jax.default_matmul_precision("highest"):
        return np.asarray(run(params, jnp.asarray(ids)))


@pytest.mark.quick
@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_logits_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    config = hf_models.CONFIGS[name]
    tensors = hf_models.random_tensors(config)
    hf_models.write_folder(tmp_path, config, {"model.safetensors": tensors})
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], 12)
    expected = numpy_decoder.logits(config, tensors, ids)
    bound = numpy_decoder.rounding_bound(config, len(ids), np.abs(expected).max())
    np.testing.assert_allclose(_ours(tmp_path, ids[None])[0], expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rope_scaling": None}),
        ("llama", {"rope_theta": 20000.0}),
        ("llama", {"rms_norm_eps": 0.1}),
        ("llama", {"hidden_act": "gelu"}),
        ("mistral", {"sliding_window": 6}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen2_moe", {"num_experts_per_tok": 3}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
)
def test_a_key_that_is_read_moves_the_logits_by_more_than_the_bound(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    """As far as in the definition: the bound is narrow enough to see every key."""
    config = hf_models.CONFIGS[name]
    tensors = hf_models.random_tensors(config)
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], 12)
    before = numpy_decoder.logits(config, tensors, ids)
    changed = {**config, **change}
    after = numpy_decoder.logits(changed, tensors, ids)
    bound = numpy_decoder.rounding_bound(changed, len(ids), np.abs(after).max())
    assert np.abs(after - before).max() > 10 * bound
    hf_models.write_folder(tmp_path, changed, {"model.safetensors": tensors})
    np.testing.assert_allclose(_ours(tmp_path, ids[None])[0], after, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.3,
            "beta_fast": 8,
        },
        {"rope_type": "default", "rope_theta": 300.0},
        hf_models.LLAMA3 | {"rope_theta": 300.0},
    ],
    ids=lambda rope: str(next(iter(rope.values()))),
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_of_either_spelling(key: str, rope: dict[str, Any], tmp_path: Path) -> None:
    config = {k: v for k, v in hf_models.CONFIGS["llama"].items() if k != "rope_scaling"} | {key: rope}
    tensors = hf_models.random_tensors(config)
    hf_models.write_folder(tmp_path, config, {"model.safetensors": tensors})
    ids = np.random.default_rng(2).integers(0, config["vocab_size"], 20)
    expected = numpy_decoder.logits(config, tensors, ids)
    bound = numpy_decoder.rounding_bound(config, len(ids), np.abs(expected).max())
    np.testing.assert_allclose(_ours(tmp_path, ids[None])[0], expected, rtol=0, atol=bound)


def _cases() -> list[str]:
    """What tools/hf_logits.py made, where torch and transformers are."""
    with tarfile.open(ARCHIVE) as tar:
        return sorted({name.split("/")[0] for name in tar.getnames() if "/" in name})


def _unpacked(case: str, folder: Path) -> Path:
    folder.mkdir()
    with tarfile.open(ARCHIVE) as tar:
        for name in ("config.json", "model.safetensors"):
            member = tar.extractfile(f"{case}/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
    return folder


def _of_transformers(case: str) -> tuple[np.ndarray, np.ndarray]:
    with tarfile.open(ARCHIVE) as tar:
        member = tar.extractfile(f"{case}/logits.npz")
        assert member is not None
        kept = np.load(io.BytesIO(member.read()))
    return kept["ids"], kept["logits"]


def test_every_family_is_there() -> None:
    with tarfile.open(ARCHIVE) as tar:
        members = [tar.extractfile(f"{case}/config.json") for case in _cases()]
        assert {json.loads(member.read())["model_type"] for member in members if member} == FAMILIES.keys()


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("case", _cases())
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Both sides are off by rounding, each by the bound at the most."""
    folder = _unpacked(case, tmp_path / case)
    ids, expected = _of_transformers(case)
    config = json.loads((folder / "config.json").read_text())
    bound = numpy_decoder.rounding_bound(config, ids.shape[1], np.abs(expected).max())
    np.testing.assert_allclose(_ours(folder, ids), expected, rtol=0, atol=2 * bound)
    # And the float64 definition that stands in for transformers above is the same model.
    tensors = {name: entry.view() for name, entry in TensorFile(folder / "model.safetensors").entries.items()}
    for row, logits in zip(ids, expected, strict=True):
        np.testing.assert_allclose(numpy_decoder.logits(config, tensors, row), logits, rtol=0, atol=bound)


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    "case",
    ["llama", "mistral", "qwen2", "qwen3_windows", "mixtral_window", "qwen2_moe_windows", "qwen3_moe_window"],
)
def test_decoding_from_a_cache_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    """A prompt, then the rest after it: windows, positions and experts are the same from a cache."""
    folder = _unpacked(case, tmp_path / case)
    ids, expected = _of_transformers(case)
    model, params = load_hf(folder, dtype="float32")
    rows, length = ids.shape
    prompt = length // 2

    @jax.jit
    def run(params: Any, ids: jax.Array) -> jax.Array:
        cache = decoder.new_cache(model, rows, length, jnp.float32)
        zeros, halves = jnp.zeros(rows, jnp.int32), jnp.full(rows, prompt, jnp.int32)
        first, cache = decoder.decode(model, params, ids[:, :prompt], cache, zeros, halves, dtype=jnp.float32)
        rest = jnp.full(rows, length - prompt, jnp.int32)
        second, _ = decoder.decode(model, params, ids[:, prompt:], cache, halves, rest, dtype=jnp.float32)
        return decoder.logits(model, params, jnp.concatenate([first, second], axis=1))

    with jax.default_matmul_precision("highest"):
        found = np.asarray(run(params, jnp.asarray(ids)))
    config = json.loads((folder / "config.json").read_text())
    bound = numpy_decoder.rounding_bound(config, length, np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=2 * bound)


@pytest.mark.spread(5)
@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("case", _cases())
def test_what_transformers_saved_comes_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    folder = _unpacked(case, tmp_path / case)
    save_hf(tmp_path / "to", *load_hf(folder))
    before, after = (TensorFile(place / "model.safetensors").entries for place in (folder, tmp_path / "to"))
    assert before.keys() == after.keys()
    for name, entry in before.items():
        assert (entry.code, entry.shape) == (after[name].code, after[name].shape), name
        assert entry.view().tobytes() == after[name].view().tobytes(), name
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


def test_the_mesh_changes_no_logits(tmp_path: Path) -> None:
    config = hf_models.CONFIGS["mixtral"]
    tensors = hf_models.random_tensors(config, ml_dtypes.bfloat16)
    hf_models.write_folder(tmp_path, config, {"model.safetensors": tensors})
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], (2, 8))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    expected = _ours(tmp_path, ids)
    bound = 2 * numpy_decoder.rounding_bound(config, 8, np.abs(expected).max())
    np.testing.assert_allclose(_ours(tmp_path, ids, mesh=mesh), expected, rtol=0, atol=bound)
