"""Who is told of alerts: a log, a web address, a command, any function. Nobody who is told holds up the monitor.

Each callback has a thread and a queue of its own. One that hangs is left to hang; what comes meanwhile waits, and the
oldest goes when too much waits.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import subprocess
import threading
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence

from capibara.errors import CapibaraError, rule_error
from capibara.observe.alerts import AlertEvent

__all__ = ["Callback", "Notifier", "command", "log_alerts", "webhook"]

_log = logging.getLogger("capibara.observe")
_MOST_WAITING = 256

Callback = Callable[[AlertEvent], None]


def log_alerts(logger: logging.Logger = _log) -> Callback:
    """A callback that logs: a warning when an alert is raised, a line of information when it is cleared."""

    def tell(event: AlertEvent) -> None:
        logger.log(logging.WARNING if event.what == "raised" else logging.INFO, "%s", event)

    return tell


def webhook(url: str, timeout_s: float = 10.0) -> Callback:
    """A callback that posts the event as JSON: event, name, source, value, threshold, side, since, time, text."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise rule_error("A webhook is an http address", repr(url), "write https://example.com/alerts")

    def tell(event: AlertEvent) -> None:
        body = json.dumps(event.as_dict()).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                answer.read(1 << 16)
        except (OSError, http.client.HTTPException) as error:
            raise CapibaraError(f"{parts.hostname} did not take the alert: {error}") from error

    return tell


def command(words: Sequence[str], timeout_s: float = 60.0) -> Callback:
    """A callback that runs a program, without a shell: the event is JSON on its input, its text in $CAPIBARA_ALERT."""
    if isinstance(words, str) or not words:
        raise rule_error("A command is a list of words", repr(words), "write ['notify-send', 'capibara']")

    def tell(event: AlertEvent) -> None:
        environment = {**os.environ, "CAPIBARA_ALERT": str(event), "CAPIBARA_ALERT_EVENT": event.what}
        try:
            done = subprocess.run(
                list(words),
                input=json.dumps(event.as_dict()).encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CapibaraError(f"{words[0]}: {error}") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-500:]
            raise CapibaraError(f"{words[0]} ended with {done.returncode}: {said}")

    return tell


class Notifier:
    """One callback, called in a thread of its own, in order."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._waiting: deque[AlertEvent] = deque()
        self._changed = threading.Condition()
        self._stop = False
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self.failed = 0

    def tell(self, event: AlertEvent) -> None:
        """Put it into the queue; it never waits."""
        with self._changed:
            if self._stop:
                return
            if len(self._waiting) >= _MOST_WAITING:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="alert callback", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stop)
                if not self._waiting:
                    return
                event = self._waiting.popleft()
            try:
                self._callback(event)
            except Exception as error:  # noqa: BLE001  # a user's function
                self.failed += 1
                _log.warning("an alert could not be told: %s: %s", type(error).__name__, error)

    def close(self, timeout_s: float = 1.0) -> None:
        """Tell what waits, for so long; then leave it."""
        with self._changed:
            self._stop = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
