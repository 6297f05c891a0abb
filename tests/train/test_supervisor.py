"""The supervisor with real processes: kill -9, exit codes, signals, nobody left over."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import capibara
from capibara.train.supervisor import Supervisor, supervise

BEGIN = f"""
    import os, signal, sys, time
    sys.path.append({str(Path(capibara.__file__).parents[1])!r})  # -S leaves out what is installed
    me, count = int(os.environ["CAPIBARA_PROCESS_ID"]), int(os.environ["CAPIBARA_PROCESS_COUNT"])
    start = int(os.environ["CAPIBARA_RESTARTS"])
    folder = sys.argv[1]
    def mark(name, text=""):
        with open(os.path.join(folder, f"{{name}}.{{me}}.{{start}}"), "w") as file:
            file.write(text or str(os.getpid()))
    def wait_for(name, of):
        while not os.path.exists(os.path.join(folder, f"{{name}}.{{of}}.{{start}}")):
            time.sleep(0.02)
"""


def command(tmp_path: Path, code: str) -> list[str]:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(code), encoding="utf-8")
    (tmp_path / "marks").mkdir(exist_ok=True)
    return [sys.executable, "-S", "-u", str(script), str(tmp_path / "marks")]


def marks(tmp_path: Path, name: str) -> list[str]:
    return sorted(path.name for path in (tmp_path / "marks").glob(f"{name}.*"))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def eventually(what: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.02)
    return what()


@pytest.mark.quick
def test_processes_know_their_places_and_their_lines_have_a_prefix(tmp_path: Path) -> None:
    output = io.StringIO()
    code = """
        print("hello", me, "of", count, os.environ["CAPIBARA_COORDINATOR"].split(":")[0], os.environ["MINE"])
        print("on stderr", file=sys.stderr)
    """
    supervisor = Supervisor(command(tmp_path, code), 3, output=output, environment={"MINE": "yes"})
    assert supervisor.run() == 0
    lines = output.getvalue().splitlines()
    for number in range(3):
        assert f"[{number}] hello {number} of 3 127.0.0.1 yes" in lines
        assert f"[{number}] on stderr" in lines
    assert sorted(end.process for end in supervisor.exits) == [0, 1, 2]


@pytest.mark.quick
def test_a_document_on_standard_output_and_words_for_a_restart(tmp_path: Path) -> None:
    output, errors = io.StringIO(), io.StringIO()
    code = """
        print("{}" if me == 0 else "not a document")
        print("told", sys.argv[2:], file=sys.stderr)
        mark("told")
        wait_for("told", 1 - me)
        sys.exit(0 if start else 1)
    """
    program = [*command(tmp_path, code), "--set"]
    words = ["--resume", "--set"]
    assert supervise(
        program, 2, plain=True, restart_words=words, backoff_seconds=0.01, output=output, errors=errors
    ) == 0  # fmt: skip
    assert set(output.getvalue().splitlines()) == {"{}"}
    told = errors.getvalue()
    assert "[1] not a document" in told
    assert "[0] told ['--set']\n" in told
    assert "[0] told ['--set', '--resume']\n" in told
    assert "supervisor: restart 1" in told


@pytest.mark.quick
def test_kill_9_of_one_restarts_all(tmp_path: Path) -> None:
    """Process 1 is killed; the others hang, as in a collective, and ignore being asked to stop."""
    output = io.StringIO()
    code = """
        if start == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark("started")
        if start == 0:
            if me == 1:
                wait_for("started", 0); wait_for("started", 2)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        print("done after", start, "restarts")
    """
    supervisor = Supervisor(command(tmp_path, code), 3, backoff_seconds=0.01, stop_seconds=0.2, output=output)
    assert supervisor.run() == 0
    assert marks(tmp_path, "started") == [f"started.{number}.{start}" for number in range(3) for start in range(2)]
    assert [(end.process, end.code) for end in supervisor.exits[:1]] == [(1, 137)]
    assert {end.code for end in supervisor.exits if end.start == 0} == {137}
    assert {end.code for end in supervisor.exits if end.start == 1} == {0}
    text = output.getvalue()
    assert "process 1 ended after" in text
    assert "killed by SIGKILL" in text
    assert "supervisor: restart 1 of all 3 processes" in text
    for name in marks(tmp_path, "started"):
        assert not is_running(int((tmp_path / "marks" / name).read_text(encoding="utf-8")))


def test_restarts_are_counted_and_wait_longer_each_time(tmp_path: Path) -> None:
    output = io.StringIO()
    supervisor = Supervisor(
        command(tmp_path, "sys.exit(43)"), max_restarts=2, backoff_seconds=0.05, output=output
    )  # fmt: skip
    began = time.monotonic()
    assert supervisor.run() == 43
    assert [end.start for end in supervisor.exits] == [0, 1, 2]
    assert time.monotonic() - began > 0.15
    assert "in 0.05 s" in output.getvalue()
    assert "in 0.1 s" in output.getvalue()
    assert "failed 3 times in a row" in output.getvalue()
    # A start that lasted begins the count anew: the limit of 0 seconds makes every one such.
    healthy = Supervisor(
        command(tmp_path, "sys.exit(0 if start == 4 else 1)"), max_restarts=1, backoff_seconds=0.01,
        healthy_seconds=0, output=io.StringIO(),
    )  # fmt: skip
    assert healthy.run() == 0
    assert len(healthy.exits) == 5


@pytest.mark.quick
@pytest.mark.parametrize("code", [2, 3, 42])
def test_what_would_come_again_is_not_restarted(tmp_path: Path, code: int) -> None:
    program = f"""
        if me == 1 or {code} == 42:
            sys.exit({code})
        time.sleep(60)
    """
    supervisor = Supervisor(command(tmp_path, program), 2, stop_seconds=0.2, output=io.StringIO())
    assert supervisor.run() == code
    assert {end.start for end in supervisor.exits} == {0}


@pytest.mark.quick
def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    output = io.StringIO()
    assert Supervisor(["no-such-command-here"], max_restarts=0, output=output).run() == 127
    assert "no-such-command-here: No such file" in output.getvalue()


def _start_supervisor(tmp_path: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
    program = f"""
        import sys
        from capibara.train.supervisor import Supervisor
        sys.exit(Supervisor({command(tmp_path, code)!r}, 2, {", ".join(arguments)}).run())
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.quick
def test_sigterm_is_passed_on_and_a_second_does_not_cut_the_save(tmp_path: Path) -> None:
    code = """
        from capibara.train.preemption import Preemption
        import capibara.train.preemption as module
        module.process_count = lambda: 1
        with Preemption() as preemption:
            mark("started")
            while not preemption.should_stop(0):
                time.sleep(0.02)
            mark("saving")
            time.sleep(0.5)
            mark("saved")
            preemption.exit()
    """
    running = _start_supervisor(tmp_path, code)
    assert eventually(lambda: len(marks(tmp_path, "started")) == 2)
    running.send_signal(signal.SIGTERM)
    assert eventually(lambda: len(marks(tmp_path, "saving")) == 2)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 42
    assert len(marks(tmp_path, "saved")) == 2
    assert len(marks(tmp_path, "started")) == 2


def test_ctrl_c_and_processes_that_do_not_listen(tmp_path: Path) -> None:
    code = """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        mark("started")
        time.sleep(60)
    """
    running = _start_supervisor(tmp_path, code, "grace_seconds=0.3")
    assert eventually(lambda: len(marks(tmp_path, "started")) == 2)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 137
    assert "supervisor: process" in running.communicate()[0]


@pytest.mark.quick
def test_a_supervisor_that_is_killed_leaves_nobody(tmp_path: Path) -> None:
    running = _start_supervisor(tmp_path, 'mark("started"); time.sleep(60)')
    assert eventually(lambda: len(marks(tmp_path, "started")) == 2)
    pids = [int((tmp_path / "marks" / name).read_text(encoding="utf-8")) for name in marks(tmp_path, "started")]
    assert all(map(is_running, pids))
    running.kill()
    running.wait()
    assert eventually(lambda: not any(map(is_running, pids)))


def test_what_a_process_started_goes_with_it(tmp_path: Path) -> None:
    """Its worker keeps the output open, and is of the same group."""
    code = """
        import subprocess
        worker = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        mark("worker", str(worker.pid))
    """
    supervisor = Supervisor(command(tmp_path, code), output=io.StringIO())
    began = time.monotonic()
    assert supervisor.run() == 0
    assert time.monotonic() - began < 300
    pid = int((tmp_path / "marks" / "worker.0.0").read_text(encoding="utf-8"))
    assert eventually(lambda: not is_running(pid))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="a list of words"):
        Supervisor("python train.py")
    with pytest.raises(ValueError, match="processes"):
        Supervisor(["true"], 0)
    with pytest.raises(ValueError, match="max_restarts"):
        Supervisor(["true"], max_restarts=-1)
