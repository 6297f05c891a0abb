"""A server, by its /metrics: `capibara serve`, and others that tell vLLM's names."""

from __future__ import annotations

import http.client
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence

from capibara.errors import CapibaraError, rule_error
from capibara.observe.sensors.reading import Reading

__all__ = ["ServerSensor", "read_exposition"]

_GAUGES = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
}
_TOKENS = "vllm:generation_tokens_total"
_GAP = "vllm:inter_token_latency_seconds"
_MOST = 16 << 20


class ServerSensor:
    """Readings of a server: what runs and waits, and tokens a second between one reading and the next.

    Args:
      address: "http://127.0.0.1:8000", with or without /metrics.
      timeout_s: for one answer.
      clock: in seconds.
    """

    accelerators = False

    def __init__(self, address: str, timeout_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        parts = urllib.parse.urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise rule_error("A server is an http address", repr(address), "write http://127.0.0.1:8000")
        self.name = address.removesuffix("/metrics").rstrip("/")
        self._timeout_s = timeout_s
        self._clock = clock
        self._before: tuple[float, Mapping[str, float]] | None = None

    def read(self) -> Sequence[Reading]:
        told = read_exposition(self._get())
        now = self._clock()
        values = {ours: told[theirs] for theirs, ours in _GAUGES.items() if theirs in told}
        if self._before is not None and now > self._before[0]:
            since, before = now - self._before[0], self._before[1]
            tokens = _grown(before, told, _TOKENS)
            if tokens is not None:
                values["tokens_per_second"] = tokens / since
            gaps, seconds = _grown(before, told, f"{_GAP}_count"), _grown(before, told, f"{_GAP}_sum")
            if gaps and seconds is not None:
                values["step_time"] = seconds / gaps
        self._before = now, told
        return [Reading(self.name, "serve", values)]

    def _get(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.name}/metrics", timeout=self._timeout_s) as answer:
                return answer.read(_MOST).decode("utf-8", errors="replace")
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise CapibaraError(f"{self.name}/metrics does not answer: {reason}") from error

    def close(self) -> None:
        pass


def _grown(before: Mapping[str, float], now: Mapping[str, float], name: str) -> float | None:
    """By how much a counter grew; None where it is not told, or began anew with its server."""
    if name not in before or name not in now or now[name] < before[name]:
        return None
    return now[name] - before[name]


def read_exposition(text: str) -> dict[str, float]:
    """Prometheus' text form: name -> value, summed over labels. What is no line of it is passed over.

    >>> read_exposition('# HELP a b\\na_total{x="1"} 2\\na_total{x="2"} 3 1700000000\\n')
    {'a_total': 5.0}
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if "{" in line:
            name, _, rest = line.partition("{")
            rest = rest.rpartition("}")[2]
        else:
            name, _, rest = line.partition(" ")
        words = rest.split()
        try:
            value = float(words[0])
        except (IndexError, ValueError):
            continue
        if math.isfinite(value):
            values[name.strip()] = values.get(name.strip(), 0.0) + value
    return values
