"""A safetensors file: a header of JSON that names every tensor, and their bytes behind it.

Read one tensor at a time by mapping its bytes alone, so that nothing of a file stays in memory but what is looked at;
written tensor by tensor in the order that was announced. The library of that name copies whole tensors and gives
numpy no bfloat16; the format is small enough to be read directly, with every mistake of a file said by name.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from capibara.errors import rule_error

__all__ = ["CODES", "TensorEntry", "TensorFile", "TensorWriter", "code_of"]

CODES: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""What the format calls the types that numpy has."""

# The format's own limit: a header beyond it is no header.
_LARGEST_HEADER = 100_000_000
_ALIGNMENT = 8
_BLOCK_BYTES = 4 * 2**20
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""How zip archives and pickles begin, which is what torch.save writes."""


def code_of(dtype: Any) -> str:
    """What the format calls a numpy type.

    >>> code_of(np.float32)
    'F32'
    """
    wanted = np.dtype(dtype)
    for code, known in CODES.items():
        if known == wanted:
            return code
    raise rule_error("A tensor of a file has a type that safetensors know", wanted, f"use one of {', '.join(CODES)}")


@dataclass(frozen=True)
class TensorEntry:
    """What a header says of one tensor."""

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    file: Path

    @property
    def dtype(self) -> np.dtype[Any]:
        return CODES[self.code]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self) -> np.ndarray:
        """The tensor as a view of the file, of which only what is looked at is read.

        What was read of it leaves the memory when the last view of it goes.
        """
        if not self.nbytes:
            return np.zeros(self.shape, self.dtype)
        start = self.begin - self.begin % mmap.ALLOCATIONGRANULARITY
        with open(self.file, "rb") as file:
            pages = mmap.mmap(file.fileno(), self.begin + self.nbytes - start, access=mmap.ACCESS_READ, offset=start)
        return np.frombuffer(pages, self.dtype, math.prod(self.shape), self.begin - start).reshape(self.shape)


class TensorFile:
    """The tensors of one file, by name, checked against the file's length."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entries: dict[str, TensorEntry] = {}
        self.metadata: dict[str, str] = {}
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            start = file.read(9)
            length = struct.unpack("<Q", start[:8])[0] if len(start) == 9 else 0
            # A length may begin as pickles do; what comes after it is the brace of a table.
            if start[8:] != b"{" and start.startswith(_PICKLES):
                raise rule_error(
                    "Weights are safetensors: a pickle runs whatever code its writer put into it",
                    f"{self.path}, which is a pickle or an archive of one",
                    "load it where you trust it, and save it with save_pretrained, which writes safetensors",
                )
            if not 2 <= length <= _LARGEST_HEADER or 8 + length > size:
                raise self._broken(f"{size} bytes with a header of {length}")
            file.seek(8)
            text = file.read(length)
        try:
            header = json.loads(text)
        except ValueError as error:
            raise self._broken(f"a header that is no JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._broken("a header that is no table")
        self.metadata = header.pop("__metadata__", None) or {}
        for name, said in header.items():
            self.entries[name] = self._entry(name, said, 8 + length, size)
        self._check_whole(8 + length, size)

    def _entry(self, name: str, said: Any, data: int, size: int) -> TensorEntry:
        try:
            code, shape, (begin, end) = said["dtype"], tuple(said["shape"]), said["data_offsets"]
            whole = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError) as error:
            raise self._broken(f"no type, shape and place of {name!r}") from error
        if code not in CODES:
            raise rule_error(
                f"Tensors are of the types {', '.join(CODES)}", f"{name!r} of {code} in {self.path}", "convert it"
            )
        if not whole or end - begin != math.prod(shape) * CODES[code].itemsize:
            raise self._broken(f"{name!r} of {code} {list(shape)} in bytes {begin} to {end}")
        if data + end > size:
            raise self._broken(f"{size} bytes, of which {name!r} would need {data + end}")
        return TensorEntry(name, code, shape, data + begin, self.path)

    def _check_whole(self, data: int, size: int) -> None:
        at = data
        for entry in sorted(self.entries.values(), key=lambda one: (one.begin, one.nbytes)):
            if entry.begin != at:
                raise self._broken(f"{entry.name!r} at byte {entry.begin}, where {at} comes next")
            at += entry.nbytes
        if at != size:
            raise self._broken(f"{size} bytes, of which {at} are tensors")

    def _broken(self, what: str) -> ValueError:
        return rule_error(
            "A safetensors file is its header and every tensor that the header names, to the last byte",
            f"{self.path}: {what}",
            "fetch or write the file again; this one is cut off or of another kind",
        )


class TensorWriter:
    """A file that is written tensor by tensor, in the order of `tensors`: (name, code, shape) each."""

    def __init__(
        self,
        path: str | Path,
        tensors: Iterable[tuple[str, str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self._coming = list(tensors)
        self._next = 0
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        at = 0
        for name, code, shape in self._coming:
            end = at + math.prod(shape) * CODES[code].itemsize
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._file = open(self.path, "wb")  # noqa: SIM115  closed by close(), which `with` calls
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, array: np.ndarray) -> None:
        """The next tensor, converted to its type; an array that lies otherwise in memory is not copied whole."""
        expected, code, shape = self._coming[self._next] if self._next < len(self._coming) else ("no more", "", ())
        if (name, array.shape) != (expected, shape):
            raise rule_error(
                f"Tensors come in the order that was announced; next is {expected} {list(shape)}",
                f"{name} {list(array.shape)}",
                "write them in that order",
            )
        dtype = CODES[code]
        if array.dtype == dtype:
            # Plain words: numpy moves those of its own types faster than those of ml_dtypes.
            dtype = np.dtype(f"u{dtype.itemsize}")
            array = array.view(dtype)
        rows = max(1, _BLOCK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
        for start in range(0, shape[0] if shape else 1, rows):
            block = array[start : start + rows] if shape else array
            self._file.write(np.ascontiguousarray(block, dtype).tobytes())
        self._next += 1

    def close(self) -> None:
        """All of it is on the disk when this returns."""
        try:
            if self._next != len(self._coming):
                raise rule_error(
                    f"{self.path} has {len(self._coming)} tensors", f"{self._next} were written", "write the others"
                )
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()
