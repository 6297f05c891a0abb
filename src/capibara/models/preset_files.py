"""The files of presets: by name or path, over those that they build on, under the environment's keys and overrides.

A file may build on another, by name or path: `base = "small"`. What counts is, from the strongest: overrides
("train.steps=100"), the environment (`CAPIBARA__TRAIN__STEPS=100`), the file, its base.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from capibara import toml_tables
from capibara.errors import rule_error, unknown_name
from capibara.toml_tables import Table

__all__ = ["FOLDER", "load_table", "name_of", "overridden", "preset_names"]

FOLDER = Path(__file__).parents[1] / "config" / "configs_toml"
_SECTIONS = ("model", "tpu", "train", "optimizer", "mesh", "data", "checkpoint", "log", "lora", "scaling")
_ENVIRONMENT = "CAPIBARA__"
_MOST_BASES = 8


def preset_names() -> list[str]:
    """The presets that ship with the package; those in a folder as "folder/name"."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml"))


def _file_of(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if text in preset_names():
        return FOLDER / f"{text}.toml"
    file = Path(text)
    if file.is_file() and file.suffix != ".json":
        return file
    # The documents write a shipped preset by its path in the package: that works from any directory.
    _, marker, inside = text.replace("\\", "/").rpartition("configs_toml/")
    if marker and (FOLDER / inside).is_file():
        return FOLDER / inside
    if file.is_dir() or (file.suffix == ".json" and file.is_file()):
        raise rule_error(
            "A preset is a TOML file or a shipped name",
            f"{text!r}, a folder or a config.json",
            "load a Hugging Face folder with capibara.models.from_hf, and plan it by capibara plan FOLDER",
        )
    if not file.suffix:
        raise unknown_name("preset", text, preset_names())
    raise rule_error(
        "A preset is a TOML file or a shipped name",
        f"{text!r}, which is not there",
        f"name a file, or one of {', '.join(preset_names())}",
    )


def name_of(name_or_path: str | Path) -> str:
    """What a preset is called: its shipped name, or its file's without folder and ending."""
    text = str(name_or_path)
    return text if text in preset_names() else _file_of(text).stem


def load_table(
    name_or_path: str | Path, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Table:
    """The sections of a preset or file over those of its bases, with the environment's and the overrides on top."""
    file = _file_of(name_or_path)
    table = Table({})
    for _ in range(_MOST_BASES):
        read = toml_tables.read(file)
        base = read.values.pop("base", None)
        table = table.over(read)
        if base is None:
            break
        if not isinstance(base, str):
            raise rule_error("base is text: a preset's name or a file", f"{base!r} in {file}", 'write base = "small"')
        beside = file.parent / base
        file = _file_of(beside if beside.suffix and beside.is_file() else base)
    else:
        raise rule_error(f"A file has at most {_MOST_BASES} bases", f"more, the last {file}", "look for a circle")
    return overridden(table, overrides, environment)


def overridden(table: Table, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> Table:
    """The table with the environment's keys and the overrides on top; a section that nobody knows is refused."""
    for name, value in sorted((os.environ if environment is None else environment).items()):
        if name.startswith(_ENVIRONMENT):
            key = name.removeprefix(_ENVIRONMENT).lower().replace("__", ".")
            table = toml_tables.set_key(table, *toml_tables.parse_override(f"{key}={value}"), f"${name}")
    for text in overrides:
        table = toml_tables.set_key(table, *toml_tables.parse_override(text), f"--set {text}")
    for section in table.values:
        if section not in _SECTIONS:
            where = table.place(section)
            raise unknown_name(f"section{f' at {where}' if where else ''}", section, _SECTIONS)
    return table
