"""Many cases at once: workers side by side, each a process, none of which can take the run down with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from capibara.compile.environment import DUMP_PASSES, compiler_environment
from capibara.compile.report import CompileReport, ErrorKind
from capibara.compile.worker import job_name
from capibara.errors import CapibaraError, rule_error
from capibara.hardware.topology import place

__all__ = ["CompileJob", "compile_many"]

# A worker is replaced after this many jobs: compilers keep memory, and a dump directory is never quite clean.
_JOBS_A_WORKER = 40
_MOST_WORKERS = 8
_STDERR_TAIL = 4000
_DONE = None


@dataclasses.dataclass(frozen=True)
class CompileJob:
    """One case to compile.

    Attributes:
      target: "module:function"; function(**kwargs) returns (fn, args), as in `capibara.compile.worker`.
      kwargs: keywords for it, of types that JSON has.
      name: what the report is called.
      mesh: axis sizes of a mesh over the slice's chips, passed to the target as `mesh=`.
      vmem_static_bytes: the caller's own account of the kernel's VMEM.
      keep_dump: a directory that the compiler's dump of this job is moved to.
    """

    target: str
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""
    mesh: Mapping[str, int] | None = None
    vmem_static_bytes: int | None = None
    keep_dump: str | None = None

    def as_dict(self, slice_name: str | None) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mesh = None if self.mesh is None else dict(self.mesh)
        return {**fields, "kwargs": dict(self.kwargs), "mesh": mesh, "slice": slice_name}


def compile_many(
    jobs: Sequence[CompileJob],
    slice_name: str | None,
    *,
    workers: int | None = None,
    timeout_s: float = 600.0,
    on_result: Callable[[int, CompileReport], None] | None = None,
    dump_passes: Sequence[str] | None = DUMP_PASSES,
) -> list[CompileReport]:
    """Compiles every job for the slice, or lowers them when it is None; reports come back in the jobs' order.

    Args:
      workers: processes side by side; by default one a core, eight at most.
      timeout_s: for one job, counting the start of its worker (a few seconds for the first of each).
      on_result: called in this thread with a job's index and report as each is done.
      dump_passes: see `capibara.compile.environment.dump_flags`.

    A worker that crashes or takes too long costs its own job only. Interrupting leaves nothing behind.
    """
    if workers is not None and workers < 1:
        raise rule_error("workers must be at least 1", workers, "leave it out for one worker a core")
    if slice_name is not None:
        place(slice_name)  # an unknown name is the caller's mistake: said before anything starts
    lines = [json.dumps(job.as_dict(slice_name)) for job in jobs]
    count = min(workers or min(os.cpu_count() or 1, _MOST_WORKERS), len(jobs))
    reports: dict[int, CompileReport] = {}
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(jobs)):
        todo.put(index)
    results: queue.SimpleQueue[tuple[int, CompileReport]] = queue.SimpleQueue()
    stop = threading.Event()
    crew = [_Member(lines, timeout_s, dump_passes, todo, results, stop) for _ in range(count)]
    try:
        for member in crew:
            member.start()
        while len(reports) < len(jobs):
            index, report = _next(results, crew)
            reports[index] = report
            if on_result is not None:
                on_result(index, report)
    finally:
        stop.set()
        for member in crew:
            member.kill()
        for member in crew:
            member.join()
    return [reports[index] for index in range(len(jobs))]


def _next(results: queue.SimpleQueue[tuple[int, CompileReport]], crew: Sequence[_Member]) -> tuple[int, CompileReport]:
    """Waits for a result, but not for threads that are gone."""
    while True:
        alive = any(member.is_alive() for member in crew)  # asked first: a last result may be on its way
        try:
            return results.get(timeout=1.0 if alive else 0.0)
        except queue.Empty:
            if not alive:
                raise CapibaraError("The threads that feed the compile workers ended early.") from None


class _Member(threading.Thread):
    """A thread that keeps one worker process fed."""

    def __init__(
        self,
        lines: Sequence[str],
        timeout_s: float,
        dump_passes: Sequence[str] | None,
        todo: queue.SimpleQueue[int],
        results: queue.SimpleQueue[tuple[int, CompileReport]],
        stop: threading.Event,
    ) -> None:
        super().__init__(name="capibara-compile", daemon=True)
        self._lines, self._timeout_s, self._dump_passes = lines, timeout_s, dump_passes
        self._todo, self._results, self._stop_event = todo, results, stop
        self._worker: _Worker | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        while not self._stop_event.is_set():
            try:
                index = self._todo.get_nowait()
            except queue.Empty:
                break
            report = self._answer(self._lines[index])
            if report is not None:
                self._results.put((index, report))
        self.kill()

    def kill(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _answer(self, line: str) -> CompileReport | None:
        try:
            with self._lock:
                if self._stop_event.is_set():
                    return None
                worker = self._worker = self._worker or _Worker(self._dump_passes)
        except OSError as error:  # no memory, no processes or no disk left
            return _no_answer(line, "crash", f"A worker could not be started: {error}.")
        reply = worker.ask(line, self._timeout_s)
        if self._stop_event.is_set():
            return None
        if isinstance(reply, CompileReport):
            if worker.jobs_done >= _JOBS_A_WORKER:
                self.kill()
            return reply
        kind, text = reply
        text = f"{text}\n{worker.stderr_tail()}".strip()
        self.kill()
        return _no_answer(line, kind, text)


def _no_answer(line: str, kind: ErrorKind, text: str) -> CompileReport:
    job = json.loads(line)
    return CompileReport(
        name=job_name(job),
        ok=False,
        evidence="not compiled: the worker process gave no report",
        slice_name=job["slice"],
        error_kind=kind,
        error=text,
    )


class _Worker:
    """A worker process, its dump directory and its standard error."""

    def __init__(self, dump_passes: Sequence[str] | None) -> None:
        self.jobs_done = 0
        self._home = tempfile.TemporaryDirectory(prefix="capibara-compile-")
        home = Path(self._home.name)
        dump_dir = home / "dump"
        dump_dir.mkdir()
        self._stderr_path = home / "stderr"
        environment = compiler_environment(dump_dir, passes=dump_passes)
        # The target may live anywhere that this process can import from.
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))
        command = [sys.executable, "-m", "capibara.compile.worker", "--dump-dir", str(dump_dir)]
        try:
            with self._stderr_path.open("wb") as stderr:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=environment,
                    encoding="utf-8",
                    start_new_session=True,  # so that it can be killed with whatever it started
                )
        except OSError:
            self._home.cleanup()
            raise
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(_DONE)

    def ask(self, line: str, timeout_s: float) -> CompileReport | tuple[ErrorKind, str]:
        """The worker's report, or why there is none."""
        assert self._process.stdin is not None
        # A worker that has died (broken pipe) or is being closed (ValueError) is found out below, by the end
        # of its output.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        try:
            answer = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return "timeout", f"The worker did not answer within {timeout_s:g} s and was stopped."
        if answer is None:
            return "crash", f"The worker died: {_cause_of_death(self._process.wait())}."
        self.jobs_done += 1
        try:
            return CompileReport.from_dict(json.loads(answer))
        except (ValueError, TypeError):
            return "crash", f"The worker answered with something else than a report: {answer[:200]!r}."

    def stderr_tail(self) -> str:
        text = self._stderr_path.read_bytes()[-_STDERR_TAIL:].decode("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-20:])

    def close(self) -> None:
        """Ends the process and everything it started, and removes its files."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # What the worker detached from itself may still hold the pipe; closing it under the reader blocks.
        self._reader.join(timeout=5)
        streams = [self._process.stdin] if self._reader.is_alive() else [self._process.stdin, self._process.stdout]
        for stream in streams:
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._home.cleanup()


def _cause_of_death(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
