"""What the processes of one program tell each other on the host, with a time limit and the missing one by name.

It goes through the key-value store that `jax.distributed` keeps, not through the devices: a device collective has no
time limit, and hangs exactly when there is something to say about it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from typing import Any

from capibara.errors import TPUError, rule_error

__all__ = [
    "COORDINATOR",
    "PROCESS_COUNT",
    "PROCESS_ID",
    "MissingProcess",
    "barrier",
    "gather",
    "join_from_environment",
    "process_count",
    "process_index",
]

PROCESS_ID = "CAPIBARA_PROCESS_ID"
PROCESS_COUNT = "CAPIBARA_PROCESS_COUNT"
COORDINATOR = "CAPIBARA_COORDINATOR"
"""Environment variables that the supervisor gives to each process of a program."""

_CALLS: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)  # names are a handful of literals
_ROOT = "capibara"


class MissingProcess(TPUError):
    """Processes that did not come to a meeting in time; `.missing` has their numbers."""

    def __init__(self, text: str, missing: tuple[int, ...]) -> None:
        super().__init__(text)
        self.missing = missing


def join_from_environment(timeout: float = 300.0) -> bool:
    """Join the program that the supervisor started this process for; whether there is one of several processes.

    It is called before anything else of jax. A process that would then be alone, and train a model of its own in
    silence, is an error.
    """
    import jax

    text = {name: os.environ.get(name) for name in (PROCESS_ID, PROCESS_COUNT, COORDINATOR)}
    if text[PROCESS_COUNT] in (None, "1"):
        return False
    try:
        process, count = int(text[PROCESS_ID] or ""), int(text[PROCESS_COUNT] or "")
        if not 0 <= process < count or not text[COORDINATOR]:
            raise ValueError
    except ValueError:
        raise rule_error(
            f"{PROCESS_ID} is a number below {PROCESS_COUNT}, and {COORDINATOR} is host:port",
            ", ".join(f"{name}={value}" for name, value in text.items()),
            "set all three, or none of them for a program of one process",
        ) from None
    jax.distributed.initialize(text[COORDINATOR], count, process, initialization_timeout=int(timeout))
    if jax.process_count() != count:
        raise TPUError(f"{PROCESS_COUNT} is {count}, and jax counts {jax.process_count()} processes after joining them")
    return True


def process_index() -> int:
    import jax

    return jax.process_index()


def process_count() -> int:
    import jax

    return jax.process_count()


def _client() -> Any:
    # jax has no public name for it; orbax.checkpoint reaches it in the same way.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise TPUError(
            f"{process_count()} processes run this program and jax.distributed was not initialised in this one; call "
            f"jax.distributed.initialize() before anything else of jax"
        )
    return client


def gather(name: str, value: Any, timeout: float = 300.0) -> list[Any]:
    """`value` (JSON) of every process, in their order. Every process calls it, the n-th call of a name together.

    Raises:
      MissingProcess: after `timeout` seconds, with the processes that did not come.
    """
    count = process_count()
    if count == 1:
        return [value]
    client, me = _client(), process_index()
    # A restarted program meets in a new store, so that counting calls is enough to keep meetings apart.
    number = next(_CALLS[name])
    place = f"{_ROOT}/{name}/{number}"
    client.key_value_set(f"{place}/{me}", json.dumps(value))
    if number > 1:
        # Whoever comes to meeting n has left n - 1, so that everybody has left n - 2.
        client.key_value_delete(f"{_ROOT}/{name}/{number - 2}/{me}")
    deadline = time.monotonic() + timeout
    answers: dict[int, Any] = {}
    for process in range(count):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            answers[process] = json.loads(client.blocking_key_value_get(f"{place}/{process}", int(left * 1000) + 1))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    missing = tuple(process for process in range(count) if process not in answers)
    if missing:
        who = ", ".join(map(str, missing))
        raise MissingProcess(
            f"process {me} waited {timeout:g} s at {name!r} (call {number}) and process {who} of {count} did not come: "
            f"it died, hangs, or runs another program",
            missing,
        )
    return [answers[process] for process in range(count)]


def barrier(name: str, timeout: float = 300.0) -> None:
    """Wait for every process, at most `timeout` seconds; those that do not come are named."""
    gather(f"barrier/{name}", None, timeout)
