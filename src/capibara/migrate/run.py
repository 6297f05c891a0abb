"""Trees of files, by several processes: what they check comes back as one report."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from capibara.errors import rule_error
from capibara.migrate.findings import Finding, Report, in_order
from capibara.migrate.rules import check_file, check_text
from capibara.migrate.settings import Settings, settings_for
from capibara.migrate.sources import files_below

__all__ = ["Job", "check_paths", "check_source", "jobs_of"]

Job = tuple[Path, Settings]
"""A file, and what is wanted of it."""

_CHUNK = 16
"""Files that a process gets at a time."""
_WORTH_A_PROCESS = 64
"""Files: fewer are checked before another process has started."""


def jobs_of(paths: Sequence[str | Path], adjust: Callable[[Settings], Settings] = lambda one: one) -> list[Job]:
    """Every file below these paths, with the settings of its project; `adjust` lays the caller's over them."""
    jobs: dict[Path, Settings] = {}
    for path in map(Path, paths):
        settings = adjust(settings_for(path if path.is_dir() else path.parent))
        for file in files_below([path], settings.exclude, settings.root):
            jobs.setdefault(file, settings)
    return list(jobs.items())


def check_paths(
    paths: Sequence[str | Path],
    *,
    adjust: Callable[[Settings], Settings] = lambda one: one,
    processes: int | None = None,
    checked: Callable[[int], None] = lambda count: None,
) -> Report:
    """The findings of every file below these paths.

    Args:
        adjust: Lays the caller's settings over a project's.
        processes: How many check at a time; as many as there are processors unless given, and one for few files.
        checked: Is called with how many files are done, as they are.
    """
    return check_jobs(jobs_of(paths, adjust), processes=processes, checked=checked)


def check_jobs(
    jobs: Sequence[Job], *, processes: int | None = None, checked: Callable[[int], None] = lambda count: None
) -> Report:
    """The same of files that were listed before."""
    if processes is not None and processes < 1:
        raise rule_error("One process or more checks the files", processes, "use --jobs 1")
    several = processes or min(_processors(), len(jobs) // _WORTH_A_PROCESS)
    findings: list[Finding] = []
    if several <= 1:
        for done, (path, settings) in enumerate(jobs, start=1):
            findings += check_file(path, settings)
            checked(done)
    else:
        findings = _in_processes(jobs, several, checked)
    return Report(in_order(findings), tuple(str(path) for path, _ in jobs))


def check_source(text: str, shown: str, settings: Settings) -> Report:
    """The findings of one module's text."""
    return Report(check_text(text, shown, settings), (shown,))


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_processes(jobs: Sequence[Job], several: int, checked: Callable[[int], None]) -> list[Finding]:
    """Processes of our own: a fork of one that runs jax hangs, and multiprocessing runs the caller's script anew."""
    waiting: queue.SimpleQueue[Sequence[Job]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, list[Finding]] | BaseException] = queue.SimpleQueue()
    chunks = [jobs[start : start + _CHUNK] for start in range(0, len(jobs), _CHUNK)]
    for chunk in chunks:
        waiting.put(chunk)
    stop = threading.Event()
    threads = [
        threading.Thread(target=_feed, args=(waiting, done, stop), daemon=True, name="capibara-migrate")
        for _ in range(min(several, len(chunks)))
    ]
    for thread in threads:
        thread.start()
    findings: list[Finding] = []
    count = 0
    try:
        while count < len(jobs):
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            count += result[0]
            findings += result[1]
            checked(count)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return findings


def _feed(waiting: queue.SimpleQueue[Sequence[Job]], done: queue.SimpleQueue[object], stop: threading.Event) -> None:
    """Hands chunks to a process until there are none."""
    try:
        worker = _Worker()
        while not stop.is_set():
            try:
                chunk = waiting.get_nowait()
            except queue.Empty:
                break
            results = worker.check(chunk)
            if results is None:  # it died of one of the files: each for itself, to know of which
                results = []
                for job in chunk:
                    worker = _Worker()
                    results += worker.check([job]) or [_died(job[0])]
                    worker.end()
                worker = _Worker()
            done.put((len(chunk), results))
        worker.end()
    except BaseException as error:  # noqa: BLE001 it is raised where the results are awaited
        done.put(error)


def _died(path: Path) -> Finding:
    message = "Python's parser died of it"
    return Finding(str(path), 1, 1, 1, 1, "CAP903", message, "exclude it", "error")


class _Worker:
    """A process that checks what it is sent."""

    def __init__(self) -> None:
        code = "from capibara.migrate.run import serve; serve()"
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},  # it imports what this process does
        )

    def check(self, jobs: Sequence[Job]) -> list[Finding] | None:
        """What it finds; None where it died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(list(jobs), self._process.stdin)
            self._process.stdin.flush()
            findings: list[Finding] = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self._process.wait()
            return None
        return findings

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve() -> None:
    """The worker's side: jobs in, findings out, until there are no more."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            jobs: list[Job] = pickle.load(requests)
        except EOFError:
            return
        findings = [one for path, settings in jobs for one in check_file(path, settings)]
        pickle.dump(findings, answers)
        answers.flush()
