"""The report as one page that needs nothing else: styles and charts are in it, light and dark, for a phone too."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from capibara.plan import words
from capibara.plan.html import document, figures
from capibara.train.report.curves import loss_svg
from capibara.train.report.sections import Section, headline
from capibara.train.report.summary import Summary

__all__ = ["page"]

_STYLE = """
.line-held{fill:none;stroke:var(--matrix);stroke-width:1.2;stroke-dasharray:2 3}
.chart{overflow-x:auto}.chart svg{min-width:560px}
dl{display:grid;grid-template-columns:minmax(80px,max-content) 1fr;gap:3px 14px;margin:6px 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.bar{display:flex;height:22px;border-radius:6px;overflow:hidden;border:1px solid var(--line);margin:8px 0}
.bar div{min-width:1px}.key span{white-space:nowrap}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;white-space:pre-wrap;
overflow-wrap:anywhere;font-size:.85rem}pre b{color:var(--soft);font-weight:400}
@media(max-width:480px){body{padding:16px 12px 40px}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:6px}}
"""
_COLOURS = ("--good", "--memory", "--matrix", "--vector", "--host", "--limit", "--soft", "--line", "--ink")


def page(summary: Summary, parts: Sequence[Section], sample: tuple[str, str] | None) -> str:
    """The whole document."""
    last = summary.lives[-1] if summary.lives else None
    body = [f"<h1>{escape(headline(summary))}</h1>"]
    if last is not None:
        body.append(f'<p class="soft">Measured on {escape(last.device_kind)}, {escape(last.date)}</p>')
    body.append(_figures(summary))
    for part in parts:
        body.append(f"<h2>{escape(part.title)}</h2>")
        if part.title == "Loss":
            body.append(f'<div class="chart">{loss_svg(summary)}</div>')
            body.append(
                '<p class="key soft"><span class="bound-memory">&#9644; training</span>'
                '<span class="bound-matrix">&#9679; held out</span></p>'
            )
        if part.title == "Time":
            body.append(_bar(summary))
        body.append(
            "<dl>" + "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in part.lines) + "</dl>"
        )
    if sample is not None:
        prompt, text = sample
        body.append(f"<h2>Text that it writes, the prompt first</h2><pre><b>{escape(prompt)}</b>{escape(text)}</pre>")
    return document(headline(summary), body, _STYLE)


def _figures(summary: Summary) -> str:
    shown = []
    if summary.held_out:
        shown.append((f"{summary.held_out[-1][1]:.3f}", "nats a token, held out"))
    elif summary.losses and summary.losses[-1][1] is not None:
        shown.append((f"{summary.losses[-1][1]:.3f}", "nats a token, training"))
    speed = summary.speed
    if speed is not None:
        shown.append((words.count(speed.tokens_per_second), "tokens a second"))
        shown.append((words.seconds(speed.seconds[1]), "a step, the median"))
        if speed.mfu is not None and speed.mfu <= 1:
            shown.append((words.percent(speed.mfu), "MFU"))
    if summary.goodput is not None:
        shown.append((words.percent(summary.goodput.goodput), "goodput"))
    return figures(shown)


def _bar(summary: Summary) -> str:
    """Where the time went, as one bar."""
    assert summary.goodput is not None
    shares = sorted(summary.goodput.fractions().items(), key=lambda item: (item[0] != "step", -item[1]))
    shown = [(name, share) for name, share in shares if share >= 0.002]
    colours = [_COLOURS[min(number, len(_COLOURS) - 1)] for number in range(len(shown))]
    parts = "".join(
        f'<div style="flex:{share:.4f};background:var({colour})" title="{escape(name)} {share:.1%}"></div>'
        for (name, share), colour in zip(shown, colours, strict=True)
    )
    key = "".join(
        f'<span style="color:var({colour})">&#9632; {escape(name.replace("_", " "))}</span> '
        for (name, _), colour in zip(shown, colours, strict=True)
    )
    return f'<div class="bar">{parts}</div><p class="key">{key}</p>'
