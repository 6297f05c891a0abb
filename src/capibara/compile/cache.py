"""Compiled programs on disk: a second start of the same program on the same machine compiles and traces nothing.

An entry is the executable itself, as jax serialises it. Its name is a digest of all that it hangs on: what it computes
(said by whoever stores it), the source of this package, the versions of jax and of the device's compiler, the devices,
and the flags in force. What does not fit is another entry, never a wrong one. Entries are read by pickle, as jax's own
are: the folder is as trusted as the code is.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.compile.executables import executable_bytes, executable_from_bytes, processor, write_whole
from capibara.distribution import source_digest
from capibara.errors import rule_error, say_once

if TYPE_CHECKING:
    import jax

__all__ = ["ExecutableCache", "check_folder"]

_log = logging.getLogger(__name__)
_SUFFIX = ".executable"
_PART = ".part"
_PART_AFTER_S = 3600.0  # of a process that was killed while it wrote
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")
_CONFIG = ("jax_default_matmul_precision", "jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl")


class ExecutableCache:
    """A folder of compiled programs of at most so many bytes and entries, of which those unused for longest go first.

    Several processes may share it: an entry is written aside and renamed, so that there is a whole one or none.
    """

    def __init__(self, folder: str | Path, *, max_bytes: int = 16 << 30, max_entries: int = 4096) -> None:
        if max_bytes < 1:
            raise rule_error("A cache of programs holds a byte or more", max_bytes, "leave max_bytes out")
        if max_entries < 1:
            raise rule_error("A cache of programs holds an entry or more", max_entries, "leave max_entries out")
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:  # nothing is found there, and storing says so again: what runs here still runs
            say_once(_log, "folder", "Compiled programs are not kept in %s: %s", self.folder, error)
            return
        check_folder(self.folder)

    def name(self, what: str) -> str:
        """The name of the entry for a program that is told from every other of this package by `what`."""
        return hashlib.sha256(f"{_surroundings()}\n{what}".encode()).hexdigest()[:40]

    def load(self, name: str, devices: Sequence[jax.Device] | None = None) -> Any | None:
        """The program of this name, ready to run; None where there is none that can be read.

        Args:
          devices: that it was compiled for, in its order; the first of the machine by default.
        """
        path = self._path(name)
        try:
            program = executable_from_bytes(path.read_bytes(), devices, source=path.name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        # Whatever a damaged file or another compiler makes of it: it is compiled again.
        except Exception as error:  # noqa: BLE001
            say_once(_log, name, "A compiled program in %s cannot be read, and is made anew: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return program

    def store(self, name: str, program: Any) -> bool:
        """Keep a program that `jit(...).lower(...).compile()` gave; False where its backend cannot be asked for it."""
        import jax

        try:
            entry = executable_bytes(program)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            say_once(_log, "serialize", "Compiled programs are not kept on disk here: %s", error)
            return False
        if len(entry) > self.max_bytes:
            return False
        try:
            write_whole(self._path(name), entry)
            self._bound()
        except OSError as error:  # a full disk is no reason not to run what is compiled
            say_once(_log, "write", "Compiled programs are not kept in %s: %s", self.folder, error)
            return False
        return True

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob(f"*{_SUFFIX}"))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"

    def _bound(self) -> None:
        for path in self.folder.glob(f"*{_PART}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _PART_AFTER_S:
                    path.unlink()
        entries = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process bounds it too
                entries.append((path.stat(), path))
        total, count = sum(found.st_size for found, _ in entries), len(entries)
        for found, path in sorted(entries, key=lambda entry: entry[0].st_mtime):
            if total <= self.max_bytes and count <= self.max_entries:
                return
            path.unlink(missing_ok=True)
            total, count = total - found.st_size, count - 1


def check_folder(folder: Path) -> None:
    """Refuse a folder that others may write to."""
    if _others_write(folder):
        raise rule_error(
            "A folder of compiled programs is written to by its owner alone: what lies in it is run",
            f"{folder}, which others may write to",
            f"chmod 700 {folder}, or name one of your own",
        )


def _others_write(folder: Path) -> bool:
    if not hasattr(os, "getuid"):  # Windows has no such bits
        return False
    found, own = folder.stat(), os.getuid()
    return bool(found.st_mode & stat.S_IWOTH) or (own != 0 and found.st_uid not in (0, own))


def _surroundings() -> str:
    """All that a program hangs on beside what it computes."""
    import jax
    import jaxlib.version

    devices = jax.devices()
    return "\n".join(
        [
            jax.__version__,
            jaxlib.version.__version__,  # has the compiler for CPUs, whose platform_version is just "cpu"
            *(processor() if devices[0].platform == "cpu" else ()),
            getattr(devices[0].client, "platform_version", ""),
            *(f"{device.id} {device.device_kind}" for device in devices),
            *(f"{name}={os.environ.get(name, '')}" for name in _FLAGS),
            *(f"{name}={getattr(jax.config, name, None)}" for name in _CONFIG),
            source_digest(),
        ]
    )
