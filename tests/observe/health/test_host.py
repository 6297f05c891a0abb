"""The host's limits, from files that a test writes, and a lock that another process really holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from capibara.observe.health.host import HostFiles, check_host

LOCKED = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def _files(folder: Path, **given: object) -> HostFiles:
    known = {"hugepages": folder / "none", "shared_memory": folder, "tpu_lock": folder / "lock"}
    return HostFiles(**known | given)  # type: ignore[arg-type]


@pytest.mark.quick
def test_a_host_with_enough_of_everything(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("[always] madvise never\n")
    (tmp_path / "lock").touch()  # left over: nobody has locked it
    assert check_host(_files(tmp_path, hugepages=tmp_path / "enabled"), "TPU v4") == []


@pytest.mark.quick
def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [found] = check_host(_files(tmp_path, shared_memory=tmp_path / "gone"))
    assert found.subject == str(tmp_path / "gone")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(64 << 20, 60 << 20, 4 << 20))
    [found] = check_host(_files(tmp_path))
    assert "has 4 MiB free" in found.text
    assert "--shm-size" in found.fix


@pytest.mark.quick
def test_open_files(tmp_path: Path) -> None:
    [found] = check_host(_files(tmp_path, open_files=lambda: 256))
    assert (found.subject, found.evidence) == ("open files", {"limit": 256})
    assert found.serious
    assert check_host(_files(tmp_path, open_files=lambda: 1024)) == []
    assert check_host(_files(tmp_path, open_files=lambda: -1)) == []  # without a limit


@pytest.mark.quick
def test_huge_pages_are_advice_and_only_where_there_is_a_tpu(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    files = _files(tmp_path, hugepages=tmp_path / "enabled")
    assert check_host(files) == []
    [found] = check_host(files, "TPU v4")
    assert "'madvise'" in found.text
    assert not found.serious


@pytest.mark.quick
def test_a_process_that_holds_the_tpu_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", LOCKED, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert check_host(_files(tmp_path)) == []  # no TPU, nothing to hold
        found = check_host(_files(tmp_path), "TPU v4")
        holder.communicate()
    [one] = found
    assert one.evidence == {"processes": [holder.pid]}
    assert one.fix == f"end it (kill {holder.pid}), or wait for it"
    assert check_host(_files(tmp_path), "TPU v4") == []


@pytest.mark.quick
def test_ones_own_lock_is_no_finding(tmp_path: Path) -> None:
    import fcntl

    with open(tmp_path / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert str(os.getpid()) in Path("/proc/locks").read_text()
        assert check_host(_files(tmp_path), "TPU v4") == []
