"""A loop that hangs is written down, the missing process named by the others, and ended with its code."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from capibara.observe import Recorder, read_recording
from capibara.train.exit_codes import HUNG
from capibara.train.watchdog import Beat, Watchdog, missing

PROGRAM = """
    import os, sys, time
    from pathlib import Path
    from capibara.observe import Recorder
    from capibara.train.watchdog import Watchdog
    folder, me, count, hangs_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

    def load_batch(step):
        if hangs_at == "data" and step == 3 and me == 1:
            time.sleep(60)
        if hangs_at == "dies" and step == 3 and me == 1:
            watchdog.where()  # its beat is written
            os._exit(0)

    def all_reduce(step):
        (folder / f"at_{step}_{me}").touch()
        while not all((folder / f"at_{step}_{other}").exists() for other in range(count)):
            time.sleep(0.02)
        while hangs_at == "network" and step == 3:
            time.sleep(1)

    all_reduce(0)  # all have started, however long that took
    with Watchdog(folder, 2.0, me, count, grace=10.0) as watchdog:
        for step in range(1, 6):
            watchdog.beat(step, "data")
            load_batch(step)
            watchdog.beat(step, "step")
            all_reduce(step)
"""


def run(tmp_path: Path, count: int, hangs_at: str) -> list[int]:
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), str(me), str(count), hangs_at],
            stderr=subprocess.DEVNULL,
        )
        for me in range(count)
    ]
    return [program.wait(60) for program in programs]


def stacks(tmp_path: Path, process: int) -> str:
    return (tmp_path / f"process_{process}.stacks.txt").read_text(encoding="utf-8")


@pytest.mark.quick
def test_the_process_that_hangs_is_named_by_the_others(tmp_path: Path) -> None:
    assert run(tmp_path, 3, "data") == [HUNG] * 3
    for other in (0, 2):
        text = stacks(tmp_path, other)
        named = text.partition("Missing: ")[2].splitlines()[0]
        assert "process 1 (pid" in named
        assert "at step 3 in 'data' is behind the others" in named
        assert "process 0 " not in named
        assert "process 2 " not in named
        assert "in all_reduce" in text
    assert "in load_batch" in stacks(tmp_path, 1)
    recording = read_recording(tmp_path / "process_0.recording")
    assert recording.events[-1].kind == "alert"
    assert "stacks in process_0.stacks.txt" in recording.events[-1].text


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "dies") == [HUNG, 0]
    named = stacks(tmp_path, 0).partition("Missing: ")[2].splitlines()[0]
    assert "process 1 (pid" in named
    assert "at step 3 in 'data'" in named


def test_when_all_are_at_the_same_place_it_is_the_network(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "network") == [HUNG] * 2
    for process in range(2):
        assert "all processes are at the same place: the devices or the network" in stacks(tmp_path, process)


@pytest.mark.quick
def test_who_is_missing() -> None:
    def beat(process: int, step: int, beats: int = 1, alive: float = 100.0, ended: bool = False) -> Beat:
        return Beat(process, 7, "host", step, "step", beats, 50.0, alive, False, ended)

    beats = {0: beat(0, 5, 2), 1: None, 2: beat(2, 5, 2, alive=20.0), 3: beat(3, 5, 1), 4: beat(4, 5, ended=True)}
    told = missing(beats, dead_after=10, now=100.0)
    assert len(told) == 4
    assert told[0] == "process 1 never gave a sign"
    assert told[1].startswith("process 2 (pid 7 on host) at step 5 in 'step' is dead or stopped: no sign for 80 s")
    assert "process 3" in told[2]
    assert "is behind the others, without progress for 50 s" in told[2]
    assert told[3].endswith("ended")
    assert missing({0: beat(0, 5), 1: beat(1, 5)}, dead_after=10, now=100.0) == []


def test_beats_keep_it_quiet_and_a_phase_may_take_longer(tmp_path: Path) -> None:
    hangs: list[str] = []
    came = threading.Event()

    def on_hang(text: str) -> None:
        hangs.append(text)
        came.set()

    # What an earlier start left says nothing.
    (tmp_path / "hang.json").write_text('{"text": "old", "time": 1.0, "process": 0}', encoding="utf-8")
    with Recorder(tmp_path) as recorder, Watchdog(tmp_path, 1.0, recorder=recorder, on_hang=on_hang) as watchdog:
        for step in range(6):
            watchdog.beat(step)
            time.sleep(0.2)
        watchdog.beat(6, "compile", allow=30)
        time.sleep(1.3)
        assert not hangs
        watchdog.beat(7, "data")
        assert came.wait(30)
    assert "process 0 made no progress for " in hangs[0]
    assert "this process is at step 7 in 'data'" in hangs[0]
    with pytest.raises(ValueError, match="timeout is more than 0"):
        Watchdog(tmp_path, 0)


@pytest.mark.quick
def test_a_hang_ends_whatever_its_story_is_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(folder: Path) -> None:
        raise struct.error("unpack requires a buffer of 128 bytes")

    monkeypatch.setattr("capibara.train.watchdog.keep_crash", unreadable)
    came = threading.Event()
    with Watchdog(tmp_path, 0.1, on_hang=lambda text: came.set()):
        assert came.wait(30)


def test_a_loop_that_keeps_pythons_lock_is_ended_too(tmp_path: Path) -> None:
    """A regular expression that takes for ever holds the lock, so that no thread of Python can run."""
    code = f"""
        import faulthandler, re, threading
        from capibara.train.watchdog import Watchdog
        later, looked = faulthandler.dump_traceback_later, threading.Event()
        faulthandler.dump_traceback_later = lambda *args, **kwargs: (later(*args, **kwargs), looked.set())
        with Watchdog({str(tmp_path)!r}, 1.0, grace=0.2) as watchdog:
            looked.wait(30)
            re.match(r"(a+)+$", "a" * 40 + "b")
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=False)
    assert ended.returncode == 1
    assert "re/__init__.py" in stacks(tmp_path, 0)
