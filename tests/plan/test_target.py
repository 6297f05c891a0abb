"""Targets: presets and functions of a file, and what is said of those that cannot be planned."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from capibara.models.preset import load_preset
from capibara.plan.target import Recipe, TargetError, load_job

PROGRAM = """
import functools
import jax
import jax.numpy as jnp
import dataclasses
from beside import WIDTH

@dataclasses.dataclass
class Config:
    width: int = WIDTH

def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)

def predict(params, x):
    return x @ params["w"]

def broken(params, batch):
    return params["missing"]

def shapes(batch=8):
    return {"w": jax.ShapeDtypeStruct((WIDTH, 4), "float32")}, {"x": jax.ShapeDtypeStruct((batch, WIDTH), "float32")}

def named():
    params, batch = shapes()
    return {"args": (params, batch["x"]), "roles": ("params", "batch"), "donate": (1,), "tokens": 99}

def misspelt():
    return {"args": (), "role": ()}

def bound(params, batch, kind):
    return params["w"] if kind == "linear" else None

def static():
    return (*shapes(), "linear")

def miscounted():
    return {"args": shapes(), "tokens": "many"}

linear = functools.partial(bound, kind="linear")

def failing():
    raise RuntimeError("no shapes today")

def nothing():
    return None

def needy(batch):
    return shapes(batch)

def strange(rows):
    return shapes(rows)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("WIDTH = 16\n", encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    return str(program)


@pytest.mark.quick
def test_a_loss_becomes_a_training_step(file: str) -> None:
    job = load_job(Recipe(f"{file}:loss", train=True, batch=32, remat="none", optimizer="sgd"))
    fn, args = job.build(**job.defaults())
    assert job.roles == ("params", "state", "batch")
    assert args[2]["x"].shape == (32, 16)
    params, _, value = jax.eval_shape(fn, *args)
    assert params["w"].shape == (16, 4)
    assert value.shape == ()


def test_any_function_with_a_dict_of_shapes(file: str) -> None:
    job = load_job(Recipe(f"{file}:predict", shapes="named"))
    assert (job.roles, job.donate, job.tokens, job.name) == (("params", "batch"), (1,), 99, "predict")


def test_a_preset_takes_overrides() -> None:
    job = load_job(Recipe("llama-1b", batch=16, sequence=1024, remat="full", accumulate=2))
    assert job.tokens == 16 * 1024
    assert job.defaults() == {"remat": "full", "accumulate": 2}


def test_its_own_error_is_kept_and_shown(file: str) -> None:
    with pytest.raises(TargetError, match=r"does not trace\. KeyError: 'missing'") as caught:
        load_job(Recipe(f"{file}:broken", train=True))
    assert isinstance(caught.value.__cause__, KeyError)
    assert "--shapes" not in str(caught.value), "its arguments are right"
    with pytest.raises(TargetError, match=r"TypeError: .*\n.*what shapes\(\) returns, 2 arguments: name the function"):
        load_job(Recipe(f"{file}:shapes"))
    with pytest.raises(TargetError, match="RuntimeError: no shapes today"):
        load_job(Recipe(f"{file}:loss", shapes="failing"))


def test_what_is_bound_by_a_partial_is_planned(file: str) -> None:
    fn, args = load_job(Recipe(f"{file}:linear")).build()
    assert fn(*args) is args[0]["w"]


def test_a_file_that_cannot_be_loaded(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import no_such_module\n", encoding="utf-8")
    with pytest.raises(TargetError, match=r"bad.py cannot be loaded. ModuleNotFoundError: .*no_such_module"):
        load_job(Recipe(f"{bad}:loss"))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"target": "{file}:lss"}, "Did you mean 'loss'"),
        ({"target": "{file}"}, "file.py:function"),
        ({"target": "gone.py:loss"}, "which is not there"),
        ({"target": "{file}:loss", "shapes": "shaps"}, "Did you mean 'shapes'"),
        ({"target": "{file}:loss", "shapes": "misspelt"}, "Did you mean 'roles'"),
        ({"target": "{file}:loss", "shapes": "nothing"}, "NoneType"),
        ({"target": "{file}:loss", "shapes": "miscounted"}, "whole number from 1 up. Got 'many'"),
        ({"target": "{file}:bound", "shapes": "static"}, "have str: bind what is no array with functools.partial"),
        ({"target": "{file}:loss", "shapes": "needy"}, "without batch. Fix: give --batch N"),
        ({"target": "{file}:loss", "shapes": "strange"}, "without rows. Fix: give its parameters defaults"),
        ({"target": "{file}:loss", "sequence": 4}, "a function of \\(batch\\)"),
        ({"target": "{file}:loss", "remat": "full"}, "add --train"),
        ({"target": "{file}:predict", "shapes": "named", "train": True}, "sets roles itself"),
        ({"target": "llama-8b"}, "Did you mean 'llama-7b'"),
    ],
)
def test_what_cannot_be_planned_says_why(file: str, recipe: dict[str, object], said: str) -> None:
    words = {key: value.format(file=file) if isinstance(value, str) else value for key, value in recipe.items()}
    with pytest.raises(ValueError, match=said):
        load_job(Recipe(**words))  # type: ignore[arg-type]


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}',
        encoding="utf-8",
    )
    return folder


@pytest.mark.quick
def test_a_hugging_face_folder_is_planned_by_its_config(hf_folder: Path) -> None:
    for target in (hf_folder, hf_folder / "config.json"):
        job = load_job(Recipe(str(target)))
        assert (job.tokens, job.name) == (8 * 512, "tiny-llama")
    job = load_job(Recipe(str(hf_folder), batch=4, sequence=32, remat="none", optimizer="sgd"))
    fn, args = job.build(**job.defaults())
    assert args[2]["inputs"].shape == (4, 32)
    assert args[0]["embed"].shape == (256, 64)
    assert jax.eval_shape(fn, *args)[2].shape == ()


def test_what_of_a_hugging_face_folder_cannot_be_planned(hf_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"made for 512 tokens. Got --sequence 1024"):
        load_job(Recipe(str(hf_folder), sequence=1024))
    with pytest.raises(ValueError, match="capibara plan FOLDER"):
        load_preset(hf_folder)
    with pytest.raises(ValueError, match="capibara plan FOLDER"):
        load_preset(hf_folder / "config.json")
    with pytest.raises(ValueError, match="which is not there"):
        load_job(Recipe(str(hf_folder / "other.json")))
    (hf_folder / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"'gpt2'.*'llama'"):
        load_job(Recipe(str(hf_folder)))
