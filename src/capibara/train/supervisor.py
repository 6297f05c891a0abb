"""The supervisor: the processes of one program on this machine, started together, ended together, started again.

A program of several processes cannot go on without one of them: the others wait for it for ever. So when one dies, of
whatever, the rest are stopped and all are started again, and find their last checkpoint themselves. A process that ends
in an orderly way for a reason that would come again (bad input, does not fit) or that was preempted is not restarted.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any, Protocol, TextIO

from capibara.errors import TPUError, rule_error
from capibara.processes import COORDINATOR, PROCESS_COUNT, PROCESS_ID
from capibara.train.exit_codes import DONE, FAILED, FINAL, PREEMPTED

__all__ = [
    "RESTARTS",
    "Exit",
    "Lines",
    "LocalProcess",
    "Place",
    "PlaceFailed",
    "Printer",
    "Running",
    "Supervisor",
    "ThisMachine",
    "free_port",
    "supervise",
]

logger = logging.getLogger(__name__)

RESTARTS = "CAPIBARA_RESTARTS"
"""How often the program was started before, for the processes to see."""

# Runs before the command, in its process: if the supervisor is killed, the kernel kills this process too (Linux). In a
# fresh interpreter and not between fork and exec, where another thread's lock would stay locked for ever. Signals that
# whoever started the supervisor keeps from itself (Ray's workers have no Ctrl-C) reach the command all the same.
_TIED = """
import os, signal, sys
parent = int(sys.argv[1])
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != parent:
    os._exit(137)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(f"{sys.argv[2]}: {error.strerror}\\n")
    os._exit(127)
"""


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    process: int
    code: int
    """As the shell has it: 137 is kill -9."""
    start: int
    """Which start of the program it was, from 0."""
    seconds: float

    def __str__(self) -> str:
        how = f"exit code {self.code}"
        if self.code - 128 in set(signal.Signals):
            how = f"killed by {signal.Signals(self.code - 128).name}"
        return f"process {self.process} ended after {self.seconds:.1f} s: {how}"


class PlaceFailed(TPUError):
    """The place could not start the program this time: a start that failed, as if a process had died."""


class Lines(Protocol):
    """Takes the lines that a process prints."""

    def line(self, process: int, line: bytes, error: bool) -> None: ...


class Running(Protocol):
    """A process of the program, wherever it runs."""

    def follow(self, ends: queue.Queue[Exit]) -> None:
        """Wait for its end and report it. In a thread of its own."""

    def signal(self, number: int) -> None:
        """Send a signal to it and to what it started. Called in a signal's handler too: it takes no lock."""


class Place(Protocol):
    """Where the processes of a program run."""

    def open(self, processes: int, stop: threading.Event) -> str:
        """Make room for one start of the program; the coordinator's address, host:port. `stop` ends a wait for it."""

    def start(
        self, number: int, start: int, command: Sequence[str], environment: Mapping[str, str], printer: Printer
    ) -> Running:
        """Start a process, with these variables added to its environment."""

    def close(self) -> None:
        """After each start, however it ended: nothing of it is left."""


class LocalProcess:
    """One running process of this machine, its output and its end."""

    def __init__(
        self,
        number: int,
        start: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        printer: Lines,
        folder: str | None = None,
    ) -> None:
        self.number, self.start = number, start
        self._began = time.monotonic()
        tied = [sys.executable, "-S", "-E", "-c", _TIED, str(os.getpid()), *command]
        self.popen = subprocess.Popen(
            tied,
            env={**os.environ, **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a group of its own: what it starts itself goes with it
        )
        self._printer = printer

        self._readers = [
            threading.Thread(target=self._read, args=(stream, error), daemon=True)
            for stream, error in ((self.popen.stdout, False), (self.popen.stderr, True))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[bytes], error: bool) -> None:
        for line in stream:
            self._printer.line(self.number, line, error)

    def follow(self, ends: queue.Queue[Exit]) -> None:
        """Wait for its end and report it. In a thread of its own."""
        code = self.popen.wait()
        # Its last lines come before its end is told; what it started may hold the pipe open for longer.
        for reader in self._readers:
            reader.join(1.0)
        ends.put(Exit(self.number, 128 - code if code < 0 else code, self.start, time.monotonic() - self._began))

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it is gone already
            os.killpg(self.popen.pid, number)


class ThisMachine:
    """The processes run here."""

    def open(self, processes: int, stop: threading.Event) -> str:
        return f"127.0.0.1:{free_port('127.0.0.1')}"

    def start(
        self, number: int, start: int, command: Sequence[str], environment: Mapping[str, str], printer: Printer
    ) -> LocalProcess:
        return LocalProcess(number, start, command, environment, printer)

    def close(self) -> None:
        pass


class Printer:
    """Whole lines of several processes, each with its process's number."""

    def __init__(self, output: TextIO, errors: TextIO, processes: int, plain: bool) -> None:
        self._output, self._errors, self._lock = output, errors, threading.Lock()
        self._width = len(str(processes - 1))
        self._prefix = processes > 1
        self._plain = plain

    def _write(self, stream: TextIO, text: str) -> None:
        with self._lock:
            stream.write(f"{text}\n")
            stream.flush()

    def line(self, process: int, line: bytes, error: bool) -> None:
        text = line.decode(errors="replace").rstrip("\n")
        numbered = f"[{process:>{self._width}}] {text}" if self._prefix else text
        if self._plain and not error and process == 0:
            self._write(self._output, text)
        else:
            self._write(self._errors if error or self._plain else self._output, numbered)

    def say(self, text: str) -> None:
        self._write(self._errors, f"supervisor: {text}")


class Supervisor:
    """Runs `processes` copies of a command as one program.

    Each copy finds its number, their count and the coordinator's address in the environment (`CAPIBARA_PROCESS_ID`,
    `CAPIBARA_PROCESS_COUNT`, `CAPIBARA_COORDINATOR`; `join_from_environment` reads them).

    Args:
      command: of each process.
      max_restarts: how often in a row the program is started again; a start that lasted `healthy_seconds` begins the
        count anew.
      backoff_seconds: wait before the first restart; each further one in a row waits twice as long, a minute at most.
      stop_seconds: between asking the rest to stop (SIGTERM) and killing them, when one has died.
      grace_seconds: the same when the supervisor itself was told to stop: time to save.
      restart_words: added to the command from the second start on, where it has not got them: "--resume".
      environment: added to this process's own.
      output: where lines of standard output go, by default to this process's own.
      errors: the same for standard error, and for what the supervisor says; by default `output` if that is given.
      plain: process 0's standard output goes to `output` as it is, and nothing else does: for a command that prints
        a document there.
      place: where the processes run, by default on this machine.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int = 1,
        *,
        max_restarts: int = 3,
        backoff_seconds: float = 1.0,
        healthy_seconds: float = 3600.0,
        stop_seconds: float = 5.0,
        grace_seconds: float = 300.0,
        restart_words: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        output: TextIO | None = None,
        errors: TextIO | None = None,
        plain: bool = False,
        place: Place | None = None,
    ) -> None:
        if isinstance(command, str) or not command:
            raise rule_error("A command is a list of words", repr(command), 'write ["python", "train.py"]')
        for name, value, low in (("processes", processes, 1), ("max_restarts", max_restarts, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise rule_error(f"{name} is a whole number from {low} up", repr(value), f"use {low} or more")
        self.command = list(command)
        self.processes = processes
        self.max_restarts = max_restarts
        self.backoff_seconds = backoff_seconds
        self.healthy_seconds = healthy_seconds
        self.stop_seconds = stop_seconds
        self.grace_seconds = grace_seconds
        self.restart_words = [word for word in restart_words if word not in self.command]
        self.environment = dict(environment or {})
        self.exits: list[Exit] = []
        """How every process ended, over all starts."""
        self.starts = 0
        """How often the program was started."""
        self._place = place or ThisMachine()
        self._printer = Printer(output or sys.stdout, errors or output or sys.stderr, processes, plain)
        self._running: list[Running] = []
        self._told = 0
        self._told_at: float | None = None
        self._woken = threading.Event()

    def run(self) -> int:
        """Run the program to its end; its exit code: 0, or that of the process that ended it.

        It is called in the main thread, which also takes the signals: the first SIGTERM or Ctrl-C is passed on, and
        after `grace_seconds` what is left is killed.
        """
        with self._signals():
            in_a_row = 0
            for start in range(sys.maxsize):
                began = time.monotonic()
                self.starts = start + 1
                code = self._one_start(start)
                if code in FINAL or self._told:
                    return code
                if time.monotonic() - began > self.healthy_seconds:
                    in_a_row = 0
                if in_a_row >= self.max_restarts:
                    self._printer.say(f"the program failed {in_a_row + 1} times in a row, and is not started again")
                    return code
                wait = min(self.backoff_seconds * 2**in_a_row, 60.0)
                in_a_row += 1
                self._printer.say(f"restart {in_a_row} of all {self.processes} processes in {wait:g} s")
                if self._woken.wait(wait):  # told to stop meanwhile: nothing runs that could be lost
                    return 128 + self._told
        raise AssertionError("unreachable")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def told(number: int, frame: FrameType | None) -> None:
            self._told_at = self._told_at or time.monotonic()
            self._told = number
            self._woken.set()
            for process in self._running:
                process.signal(number)

        before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._kill()

    def _kill(self) -> None:
        for process in self._running:
            process.signal(signal.SIGKILL)

    def _one_start(self, start: int) -> int:
        """All processes once, from start to end; the code of the one that decided it."""
        ends: queue.Queue[Exit] = queue.Queue()
        threads = []
        try:
            coordinator = self._place.open(self.processes, self._woken)
            for number in range(self.processes):
                environment = {
                    **self.environment,
                    PROCESS_ID: str(number),
                    PROCESS_COUNT: str(self.processes),
                    COORDINATOR: coordinator,
                    RESTARTS: str(start),
                }
                command = self.command + (self.restart_words if start else [])
                process = self._place.start(number, start, command, environment, self._printer)
                self._running.append(process)
                threads.append(threading.Thread(target=process.follow, args=(ends,), daemon=True))
                threads[-1].start()
            if self._told:  # while they were being started
                for process in self._running:
                    process.signal(self._told)
            return self._until_all_ended(ends)
        except PlaceFailed as failure:
            self._printer.say(str(failure))
            return 128 + self._told if self._told else FAILED
        finally:
            self._kill()  # what the processes left behind in their groups, too
            for thread in threads:
                thread.join()
            self._running = []
            self._place.close()

    def _until_all_ended(self, ends: queue.Queue[Exit]) -> int:
        decided: Exit | None = None
        deadline: float | None = None
        for _ in range(self.processes):
            end = self._next(ends, deadline)
            self.exits.append(end)
            if end.code == DONE or decided is not None:
                continue
            # The first that did not end well decides; those that fall after it fall because of it.
            decided = end
            self._printer.say(str(end))
            # One that was preempted leaves the others time to save too: they were all told.
            patience = self.grace_seconds if end.code == PREEMPTED or self._told else self.stop_seconds
            deadline = time.monotonic() + patience
            if end.code != PREEMPTED and not self._told:
                for process in self._running:
                    process.signal(signal.SIGTERM)
        return DONE if decided is None else decided.code

    def _next(self, ends: queue.Queue[Exit], deadline: float | None) -> Exit:
        """The next end. Past the deadline what still runs is killed, and so ends."""
        killed = False
        while True:
            if self._told_at is not None and not killed:
                deadline = min(deadline or float("inf"), self._told_at + self.grace_seconds)
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                self._kill()
                killed, left, deadline = True, 1.0, None
            try:
                # In pieces of a second at most, so that a signal that came just before the wait is seen.
                return ends.get(timeout=min(left, 1.0))
            except queue.Empty:
                continue


def supervise(command: Sequence[str], processes: int = 1, **options: Any) -> int:
    """`Supervisor(command, processes, **options).run()`: the exit code."""
    return Supervisor(command, processes, **options).run()


def free_port(host: str) -> int:
    """A port of this machine that nobody listens on at this address."""
    with socket.socket() as opened:
        opened.bind((host, 0))
        return int(opened.getsockname()[1])
