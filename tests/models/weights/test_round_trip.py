"""Hugging Face to capibara and back: every tensor's name, type, shape and bits, and every key of the config."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors import safe_open
from tests.models.weights import hf_models

from capibara.models import ModularModelConfig, decoder, from_hf
from capibara.models.weights import load_hf, save_hf
from capibara.models.weights.folder import tensor_entries

BITS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def _written(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (entry.code, entry.shape, entry.view().tobytes()) for name, entry in tensor_entries(folder).items()}


def _expected(tensors: dict[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    codes = {word: code for code, word in BITS.items()}
    return {name: (codes[t.dtype.name], t.shape, t.tobytes()) for name, t in tensors.items()}


def _mesh(*sizes: int, names: tuple[str, ...] = ("data", "model")) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)


@pytest.mark.spread(5)
@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_back_again_bit_for_bit(name: str, dtype: Any, tmp_path: Path) -> None:
    config = {**hf_models.CONFIGS[name], "torch_dtype": np.dtype(dtype).name, "a_key_of_mine": {"kept": [1, None]}}
    tensors = hf_models.random_tensors(config, dtype)
    hf_models.write_folder(tmp_path / "from", config, hf_models.in_parts(tensors, 3))
    model, params = load_hf(tmp_path / "from")
    save_hf(tmp_path / "to", model, params, shard_bytes=20_000)
    assert len(list((tmp_path / "to").glob("model-*-of-*.safetensors"))) > 1
    assert _written(tmp_path / "to") == _expected(tensors)
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == config
    index = json.loads((tmp_path / "to" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()


def test_the_library_of_the_format_reads_what_is_written(tmp_path: Path) -> None:
    config = hf_models.CONFIGS["qwen3"]
    tensors = hf_models.random_tensors(config, np.float32)
    hf_models.write_folder(tmp_path / "from", config, {"model.safetensors": tensors})
    save_hf(tmp_path / "to", *load_hf(tmp_path / "from"))
    with safe_open(tmp_path / "to" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(file.get_tensor(name), tensor)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "sizes", "names"),
    [
        ("llama", (2, 2), ("data", "model")),
        ("mixtral", (2, 2), ("model", "expert")),
        ("qwen3_moe", (2, 2, 2), ("data", "expert", "model")),
        ("mistral", (2, 2), ("pipeline", "model")),
    ],
)
def test_each_device_gets_its_part(name: str, sizes: tuple[int, ...], names: tuple[str, ...], tmp_path: Path) -> None:
    config = hf_models.CONFIGS[name]
    tensors = hf_models.random_tensors(config)
    hf_models.write_folder(tmp_path / "from", config, hf_models.in_parts(tensors, 2))
    _, whole = load_hf(tmp_path / "from")
    mesh = _mesh(*sizes, names=names)
    model, params = load_hf(tmp_path / "from", mesh=mesh)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), whole, params)
    axes = decoder.axes(model)
    up = params["layers"][-1]["moe" if "moe" in model.blocks else "mlp"]["up"]
    split = {"mlp": "model", "expert": "expert", "stage": "pipeline"}
    parts = [split.get(axis or "") for axis in axes["layers"][-1]["moe" if "moe" in model.blocks else "mlp"]["up"]]
    expected = tuple(size // mesh.shape.get(axis, 1) for size, axis in zip(up.shape, parts, strict=True))
    assert expected != up.shape
    assert {shard.data.shape for shard in up.addressable_shards} == {expected}
    save_hf(tmp_path / "to", model, params)
    assert _written(tmp_path / "to") == _expected(tensors)


def test_rules_say_where_it_lies(tmp_path: Path) -> None:
    config = hf_models.CONFIGS["llama"]
    hf_models.write_folder(tmp_path, config, {"model.safetensors": hf_models.random_tensors(config)})
    _, params = load_hf(tmp_path, mesh=_mesh(2, 2), rules={"vocab": "data", "mlp": None, "heads": None, "stage": None})
    assert params["embed"].sharding.spec[0] == "data"
    assert params["layers"][0]["mlp"]["up"].sharding.is_fully_replicated


@pytest.mark.quick
def test_dtype_converts_but_for_the_router(tmp_path: Path) -> None:
    config = hf_models.CONFIGS["mixtral"]
    tensors = hf_models.random_tensors(config, np.float32)
    hf_models.write_folder(tmp_path / "from", config, {"model.safetensors": tensors})
    model, params = load_hf(tmp_path / "from", dtype="bfloat16")
    moe = params["layers"][0]["moe"]
    assert params["embed"].dtype == moe["up"].dtype == jnp.bfloat16
    assert moe["router"].dtype == jnp.float32
    rounded = tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(params["embed"]), rounded)
    # A float32 router has bits that bfloat16 does not: it is written whole.
    save_hf(tmp_path / "to", model, params)
    codes = {name: entry.code for name, entry in tensor_entries(tmp_path / "to").items()}
    assert {code for name, code in codes.items() if "moe.gate" not in name} == {"BF16"}
    assert {code for name, code in codes.items() if "moe.gate" in name} == {"F32"}
    assert json.loads((tmp_path / "to" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    save_hf(tmp_path / "narrow", model, params, dtype="bfloat16")
    assert {entry.code for entry in tensor_entries(tmp_path / "narrow").values()} == {"BF16"}


def test_tensors_of_several_types_keep_theirs(tmp_path: Path) -> None:
    config = hf_models.CONFIGS["mixtral"]
    tensors = hf_models.random_tensors(config)
    for name in ("model.layers.1.block_sparse_moe.gate.weight", "model.layers.0.input_layernorm.weight"):
        # Values that bfloat16 has, in a wider type: the type is what has to come back.
        tensors[name] = tensors[name].astype(np.float32)
    tensors["model.norm.weight"] = np.random.default_rng(3).standard_normal(hf_models.H).astype(np.float32)
    hf_models.write_folder(tmp_path / "from", config, {"model.safetensors": tensors})
    save_hf(tmp_path / "to", *load_hf(tmp_path / "from"))
    assert _written(tmp_path / "to") == _expected(tensors)


def test_a_tied_head_in_the_file_comes_back(tmp_path: Path) -> None:
    config = hf_models.CONFIGS["qwen2"]
    tensors = hf_models.random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    hf_models.write_folder(tmp_path / "from", config, {"model.safetensors": tensors})
    model, params = load_hf(tmp_path / "from")
    assert model.tied
    assert "head" not in params
    save_hf(tmp_path / "to", model, params)
    assert _written(tmp_path / "to") == _expected(tensors)


def test_what_the_config_remembers_survives_toml(tmp_path: Path) -> None:
    config = {**hf_models.CONFIGS["qwen2"], "note": 'quotes " and \\ and \n lines, é'}
    tensors = hf_models.random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    hf_models.write_folder(tmp_path / "from", config, {"model.safetensors": tensors})
    model, params = load_hf(tmp_path / "from")
    model.to_toml(tmp_path / "model.toml")
    again = ModularModelConfig.from_toml(tmp_path / "model.toml", name="")
    assert again == model
    save_hf(tmp_path / "to", again, params)
    assert _written(tmp_path / "to") == _expected(tensors)
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == config


@pytest.mark.quick
def test_a_model_of_our_own_becomes_a_llama_that_loads_again(tmp_path: Path) -> None:
    blocks = {"attention": {"heads": 4, "kv_heads": 2}, "mlp": {"ffn": 48}}
    model = ModularModelConfig(hidden=32, layers=2, vocab=64, blocks=blocks)
    params = jax.jit(lambda key: decoder.init(model, key))(jax.random.key(0))
    save_hf(tmp_path / "to", model, params, dtype="bfloat16", extra={"bos_token_id": 7})
    written = json.loads((tmp_path / "to" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert (written["torch_dtype"], written["bos_token_id"]) == ("bfloat16", 7)
    again, loaded = load_hf(tmp_path / "to")
    assert again.parameters == model.parameters
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a.astype(jnp.bfloat16)), np.asarray(b)), params, loaded
    )


def test_numpy_parameters_are_written_too(tmp_path: Path) -> None:
    config = hf_models.CONFIGS["qwen2_moe"]
    tensors = hf_models.random_tensors(config)
    hf_models.write_folder(tmp_path / "from", config, {"model.safetensors": tensors})
    model, params = load_hf(tmp_path / "from")
    save_hf(tmp_path / "to", model, jax.tree.map(np.asarray, params))
    assert _written(tmp_path / "to") == _expected(tensors)


def test_a_changed_model_changes_only_its_own_keys(tmp_path: Path) -> None:
    config = {**hf_models.CONFIGS["qwen3"], "mine": 1}
    hf_models.write_folder(tmp_path / "from", config, {"model.safetensors": hf_models.random_tensors(config)})
    model, params = load_hf(tmp_path / "from")
    longer = dataclasses.replace(model, vocab=72, max_length=256)
    params["embed"] = jnp.zeros((72, hf_models.H), jnp.bfloat16)
    params["head"] = jnp.zeros((hf_models.H, 72), jnp.bfloat16)
    save_hf(tmp_path / "to", longer, params)
    written = json.loads((tmp_path / "to" / "config.json").read_text())
    assert written == {**config, "vocab_size": 72, "max_position_embeddings": 256}
    assert load_hf(tmp_path / "to")[1]["embed"].shape == (72, hf_models.H)


def test_overwrite_replaces_what_was_there(tmp_path: Path) -> None:
    config = hf_models.CONFIGS["llama"]
    tensors = hf_models.random_tensors(config)
    hf_models.write_folder(tmp_path / "from", config, hf_models.in_parts(tensors, 3))
    (tmp_path / "from" / "notes").mkdir()
    (tmp_path / "from" / "notes" / "a.txt").write_text("kept")
    (tmp_path / ".from.partial").mkdir()
    (tmp_path / ".from.partial" / "model-00001-of-00009.safetensors").write_text("of a process that was killed")
    model, params = load_hf(tmp_path / "from")
    with pytest.raises(ValueError, match="overwrite=True"):
        save_hf(tmp_path / "from", model, params)
    save_hf(tmp_path / "from", model, params, overwrite=True)
    assert sorted(file.name for file in (tmp_path / "from").iterdir()) == [
        "config.json", "model.safetensors", "notes",
    ]  # fmt: skip
    assert (tmp_path / "from" / "notes" / "a.txt").read_text() == "kept"
    assert _written(tmp_path / "from") == _expected(tensors)
    assert [file.name for file in tmp_path.iterdir()] == ["from"]


@pytest.mark.quick
def test_the_model_object_goes_both_ways_with_its_tokenizer(tmp_path: Path) -> None:
    config = hf_models.CONFIGS["qwen3"]
    tensors = hf_models.random_tensors(config)
    hf_models.write_folder(tmp_path / "from", config, {"model.safetensors": tensors})
    (tmp_path / "from" / "tokenizer.json").write_text('{"of": "mine"}')
    (tmp_path / "from" / "generation_config.json").write_text("{}")
    (tmp_path / "from" / "notes.txt").write_text("not the model's")
    model = from_hf(tmp_path / "from")
    assert (model.precision, model.config.tokenizer) == ("bfloat16", str(tmp_path / "from"))
    assert from_hf(tmp_path / "from", dtype="float32").precision == "mixed"
    model.to_hf(tmp_path / "to")
    assert _written(tmp_path / "to") == _expected(tensors)
    names = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    assert {file.name for file in (tmp_path / "to").iterdir()} == names
    assert (tmp_path / "to" / "tokenizer.json").read_text() == '{"of": "mine"}'
    lost = dataclasses.replace(model.config, tokenizer=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="with its tokenizer"):
        save_hf(tmp_path / "other", lost, model.params)
    assert not (tmp_path / "other").exists()


def test_a_folder_without_weights_is_filled(tmp_path: Path) -> None:
    config = hf_models.CONFIGS["llama"]
    tensors = hf_models.random_tensors(config)
    hf_models.write_folder(tmp_path / "from", config, {"model.safetensors": tensors})
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "config.json").write_text("{}")
    (tmp_path / "to" / "mine.txt").write_text("kept")
    save_hf(tmp_path / "to", *load_hf(tmp_path / "from"))
    assert _written(tmp_path / "to") == _expected(tensors)
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == config
    assert (tmp_path / "to" / "mine.txt").read_text() == "kept"
