"""The loss over steps: as dots for a terminal, and as inline SVG for a page; resumes are marked in both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

from capibara.plan.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, left_axis, svg, ticks
from capibara.train.report.summary import Summary

__all__ = ["loss_dots", "loss_svg"]

_MOST_POINTS = 600
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Of a Braille character: dots by row and column."""


def _finite(summary: Summary) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in summary.losses if loss is not None]


def loss_dots(summary: Summary, width: int = 68, height: int = 9, *, unicode: bool = True) -> list[str]:
    """The curve in lines of text: dots for training, `o` for held-out losses, a bar where the run was resumed."""
    train, held = _finite(summary), list(summary.held_out)
    if len(train) < 2:
        return []
    wide = width - 8  # the numbers of the axis and the line beside them
    low, high = _range([loss for _, loss in (*train, *held)])
    first, last = train[0][0], max(train[-1][0], *(step for step, _ in held), train[0][0] + 1)
    across, down = (2, 4) if unicode else (1, 1)

    def place(step: float, loss: float) -> tuple[int, int]:
        x = round((step - first) / (last - first) * (wide * across - 1))
        y = round((high - min(max(loss, low), high)) / (high - low) * (height * down - 1))
        return x, y

    cells = [[0] * wide for _ in range(height)]
    for (step, loss), (after, loss_after) in itertools.pairwise(train):
        (x, y), (x_after, y_after) = place(step, loss), place(after, loss_after)
        length = max(abs(x_after - x), abs(y_after - y), 1)
        for n in range(length + 1):  # the line between two points
            px, py = x + (x_after - x) * n // length, y + (y_after - y) * n // length
            cells[py // down][px // across] |= _BITS[py % down][px % across] if unicode else 1
    canvas = [[_dot(cell, unicode) for cell in row] for row in cells]
    for step in summary.resumes:
        x, _ = place(min(max(step, first), last), low)
        for row in canvas:
            if row[x // across] == " ":
                row[x // across] = "┊" if unicode else "|"
    for step, loss in held:
        x, y = place(step, loss)
        canvas[y // down][x // across] = "o"
    lines = []
    for number, row in enumerate(canvas):
        value = high - (high - low) * number / (height - 1)
        lines.append(f"{value:6.2f} {'┤' if unicode else '|'}{''.join(row)}".rstrip())
    lines.append(f"{'':7}{'└' if unicode else '+'}{('─' if unicode else '-') * wide}")
    lines.append(f"{'':8}{f'step {first}':<{wide - 12}}{last:>12,}")
    return lines


def _dot(cell: int, unicode: bool) -> str:
    if not cell:
        return " "
    return chr(0x2800 + cell) if unicode else "."


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From the least to the most, with the first few steps' spikes cut off: they would flatten all that follows."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)))]
    return (low - 0.05, high) if high - low > 1e-9 else (low - 0.5, high + 0.5)


def loss_svg(summary: Summary) -> str:
    """The curve for a page: training as a line, held-out losses as points, resumes as dashed lines."""
    train, held = _finite(summary), list(summary.held_out)
    if len(train) < 2:
        return "<p>fewer than two steps have a loss</p>"
    low, high = _range([loss for _, loss in (*train, *held)])
    first, last = train[0][0], max(train[-1][0], *(step for step, _ in held), train[0][0] + 1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first)

    def y(loss: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (min(max(loss, low), high) - low) / (high - low)

    def points(curve: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in curve)

    rows = [(y(tick), f"{tick:g}") for tick in _between(low, high)]
    columns = "".join(
        f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" class="tick" text-anchor="middle">{tick:,.0f}</text>'
        for tick in ticks(last)
        if tick >= first
    )
    resumed = "".join(
        f'<line x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="limit">'
        f"<title>resumed after step {step:,}</title></line>"
        f'<text x="{x(step) + 5:.1f}" y="{TOP + 12}" class="label limit-text">resumed after {step:,}</text>'
        for step in summary.resumes
    )
    dots = "".join(
        f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4.5" class="bound-matrix"><title>held out at step {step:,}: '
        f"{loss:.4f}</title></circle>"
        for step, loss in held
    )
    text = ""
    if held:
        step, loss = held[-1]
        text = (
            f'<text x="{x(step) - 6:.1f}" y="{y(loss) - 10:.1f}" class="label" text-anchor="end">held out '
            f"{loss:.3f}</text>"
        )
    name = escape(summary.preset.name or "model")
    return svg(
        f"The loss of {name} over its steps",
        f"{left_axis(rows, 'loss, nats a token')}{columns}{resumed}"
        f'<polyline points="{points(_averaged(train))}" class="line-memory"/>'
        f'<polyline points="{points(held)}" class="line-held"/>{dots}{text}'
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" class="label" text-anchor="middle">steps</text>',
    )


def _between(low: float, high: float) -> list[float]:
    """Round numbers inside of a range."""
    step = ticks(high - low)[1] if len(ticks(high - low)) > 1 else high - low
    start = math.ceil(low / step)
    return [round(n * step, 12) for n in range(start, math.floor(high / step) + 1)]


def _averaged(curve: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """At most so many points, each the mean of its stretch."""
    width = math.ceil(len(curve) / _MOST_POINTS)
    stretches = (curve[start : start + width] for start in range(0, len(curve), width))
    return [
        (sum(step for step, _ in part) / len(part), sum(loss for _, loss in part) / len(part)) for part in stretches
    ]
