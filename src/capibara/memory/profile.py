"""jax's profile of device memory, read: which Python lines made the buffers that are live.

`jax.profiler.device_memory_profile()` is a gzipped protocol buffer in the format of pprof. The fields that are needed
are few, so they are read here, and no library for the format is.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.errors import rule_error

__all__ = ["Frame", "LiveBuffers", "made_by", "read_profile"]

# pprof's profile.proto.
_SAMPLE, _LOCATION, _FUNCTION, _STRING = 2, 4, 5, 6
_SAMPLE_LOCATIONS, _SAMPLE_VALUES, _SAMPLE_LABEL = 1, 2, 3
_LABEL_KEY, _LABEL_STRING = 1, 2
_LOCATION_ID, _LOCATION_LINE = 1, 4
_LINE_FUNCTION, _LINE_NUMBER = 1, 2
_FUNCTION_ID, _FUNCTION_NAME, _FUNCTION_FILE = 1, 2, 4


@dataclass(frozen=True)
class Frame:
    """One function of a call stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({os.path.basename(self.file)}:{self.line})"


@dataclass(frozen=True)
class LiveBuffers:
    """Buffers on one device that were made at one place of the program."""

    device: str
    count: int
    bytes: int
    """Of all of them."""
    stack: tuple[Frame, ...]
    """The innermost call first."""


def read_profile(data: bytes) -> list[LiveBuffers]:
    """The buffers of a profile, the most bytes first. Compiled programs, which it lists too, are left out.

    >>> import jax, jax.numpy as jnp
    >>> array = jnp.ones((64, 1024)) + 1
    >>> found = read_profile(jax.profiler.device_memory_profile())
    >>> any(one.bytes >= 64 * 1024 * 4 for one in found)
    True
    """
    try:
        return _read(gzip.decompress(data))
    except (OSError, EOFError, zlib.error, IndexError, UnicodeDecodeError, KeyError) as damaged:
        raise rule_error(
            "A profile of device memory is what jax.profiler.device_memory_profile gave, whole",
            f"{len(data)} bytes: {damaged}",
            "take the profile again",
        ) from damaged


def _read(profile: bytes) -> list[LiveBuffers]:
    parts: dict[int, list[Any]] = {_SAMPLE: [], _LOCATION: [], _FUNCTION: [], _STRING: []}
    for number, value in _fields(profile):
        if number in parts:
            parts[number].append(value)
    if not parts[_STRING]:
        raise EOFError("it is empty")
    strings = [text.decode() for text in parts[_STRING]]
    functions = {}
    for one in parts[_FUNCTION]:
        fields = dict(_fields(one))
        functions[fields[_FUNCTION_ID]] = (
            strings[fields.get(_FUNCTION_NAME, 0)],
            strings[fields.get(_FUNCTION_FILE, 0)],
        )
    frames = {}
    for one in parts[_LOCATION]:
        lines = [dict(_fields(line)) for number, line in _fields(one) if number == _LOCATION_LINE]
        frames[dict(_fields(one))[_LOCATION_ID]] = tuple(
            Frame(*functions[line[_LINE_FUNCTION]], line.get(_LINE_NUMBER, 0)) for line in lines
        )
    found = []
    for one in parts[_SAMPLE]:
        labels = {}
        for number, value in _fields(one):
            if number == _SAMPLE_LABEL:
                label = dict(_fields(value))
                labels[strings[label[_LABEL_KEY]]] = strings[label.get(_LABEL_STRING, 0)]
        if labels.get("kind") != "buffer":
            continue
        count, size = _numbers(one, _SAMPLE_VALUES)
        stack = tuple(frame for place in _numbers(one, _SAMPLE_LOCATIONS) for frame in frames[place])
        found.append(LiveBuffers(labels.get("device", ""), count, size, stack))
    return sorted(found, key=lambda one: -one.bytes)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """A message's field numbers and values: numbers, or bytes of what is nested."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(message, at)
        else:
            length = {1: 8, 5: 4}[wire]
        if at + length > len(message):
            raise EOFError("it was cut short")
        yield number, message[at : at + length]
        at += length


def _numbers(message: bytes, wanted: int) -> list[int]:
    """A repeated number: packed into bytes, or one field each."""
    found: list[int] = []
    for number, value in _fields(message):
        if number != wanted:
            continue
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return found


def _folder(module: str) -> str:
    spec = importlib.util.find_spec(module)
    return "" if spec is None or spec.origin is None else str(Path(spec.origin).parent) + os.sep


def made_by(stack: tuple[Frame, ...]) -> tuple[Frame | None, Frame | None]:
    """The innermost function that is not jax's own; and of those, the innermost that is the user's: neither of this
    library, nor of Python's or another that is installed."""
    jaxs = (_folder("jax"), _folder("jaxlib"))
    installed = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
    outside = [frame for frame in stack if not frame.file.startswith(jaxs)]
    own = [frame for frame in outside if not frame.file.startswith((_folder("capibara"), *installed))]
    return (outside[0] if outside else None), (own[0] if own else None)
