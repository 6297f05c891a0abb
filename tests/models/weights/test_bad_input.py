"""What is wrong with a folder, a file or a config is said by name, and nothing of an earlier one is lost."""

from __future__ import annotations

import errno
import json
import pickle
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.weights import hf_models

from capibara.models.weights import config_from_hf, load_hf, save_hf
from capibara.models.weights.folder import tensor_entries
from capibara.models.weights.tensor_file import TensorFile, TensorWriter

CONFIG = hf_models.CONFIGS["llama"]


def _folder(folder: Path, tensors: dict[str, np.ndarray], parts: int = 1, config: Any = CONFIG) -> Path:
    files = {"model.safetensors": tensors} if parts == 1 else hf_models.in_parts(tensors, parts)
    return hf_models.write_folder(folder, config, files)


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return hf_models.random_tensors(CONFIG)


@pytest.mark.quick
def test_a_missing_tensor_is_named_with_the_nearest(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.1.self_attn.qq_proj.weight"] = tensors.pop("model.layers.1.self_attn.q_proj.weight")
    with pytest.raises(ValueError) as error:
        load_hf(_folder(tmp_path, tensors))
    text = str(error.value)
    assert "1 missing: model.layers.1.self_attn.q_proj.weight" in text
    assert "nearest there: model.layers.1.self_attn.qq_proj.weight" in text
    assert "1 that the model has no place for: model.layers.1.self_attn.qq_proj.weight" in text


def test_many_missing_tensors_are_counted(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    few = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    with pytest.raises(ValueError, match=rf"{len(tensors) - len(few)} missing: .* and 3 more"):
        load_hf(_folder(tmp_path, few))


def test_a_missing_head_may_be_a_tied_one(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        load_hf(_folder(tmp_path, tensors))


def test_extra_tensors_are_named(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match=r"no place for: model.layers.0.self_attn.q_proj.bias"):
        load_hf(_folder(tmp_path, tensors))


def test_experts_in_one_tensor_are_told_how_to_come_apart(tmp_path: Path) -> None:
    config = hf_models.CONFIGS["qwen3_moe"]
    tensors = {n: t for n, t in hf_models.random_tensors(config).items() if ".experts." not in n}
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = np.zeros((4, 40, 32), np.float32)
    with pytest.raises(ValueError, match="save_original_format=True"):
        load_hf(_folder(tmp_path, tensors, config=config))


def test_tables_of_old_versions_are_left_out(
    tmp_path: Path, tensors: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    load_hf(_folder(tmp_path, tensors))
    assert "left out 1 tensors" in caplog.text


@pytest.mark.quick
def test_a_shape_says_here_and_there(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"] = np.ones(31, np.float32)
    with pytest.raises(
        ValueError, match=r"model.norm.weight is \[32\] by config.json. Got \[31\] in model.safetensors"
    ):
        load_hf(_folder(tmp_path, tensors))


def test_a_head_that_is_not_the_table_is_not_tied(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match=r"lm_head.weight that differs from model.embed_tokens.weight"):
        load_hf(_folder(tmp_path, tensors, config={**CONFIG, "tie_word_embeddings": True}))


@pytest.mark.quick
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_and_told_how_to_convert(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(pickle.dumps({"w": [1.0]}))
    with pytest.raises(ValueError, match=rf"a pickle runs whatever code.*{name}.*save_pretrained"):
        load_hf(tmp_path)


@pytest.mark.parametrize("kind", ["pickle", "zip"])
def test_a_pickle_by_another_name_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "model.safetensors"
    if kind == "pickle":
        file.write_bytes(pickle.dumps({"w": list(range(100))}, protocol=2))
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps([1]))
    with pytest.raises(ValueError, match="which is a pickle or an archive of one"):
        load_hf(tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_truncated_file_is_named(kept: int, tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    _folder(tmp_path, tensors, parts=2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{file.name}.*cut off"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[1]     ", "no table"),
        (b"{nothing", "no JSON"),
        (b'{"w":{"dtype":"F32","shape":[2]}}', "no type, shape and place of 'w'"),
        (b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', r"'w' of F32 \[3\] in bytes 0 to 8"),
        (b'{"w":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}}', "'w' of F31"),
        (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', "would need 75"),
        (b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "where"),
    ],
)
def test_headers_that_lie(header: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=said):
        TensorFile(file)


def test_an_index_that_names_what_is_not_there(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    _folder(tmp_path, tensors, parts=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"without model-00002-of-00003.safetensors, 1 of 3"):
        load_hf(tmp_path)


def test_an_index_that_names_another_folder_or_a_wrong_file(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    _folder(tmp_path, tensors, parts=2)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="lie beside it"):
        load_hf(tmp_path)
    names = sorted(f.name for f in tmp_path.glob("*.safetensors"))
    index["weight_map"] |= dict.fromkeys(index["weight_map"], names[0])
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"not in {names[0]}"):
        load_hf(tmp_path)


def test_no_config_and_no_folder(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    _folder(tmp_path, tensors)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json, which is not there; the folder has model.safetensors"):
        load_hf(tmp_path)
    with pytest.raises(ValueError, match="Weights are in a folder"):
        load_hf(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"config.json is JSON"):
        load_hf(tmp_path)


@pytest.mark.parametrize("code", ["I8", "F64"])
def test_types_that_are_no_weights(code: str, tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"] = np.ones(32, {"I8": np.int8, "F64": np.float64}[code])
    with pytest.raises(ValueError, match=f"{code} of model.norm.weight"):
        load_hf(_folder(tmp_path, tensors))
    if code == "F64":
        assert load_hf(tmp_path, dtype="float32")[1]["norm"]["scale"].dtype == jnp.float32


def test_dtype_is_a_float_of_weights(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    _folder(tmp_path, tensors)
    with pytest.raises(ValueError, match="bfloat16, float16 or float32"):
        load_hf(tmp_path, dtype="int8")
    model, params = load_hf(tmp_path)
    with pytest.raises(ValueError, match="bfloat16, float16 or float32"):
        save_hf(tmp_path / "to", model, params, dtype="float64")


@pytest.mark.quick
def test_parameters_of_another_model_are_not_written(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    model, params = load_hf(_folder(tmp_path / "from", tensors))
    with pytest.raises(ValueError, match=r"\['embed'\] is \[64, 32\]. Got \[65, 32\]"):
        save_hf(tmp_path / "to", model, {**params, "embed": jnp.zeros((65, 32))})
    with pytest.raises(ValueError, match=r"without .*'head'"):
        save_hf(tmp_path / "to", model, {name: leaf for name, leaf in params.items() if name != "head"})
    assert not (tmp_path / "to").exists()


@pytest.mark.quick
def test_a_disk_that_fills_up_leaves_what_was_there(
    tmp_path: Path, tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path / "model", tensors)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    model, params = load_hf(folder)
    written = TensorWriter.write
    count = 0

    def full(self: TensorWriter, name: str, array: np.ndarray) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(self, name, array)

    monkeypatch.setattr(TensorWriter, "write", full)
    with pytest.raises(OSError, match="No space"):
        save_hf(folder, model, params, overwrite=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_room_is_asked_for_first(
    tmp_path: Path, tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, params = load_hf(_folder(tmp_path / "from", tensors))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(ValueError, match="room for the weights"):
        save_hf(tmp_path / "to", model, params)
    assert not (tmp_path / "to").exists()


def test_a_writer_takes_what_was_announced(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"next is a \[2\]"), TensorWriter(tmp_path / "x", [("a", "F32", (2,))]) as out:
        out.write("b", np.zeros(2, np.float32))
    with (
        pytest.raises(ValueError, match=r"1 tensors. Got 0 were written"),
        TensorWriter(tmp_path / "y", [("a", "F32", (2,))]),
    ):
        pass


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    shapes = [("none", "F32", (0, 3)), ("scalar", "BF16", ())]
    with TensorWriter(tmp_path / "model.safetensors", shapes) as out:
        out.write("none", np.zeros((0, 3), np.float32))
        out.write("scalar", np.full((), 1.5, np.float32))
    entries = tensor_entries(tmp_path)
    assert entries["none"].view().shape == (0, 3)
    assert float(entries["scalar"].view()) == 1.5


@pytest.mark.quick
def test_an_unknown_architecture_names_those_known() -> None:
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3MoeForCausalLM"):
        config_from_hf({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    with pytest.raises(ValueError, match=r"'lama'. Did you mean 'llama'"):
        config_from_hf({**CONFIG, "architectures": None, "model_type": "lama"})
    with pytest.raises(ValueError, match="is of the model_type llama"):
        config_from_hf({**CONFIG, "model_type": "mistral"})


def test_a_process_that_is_killed_leaves_what_was_there(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    folder = _folder(tmp_path / "model", tensors)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    program = (
        "import os, signal, sys\n"
        "from capibara.models.weights import load_hf, save_hf, tensor_file\n"
        "written = tensor_file.TensorWriter.write\n"
        "def killed(self, name, array):\n"
        "    written(self, name, array)\n"
        "    if name == 'model.norm.weight':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "tensor_file.TensorWriter.write = killed\n"
        "save_hf(sys.argv[1], *load_hf(sys.argv[1]), overwrite=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    save_hf(folder, *load_hf(folder), overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
