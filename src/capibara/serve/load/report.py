"""What a load has shown: throughput, percentiles, goodput, and a chart of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from capibara.serve.load.client import Record

__all__ = ["chart", "gaps", "summary"]

_PERCENTILES = (50, 90, 95, 99)
_BARS = " ▁▂▃▄▅▆▇█"
_PLAIN = " .:-=+*#@"


def gaps(record: Record) -> list[float]:
    """Seconds between a request's tokens; of several that came at once, the wait for them is shared out among them."""
    out: list[float] = []
    for (before, had), (now, has) in zip(record.events, record.events[1:], strict=False):
        out += [(now - before) / (has - had)] * (has - had)
    return out


def summary(
    records: Sequence[Record],
    began: float,
    *,
    target_latency_ms: float | None = None,
    target_first_ms: float | None = None,
) -> dict[str, Any]:
    """The figures of a run.

    A request is good when the mean gap between its tokens is within `target_latency_ms` and its first token came within
    `target_first_ms`, of those that are given; goodput counts these alone.
    """
    good = [record for record in records if record.ok]
    ended = max((record.ended for record in records), default=began)
    seconds = max(ended - began, 1e-9)
    between = [gap for record in good for gap in gaps(record)]
    pauses = [b[0] - a[0] for record in good for a, b in zip(record.events, record.events[1:], strict=False)]
    kept = [record for record in good if _within(record, target_latency_ms, target_first_ms)]
    figures: dict[str, Any] = {
        "requests": len(records),
        "answered": len(good),
        "failed": dict(Counter(str(record.status) for record in records if not record.ok)),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "prompt_tokens_per_second": sum(record.prompt_tokens for record in good) / seconds,
        "output_tokens_per_second": sum(record.completion_tokens for record in good) / seconds,
        "prompt_tokens": _spread([record.prompt_tokens for record in good]),
        "output_tokens": _spread([record.completion_tokens for record in good]),
        "first_token_ms": _spread([1000 * (record.events[0][0] - record.due) for record in good]),
        "inter_token_ms": _spread([1000 * gap for gap in between]),
        "between_events_ms": _spread([1000 * pause for pause in pauses]),
        "whole_answer_ms": _spread([1000 * (record.ended - record.due) for record in good]),
        "sent_late_ms": _spread([1000 * (record.sent - record.due) for record in records]),
        "most_at_a_time": max(_running(records, began, seconds, 400), default=0),
    }
    if target_latency_ms is not None or target_first_ms is not None:
        figures["goodput"] = {
            "target_latency_ms": target_latency_ms,
            "target_first_ms": target_first_ms,
            "requests": len(kept),
            "share": len(kept) / len(records) if records else 0.0,
            "requests_per_second": len(kept) / seconds,
            "output_tokens_per_second": sum(record.completion_tokens for record in kept) / seconds,
        }
    return figures


def _within(record: Record, latency_ms: float | None, first_ms: float | None) -> bool:
    own = gaps(record)
    slow = latency_ms is not None and own and 1000 * sum(own) / len(own) > latency_ms
    late = first_ms is not None and 1000 * (record.events[0][0] - record.due) > first_ms
    return not slow and not late


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    numbers = np.asarray(values, float)
    percentiles = np.percentile(numbers, _PERCENTILES)
    named = {f"p{percent}": float(value) for percent, value in zip(_PERCENTILES, percentiles, strict=True)}
    return {"mean": float(numbers.mean()), **named, "max": float(numbers.max())}


def _running(records: Sequence[Record], began: float, seconds: float, bins: int) -> list[int]:
    """How many requests were on their way, at so many moments of the run."""
    moments = began + seconds * (np.arange(bins) + 0.5) / bins
    sent = np.sort([record.sent for record in records])
    ended = np.sort([record.ended for record in records])
    return (np.searchsorted(sent, moments) - np.searchsorted(ended, moments)).tolist()


def chart(records: Sequence[Record], began: float, *, width: int = 60, unicode: bool = True) -> str:
    """The run from left to right: requests on their way, tokens a second, the 95th percentile of gaps; and the gaps."""
    good = [record for record in records if record.ok]
    seconds = max(max((record.ended for record in records), default=began) - began, 1e-9)
    edges = np.linspace(0, seconds, width + 1)
    times, counts, lengths = [], [], []
    for record in good:
        had = 0
        for (now, has), gap in zip(record.events, [None, *_event_gaps(record)], strict=True):
            times.append(now - began)
            counts.append(has - had)
            lengths.append(gap)
            had = has
    where = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, width - 1)
    tokens = np.bincount(where, weights=counts, minlength=width) * width / seconds
    slow = np.zeros(width)
    for place in range(width):
        own = [1000 * gap for gap, at in zip(lengths, where, strict=True) if at == place and gap is not None]
        slow[place] = np.percentile(own, 95) if own else 0.0
    rows: list[tuple[str, Any, str]] = [
        ("on their way", _running(records, began, seconds, width), "{:,.0f}"),
        ("tokens/s", tokens, "{:,.0f}"),
        ("p95 gap, ms", slow, "{:,.3g}"),
    ]
    lines = []
    for name, values, form in rows:
        top = max(float(np.max(values)), 1e-12)
        lines.append(f"{name:>12} {_bars(values, top, unicode)} {form.format(top)}")
    lines.append(f"{'':>12} 0{f'{seconds:.3g} s':>{width - 1}}")
    between = np.asarray([1000 * gap for record in good for gap in gaps(record)])
    if between.size:
        # Of equal steps on a logarithmic scale: a stall of a second is to be seen beside gaps of a millisecond.
        low, high = max(float(between.min()), 1e-3), max(float(between.max()), 2e-3)
        counted, _ = np.histogram(np.clip(between, low, high), np.geomspace(low, high * 1.0001, width + 1))
        lines.append(
            f"{'gaps':>12} {_bars(np.sqrt(counted), float(np.sqrt(counted.max())), unicode)} {counted.max():,}"
        )
        ends = f"{low:.3g} ms", f"{high:.3g} ms"
        lines.append(f"{'':>12} {ends[0]}{ends[1]:>{width - len(ends[0])}}")
    return "\n".join(lines) + "\n"


def _event_gaps(record: Record) -> list[float]:
    """Seconds a token before each event but the first."""
    return [
        (now - before) / (has - had)
        for (before, had), (now, has) in zip(record.events, record.events[1:], strict=False)
    ]


def _bars(values: Any, top: float, unicode: bool) -> str:
    signs = _BARS if unicode else _PLAIN
    scaled = [float(value) / top if top else 0.0 for value in values]
    return "".join(signs[min(int(np.ceil(share * 8)), 8)] for share in scaled)
