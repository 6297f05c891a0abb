"""The last samples of a monitor inside of a recording: rows of figures behind the events, in a ring of their own.

Events come at every phase of a step and samples once a second or so: in one ring the steps of a fast run would push out
its minutes of sensors. A series has a name and a column; names are written before the first row that has them, and
names and rows each have a checksum, so that what was being written when the process was killed is left out.
"""

from __future__ import annotations

import logging
import math
import mmap
import struct
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from capibara.errors import say_once

__all__ = ["SampleRing", "Samples", "read_samples", "ring_rows"]

_log = logging.getLogger("capibara.observe")

_MAGIC = b"CAPISMP1"
_HEADER = struct.Struct("<8sII")  # magic, rows, series
_NAME_BYTES = 128
_NAME = struct.Struct(f"<I{_NAME_BYTES - 4}s")  # CRC-32, source and metric with a zero between them
_FIELDS = struct.Struct("<QdI")  # number, time, process id
_CRC = struct.Struct("<I")
_SERIES = 128
"""As many as eight GPUs and their host tell."""


@dataclass(frozen=True)
class Samples:
    """What sensors said, the oldest first; NaN where a series had no figure."""

    times: tuple[float, ...] = ()
    series: Mapping[tuple[str, str], tuple[float, ...]] | None = None
    """(source, metric) -> a value a sample."""

    def since(self, time: float) -> Samples:
        """Those of this moment on."""
        kept = [place for place, when in enumerate(self.times) if when >= time]
        series = {key: tuple(values[place] for place in kept) for key, values in (self.series or {}).items()}
        told = {key: values for key, values in series.items() if not all(map(math.isnan, values))}
        return Samples(tuple(self.times[place] for place in kept), told)


class SampleRing:
    """Writes rows into a mapped file, from `at` on; goes on with the rows that lie there."""

    def __init__(self, mapped: mmap.mmap, at: int, rows: int) -> None:
        self._map, self._at, self._rows = mapped, at, rows
        self._number = 0
        self._columns: dict[tuple[str, str], int] = {}
        lying = mapped[at : at + self.size(rows)]
        found = _read(lying) if ring_rows(lying) == rows else None
        if found is None:
            # Nothing, or the ring of another version or a damaged one, whose rows lie elsewhere.
            mapped[at : at + len(lying)] = _HEADER.pack(_MAGIC, rows, _SERIES).ljust(len(lying), b"\0")
        else:
            names, lines = found
            self._columns = {name: column for column, name in names.items()}
            self._number = max((number for number, *_ in lines), default=-1) + 1

    @staticmethod
    def size(rows: int) -> int:
        """Bytes of a ring of so many rows."""
        return _HEADER.size + _SERIES * _NAME_BYTES + rows * _row_bytes(_SERIES)

    def append(self, time: float, pid: int, figures: Mapping[tuple[str, str], float]) -> None:
        values = array("f", [math.nan]) * _SERIES
        for key, value in figures.items():
            column = self._columns.get(key)
            if column is None:
                column = self._new_column(key)
            if column is not None:
                values[column] = value
        body = _FIELDS.pack(self._number, time, pid) + values.tobytes()
        size = _row_bytes(_SERIES)
        at = self._at + _HEADER.size + _SERIES * _NAME_BYTES + size * (self._number % self._rows)
        self._map[at : at + size] = body + _CRC.pack(zlib.crc32(body))
        self._number += 1

    def _new_column(self, key: tuple[str, str]) -> int | None:
        taken = set(self._columns.values())
        column = next((place for place in range(_SERIES) if place not in taken), None)
        name = "\0".join(key).encode()
        if column is None or len(name) > _NAME_BYTES - 4:
            say_once(_log, key, "%s of %s is not recorded: a recording has %d series", key[1], key[0], _SERIES)
            return None
        padded = name.ljust(_NAME_BYTES - 4, b"\0")
        at = self._at + _HEADER.size + column * _NAME_BYTES
        self._map[at : at + _NAME_BYTES] = _NAME.pack(zlib.crc32(padded), padded)
        self._columns[key] = column
        return column


def _row_bytes(series: int) -> int:
    return _FIELDS.size + 4 * series + _CRC.size


_Row = tuple[int, float, "array[float]"]


def _read(data: bytes) -> tuple[dict[int, tuple[str, str]], list[_Row]] | None:
    """Names by column, and rows in their order; None where there is no ring."""
    if len(data) < _HEADER.size or data[: len(_MAGIC)] != _MAGIC:
        return None
    _, rows, series = _HEADER.unpack(data[: _HEADER.size])
    # The header has no checksum, and a file may be cut off: no more is looked for than there is.
    series = min(series, (len(data) - _HEADER.size) // _NAME_BYTES)
    size = _row_bytes(series)
    rows = min(rows, (len(data) - _HEADER.size - series * _NAME_BYTES) // size)
    names: dict[int, tuple[str, str]] = {}
    for column in range(series):
        at = _HEADER.size + column * _NAME_BYTES
        crc, name = _NAME.unpack(data[at : at + _NAME_BYTES])
        if name.strip(b"\0") and zlib.crc32(name) == crc:
            source, metric = name.rstrip(b"\0").decode(errors="replace").split("\0")
            names[column] = source, metric
    lines: list[_Row] = []
    for place in range(rows):
        at = _HEADER.size + series * _NAME_BYTES + place * size
        line = data[at : at + size]
        body = line[: -_CRC.size]
        if body == b"\0" * len(body) or _CRC.unpack(line[-_CRC.size :])[0] != zlib.crc32(body):
            continue  # never written, or the one that was being written
        number, time, _pid = _FIELDS.unpack(body[: _FIELDS.size])
        values = array("f")
        values.frombytes(body[_FIELDS.size :])
        lines.append((number, time, values))
    return names, sorted(lines, key=lambda line: line[0])


def read_samples(data: bytes) -> Samples:
    """The samples of a ring; none where a recording has no ring."""
    found = _read(data)
    if found is None:
        return Samples((), {})
    names, lines = found
    series = {name: tuple(values[column] for _, _, values in lines) for column, name in names.items()}
    return Samples(tuple(time for _, time, _ in lines), series)


def ring_rows(data: bytes) -> int | None:
    """How many rows the ring in a recording has; None where there is none that could be gone on with."""
    if len(data) < _HEADER.size or data[: len(_MAGIC)] != _MAGIC:
        return None
    _, rows, series = _HEADER.unpack(data[: _HEADER.size])
    return int(rows) if rows and series == _SERIES and len(data) == SampleRing.size(rows) else None
