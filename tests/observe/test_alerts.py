"""Thresholds and hysteresis."""

from __future__ import annotations

from typing import Any

import pytest

from capibara.observe.alerts import THRESHOLDS, Alerts, check_thresholds
from capibara.observe.sensors import METRICS


def _follow(alerts: Alerts, name: str, values: list[float]) -> list[str]:
    """At each value: + raised, - cleared, ! is raised, . is not."""
    marks = []
    for time, value in enumerate(values):
        changed = [event.what for event in alerts.update(float(time), {("tpu:0", name): value})]
        marks.append({"raised": "+", "cleared": "-"}[changed[0]] if changed else "!" if alerts.active else ".")
    return marks


@pytest.mark.quick
def test_above_and_below_with_a_margin() -> None:
    limits = {"memory_usage": 0.9, "temperature": 80.0, "utilization": 0.3}
    trembling = [0.89, 0.91, 0.89, 0.91, 0.86, 0.91, 0.85, 0.89]
    assert "".join(_follow(Alerts(limits), "memory_usage", trembling)) == ".+!!!!-."
    assert "".join(_follow(Alerts(limits, hysteresis=0.0), "memory_usage", trembling)) == ".+-+-+-."
    assert "".join(_follow(Alerts(limits), "temperature", [80.0, 80.5, 77.0, 75.9])) == ".+!-"
    assert "".join(_follow(Alerts(limits), "utilization", [0.3, 0.2, 0.31, 0.32])) == ".+!-"


@pytest.mark.quick
def test_it_has_to_last() -> None:
    alerts = Alerts({"utilization": 0.3}, sustain_s=2.0)
    assert "".join(_follow(alerts, "utilization", [0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.9])) == "....+!-"
    assert [event.time for event in alerts.events] == [4.0, 6.0]


@pytest.mark.quick
def test_sources_have_alerts_of_their_own_and_silence_changes_nothing() -> None:
    alerts = Alerts({"memory_usage": 0.9})
    alerts.update(0.0, {("tpu:0", "memory_usage"): 0.95, ("tpu:1", "memory_usage"): 0.5})
    alerts.update(1.0, {})
    [alert] = alerts.active
    assert str(alert) == "memory_usage of tpu:0 is 0.95, above 0.9"
    assert (alert.since, alert.source) == (0.0, "tpu:0")
    alerts.update(2.0, {("tpu:0", "memory_usage"): 0.97, ("tpu:1", "memory_usage"): 0.99})
    assert [(one.source, one.value) for one in alerts.active] == [("tpu:0", 0.97), ("tpu:1", 0.99)]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("thresholds", "said"),
    [
        ({"memory": 0.9}, "Did you mean 'memory_usage'.*'temperature', 'utilization'"),
        ({"memory_usage": -0.9}, "above 0 and at most 1.*memory_usage=0.9"),
        ({"memory_usage": 90}, "at most 1.*write 0.9"),
        ({"temperature": -5}, "above 0 and at most 200.*raised above it"),
        ({"utilization": 0}, "raised below it"),
        ({"utilization": float("nan")}, "Got nan"),
        ({"utilization": True}, "Got True"),
        ({"utilization": "0.3"}, "Got '0.3'"),
    ],
)
def test_wrong_thresholds(thresholds: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_thresholds(thresholds)


def test_every_threshold_is_a_figure_and_has_an_example() -> None:
    assert THRESHOLDS.keys() <= METRICS.keys()
    for name in THRESHOLDS:
        with pytest.raises(ValueError, match=rf"Fix: {name}=\S+|Fix: write"):
            check_thresholds({name: float("inf")})
    assert check_thresholds({"loss": -3}) == {"loss": -3.0}, "a loss may be negative"
    with pytest.raises(ValueError, match="hysteresis"):
        Alerts({}, hysteresis=1.0)
    with pytest.raises(ValueError, match="sustain_s"):
        Alerts({}, sustain_s=-1)
