"""jax's own cache of compiled programs on disk, set up for a whole process: every jitted function is in it.

A program is looked up after tracing, by what it computes, so that a second start of the same command compiles nothing,
whoever wrote the functions. (`cache.py` keeps single programs that are not even traced again.) jax reads and writes
the entries; what it leaves open is done here, before each of its writes and when the cache is set up:

- an entry has two files, the program and when it was last used. A process that was killed, or a disk that was full,
  leaves the first without the second, cut short or not: what is whole is kept, what is not goes. (jax 0.10.2 stops
  writing where it meets one; no jax makes it whole.)
- an entry that was read and could not be used goes, so that the program compiled in its place is kept.
- entries are bounded in number, beside jax's bound in bytes; those unused for longest go first.

All of it under the lock that jax itself takes (`filelock`), which the system lets go of when a process ends, however it
ends. Programs for a CPU are of its instructions, so each kind of processor has a folder of its own below the one that
is named. Entries are code: the folder is as trusted as the program is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from capibara.compile.cache import check_folder
from capibara.compile.executables import processor
from capibara.errors import rule_error, say_once

__all__ = ["MAX_BYTES", "MAX_ENTRIES", "PersistentCache", "current_persistent_cache", "persistent_cache", "stable_key"]

_log = logging.getLogger(__name__)

MAX_BYTES = 8 << 30
MAX_ENTRIES = 4096

_PROGRAM, _USED = "-cache", "-atime"  # jax's names of an entry's two files
_LOCK = ".lockfile"  # jax's, too
_LOCK_SECONDS = 10.0
_VERSIONS = "versions.json"
_VERSIONS_KEPT = 16
_LEAST_FREE = 64 << 20
_HOOK = "CustomSPMDPartitioning"  # XLA's name of it
_BEFORE_WRITE = "/jax/compilation_cache/cache_misses"  # reported right before jax writes an entry

Mode = Literal["used", "read-only", "off", "the program's own"]


@dataclass(frozen=True)
class PersistentCache:
    """The cache as it was set up, and why so."""

    folder: Path | None
    """Where programs lie; None where there is no cache."""
    max_bytes: int
    max_entries: int
    mode: Mode
    why: str = ""
    """A sentence where it is not simply used."""

    @property
    def entries(self) -> int:
        return 0 if self.folder is None else sum(1 for _ in self.folder.glob(f"*{_PROGRAM}"))

    @property
    def bytes(self) -> int:
        if self.folder is None:
            return 0
        return sum(_size(path) for path in self.folder.glob(f"*{_PROGRAM}"))


_current: PersistentCache | None = None
_keeper: _Keeper | None = None
_setting_up = threading.Lock()


def current_persistent_cache() -> PersistentCache | None:
    """What `persistent_cache` set up last in this process; None before."""
    return _current


def persistent_cache(
    folder: str | Path | None = None, *, max_bytes: int | None = None, max_entries: int | None = None
) -> PersistentCache:
    """Keep every program that this process compiles on disk, and take those that are there. Called again, it changes
    what is given and leaves the rest.

    Where that cannot be, because the folder is read-only, full or no folder, it is said once and the program goes on:
    a folder that can be read is read, but for one that is another user's or that others may write to. A folder that
    the program chose itself (`jax_compilation_cache_dir`, or the variable JAX_COMPILATION_CACHE_DIR) stays, with its
    own limits, unless another is given here; and where `jax_enable_compilation_cache` is False, there is none.

    Args:
      folder: `$CAPIBARA_CACHE_DIR/xla` or the platform's cache folder by default.
      max_bytes: 8 GiB by default.
      max_entries: 4096 by default.
    """
    global _current
    import jax

    for name, limit in (("max_bytes", max_bytes), ("max_entries", max_entries)):
        if limit is not None and limit < 1:
            raise rule_error(f"A cache of programs has a {name} of 1 or more", limit, f"leave {name} out")
    with _setting_up:
        last = _current
        size = max_bytes or (last.max_bytes if last else MAX_BYTES)
        count = max_entries or (last.max_entries if last else MAX_ENTRIES)
        if not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
            _current = PersistentCache(None, size, count, "off", "jax_enable_compilation_cache is False.")
            return _current
        own = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        if folder is None and own and (last is None or last.folder is None or own != str(last.folder)):
            why = f"jax_compilation_cache_dir was set to {own}; its limits are jax's."
            _current = PersistentCache(Path(own), size, count, "the program's own", why)
            return _current
        root = Path(folder).expanduser() if folder is not None else None
        place = _place(root) if root is not None or last is None or last.folder is None else last.folder
        if (
            last is not None
            and last.mode == "used"
            and (last.folder, last.max_bytes, last.max_entries)
            == (
                place,
                size,
                count,
            )
        ):
            return last
        _current = _set_up(place, size, count)
        if _current.mode != "used":
            say_once(_log, (str(place), _current.mode), "Compiled programs are not kept on disk: %s", _current.why)
        return _current


@contextlib.contextmanager
def stable_key(lowered: Any) -> Iterator[None]:
    """Inside, what `jax.jit(...).lower(...)` gave is compiled under a key that is the same in the next process, also
    where XLA's partitioner splits kernels of this package's in it: by their names in place of their addresses.

    A program with a call of the partitioner's hook that has no name, of somebody else's code, keeps the addresses: it
    is compiled at every start, and never taken for another.
    """
    from jax._src.config import remove_custom_partitioning_ptr_from_cache_key as without_addresses

    hooks = _partitioner_hooks(lowered.compiler_ir("stablehlo"))
    with without_addresses(True) if hooks and all(hooks) else contextlib.nullcontext():
        yield


def _partitioner_hooks(module: Any) -> list[bool]:
    """Of each call of the partitioner's hook in a module, whether it is named."""
    from jax.extend.mlir import ir

    from capibara.kernels.core.naming import ATTRIBUTE

    hooks = []

    def look(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == _HOOK:
            named = "mhlo.frontend_attributes" in op.attributes
            hooks.append(named and ATTRIBUTE in op.attributes["mhlo.frontend_attributes"])
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return hooks


def _place(root: Path | None) -> Path:
    from capibara.kernels.core.tables import cache_directory

    root = cache_directory().parent / "xla" if root is None else root
    return root / hashlib.sha256("\n".join(processor()).encode()).hexdigest()[:12]


def _set_up(place: Path, max_bytes: int, max_entries: int) -> PersistentCache:
    global _keeper
    import jax
    from jax import monitoring
    from jax.experimental.compilation_cache import compilation_cache

    if _keeper is not None:
        with contextlib.suppress(ValueError, AssertionError):  # somebody cleared all listeners
            monitoring.unregister_event_listener(_keeper.on_event)
        _keeper = None
    keeper = _Keeper(place, max_bytes, max_entries)
    mode: Mode = "used"
    why = ""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(place)
        keeper.begin()
    except ValueError as error:  # others may write to it: what lies there is not even read
        mode, why = "off", str(error)
    except (OSError, NotImplementedError) as error:  # the latter of filelock, where a file system has no locks
        readable = os.path.isdir(place) and os.access(place, os.R_OK | os.X_OK)  # Path.is_dir raises
        mode = "read-only" if readable else "off"
        why = f"{place} cannot be written to ({error})" + ("; what is there is read." if readable else ".")
    settings: dict[str, Any] = {
        "jax_compilation_cache_dir": None if mode == "off" else str(place),
        # With a limit jax takes a lock, which is a file, also to read.
        "jax_compilation_cache_max_size": max_bytes if mode == "used" else -1,
        # A start makes dozens of small programs, and is to compile none of them again.
        "jax_persistent_cache_min_compile_time_secs": 0.0 if mode == "used" else math.inf,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    compilation_cache.reset_cache()  # jax opens a folder once
    for name, value in settings.items():
        jax.config.update(name, value)
    if mode == "used":
        _keeper = keeper
        monitoring.register_event_listener(keeper.on_event)
    return PersistentCache(None if mode == "off" else place, max_bytes, max_entries, mode, why)


class _Keeper:
    """Keeps a folder of jax's entries whole and within its bounds."""

    def __init__(self, folder: Path, max_bytes: int, max_entries: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self._looked = time.time_ns()

    def begin(self) -> None:
        """Write to the folder once, as jax will, and put it in order. An `OSError` says that it cannot be."""
        with self._alone():
            probe = self.folder / f".probe-{os.getpid()}"
            try:
                probe.write_bytes(b"\0" * 4096)
            finally:
                probe.unlink(missing_ok=True)
            if (free := shutil.disk_usage(self.folder).free) < _LEAST_FREE:
                raise OSError(28, f"its disk is full: {free >> 20} MiB are free, and {_LEAST_FREE >> 20} are kept so")
            self._tell_versions()
            self._sweep(room=0)

    def on_event(self, event: str, **_: Any) -> None:
        if event != _BEFORE_WRITE:
            return
        try:
            with self._alone():
                self._sweep(room=1)
        except (OSError, NotImplementedError) as error:
            # A lock that another holds for long is one: jax waits for it, too, and then goes on.
            say_once(_log, (str(self.folder), "sweep"), "%s is not put in order now: %s", self.folder, error)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        import filelock

        with filelock.FileLock(self.folder / _LOCK, timeout=_LOCK_SECONDS):
            yield

    def _sweep(self, *, room: int) -> None:
        """Make every entry whole or nothing, and leave room for so many more. The lock is held."""
        looked, self._looked = self._looked, time.time_ns()
        entries: list[tuple[int, int, Path]] = []
        for program in self.folder.glob(f"*{_PROGRAM}"):
            used = _used(program)
            # One that was read since the last look, and is made again now, may have been read in vain.
            if (used is None or used >= looked) and not _whole(program):
                _log.warning("A compiled program in %s is not whole, and goes: %s", self.folder, program.name)
                _remove(program)
                continue
            if used is None:
                used = program.stat().st_mtime_ns
                _stamp(program).write_bytes(used.to_bytes(8, "little"))
            entries.append((used, _size(program), program))
        for stamp in self.folder.glob(f"*{_USED}"):
            if not _program_of(stamp).exists():
                stamp.unlink(missing_ok=True)
        total = sum(size for _, size, _ in entries)
        count = len(entries)
        for _, size, program in sorted(entries):
            if total <= self.max_bytes and count + room <= self.max_entries:
                return
            _remove(program)
            total, count = total - size, count - 1

    def _tell_versions(self) -> None:
        """Say it where the folder is another version's: its entries are not read, and go as they age."""
        import jax
        import jaxlib.version

        now = f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__}"
        file = self.folder / _VERSIONS
        known: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            known = [str(name) for name in json.loads(file.read_text(encoding="utf-8"))]
        if now in known:
            return
        if known and any(self.folder.glob(f"*{_PROGRAM}")):
            say_once(
                _log,
                (str(self.folder), now),
                "%s has programs of %s, which %s cannot read: it makes its own beside them, once",
                self.folder,
                "; ".join(known),
                now,
            )
        draft = self.folder / f"{_VERSIONS}.{os.getpid()}"
        draft.write_text(json.dumps([*known, now][-_VERSIONS_KEPT:]), encoding="utf-8")
        draft.replace(file)


def _stamp(program: Path) -> Path:
    return program.with_name(program.name.removesuffix(_PROGRAM) + _USED)


def _program_of(stamp: Path) -> Path:
    return stamp.with_name(stamp.name.removesuffix(_USED) + _PROGRAM)


def _used(program: Path) -> int | None:
    """When jax read or wrote an entry last, in nanoseconds; None where that was not written down."""
    try:
        stamp = _stamp(program).read_bytes()
    except OSError:
        return None
    return int.from_bytes(stamp, "little") if len(stamp) == 8 else None


def _whole(program: Path) -> bool:
    from jax._src import compilation_cache  # which of three compressions it is, jax alone says

    try:
        return len(compilation_cache.decompress_executable(program.read_bytes())) > 0
    except Exception:  # noqa: BLE001  # each compression raises its own
        return False


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _remove(program: Path) -> None:
    program.unlink(missing_ok=True)
    _stamp(program).unlink(missing_ok=True)
