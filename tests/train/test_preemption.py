"""SIGTERM asks and does not kill; several processes stop after the same step."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from capibara.errors import TPUError
from capibara.train import preemption as module
from capibara.train.preemption import Preemption


@pytest.mark.quick
def test_a_signal_is_a_request_and_so_is_the_second() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.should_stop(1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested
        assert preemption.should_stop(2)
        with pytest.raises(SystemExit) as ended:
            preemption.exit()
        assert ended.value.code == 42
    assert signal.getsignal(signal.SIGTERM) is before


class Store:
    """As jax.distributed keeps it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        if key in self.values:
            raise RuntimeError("ALREADY_EXISTS: key")
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise RuntimeError("NOT_FOUND: key")
        return self.values[key]


@pytest.mark.quick
def test_processes_stop_after_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(module, "process_count", lambda: 2)
    monkeypatch.setattr(module, "_client", lambda: store)
    asked, other = Preemption(margin=2), Preemption(margin=2)
    assert not other.should_stop(10)
    asked._requests = 1
    assert [asked.should_stop(step) for step in (10, 11, 12)] == [False, False, True]
    other._requests = 1  # asked too, a moment later
    assert [other.should_stop(step) for step in (11, 12)] == [False, True]
    too_far = Preemption()
    with pytest.raises(TPUError, match="agreed to stop after step 12, and this one is at step 15 already"):
        too_far.should_stop(15)


@pytest.mark.quick
def test_bad_input() -> None:
    with pytest.raises(ValueError, match="margin"):
        Preemption(margin=0)
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            Preemption().__enter__()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
