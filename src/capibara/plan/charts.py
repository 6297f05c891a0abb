"""Two charts as inline SVG: bytes live over a step, and the work of a step under the chip's roofline.

Colours are CSS variables of the page, so the charts follow its light and dark form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from capibara.cost.result import Memory, Part
from capibara.hardware.facts import Chip
from capibara.plan import words

__all__ = ["left_axis", "memory_timeline", "roofline", "svg", "ticks"]

WIDTH, HEIGHT = 860, 320
LEFT, RIGHT, TOP, BOTTOM = 78, 16, 18, 44
_MOST_POINTS = 1500
GiB = 2**30


def memory_timeline(memory: Memory) -> str:
    """Bytes live at each step of the program, on top of its arguments and under the line of what a chip has."""
    held = memory.arguments
    points = [(name, held + beside) for name, beside in _thinned(memory.timeline)]
    if not points:
        return _empty("no timeline was made")
    top = 1.08 * max(memory.limit, *(count for _, count in points))

    def x(index: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * index / max(1, len(points))

    def y(count: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * count / top

    steps = []
    for index, (_, count) in enumerate(points):
        steps += [f"{x(index):.1f},{y(count):.1f}", f"{x(index + 1):.1f},{y(count):.1f}"]
    outline = " ".join(steps)
    area = f"{x(0):.1f},{y(held):.1f} {outline} {x(len(points)):.1f},{y(held):.1f}"
    base = (
        f'<rect x="{LEFT}" y="{y(held):.1f}" width="{WIDTH - LEFT - RIGHT}" height="{y(0) - y(held):.1f}" '
        f'class="fill-arguments"><title>arguments: {words.gib(held)}</title></rect>'
    )
    peak = max(range(len(points)), key=lambda index: points[index][1])
    marks = left_axis([(y(tick * GiB), f"{tick:g}") for tick in ticks(top / GiB)], "GiB a chip")
    # A strip for each step would be thousands of elements; the largest ones carry the names a reader looks for.
    named = sorted(range(len(points)), key=lambda index: -points[index][1])[:60]
    hover = "".join(
        f'<rect x="{x(index):.1f}" y="{TOP}" width="{max(1.0, x(index + 1) - x(index)):.1f}" '
        f'height="{HEIGHT - TOP - BOTTOM}" fill="transparent"><title>{escape(points[index][0])}: '
        f"{words.gib(points[index][1])}</title></rect>"
        for index in sorted(named)
    )
    text_x = min(max(x(peak + 0.5), LEFT + 90), WIDTH - 120)
    return svg(
        "Bytes live on one chip over a step",
        f'{marks}{base}<polygon points="{area}" class="fill-memory"/><polyline points="{outline}" class="line-memory"/>'
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(memory.limit):.1f}" y2="{y(memory.limit):.1f}" class="limit"/>'
        f'<text x="{WIDTH - RIGHT}" y="{y(memory.limit) - 5:.1f}" class="label limit-text" text-anchor="end">usable '
        f"{words.gib(memory.limit)}</text>"
        f'<circle cx="{x(peak + 0.5):.1f}" cy="{y(points[peak][1]):.1f}" r="4" class="peak"/>'
        f'<text x="{text_x:.1f}" y="{y(points[peak][1]) - 9:.1f}" class="label" text-anchor="middle">'
        f"{words.gib(points[peak][1])}</text>{hover}"
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" class="label" text-anchor="middle">'
        "steps of the program, in order; the band below is its arguments</text>",
    )


def roofline(parts: Sequence[Part], chip: Chip) -> str:
    """Each kind of work by its flops a byte and its flops a second; a point's area is its share of the time."""
    shown = [part for part in parts if part.flops > 0 and part.bytes > 0 and part.seconds > 0]
    if not shown:
        return _empty("no part of the program has both arithmetic and memory traffic")
    peak, bandwidth = chip.peak_flops("bfloat16"), chip.hbm_bandwidth
    ridge = peak / bandwidth
    intensities = [part.flops / part.bytes for part in shown]
    rates = [part.flops / part.seconds for part in shown]
    x_low, x_high = _decades([*intensities, ridge])
    y_low, y_high = _decades([*rates, peak])
    total = sum(part.seconds for part in shown)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(value) - x_low) / (x_high - x_low)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(value) - y_low) / (y_high - y_low)

    def roof(intensity: float) -> float:
        return max(10**y_low, min(peak, bandwidth * intensity))

    # Where the slope leaves the chart at its bottom it is cut, not bent.
    first = max(10**x_low, 10**y_low / bandwidth)
    line = " ".join(f"{x(one):.1f},{y(roof(one)):.1f}" for one in (first, ridge, 10**x_high))
    rows = [(y(10.0**power), _flops(10.0**power)) for power in range(math.ceil(y_low), math.floor(y_high) + 1)]
    columns = "".join(
        f'<line x1="{x(10.0**power):.1f}" x2="{x(10.0**power):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="grid"/>'
        f'<text x="{x(10.0**power):.1f}" y="{HEIGHT - BOTTOM + 15}" class="tick" text-anchor="middle">{10.0**power:g}'
        "</text>"
        for power in range(math.ceil(x_low), math.floor(x_high) + 1)
    )
    dots = "".join(
        f'<circle cx="{x(intensity):.1f}" cy="{y(rate):.1f}" r="{3 + 22 * math.sqrt(part.seconds / total):.1f}" '
        f'class="dot bound-{escape(part.bound)}"><title>{escape(part.name)}: {words.seconds(part.seconds)}, '
        f"{_flops(rate)}, {intensity:.3g} flops a byte, bound by {escape(part.bound)}</title></circle>"
        for part, intensity, rate in sorted(
            zip(shown, intensities, rates, strict=True), key=lambda one: -one[0].seconds
        )
    )
    return svg(
        f"The work of a step under the roofline of {chip.name}",
        f"{left_axis(rows, 'flop/s')}{columns}"
        f'<polyline points="{line}" class="roof"/>{dots}'
        f'<text x="{WIDTH - RIGHT}" y="{y(peak) - 6:.1f}" class="label" text-anchor="end">{_flops(peak)} in '
        "bfloat16</text>"
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" class="label" text-anchor="middle">'
        "flops a byte of memory traffic</text>",
    )


def _thinned(timeline: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """At most so many points, each the largest of its run, so that no peak is lost."""
    if len(timeline) <= _MOST_POINTS:
        return list(timeline)
    width = math.ceil(len(timeline) / _MOST_POINTS)
    runs = (timeline[start : start + width] for start in range(0, len(timeline), width))
    return [max(run, key=lambda one: one[1]) for run in runs]


def ticks(top: float) -> list[float]:
    """Round numbers from 0 up to `top`, six intervals at the most."""
    step = 10.0 ** math.floor(math.log10(max(top, 1e-9)))
    step = next(one for one in (step / 5, step / 2, step, 2 * step) if top / one <= 6)
    return [round(index * step, 12) for index in range(int(top / step) + 1)]


def _decades(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    return math.floor(low - 0.05), math.ceil(high + 0.05)


def _flops(rate: float) -> str:
    for unit, scale in (("Pflop/s", 1e15), ("Tflop/s", 1e12), ("Gflop/s", 1e9), ("Mflop/s", 1e6), ("kflop/s", 1e3)):
        if rate >= scale:
            return f"{rate / scale:.3g} {unit}"
    return f"{rate:.3g} flop/s"


def left_axis(rows: Sequence[tuple[float, str]], title: str) -> str:
    """Lines across the chart at these heights, each with its text, and what they count."""
    lines = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{height + 4:.1f}" class="tick" text-anchor="end">{escape(text)}</text>'
        for height, text in rows
    )
    return f'{lines}<text x="{LEFT}" y="{TOP - 6}" class="label">{escape(title)}</text>'


def svg(label: str, inside: str) -> str:
    """A chart of `WIDTH` by `HEIGHT`, as wide as the page."""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _empty(why: str) -> str:
    return f"<p>{escape(why)}</p>"
