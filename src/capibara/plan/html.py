"""A plan as one page that needs nothing else: styles and charts are in it, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from capibara.plan import words
from capibara.plan.charts import memory_timeline, roofline
from capibara.plan.report import bill_line, compiled_line, headlines, refusals

if TYPE_CHECKING:
    from capibara.plan.result import Plan

__all__ = ["STYLE", "document", "figures", "page", "table"]

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2733;--soft:#5b6875;--line:#dde3e9;--card:#f5f7f9;
--memory:#2f6db5;--matrix:#b3541e;--vector:#7a4fb0;--host:#1d8a6b;--limit:#c0392b;--good:#1d7a4f;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--paper:#12181f;--ink:#e4e9ee;--soft:#9aa7b4;--line:#2b3642;--card:#1a222b;
--memory:#7fb2ee;--matrix:#f0a06a;--vector:#bd9cf0;--host:#62cdaa;--limit:#ff8a7a;--good:#6fd6a2;--bad:#ff8a7a}}
body{margin:0 auto;max-width:920px;padding:24px 20px 60px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4rem;margin:0 0 4px}h2{font-size:1.05rem;margin:32px 0 8px}p{margin:6px 0}
.soft{color:var(--soft)}.verdict{font-weight:700}.fits{color:var(--good)}.not{color:var(--bad)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:16px 0}
.figures div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.figures b{display:block;font-size:1.25rem}.figures span{color:var(--soft);font-size:.85rem}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:right;padding:5px 8px;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600}.l{text-align:left}
svg{width:100%;height:auto}.grid{stroke:var(--line)}.tick,.label{fill:var(--soft);font-size:12px}
.fill-memory{fill:var(--memory);opacity:.22}.fill-arguments{fill:var(--memory);opacity:.45}.line-memory{fill:none;stroke:var(--memory);stroke-width:1.5}
.limit{stroke:var(--limit);stroke-dasharray:6 4}.limit-text{fill:var(--limit)}.peak{fill:var(--memory)}
.roof{fill:none;stroke:var(--ink);stroke-width:1.6}.dot{opacity:.65;stroke:var(--paper)}
.bound-matrix{fill:var(--matrix);color:var(--matrix)}.bound-vector{fill:var(--vector);color:var(--vector)}
.bound-memory{fill:var(--memory);color:var(--memory)}.bound-host{fill:var(--host);color:var(--host)}
.key span{margin-right:14px}
"""
_LEFT = ("layout", "bound", "buffer", "kind", "axes", "link", "why", "evidence", "change", "on", "reason")


def page(plan: Plan) -> str:
    """The whole document."""
    title = f"{plan.name or 'program'} on {plan.where.name}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">Predicted, not run. {escape(plan.evidence)}. {plan.date}</p>',
    ]
    verdict = "fits" if plan.fits else "not"
    lines = headlines(plan)
    for said in (plan.work is not None, not plan.complete):
        if said:
            body.append(f"<p>{escape(lines.pop(1))}</p>")
    body.append(f'<p class="verdict {verdict}">{escape(lines[1])}</p>')
    body += [f"<p>{escape(line)}</p>" for line in refusals(plan)]
    if plan.best is not None:
        body += [_figures(plan), *(f"<p>{escape(bill_line(one, plan.unit))}</p>" for one in plan.bills)]
    if plan.changes:
        rows = [
            (
                one.what,
                one.on,
                words.gib(one.bytes),
                words.seconds(one.seconds),
                words.dollars(one.usd_per_billion_tokens),
            )
            for one in plan.changes
        ]
        body.append("<h2>What would make it fit, the cheapest first</h2>")
        body.append(table(("change", "on", "a chip", "step", f"a billion {plan.unit}"), rows))
    if plan.best is not None:
        body += _charts_and_tables(plan)
    if plan.refused:
        body.append("<h2>Ruled out</h2>")
        body.append(table(("layout", "reason"), plan.refused[:20]))
    if plan.notes:
        body.append("<h2>Notes</h2>" + "".join(f'<p class="soft">{escape(note)}</p>' for note in plan.notes))
    return document(title, body)


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """A page of these parts, which needs nothing else."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _figures(plan: Plan) -> str:
    assert plan.best is not None
    estimate = plan.best.estimate
    shown = [
        (words.gib(plan.best.bytes), f"a chip, of {words.gib(estimate.memory.limit)}"),
        (words.seconds(estimate.seconds), f"a step ({words.seconds(estimate.low)} to {words.seconds(estimate.high)})"),
        (words.count(plan.tokens_per_second), f"{plan.unit} a second"),
        (words.percent(estimate.mfu), f"MFU; bound by {estimate.bound}"),
        *(
            (words.dollars(one.usd_per_billion_tokens), f"a billion {plan.unit}, {one.price.kind.replace('_', ' ')}")
            for one in plan.bills
        ),
    ]
    return figures(shown)


def figures(shown: Iterable[tuple[str, str]]) -> str:
    """Large figures, each with what it is, beside each other where there is room."""
    return (
        '<div class="figures">'
        + "".join(f"<div><b>{escape(figure)}</b><span>{escape(text)}</span></div>" for figure, text in shown)
        + "</div>"
    )


def _charts_and_tables(plan: Plan) -> list[str]:
    assert plan.best is not None
    estimate = plan.best.estimate
    bounds = dict.fromkeys(part.bound for part in estimate.parts)
    key = "".join(f'<span class="bound-{escape(one)}">&#9679; {escape(one)}</span>' for one in bounds)
    layouts = [
        (
            one.layout.name,
            words.gib(one.bytes),
            words.seconds(one.estimate.seconds),
            f"{words.seconds(one.estimate.low)} to {words.seconds(one.estimate.high)}",
            one.estimate.bound,
            words.percent(one.estimate.mfu),
            one.level if one.compiled is None else compiled_line(one),
        )
        for one in plan.candidates
    ]
    links = [
        (
            use.kind,
            ",".join(use.axes),
            use.link,
            words.count(use.count),
            words.size(use.bytes),
            words.seconds(use.seconds),
            use.why,
        )
        for use in sorted(estimate.links, key=lambda one: -one.bytes)
    ]
    return [
        "<h2>Layouts</h2>",
        table(("layout", "a chip", "step", "range", "bound", "MFU", "evidence"), layouts),
        "<h2>Memory over a step, predicted</h2>",
        memory_timeline(estimate.memory),
        table(("buffer", "a chip"), [(name, words.size(count)) for name, count in estimate.memory.largest[:5]]),
        "<h2>Roofline</h2>",
        roofline(estimate.parts, plan.where.chip),
        f'<p class="key soft">{key} A point is as large as its share of the time.</p>',
        "<h2>Exchanges of a step, of one chip</h2>",
        table(("kind", "axes", "link", "times", "sent", "time", "why"), links) if links else "<p>none</p>",
    ]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Figures to the right, words to the left."""
    side = ["l" if one in _LEFT else "r" for one in columns]
    head = "".join(f'<th class="{how}">{escape(one)}</th>' for one, how in zip(columns, side, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{how}">{escape(str(cell))}</td>' for cell, how in zip(row, side, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
