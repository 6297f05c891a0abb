"""A load trace: what arrived, what a chip cost and when the slice was taken away, interval by interval.

Everything is in whole minutes and whole chip-minutes, so that the cheapest way through a trace can be computed without
rounding. What a change costs (saving, starting, work done again) is a fact of the trace, the same for every policy.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.errors import rule_error, unknown_name

__all__ = ["Trace", "read_trace"]


@dataclass(frozen=True)
class Trace:
    """What happens to a slice over some days."""

    name: str
    arrivals: tuple[int, ...]
    """Work that arrives in each interval, in chip-minutes; it can be done from that interval on."""
    prices: tuple[float, ...]
    """US dollars a chip-hour in each interval, known when it begins."""
    preemptions: tuple[int, ...] = ()
    """Intervals at whose beginning the slice is taken away, in rising order; another comes after `startup_minutes`."""
    interval_minutes: int = 10
    startup_minutes: int = 10
    """From asking for chips to working on them. They are paid for, and do nothing."""
    checkpoint_minutes: int = 2
    """What saving takes before a change; the old chips are paid for, and do nothing."""
    redo_minutes: int = 10
    """Work since the last save, which a preemption loses and which is done again."""
    patience_minutes: int = 120
    """How long work may wait: what arrived in an interval is late when this much later it is not done."""
    highest_price: float | None = None
    """What a chip-hour never costs more than, such as the price on demand for spot; the highest of the trace if None.
    """

    def __post_init__(self) -> None:
        for name in ("arrivals", "prices", "preemptions"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.arrivals or len(self.arrivals) != len(self.prices):
            raise rule_error(
                "A trace has a price for each interval, and one interval or more",
                f"{len(self.arrivals)} arrivals and {len(self.prices)} prices",
                "give both the same length",
            )
        for where, load in enumerate(self.arrivals):
            if isinstance(load, bool) or not isinstance(load, int) or load < 0:
                raise rule_error(
                    "Arrivals are whole chip-minutes from 0 up", f"{load!r} in interval {where}", "round what was seen"
                )
        for where, price in enumerate(self.prices):
            if not isinstance(price, (int, float)) or isinstance(price, bool) or not 0 <= price < math.inf:
                raise rule_error(
                    "A price is a number of dollars a chip-hour from 0 up",
                    f"{price!r} in interval {where}",
                    "fill the hole, with the interval's before it for one",
                )
        self._check_preemptions()
        self._check_minutes()
        top = max(self.prices)
        if self.highest_price is not None and not top <= self.highest_price < math.inf:
            raise rule_error(
                "highest_price is at least every price of the trace", f"{self.highest_price} below {top}", f"use {top}"
            )

    def _check_preemptions(self) -> None:
        for where in self.preemptions:
            if isinstance(where, bool) or not isinstance(where, int) or not 0 <= where < len(self.arrivals):
                raise rule_error(
                    f"A preemption is at one of the trace's {len(self.arrivals)} intervals, counted from 0",
                    repr(where),
                    "leave it out",
                )
        if any(after <= before for before, after in zip(self.preemptions, self.preemptions[1:], strict=False)):
            raise rule_error("Preemptions are in rising order, each once", self.preemptions, "sort them")

    def _check_minutes(self) -> None:
        for name, least in (
            ("interval_minutes", 1),
            ("startup_minutes", 0),
            ("checkpoint_minutes", 0),
            ("redo_minutes", 0),
            ("patience_minutes", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise rule_error(f"{name} is a whole number from {least} up", repr(value), f"use {least} or more")
        if self.checkpoint_minutes > self.interval_minutes:
            raise rule_error(
                "A slice is saved within an interval",
                f"{self.checkpoint_minutes} minutes of {self.interval_minutes}",
                "use longer intervals",
            )
        if self.patience_minutes % self.interval_minutes:
            raise rule_error(
                f"patience_minutes is a multiple of interval_minutes = {self.interval_minutes}",
                self.patience_minutes,
                f"use {self.patience_minutes // self.interval_minutes * self.interval_minutes}",
            )

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def patience(self) -> int:
        """In intervals."""
        return self.patience_minutes // self.interval_minutes

    @property
    def ceiling(self) -> float:
        """The price that a cost limit is kept at."""
        return max(self.prices) if self.highest_price is None else self.highest_price

    @property
    def work(self) -> int:
        """Of the whole trace, in chip-minutes."""
        return sum(self.arrivals)

    def arrived(self, interval: int) -> int:
        """After the trace's end nothing arrives."""
        return self.arrivals[interval] if 0 <= interval < len(self) else 0

    def price(self, interval: int) -> float:
        """After the trace's end, while what is left is worked off, the last price stays."""
        return self.prices[min(interval, len(self) - 1)]

    def may_wait(self, interval: int) -> int:
        """The most work that may be undone after this interval with none of it late: what arrived within patience."""
        return sum(self.arrived(one) for one in range(interval - self.patience + 1, interval + 1))

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_trace(source: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Trace:
    """A trace from a JSON file or its document: the fields of `Trace`, or with `samples` instead of the three lists.

    A sample has `minute`, `arrivals` and `price`, and `preempted` where it was; samples are in order and
    `interval_minutes` apart, as a recorder writes them.
    """
    if isinstance(source, (str, Path)):
        file = Path(source)
        if not file.is_file():
            raise rule_error("A trace is a JSON file", f"{str(source)!r}, which is not there", "name one")
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise rule_error("A trace is JSON", f"{file}: {error}", "mend that line") from error
        name = file.stem
    else:
        document, name = source, "trace"
    if isinstance(document, (list, tuple)):
        document = {"samples": document}
    if not isinstance(document, Mapping):
        raise rule_error("A trace is an object, or a list of samples", type(document).__name__, "write {...}")
    fields = {"name": name, **document}
    if "samples" in fields:
        fields |= _from_samples(fields.pop("samples"), fields.get("interval_minutes", Trace.interval_minutes))
    known = [field.name for field in dataclasses.fields(Trace)]
    for key in fields:
        if key not in known:
            raise unknown_name("key of a trace", key, [*known, "samples"])
    for key in ("arrivals", "prices"):
        if not isinstance(fields.get(key), (list, tuple)):
            raise rule_error(f"A trace has a list of {key}", repr(fields.get(key)), f"add {key}, or samples")
    return Trace(**fields)


def _from_samples(samples: Any, interval: int) -> dict[str, Any]:
    before = None
    for number, sample in enumerate(samples):
        missing = [key for key in ("minute", "arrivals", "price") if key not in sample]
        if missing:
            raise rule_error(
                "A sample has minute, arrivals and price", f"sample {number} without {', '.join(missing)}", "fill it in"
            )
        if before is not None and sample["minute"] != before + interval:
            raise rule_error(
                f"Samples are in order and {interval} minutes apart",
                f"minute {sample['minute']} after minute {before}",
                "sort them, fill holes, or give interval_minutes",
            )
        before = sample["minute"]
    return {
        "arrivals": [sample["arrivals"] for sample in samples],
        "prices": [sample["price"] for sample in samples],
        "preemptions": [number for number, sample in enumerate(samples) if sample.get("preempted")],
    }
