"""Tables of TOML as frozen dataclasses: unknown keys are refused with the nearest, types with file and line.

A config of this library is a dataclass whose fields have plain types: int, float, bool, str, another such dataclass, a
tuple, a mapping, or one of these and None. `build` makes it from a table; `read` gets the table of a file, with the
line of every key; `set_keys` lays overrides ("train.steps=100") over it. None is written "none", for TOML has no word
for it.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from capibara.errors import rule_error, unknown_name

__all__ = ["Table", "build", "build_part", "parse_override", "plain", "read", "set_key", "to_toml"]

T = TypeVar("T")

_HEADER = re.compile(r"^\s*\[\[?\s*([A-Za-z0-9_\-.\"' ]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-.\"']+)\s*=")


@dataclasses.dataclass(frozen=True)
class Table:
    """Values by key, nested, and where each dotted key was written ("file.toml:12", "--set")."""

    values: dict[str, Any]
    places: dict[str, str] = dataclasses.field(default_factory=dict)

    def over(self, other: Table) -> Table:
        """This table with the other's keys where it has none of its own."""
        return Table(_merged(other.values, self.values), {**other.places, **self.places})

    def place(self, path: str) -> str | None:
        """Where a dotted key was written: itself, the table or line that it is in, or the first key below it."""
        return _place(path, self.places)


def _place(path: str, places: Mapping[str, str]) -> str | None:
    above = path
    while above:
        if above in places:
            return places[above]
        above = above.rpartition(".")[0]
    return next((place for key, place in places.items() if key.startswith(f"{path}.")), None)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def read(file: Path) -> Table:
    """The table of a TOML file."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise rule_error("TOML is UTF-8", f"{file}, byte {error.start}: {error.reason}", "save it as UTF-8") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise rule_error("A config is TOML", f"{file}: {error}", "mend that line") from error
    return Table(values, dict(_places(text, file)))


def _places(text: str, file: Path) -> Iterable[tuple[str, str]]:
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = _HEADER.match(line)
        if header:
            section = header[1].replace('"', "").replace("'", "") + "."
            yield section[:-1], f"{file}:{number}"
            continue
        key = _KEY.match(line)
        if key:
            yield section + key[1].replace('"', "").replace("'", ""), f"{file}:{number}"


def parse_override(text: str) -> tuple[str, Any]:
    """("a.b", value) of "a.b=value"; the value is read as TOML, and is text where it is none.

    >>> parse_override("train.steps=100"), parse_override("data.path=books/*.txt")
    (('train.steps', 100), ('data.path', 'books/*.txt'))
    """
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise rule_error("An override is written key=value", repr(text), "use e.g. train.steps=100")
    try:
        return key.strip(), tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def set_key(table: Table, key: str, value: Any, place: str) -> Table:
    """The table with one dotted key set."""
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return Table(nested, {key: place}).over(table)


def build(kind: type[T], table: Table, path: str = "") -> T:
    """The dataclass of this kind from the part of the table at `path` ("" is all of it).

    A `ValueError` of the class's own checks says where its table was written.
    """
    values: Any = table.values
    for part in path.split(".") if path else ():
        values = values.get(part, {})
    return _build(kind, values, path, table.places)


def build_part(kind: type[T], values: Any, table: Table, path: str) -> T:
    """The dataclass of this kind from values that stand at `path` of the table, where it is written what they are."""
    return _build(kind, values, path, table.places)


def _build(kind: type[T], values: Any, path: str, places: Mapping[str, str]) -> T:
    if not isinstance(values, Mapping):
        raise rule_error(f"{path or 'a config'} is a table of keys", _shown(values, path, places), f"write [{path}]")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    arguments = {}
    for key, value in values.items():
        dotted = f"{path}.{key}" if path else key
        if key not in fields:
            where = _place(dotted, places)
            raise unknown_name(f"key of {path or 'the config'}{f' at {where}' if where else ''}", key, fields)
        arguments[key] = _converted(hints[key], value, dotted, places)
    missing = [
        name
        for name, field in fields.items()
        if name not in arguments
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        where = _place(path, places)
        raise rule_error(
            f"{path or 'The config'} names {', '.join(missing)}",
            f"{where or 'a table'} without",
            f"add {missing[0]} and its value",
        )
    try:
        return kind(**arguments)
    except ValueError as error:
        raise _located(error, path, places) from error


def _located(error: ValueError, path: str, places: Mapping[str, str]) -> ValueError:
    """The error of a class's own checks, of the same class, with where its table was written and what overrode it."""
    overridden = [place for key, place in places.items() if key.startswith(f"{path}.") and place[0] in "-$"]
    written = [place for place in (_place(path, places), *overridden) if place]
    if not written:
        return error
    located = type(error)(f"{', '.join(dict.fromkeys(written))}: {error}")
    located.__dict__.update(error.__dict__)  # rule, got and fix
    return located


def _converted(hint: Any, value: Any, path: str, places: Mapping[str, str]) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in inner and (value is None or value == "none"):
            return None
        choices = [one for one in inner if one is not type(None)]
        for choice in choices[:-1]:
            try:
                return _converted(choice, value, path, places)
            except ValueError:
                continue
        return _converted(choices[-1], value, path, places)
    if origin is typing.Literal:
        if any(value == one and type(value) is type(one) for one in inner):  # true is no 1
            return value
        raise rule_error(
            f"{path} is one of {', '.join(map(repr, inner))}", _shown(value, path, places), f"use {inner[0]!r}"
        )
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast("type", hint)):
            return value
        return _build(typing.cast("type", hint), value, path, places)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise rule_error(f"{path} is a list", _shown(value, path, places), f"write {path.split('.')[-1]} = [...]")
        return tuple(_converted(inner[0], one, path, places) for one in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise rule_error(f"{path} is a table of keys", _shown(value, path, places), f"write [{path}]")
        return {
            key: one if inner[1] is Any else _converted(inner[1], one, f"{path}.{key}", places)
            for key, one in value.items()
        }
    return value if hint is Any else _scalar(hint, value, path, places)


def _scalar(hint: type, value: Any, path: str, places: Mapping[str, str]) -> Any:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    examples = {int: "8", float: "0.1", bool: "true", str: '"text"'}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number and abs(value) <= sys.float_info.max:  # not nan, and no whole number beyond
        return float(value)
    if hint is int and is_number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if hint in (bool, str) and type(value) is hint:
        return value
    raise rule_error(
        f"{path} is {words.get(hint, hint)}",
        _shown(value, path, places),
        f"use e.g. {path.split('.')[-1]} = {examples.get(hint)}",
    )


def _shown(value: Any, path: str, places: Mapping[str, str]) -> str:
    where = _place(path, places)
    return f"{value!r} at {where}" if where else repr(value)


def plain(config: Any) -> Any:
    """A dataclass as tables, lists and values that TOML and JSON take: None is "none", and what is a default stays."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config) if field.init}
    if isinstance(config, Mapping):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [plain(value) for value in config]
    return "none" if config is None else config


def to_toml(values: Mapping[str, Any], path: str = "") -> str:
    """Tables of plain values as TOML text, keys before sections."""
    scalars = [(key, value) for key, value in values.items() if not isinstance(value, Mapping)]
    tables = [(key, value) for key, value in values.items() if isinstance(value, Mapping)]
    lines = [f"{_key(key)} = {_toml_value(value)}" for key, value in scalars]
    header = [f"[{path}]"] if path and (lines or not tables) else []
    parts = ["\n".join([*header, *lines])] if header or lines else []
    parts += [to_toml(value, f"{path}.{_key(key)}" if path else _key(key)).rstrip("\n") for key, value in tables]
    return "\n\n".join(part for part in parts if part) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        # Control characters have one spelling that every TOML reader takes.
        return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda c: f"\\u{ord(c[0]):04x}", escaped) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(one) for one in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    return repr(value)
