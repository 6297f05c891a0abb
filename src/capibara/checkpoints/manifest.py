"""The manifest of a checkpoint: what is in it, and a checksum of every file. It is written last, and so is the commit.

A folder without a manifest is a save that did not finish. With one, a file that was cut, changed or lost is found
before anything is read into a device. Checksums are CRC-32 (zlib's, which every Python has, 1.5 GB/s a core measured
on one virtual x86 core): any flipped bit and any burst below 32 bits changes it, other damage goes unseen once in four
thousand million times. Both taking and checking them reads every file once, over `THREADS` files at a time; the files
were written or will be read at that time anyway, so that the second pass is in the page cache where they fit.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from capibara.checkpoints.leaves import Leaf

__all__ = ["MANIFEST", "Damage", "Manifest", "checksums", "read", "verify", "write"]

MANIFEST = "capibara.json"
FORMAT = 1
THREADS = 8
_BLOCK = 4 << 20


class Damage(Exception):
    """What is wrong with a checkpoint, in words."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    serial: int
    """Of all saves into this folder: the newest has the highest, whatever its step."""
    leaves: Mapping[str, Leaf]
    extra: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_at: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Path below the folder -> bytes and CRC-32."""

    def to_text(self) -> str:
        body = {
            "format": FORMAT,
            "step": self.step,
            "serial": self.serial,
            "saved_at": self.saved_at,
            "versions": dict(self.versions),
            "metrics": dict(self.metrics),
            "extra": dict(self.extra),
            "leaves": {name: leaf.to_json() for name, leaf in self.leaves.items()},
            "files": {name: list(pair) for name, pair in self.files.items()},
        }
        # The manifest's own checksum is over the line that it stands before.
        text = json.dumps(body)
        return f"{zlib.crc32(text.encode()):08x}\n{text}\n"

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Raises `Damage` for a text that is not one, or not whole."""
        crc, _, body = text.partition("\n")
        if f"{zlib.crc32(body.rstrip(chr(10)).encode()):08x}" != crc:
            raise Damage(f"its manifest {MANIFEST} is cut or was changed: the checksum does not fit")
        data = json.loads(body)
        if data["format"] != FORMAT:
            raise Damage(f"its manifest has format {data['format']}, and this version of capibara reads {FORMAT}")
        return cls(
            step=data["step"],
            serial=data["serial"],
            leaves={name: Leaf.from_json(leaf) for name, leaf in data["leaves"].items()},
            extra=data["extra"],
            metrics=data["metrics"],
            saved_at=data["saved_at"],
            versions=data["versions"],
            files={name: (pair[0], pair[1]) for name, pair in data["files"].items()},
        )


def _checksum(path: Any, sync: bool) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        if sync:
            # What stands in the cache alone would go with the machine, after the older checkpoint was deleted.
            os.fsync(file.fileno())
        while block := file.read(_BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def checksums(folder: Any, sync: bool = False) -> dict[str, tuple[int, int]]:
    """Bytes and CRC-32 of every file below a folder (an `epath.Path`) but for the manifest.

    Args:
      sync: also have each file written to the disk itself; for folders of this machine.
    """
    files: list[tuple[str, Any]] = []
    folders = [("", folder)]
    while folders:
        prefix, inner = folders.pop()
        for path in inner.iterdir():
            name = prefix + path.name
            if path.is_dir():
                folders.append((name + "/", path))
            elif not path.name.startswith(MANIFEST):
                files.append((name, path))
    files.sort(key=lambda file: file[0])
    with ThreadPoolExecutor(THREADS) as pool:
        sums = pool.map(lambda file: _checksum(file[1], sync), files)
        return {name: pair for (name, _), pair in zip(files, sums, strict=True)}


def write(folder: Any, manifest: Manifest, local: bool) -> None:
    """Put the manifest there, whole or not at all."""
    text = manifest.to_text()
    if not local:  # an object store shows an object when all of it has arrived
        (folder / MANIFEST).write_text(text)
        return
    draft = folder / f"{MANIFEST}.draft"
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, folder / MANIFEST)
    for path in (folder, folder.parent):  # the names are of the folders
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(folder: Any) -> Manifest:
    """The manifest of a checkpoint; `Damage` where it is missing or not whole."""
    try:
        text = (folder / MANIFEST).read_text()
    except FileNotFoundError:
        raise Damage(f"its manifest {MANIFEST} is missing: the save did not finish, or the file was lost") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Damage(f"its manifest {MANIFEST} cannot be read: {error}") from error
    return Manifest.from_text(text)


def verify(folder: Any, manifest: Manifest) -> None:
    """Read every file and compare; `Damage` names the first few that differ and how."""
    try:
        present = checksums(folder)
    except OSError as error:
        raise Damage(f"a file cannot be read: {error}") from error
    wrong = []
    for name, (size, crc) in manifest.files.items():
        if name not in present:
            wrong.append(f"{name} is missing")
        elif present[name][0] != size:
            wrong.append(f"{name} has {present[name][0]} bytes and had {size}")
        elif present[name][1] != crc:
            wrong.append(f"{name} was changed: its checksum is {present[name][1]:08x} and was {crc:08x}")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Damage("; ".join(wrong[:3]) + more)
