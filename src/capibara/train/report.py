"""The page at the end of a run: what ran where, how fast, in what memory, predicted against measured, what it costs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.train.run import Trained

__all__ = ["Report", "write_report"]


@dataclass(frozen=True)
class Report:
    """A run in figures and as pages."""

    tokens_per_second: float | None
    """Median over the steps of this process, the first left out."""
    mfu: float | None
    text: str
    html: Path | None


def _median(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows[1:] or rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def write_report(trained: Trained) -> Report:
    """The report of a run, written into its folder as report.html."""
    rows = trained.result.history
    rate, mfu = _median(rows, "tokens_per_second"), _median(rows, "mfu")
    loop = trained.loop
    lines = [
        f"{trained.model!r}: step {trained.result.step}",
        f"loss {trained.result.metrics.get('loss', float('nan')):.4f}"
        + ("" if trained.result.eval_loss is None else f", held-out {trained.result.eval_loss:.4f} nats a token"),
        f"on {len(loop.devices)} x {loop.devices[0].device_kind}",
    ]
    if rate is not None:
        lines.append(f"{rate:,.0f} tokens/s" + ("" if mfu is None else f", MFU {mfu:.1%}"))
    if trained.goodput is not None:
        lines.append(str(trained.goodput))
    text = "\n".join(lines) + "\n"
    html = None
    if trained.folder is not None:
        html = trained.folder / "report.html"
        html.write_text(f"<!doctype html><meta charset=utf-8><pre>{text}</pre>", encoding="utf-8")
    return Report(rate, mfu, text, html)
