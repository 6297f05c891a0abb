"""A model's chat template in a process of its own, which ends when it takes too long and cannot grow too large.

Jinja's sandbox keeps a template from files and modules, and not from loops in loops or from text that doubles itself.
Such a one holds its thread forever, and no thread can be ended from outside; a process can. It answers one
conversation after another, and is started anew after one that had to be ended.

`python -m capibara.serve.http.templates` is that process: on standard input and output, a JSON document with its
length before it for each conversation and each answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from capibara.errors import CapibaraError, rule_error
from capibara.models.chat import Message, render

__all__ = ["TemplateLimit", "TemplateProcesses"]

SECONDS = 5.0
"""That one conversation may take: a template's work is milliseconds, also on a busy machine."""
CHARACTERS = 32 << 20
"""Of the text that comes of it: more than any context has tokens for."""
_BYTES = 1 << 30
"""Of the process's memory."""
_PROCESSES = 2
_START_S = 60.0
"""That a new process may take to be there; it counts apart."""
_LENGTH = struct.Struct("<I")


class TemplateLimit(CapibaraError, ValueError):
    """A conversation whose rendering takes too long, or grows too large."""


class TemplateProcesses:
    """Renders conversations by one template. Threads may share it; a process is started when it is first needed."""

    def __init__(self, template: str, *, seconds: float = SECONDS, characters: int = CHARACTERS) -> None:
        self._template = template
        self._seconds = seconds
        self._characters = characters
        self._lock = threading.Lock()
        self._alive: set[subprocess.Popen[bytes]] = set()
        self._free: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(_PROCESSES):
            self._free.put(None)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The text of a conversation. A `ValueError` says what the template, or its limits, have against it."""
        asked = {
            "template": self._template,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "variables": variables,
            "characters": self._characters,
            "seconds": self._seconds,
        }
        try:
            document = json.dumps(asked).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise rule_error("A conversation is plain JSON", f"{error}", "send text, numbers and lists") from error
        process = self._free.get()
        try:
            if process is None or process.poll() is not None:
                process = self._started(process)
            answer = _asked(process, document, self._seconds)
            if answer is None or "ended" in answer:
                self._end(process)
                process = None
        except BaseException:
            self._end(process)
            process = None
            raise
        finally:
            self._free.put(process)
        if answer is None:
            raise TemplateLimit(
                f"A conversation is rendered within {self._seconds:g} s. Got one that takes longer. Fix: send a "
                f"shorter one."
            )
        if "limit" in answer:
            raise TemplateLimit(answer["limit"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["text"])

    def close(self) -> None:
        """End the processes."""
        for process in list(self._alive):
            self._end(process)

    def _started(self, before: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
        self._end(before)
        process = subprocess.Popen(
            [sys.executable, "-m", "capibara.serve.http.templates"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with self._lock:
            self._alive.add(process)
        answer = _asked(process, b"null", _START_S)
        if answer is None or "ended" in answer:
            self._end(process)
            why = f"is not there within {_START_S:g} s" if answer is None else "ends before it is asked anything"
            raise CapibaraError(f"The process for chat templates {why}")
        return process

    def _end(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is None:
            return
        with self._lock:
            self._alive.discard(process)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not written yet is nobody's
                    stream.close()


def _asked(process: subprocess.Popen[bytes], document: bytes, seconds: float) -> dict[str, Any] | None:
    """The process's answer; None where it does not come in time. It is "ended" where the process has."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(_LENGTH.pack(len(document)) + document)
        process.stdin.flush()
        deadline = time.monotonic() + seconds
        head = _read_by(process.stdout.fileno(), _LENGTH.size, deadline)
        body = None if head is None else _read_by(process.stdout.fileno(), _LENGTH.unpack(head)[0], deadline)
    except (OSError, EOFError):
        return {"limit": _TOO_LARGE, "ended": True}
    if body is None:
        return None
    answer: dict[str, Any] = json.loads(body)
    return answer


_TOO_LARGE = f"A conversation is rendered in {_BYTES >> 20} MiB. Got one that takes more. Fix: send a shorter one."


def _read_by(file: int, size: int, deadline: float) -> bytes | None:
    """So many bytes; None where they are not there by then. A server has too many files open for `select`."""
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    parts = bytearray()
    while len(parts) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not waiting.poll(left * 1000):
            return None
        part = os.read(file, size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


# The process.


def _answer(asked: Mapping[str, Any]) -> dict[str, str]:
    try:
        text = render(asked["template"], asked["messages"], asked["add_generation_prompt"], **asked["variables"])
        if len(text) > asked["characters"]:
            most = f"A rendered conversation has {asked['characters']} characters at the most"
            return {"limit": f"{most}. Got {len(text)}. Fix: send a shorter one."}
        return {"text": text}
    except MemoryError:
        return {"limit": _TOO_LARGE}
    except ValueError as error:
        return {"error": str(error)}


def main(source: BinaryIO, target: BinaryIO) -> None:
    """Answer until the other side is gone."""
    while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
        asked = json.loads(source.read(_LENGTH.unpack(head)[0]))
        # Whoever waits ends this process at the deadline; where nobody does any more, the alarm ends it.
        signal.setitimer(signal.ITIMER_REAL, 0 if asked is None else asked["seconds"] + 1)
        document = json.dumps({} if asked is None else _answer(asked)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        target.write(_LENGTH.pack(len(document)) + document)
        target.flush()


if __name__ == "__main__":
    # Ctrl-C reaches every process of a terminal; whoever started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError, ValueError, OSError):  # systems without it have the deadline alone
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    main(sys.stdin.buffer, sys.stdout.buffer)
