"""Many workers at once, and what happens when one of them misbehaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from capibara.compile import CompileJob, compile_many
from capibara.errors import UnknownNameError

# Targets that misbehave do so before jax is imported, which keeps these tests quick.
TARGETS = """
import os, sys, time

def crash():
    sys.stderr.write("the last words\\n")
    os._exit(3)

def segfault():
    os.kill(os.getpid(), 11)

def hang(pid_file=None):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if pid_file:
        open(pid_file, "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(600)

def refuse(n):
    raise ValueError(f"case {n}")
"""


@pytest.fixture
def targets(tmp_path, monkeypatch):
    """A module of targets that needs this process's import path to be found, and a temp folder of our own."""
    code, temporary = tmp_path / "code", tmp_path / "tmp"
    code.mkdir()
    temporary.mkdir()
    (code / "pool_targets.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(str(code))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    yield tmp_path
    assert list(temporary.iterdir()) == []
    assert all(process.returncode is not None for process in started)


def job(name, **kwargs):
    return CompileJob(f"pool_targets:{name}", kwargs)


@pytest.mark.quick
def test_reports_come_in_order_and_as_they_are_done(targets):
    jobs = [
        CompileJob("capibara.compile.selfcheck:stock_pallas_matmul", {"size": 512, "block": 256}, name="good"),
        job("crash"),
        job("refuse", n=1),
        CompileJob("capibara.compile.selfcheck:xla_matmul", {"size": 8}, mesh=None, vmem_static_bytes=5),
    ]
    seen = []
    reports = compile_many(jobs, None, workers=2, timeout_s=100, on_result=lambda i, report: seen.append((i, report)))
    assert [report.ok for report in reports] == [True, False, False, True]
    assert reports[0].name == "good"
    assert reports[0].custom_calls == ("tpu_custom_call",)
    assert reports[3].vmem_bytes == 5
    assert sorted(seen, key=lambda pair: pair[0]) == list(enumerate(reports))


@pytest.mark.quick
def test_crashes_cost_their_own_job_only(targets):
    reports = compile_many([job("crash"), job("refuse", n=1), job("segfault"), job("refuse", n=2)], None, workers=1)
    assert [report.error_kind for report in reports] == ["crash", "target", "crash", "target"]
    assert "exit status 3" in reports[0].error
    assert "the last words" in reports[0].error
    assert "SIGSEGV" in reports[2].error
    assert "case 2" in reports[3].error
    assert reports[0].name == "pool_targets:crash()"


@pytest.mark.quick
def test_a_job_that_hangs_is_stopped(targets):
    start = time.monotonic()
    reports = compile_many([job("hang"), job("refuse", n=1)], "v4-32", workers=2, timeout_s=1.5)
    assert time.monotonic() - start < 300
    assert (reports[0].ok, reports[0].error_kind, reports[0].slice_name) == (False, "timeout", "v4-32")
    assert "1.5 s" in reports[0].error


def test_a_worker_that_cannot_start_is_a_report(targets, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no processes left")

    monkeypatch.setattr(subprocess, "Popen", fail)
    (report,) = compile_many([job("refuse", n=1)], None)
    assert (report.ok, report.error_kind) == (False, "crash")
    assert "no processes left" in report.error


def test_workers_are_replaced_after_a_while(targets, monkeypatch):
    monkeypatch.setattr("capibara.compile.pool._JOBS_A_WORKER", 1)
    reports = compile_many([job("refuse", n=n) for n in range(3)], None, workers=1)
    assert [report.error.splitlines()[-1] for report in reports] == [f"ValueError: case {n}" for n in range(3)]


def test_an_error_in_the_callback_reaches_the_caller(targets):
    def on_result(index, report):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        compile_many([job("refuse", n=1), job("hang"), job("hang")], None, workers=2, on_result=on_result)


def test_nothing_to_do(targets):
    assert compile_many([], "v4-32") == []


def test_mistakes_are_said_before_anything_starts(targets):
    with pytest.raises(UnknownNameError, match="v9-32"):
        compile_many([job("hang")], "v9-32")
    with pytest.raises(ValueError, match="at least 1"):
        compile_many([job("hang")], None, workers=0)
    with pytest.raises(TypeError, match="JSON"):
        compile_many([job("refuse", n=object())], None)


def test_interrupting_leaves_nothing_behind(tmp_path):
    temporary, pids = tmp_path / "tmp", tmp_path / "pids"
    temporary.mkdir()
    (tmp_path / "pool_targets.py").write_text(TARGETS)
    script = (
        # A shell's background job ignores the interrupt, and its children inherit that.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from capibara.compile import CompileJob, compile_many\n"
        f"compile_many([CompileJob('pool_targets:hang', {{'pid_file': {str(pids)!r}}})], None)\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "TMPDIR": str(temporary),
    }
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert "KeyboardInterrupt" in stderr
    assert list(temporary.iterdir()) == []
    for pid in map(int, pids.read_text().split()):
        while _state(pid) not in ("", "Z"):  # gone, or waiting for whoever inherited it to notice
            assert time.monotonic() < deadline + 60
            time.sleep(0.02)


def _state(pid: int) -> str:
    ran = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return ran.stdout.strip()[:1]


@pytest.mark.tpu_compiler
def test_schedules_of_several_jobs_in_one_worker(targets):
    matmul = "capibara.compile.selfcheck:stock_pallas_matmul"
    jobs = [
        CompileJob(matmul, {"block": 256}),
        CompileJob(matmul, {"block": 512}, keep_dump=str(targets / "kept")),
        CompileJob("capibara.compile.selfcheck:xla_matmul"),
    ]
    small, large, xla = compile_many(jobs, "v4-32", workers=1)
    assert all(report.compiled for report in (small, large, xla)), (small.error, large.error, xla.error)
    assert small.bundles is not None
    assert large.bundles is not None
    # A body of twice the side has eight times the work.
    assert 4 < large.bundles / small.bundles < 10
    assert large.bundles >= 2048  # the cycles that the matrix units need
    assert list((targets / "kept").rglob("*final_bundles.txt"))
