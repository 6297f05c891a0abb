"""Figures in words, the same in the table, the page and the text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capibara.cost.correction import Witness
    from capibara.cost.result import Estimate

__all__ = ["corrections", "count", "dollars", "gib", "percent", "seconds", "size"]

GiB = 2**30
MISSING = "-"


def gib(value: float | None) -> str:
    """Bytes in GiB, to compare in a column; what would be 0.0 something of them, in its own unit."""
    if value is None or 0 < value < GiB / 10:
        return size(value)
    return f"{value / GiB:.2f} GiB"


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


def corrections(estimate: Estimate, chip: str) -> list[str]:
    """What measured runs changed in an estimate, which ones, and how far they are from the planned step."""
    asked = estimate.correction
    if asked is None:
        return []
    heard = [one for one in asked.witnesses if one.weight >= _HARDLY]
    ignored = len(asked.witnesses) - len(heard)
    made = []
    if heard:
        runs = "; ".join(_witness(one) for one in heard[:_NAMED])
        more = "" if len(heard) <= _NAMED else f"; and {len(heard) - _NAMED} more"
        made.append(
            f"step time corrected from {seconds(asked.predicted_seconds)} to {seconds(estimate.seconds)} by "
            f"{_runs(len(heard))} on {chip} ({runs}{more}); --uncalibrated leaves the correction out"
        )
    if ignored:
        nearest = min(
            (one.times for one in asked.witnesses if one.weight < _HARDLY), key=lambda one: abs(math.log(one))
        )
        made.append(
            f"{_runs(ignored)} on {chip} {'says' if ignored == 1 else 'say'} next to nothing about this step: "
            f"{'it is' if ignored == 1 else 'the nearest is'} {_times(nearest)}, or at odds with the others"
        )
    if asked.bytes:
        way = "more" if asked.bytes > 0 else "less"
        made.append(f"memory corrected by measured runs on {chip}: {size(abs(asked.bytes))} {way} than predicted")
    return made


_HARDLY = 0.02
"""A run that counts less than this is said not to count."""
_NAMED = 3


def _runs(many: int) -> str:
    return f"{many} measured run{'' if many == 1 else 's'}"


def _witness(one: Witness) -> str:
    return f"{one.name}: {seconds(one.seconds)} measured, {_times(one.times)}, counts {one.weight:.2g} of 1"


def _times(times: float) -> str:
    """How long a run is beside the planned step."""
    if 0.8 < times < 1.25:
        return "as long as this step"
    return f"{count(1 / times)} times shorter" if times < 1 else f"{count(times)} times longer"
