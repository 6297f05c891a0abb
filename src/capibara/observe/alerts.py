"""Thresholds, and the alerts that they raise: one for each source and figure, with hysteresis.

An alert is raised when a figure is beyond its threshold, and cleared when it is back by more than a margin, so that a
figure that trembles at the threshold gives one alert and not a hundred. A source that says nothing changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from capibara.errors import rule_error, unknown_name
from capibara.observe.sensors.reading import METRICS

__all__ = ["THRESHOLDS", "Alert", "AlertEvent", "Alerts", "check_thresholds"]

THRESHOLDS: Mapping[str, Literal["above", "below"]] = {
    "memory_usage": "above",
    "temperature": "above",
    "utilization": "below",
    "power": "above",
    "loss": "above",
    "step_time": "above",
    "since_step": "above",
    "tokens_per_second": "below",
    "mfu": "below",
    "goodput": "below",
    "requests_waiting": "above",
    "kv_cache_usage": "above",
    "joules_per_token": "above",
    "dollars_per_token": "above",
}
"""What may have a threshold -> on which side of it an alert is."""

_KEPT = 1000


@dataclass(frozen=True)
class Alert:
    """A figure that is beyond its threshold."""

    name: str
    source: str
    value: float
    """The last one."""
    threshold: float
    side: Literal["above", "below"]
    since: float
    """When it was raised, by the clock of the wall."""

    def __str__(self) -> str:
        return f"{self.name} of {self.source} is {self.value:.4g}, {self.side} {self.threshold:.4g}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "source": self.source,
            "value": self.value,
            "threshold": self.threshold,
            "side": self.side,
            "since": self.since,
            "text": str(self),
        }


@dataclass(frozen=True)
class AlertEvent:
    """An alert that was raised or cleared: what callbacks get."""

    what: Literal["raised", "cleared"]
    alert: Alert
    time: float

    def __str__(self) -> str:
        if self.what == "raised":
            return str(self.alert)
        return f"{self.alert.name} of {self.alert.source} is {self.alert.value:.4g}: the alert is cleared"

    def as_dict(self) -> dict[str, Any]:
        return {"event": self.what, "time": self.time, **self.alert.as_dict(), "text": str(self)}


def check_thresholds(thresholds: Mapping[str, float] | None) -> dict[str, float]:
    """The thresholds, each a number that its figure can have; a ValueError names the choices where one is not."""
    checked = {}
    for name, value in (thresholds or {}).items():
        if name not in THRESHOLDS:
            raise unknown_name("alert threshold", name, THRESHOLDS)
        metric = METRICS[name]
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        inside = number and metric.least <= value <= metric.most and (value > 0 or metric.least < 0)
        if not inside:
            most = "" if metric.most == math.inf else f" and at most {metric.most:g}"
            sign = "a number" if metric.least < 0 else f"a number above 0{most}"
            hint = (
                f"write {value / 100:g}"
                if number and metric.most == 1.0 and 1 < value <= 100
                else f"{name}={_LIKE[name]}"
            )
            raise rule_error(
                f"The threshold of {name} is {sign}: an alert is raised {THRESHOLDS[name]} it", repr(value), hint
            )
        checked[name] = float(value)
    return checked


_LIKE = {
    "memory_usage": 0.9, "temperature": 80.0, "utilization": 0.3, "power": 700, "loss": 10.0, "step_time": 2.0,
    "since_step": 120, "tokens_per_second": 1000, "mfu": 0.2, "goodput": 0.9, "requests_waiting": 100,
    "kv_cache_usage": 0.95, "joules_per_token": 1.0, "dollars_per_token": 1e-5,
}  # fmt: skip


class Alerts:
    """Follows figures and says which are beyond their thresholds.

    Args:
      thresholds: name -> value, of `THRESHOLDS`.
      hysteresis: how far back a figure has to come, as a share of the threshold, before its alert is cleared.
      sustain_s: for how long a figure has to be beyond its threshold before there is an alert.

    Examples:
        >>> alerts = Alerts({"memory_usage": 0.9}, hysteresis=0.05)
        >>> [str(event) for event in alerts.update(0.0, {("tpu:0", "memory_usage"): 0.95})]
        ['memory_usage of tpu:0 is 0.95, above 0.9']
        >>> alerts.update(1.0, {("tpu:0", "memory_usage"): 0.88})  # back, but by less than the margin
        []
        >>> [event.what for event in alerts.update(2.0, {("tpu:0", "memory_usage"): 0.80})]
        ['cleared']
    """

    def __init__(
        self, thresholds: Mapping[str, float] | None, *, hysteresis: float = 0.05, sustain_s: float = 0.0
    ) -> None:
        if not 0 <= hysteresis < 1:
            raise rule_error("hysteresis is a share from 0 up to 1", f"{hysteresis!r}", "leave it out for 0.05")
        if not 0 <= sustain_s < math.inf:
            raise rule_error("sustain_s is a number of seconds from 0 up", f"{sustain_s!r}", "leave it out for 0")
        self.thresholds = check_thresholds(thresholds)
        self._hysteresis = hysteresis
        self._sustain_s = sustain_s
        self._active: dict[tuple[str, str], Alert] = {}
        self._beyond_since: dict[tuple[str, str], float] = {}
        self.events: deque[AlertEvent] = deque(maxlen=_KEPT)

    @property
    def active(self) -> list[Alert]:
        """Those that are raised now, the oldest first."""
        return list(self._active.values())

    def update(self, time: float, figures: Mapping[tuple[str, str], float]) -> list[AlertEvent]:
        """Take one sample, (source, metric) -> value, and give what changed."""
        changed: list[AlertEvent] = []
        for (source, name), value in figures.items():
            threshold = self.thresholds.get(name)
            if threshold is not None:
                changed += self._one((source, name), value, threshold, time)
        self.events.extend(changed)
        return changed

    def _one(self, key: tuple[str, str], value: float, threshold: float, time: float) -> list[AlertEvent]:
        source, name = key
        side = THRESHOLDS[name]
        sign = 1.0 if side == "above" else -1.0
        beyond = sign * (value - threshold) > 0
        active = self._active.get(key)
        if active is not None:
            now = Alert(name, source, value, threshold, side, active.since)
            if beyond or sign * (value - threshold) > -self._hysteresis * abs(threshold):
                self._active[key] = now
                return []
            del self._active[key]
            self._beyond_since.pop(key, None)
            return [AlertEvent("cleared", now, time)]
        if not beyond:
            self._beyond_since.pop(key, None)
            return []
        if time - self._beyond_since.setdefault(key, time) < self._sustain_s:
            return []
        self._active[key] = Alert(name, source, value, threshold, side, time)
        return [AlertEvent("raised", self._active[key], time)]
