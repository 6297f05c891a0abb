"""Which files a path means, what is in them, and whether they have changed."""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from capibara.errors import rule_error, say_once

__all__ = ["TOPICS", "fingerprint", "formats_of", "open_bytes", "opened", "resolve"]

_log = logging.getLogger(__name__)

TOPICS = "python:topics"
"""The help texts that every Python ships: data that is there without a network."""

_SUFFIXES = {
    "text": (".txt", ".text", ".md", ".rst", ".py"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather", ".ipc"),
    "tokens": (".bin", ".npy"),
}
_FORMAT = {suffix: format for format, suffixes in _SUFFIXES.items() for suffix in suffixes}


def formats_of(file: Path) -> str | None:
    """The format that a file's suffix names; ".gz" after it does not count."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return _FORMAT.get(suffixes[-1]) if suffixes else None


def resolve(path: str, format: str) -> tuple[list[Path], str]:
    """The files, in order of their names, and their one format."""
    files = _listed(path)
    if format != "auto":
        named = [file for file in files if formats_of(file) == format] if Path(path).is_dir() else files
        if not named:
            raise rule_error(
                f"A folder of {format} has files ending in {', '.join(_SUFFIXES[format])}",
                f"{path} with {len(files)} others",
                "name the files by a glob",
            )
        return named, format
    kinds: dict[str, list[Path]] = {}
    for file in files:
        kind = formats_of(file)
        if kind:
            kinds.setdefault(kind, []).append(file)
    if len(kinds) != 1:
        known = ", ".join(_FORMAT)
        raise rule_error(
            f"Training data has one format, known by its suffix ({known}, or one of them with .gz)",
            f"{path} with {' and '.join(sorted(kinds))}" if kinds else f"{path} with none of them",
            f"name the format: {', '.join(_SUFFIXES)}",
        )
    kind, named = next(iter(kinds.items()))
    left_out = len(files) - len(named)
    if left_out:
        say_once(_log, path, "%s: %d files of other kinds are left out.", path, left_out, level=logging.INFO)
    return named, kind


_BESIDE = (".starts.npy", ".hashes.npy", ".mask.bin")  # what belongs to a .bin of tokens and is none itself


def _listed(path: str) -> list[Path]:
    return [file for file in _every(path) if not file.name.endswith(_BESIDE)]


def _every(path: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.is_file() and not file.name.startswith("."))
    elif place.is_file():
        return [place]
    elif glob.has_magic(path):
        files = sorted(file for file in map(Path, glob.glob(str(place), recursive=True)) if file.is_file())
    else:
        nearest = sorted(entry.name for entry in place.parent.iterdir()) if place.parent.is_dir() else []
        there = f"beside it: {', '.join(nearest[:5])}" if nearest else f"{place.parent} is no folder"
        raise rule_error(
            "Training data is a file, a folder or a glob", f"{path!r}, which is not there ({there})", "mend the path"
        )
    if not files:
        raise rule_error("Training data has at least one file", f"{path!r}, where there is none", "mend the path")
    return files


def fingerprint(files: Sequence[Path], how: str) -> str:
    """Changes when the files do: by size and "times", or by their "content"."""
    digest = hashlib.sha256(how.encode())
    for file in files:
        if how == "content":
            with file.open("rb") as data:
                digest.update(hashlib.file_digest(data, "sha256").digest())
        else:
            status = file.stat()
            digest.update(f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where it is a .gz; a cut one is the caller's to know about."""
    try:
        with open_bytes(file) as data:
            yield data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise rule_error("A .gz file is whole", f"{file}: {error}", "copy it again") from error


def open_bytes(file: Path) -> IO[bytes]:
    if file.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.open(file, "rb"))
    return file.open("rb")
