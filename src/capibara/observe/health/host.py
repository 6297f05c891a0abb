"""What the operating system of a host has to give: huge pages, open files, /dev/shm, a TPU that nobody else holds."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from capibara.hardware.facts import MiB
from capibara.observe.health.report import Finding

__all__ = ["HostFiles", "check_host"]

# A server's connections, a dataset's shards and a checkpoint's files are open at once.
_OPEN_FILES = 1024
# Less than a container's usual 64 MiB: what GPUs of one host exchange, and what data loaders hand over, is put there.
_SHARED_MEMORY = 32 * MiB


def _open_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@dataclass(frozen=True)
class HostFiles:
    """Where the kernel and libtpu say it."""

    hugepages: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    shared_memory: Path = Path("/dev/shm")
    tpu_lock: Path = Path("/tmp/libtpu_lockfile")
    locks: Path = Path("/proc/locks")
    open_files: Callable[[], int] = _open_files


def check_host(files: HostFiles, tpu: str | None = None) -> list[Finding]:
    """What is wrong with this host.

    Args:
      files: where it is looked up.
      tpu: the kind of TPU in it; without one nothing is asked about huge pages and libtpu's lock.
    """
    checks = [_shared_memory(files), _files(files)]
    if tpu is not None:
        checks += [_huge_pages(files), _lock(files)]
    return [one for one in checks if one is not None]


def _shared_memory(files: HostFiles) -> Finding | None:
    place = files.shared_memory
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding("host", str(place), f"{place} cannot be used: {error}", "mount a tmpfs there")
    if free >= _SHARED_MEMORY:
        return None
    return Finding(
        "host",
        str(place),
        f"{place} has {free / MiB:.0f} MiB free, and processes of one host exchange data through it",
        "remove what fills it, or start the container with --shm-size=16g",
        evidence={"free_bytes": free},
    )


def _files(files: HostFiles) -> Finding | None:
    limit = files.open_files()
    if limit == resource.RLIM_INFINITY or limit >= _OPEN_FILES:
        return None
    return Finding(
        "host",
        "open files",
        f"A process may have {limit} files open, and checkpoints, data and connections need {_OPEN_FILES} or more",
        "ulimit -n 65536, or LimitNOFILE= of the service",
        evidence={"limit": limit},
    )


def _huge_pages(files: HostFiles) -> Finding | None:
    try:
        told = files.hugepages.read_text()
    except OSError:
        return None  # a kernel without them has no switch
    if "[always]" in told:
        return None
    return Finding(
        "host",
        "huge pages",
        f"Transparent huge pages are {told[told.find('[') + 1 : told.find(']')] or told.strip()!r}: transfers between "
        f"host and TPU, and starting and ending, are slower",
        f"as root: echo always > {files.hugepages}",
        serious=False,
    )


def _lock(files: HostFiles) -> Finding | None:
    """libtpu locks this file while it holds the chips; a file that nobody has locked is left over and does no harm."""
    lock = files.tpu_lock
    try:
        number = lock.stat().st_ino
    except OSError:
        return None
    if not os.access(lock, os.R_OK | os.W_OK):
        return Finding(
            "host",
            str(lock),
            f"{lock} is another user's, and libtpu cannot lock it",
            f"end that user's program, then as root: rm {lock}",
        )
    holders = [pid for pid in _holders(files.locks, number) if pid != os.getpid()]
    if not holders:
        return None
    who = ", ".join(map(str, holders))
    return Finding(
        "host",
        str(lock),
        f"Process {who} holds this host's TPU: {lock} is locked, and a second program cannot open the chips",
        f"end it (kill {holders[0]}), or wait for it",
        evidence={"processes": holders},
    )


def _holders(locks: Path, number: int) -> list[int]:
    """Processes that have a lock on the file of this inode, as the kernel lists them."""
    try:
        lines = locks.read_text().splitlines()
    except OSError:
        return []
    # "1: FLOCK  ADVISORY  WRITE 4711 08:01:123456 0 EOF"; one that waits has "->" after the number.
    rows = [line.split() for line in lines if "->" not in line]
    return sorted({int(row[4]) for row in rows if len(row) > 5 and row[5].rpartition(":")[2] == str(number)})
