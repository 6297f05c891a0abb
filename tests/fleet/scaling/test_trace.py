"""Traces are checked when they are made, and read back as they were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capibara.fleet.scaling.drawn import FIXED_TRACES, TraceKind, draw_kind, draw_trace, fixed_trace
from capibara.fleet.scaling.trace import Trace, read_trace


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prices": (1.0,)}, "a price for each interval"),
        ({"arrivals": ()}, "one interval or more"),
        ({"arrivals": (1, 2.5, 3)}, "whole chip-minutes.*2.5 in interval 1"),
        ({"arrivals": (1, -2, 3)}, "from 0 up.*-2 in interval 1"),
        ({"prices": (1.0, None, 1.0)}, "None in interval 1.*fill the hole"),
        ({"prices": (1.0, float("nan"), 1.0)}, "nan in interval 1"),
        ({"prices": (1.0, -1.0, 1.0)}, "dollars a chip-hour from 0 up"),
        ({"preemptions": (2, 1)}, "rising order"),
        ({"preemptions": (3,)}, "3 intervals, counted from 0"),
        ({"interval_minutes": 0}, "interval_minutes is a whole number from 1"),
        ({"startup_minutes": -1}, "startup_minutes is a whole number from 0"),
        ({"checkpoint_minutes": 11}, "saved within an interval"),
        ({"patience_minutes": 25}, "multiple of interval_minutes = 10.*use 20"),
        ({"highest_price": 0.5}, "at least every price"),
    ],
)
def test_bad_input(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Trace(**{"name": "bad", "arrivals": (1, 2, 3), "prices": (1.0, 1.0, 1.0), **change})


@pytest.mark.quick
def test_files_in_both_forms(tmp_path: Path) -> None:
    file = tmp_path / "monday.json"
    file.write_text(json.dumps({"arrivals": [4, 8], "prices": [1, 2], "preemptions": [1], "startup_minutes": 5}))
    assert read_trace(file) == Trace("monday", (4, 8), (1, 2), (1,), startup_minutes=5)
    trace = fixed_trace("bursty")
    assert read_trace(json.loads(json.dumps(trace.as_dict()))) == trace
    samples = [{"minute": 10 * n, "arrivals": n, "price": 1.0, "preempted": n == 2} for n in range(3)]
    assert read_trace(samples) == Trace("trace", (0, 1, 2), (1.0, 1.0, 1.0), (2,))


@pytest.mark.quick
def test_files_that_are_not_traces(tmp_path: Path) -> None:
    samples = [{"minute": 10 * n, "arrivals": 1, "price": 1.0} for n in range(3)]
    with pytest.raises(ValueError, match=r"in order and 10 minutes apart. Got minute 0 after minute 10"):
        read_trace([samples[1], samples[0]])
    with pytest.raises(ValueError, match="minute 20 after minute 0"):
        read_trace([samples[0], samples[2]])
    with pytest.raises(ValueError, match="sample 1 without price"):
        read_trace([samples[0], {"minute": 10, "arrivals": 1}])
    with pytest.raises(ValueError, match="Unknown key of a trace 'price'"):
        read_trace({"arrivals": [1], "prices": [1.0], "price": 3})
    with pytest.raises(ValueError, match="a list of prices"):
        read_trace({"arrivals": [1]})
    with pytest.raises(ValueError, match="which is not there"):
        read_trace(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"arrivals": [1')
    with pytest.raises(ValueError, match="A trace is JSON"):
        read_trace(tmp_path / "half.json")
    with pytest.raises(ValueError, match="an object, or a list"):
        read_trace(tmp_path.joinpath("half.json").write_text("3") and json.loads("3"))


@pytest.mark.quick
def test_drawn_traces_have_what_their_kind_says() -> None:
    assert len({fixed_trace(name).arrivals for name in FIXED_TRACES}) == 6
    with pytest.raises(ValueError, match="Unknown fixed trace"):
        fixed_trace("weekend")
    calm = draw_trace(TraceKind(noise=0.0, days=1), 1)
    assert pytest.approx(min(calm.arrivals), abs=4) == 12 * (1 - 0.7) * 10
    assert pytest.approx(max(calm.arrivals), abs=4) == 12 * (1 + 0.7) * 10
    assert not calm.preemptions
    assert max(calm.prices) < 1.2
    wild = draw_trace(TraceKind(spikes_a_day=6, preemptions_a_day=6, bursts_a_day=6, noise=0.0, days=1), 1)
    assert max(wild.prices) > 2
    assert wild.preemptions
    assert max(wild.arrivals) > 1.2 * max(calm.arrivals)
    assert draw_kind(3) == draw_kind(3) != draw_kind(4)
