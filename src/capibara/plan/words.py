"""Figures in words, the same in the table, the page and the text."""

from __future__ import annotations

import math

__all__ = ["count", "dollars", "gib", "percent", "seconds", "size"]

GiB = 2**30
MISSING = "-"


def gib(value: float | None) -> str:
    return MISSING if value is None else f"{value / GiB:.2f} GiB"


def size(value: float | None) -> str:
    """Bytes in the largest binary unit that leaves a number above one."""
    if value is None:
        return MISSING
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    if value is None:
        return MISSING
    if math.isinf(value):
        return "never"
    for unit, scale, below in (("µs", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 180.0), ("min", 60.0, 7200.0)):
        if value < below:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 3600:.3g} h"


def dollars(value: float | None) -> str:
    if value is None:
        return MISSING
    if math.isinf(value):
        return "endless"
    return f"{value:,.0f} USD" if value >= 100 else f"{value:.3g} USD"


def count(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"
