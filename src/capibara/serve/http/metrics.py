"""Figures for Prometheus, by the names that vLLM's dashboards read.

The prefix is theirs, so that a dashboard that is there shows this server as it is. What the engine counts is told by
its process; what a client sees (first token, gaps between tokens) is measured where it is sent.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from capibara.serve.link import Stats
from capibara.serve.request import RequestOutput

__all__ = ["CONTENT_TYPE", "Metrics", "Timeline"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)

_GAUGES = {
    "num_requests_running": ("running", "Requests in the engine's batch."),
    "num_requests_waiting": ("waiting", "Requests that wait for room in it."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Pages of the cache in use, 0 to 1."),
}
_COUNTERS = {
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens that were looked up in the cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens that were found in it."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed or found."),
    "generation_tokens": ("generation_tokens", "Tokens written."),
    "num_preemptions": ("preemptions", "Requests that gave their pages back and started anew."),
    "spec_decode_num_draft_tokens": ("drafted", "Tokens guessed ahead."),
    "spec_decode_num_accepted_tokens": ("accepted", "Guessed tokens that were right."),
}


@dataclass
class Timeline:
    """When a request came, and when its tokens did."""

    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    waited_s: float | None = None
    """Before it ran, as the engine tells."""


class _EngineFigures(Collector):
    """The engine's own counts, as they were last told."""

    def __init__(self, model: str, dollars_per_hour: float | None) -> None:
        self.model = model
        self.dollars_per_hour = dollars_per_hour
        self.stats = Stats()

    def collect(self):  # type: ignore[no-untyped-def]  # prometheus_client's own is untyped
        for name, (source, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self.model], getattr(self.stats, source))
            yield gauge
        for name, (source, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            counter.add_metric([self.model], getattr(self.stats, source))
            yield counter
        spent = self.stats.phase_seconds
        yield _by_phase("capibara:goodput_seconds", "Where the server's time went.", spent)
        if self.dollars_per_hour is not None:
            cost = {phase: seconds / 3600 * self.dollars_per_hour for phase, seconds in spent.items()}
            yield _by_phase("capibara:goodput_dollars", "What that cost.", cost)


def _by_phase(name: str, text: str, values: dict[str, float]) -> CounterMetricFamily:
    counter = CounterMetricFamily(name, text, labels=["phase"])
    for phase, value in values.items():
        counter.add_metric([phase], value)
    return counter


class Metrics:
    """One server's; a registry of its own, so that several may be in one process."""

    def __init__(self, model: str, dollars_per_hour: float | None = None) -> None:
        self.model = model
        self.registry = CollectorRegistry()
        self._engine = _EngineFigures(model, dollars_per_hour)
        self.registry.register(self._engine)
        labels = ["model_name"]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, labels, buckets=buckets, registry=self.registry)
            return made.labels(model)

        self._first = histogram("time_to_first_token_seconds", "From a request to its first token.", _FIRST)
        self._between = histogram("inter_token_latency_seconds", "Between a request's tokens.", _BETWEEN)
        self._each = histogram(
            "request_time_per_output_token_seconds", "A request's mean gap between tokens.", _BETWEEN
        )
        self._whole = histogram("e2e_request_latency_seconds", "From a request to the end of its answer.", _WHOLE)
        self._queued = histogram("request_queue_time_seconds", "Before a request ran.", _WHOLE)
        self._prefill = histogram("request_prefill_time_seconds", "From there to its first token.", _WHOLE)
        self._decode = histogram("request_decode_time_seconds", "From there to its last.", _WHOLE)
        self._inference = histogram("request_inference_time_seconds", "From where it ran to its last token.", _WHOLE)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._written = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._finished = Counter(
            "vllm:request_success", "Answers, by how they ended.", [*labels, "finished_reason"], registry=self.registry
        )
        self._answers = Counter(
            "capibara:http_responses", "By path and status.", ["path", "status"], registry=self.registry
        )
        self._open = Gauge("capibara:http_requests_open", "Requests being answered.", registry=self.registry)

    def told(self, stats: Stats) -> None:
        self._engine.stats = stats

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def opened(self) -> None:
        self._open.inc()

    def answered(self, path: str, status: int) -> None:
        self._open.dec()
        self._answers.labels(path, str(status)).inc()

    def output(self, timeline: Timeline, output: RequestOutput) -> None:
        """Tokens have come. Of several at once the gap since the last is shared out among them."""
        now = time.monotonic()
        tokens = len(output.tokens)
        if timeline.waited_s is None:
            timeline.waited_s = output.waited_s
        if tokens and timeline.first is None:
            timeline.first = timeline.last = now
            self._first.observe(now - timeline.started)
            tokens -= 1
            for _ in range(tokens):  # in one step with the first
                self._between.observe(0.0)
        elif tokens:
            assert timeline.last is not None
            gap = (now - timeline.last) / tokens
            for _ in range(tokens):
                self._between.observe(gap)
            timeline.last = now
        if output.finish_reason is not None:
            self._whole.observe(now - timeline.started)
            self._prompt.observe(output.usage.prompt_tokens)
            self._written.observe(output.usage.completion_tokens)
            self._finished.labels(self.model, output.finish_reason).inc()
            self._parts(timeline)
            if timeline.first is not None and output.usage.completion_tokens > 1:
                self._each.observe((now - timeline.first) / (output.usage.completion_tokens - 1))

    def _parts(self, timeline: Timeline) -> None:
        """Where a request's time went, when it is over."""
        if timeline.waited_s is None:
            return
        self._queued.observe(timeline.waited_s)
        if timeline.first is None or timeline.last is None:
            return
        prefill = max(0.0, timeline.first - timeline.started - timeline.waited_s)
        decode = timeline.last - timeline.first
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._inference.observe(prefill + decode)
