"""Told to stop: a signal asks, the loop finishes its step, saves, and ends with exit code 42."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn

from capibara.errors import TPUError, rule_error
from capibara.processes import _client, process_count
from capibara.train.exit_codes import PREEMPTED

__all__ = ["Preemption"]

logger = logging.getLogger(__name__)
_KEY = "capibara/preempted_at"


class Preemption:
    """Takes SIGTERM while it is entered; a second one changes nothing, and so does not cut off the save.

    Args:
      signals: those that ask.
      margin: with several processes, how many steps after the first to be asked all of them stop, so that they save
        the same step: more than any of them is ahead of the slowest.

    Examples:
        >>> with Preemption() as preemption:
        ...     for step in range(3):
        ...         if preemption.should_stop(step):
        ...             preemption.exit()  # after saving
        >>> preemption.requested
        False
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM,), margin: int = 3) -> None:
        if margin < 1:
            raise rule_error("margin is a whole number of steps from 1 up", f"{margin}", "leave it out for 3")
        self._signals = tuple(signals)
        self._margin = margin
        self._requests = 0
        self._stop_at: int | None = None
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._requests += 1  # and nothing else: a handler runs between any two instructions of the loop

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._requests > 0

    def should_stop(self, step: int) -> bool:
        """Whether to save now and stop, after this step. With several processes, all of them after the same one."""
        if process_count() == 1:
            return self.requested
        client = _client()
        if self._stop_at is None and self.requested:
            try:
                client.key_value_set(_KEY, str(step + self._margin))
            except Exception as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise  # else another process was asked first, and its step is the one
        if self._stop_at is None:
            try:
                self._stop_at = int(client.key_value_try_get(_KEY))
            except Exception as error:
                if "NOT_FOUND" not in str(error):
                    raise
                return False
        if step > self._stop_at:
            raise TPUError(
                f"The processes agreed to stop after step {self._stop_at}, and this one is at step {step} already: "
                f"it runs further ahead of the others than margin={self._margin}"
            )
        return step == self._stop_at

    def exit(self) -> NoReturn:
        """End the process with the code that says: preempted, and saved."""
        logger.warning("told to stop, and saved: exit code %d", PREEMPTED)
        raise SystemExit(PREEMPTED)

    def __enter__(self) -> Preemption:
        if threading.current_thread() is not threading.main_thread():
            raise rule_error(
                "Python takes signals in its main thread", threading.current_thread().name, "enter it there"
            )
        self._before = {number: signal.signal(number, self._handle) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: a handler that Python did not set, and cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
