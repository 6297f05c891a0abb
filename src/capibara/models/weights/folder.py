"""A folder in the Hugging Face layout: config.json, and safetensors in one file or several with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from capibara.errors import rule_error
from capibara.models.weights.tensor_file import TensorEntry, TensorFile

__all__ = [
    "BESIDE",
    "CONFIG",
    "GENERATION_CONFIG",
    "INDEX",
    "SINGLE",
    "TOKENIZER",
    "is_hf",
    "read_config",
    "read_json",
    "tensor_entries",
]

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
GENERATION_CONFIG = "generation_config.json"
BESIDE = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json", GENERATION_CONFIG,
)  # fmt: skip
"""What else a folder has that belongs to the model: how its text becomes tokens, and how it is sampled."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def is_hf(path: str | Path) -> bool:
    """Whether this is a config.json, or a folder with one."""
    place = Path(path)
    return (place / CONFIG).is_file() or (place.suffix == ".json" and place.is_file())


def read_json(file: Path, what: str) -> dict[str, Any]:
    """The keys of a JSON file, which messages call `what`."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise rule_error(f"{what} is JSON", f"{file}: {error}", "fetch or write it again") from error
    if not isinstance(values, dict):
        raise rule_error(f"{what} is a table of keys", f"{file}: {type(values).__name__}", "fetch it again")
    return values


def read_config(path: str | Path) -> dict[str, Any]:
    """The keys of a config.json, or of the one in a folder."""
    place = Path(path)
    file = place / CONFIG if place.is_dir() else place
    if not file.is_file():
        there = sorted(one.name for one in place.iterdir())[:8] if place.is_dir() else []
        raise rule_error(
            "A Hugging Face model is a folder with config.json and safetensors",
            f"{file}, which is not there" + (f"; the folder has {', '.join(there)}" if there else ""),
            "name the folder that save_pretrained wrote, or that was downloaded",
        )
    return read_json(file, "config.json")


def tensor_entries(folder: str | Path) -> dict[str, TensorEntry]:
    """Every tensor of a folder, by name: of its index where it has one, or else of its single file."""
    place = Path(folder)
    if (place / INDEX).is_file():
        return _indexed(place)
    if (place / SINGLE).is_file():
        return TensorFile(place / SINGLE).entries
    # Some models have a file of another name; several without an index may be parts of different things.
    others = sorted(place.glob("*.safetensors")) if place.is_dir() else []
    if len(others) == 1:
        return TensorFile(others[0]).entries
    if others:
        raise rule_error(
            f"Weights in several files have {INDEX}, which says what is where",
            f"{place} with {', '.join(file.name for file in others[:4])} and none",
            "fetch the index too",
        )
    pickles = sorted(file.name for file in place.iterdir() if file.suffix in _PICKLES) if place.is_dir() else []
    if pickles:
        raise rule_error(
            "Weights are safetensors: a pickle runs whatever code its writer put into it",
            f"{place} with {', '.join(pickles[:4])}",
            "convert them where you trust them: "
            f"AutoModelForCausalLM.from_pretrained({str(place)!r}).save_pretrained(NEW_FOLDER)",
        )
    raise rule_error(f"Weights are {SINGLE}, or several files and {INDEX}", f"{place} without", "name their folder")


def _indexed(place: Path) -> dict[str, TensorEntry]:
    weight_map = read_json(place / INDEX, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise rule_error(f"{INDEX} has weight_map, tensor to file", f"{place / INDEX} without", "fetch it again")
    names = list(dict.fromkeys(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise rule_error(f"Files of {INDEX} lie beside it", repr(name), "write their bare names")
    absent = [name for name in names if not (place / name).is_file()]
    if absent:
        raise rule_error(
            f"Every file that {INDEX} names is there",
            f"{place} without {', '.join(absent[:4])}{' and more' * (len(absent) > 4)}, {len(absent)} of {len(names)}",
            "fetch what is missing",
        )
    files = {name: TensorFile(place / name).entries for name in names}
    for tensor, name in weight_map.items():
        if tensor not in files[name]:
            raise rule_error(
                f"A tensor is in the file that {INDEX} names for it", f"{tensor!r} not in {name}", "fetch both again"
            )
    # What a file has beyond the index is no tensor of this model to transformers either; the check of names sees it.
    entries: dict[str, TensorEntry] = {}
    for name in names:
        for tensor, entry in files[name].items():
            if weight_map.get(tensor, name) == name:
                entries[tensor] = entry
    return entries
