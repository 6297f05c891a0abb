"""Plain data as YAML, for files that people read before they send them off. No library is needed to write it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["yaml_text"]

_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")
# Words that a reader takes for something else than text.
_TAKEN = re.compile(r"(?i:y|n|yes|no|true|false|on|off|null|nan|inf)")
# JSON writes these as they are, and YAML has them by their number alone.
_UNPRINTABLE = re.compile("[^\n\x20-\x7e\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def yaml_text(data: Any) -> str:
    """Mappings, sequences, text, whole numbers, booleans and None as a YAML document.

    >>> print(yaml_text({"run": "cd work\\nmake\\n", "nodes": [{"rank": 0, "name": "no"}], "envs": {}}), end="")
    run: |
      cd work
      make
    nodes:
      - rank: 0
        name: "no"
    envs: {}
    """
    return _value(data, 0).lstrip("\n ") + "\n"


def _value(data: Any, depth: int) -> str:
    """What stands behind `key:` or `-`: on the same line after a blank, or below."""
    indent = "  " * depth
    if isinstance(data, Mapping) and data:
        return "".join(f"\n{indent}{_scalar(str(key))}:{_value(value, depth + 1)}" for key, value in data.items())
    if isinstance(data, Sequence) and not isinstance(data, str) and data:
        items = (_value(value, depth + 1) for value in data)
        # A mapping's first line moves up to the dash.
        return "".join(f"\n{indent}- {item.lstrip(chr(10) + ' ')}" for item in items)
    if isinstance(data, str) and _is_block(data):
        return " |" + "".join(f"\n{indent}{line}" if line else "\n" for line in data.splitlines())
    return f" {_scalar(data)}"


def _is_block(text: str) -> bool:
    """Whether `|` gives it back: whole lines, the first of which starts with no blank, and the last is not empty."""
    whole = text.endswith("\n") and not text.endswith("\n\n") and text[0] not in " \n"
    return whole and not _UNPRINTABLE.search(text) and text.splitlines() == text.split("\n")[:-1]


def _scalar(data: Any) -> str:
    if isinstance(data, str) and _PLAIN.fullmatch(data) and not _TAKEN.fullmatch(data):
        return data
    if isinstance(data, Mapping | Sequence) and not isinstance(data, str):
        return "{}" if isinstance(data, Mapping) else "[]"
    if data is not None and not isinstance(data, str | int):
        raise TypeError(f"YAML of a {type(data).__name__} is not written here")
    quoted = json.dumps(data, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
