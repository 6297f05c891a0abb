"""The charts stay inside of their frame and say what they were given."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.cost.result import Memory, Part
from capibara.hardware.chips import chip
from capibara.plan.charts import HEIGHT, WIDTH, memory_timeline, roofline

GiB = 2**30
_ACROSS = ("x", "x1", "x2", "cx")


def _inside(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    for one in root.iter():
        for name, value in one.attrib.items():
            if name in (*_ACROSS, "y", "y1", "y2", "cy"):
                assert 0 <= float(value) <= (WIDTH if name in _ACROSS else HEIGHT), (one.tag, name, value)
            if name == "points":
                for x, y in re.findall(r"([-\d.]+),([-\d.]+)", value):
                    assert 0 <= float(x) <= WIDTH
                    assert 0 <= float(y) <= HEIGHT
    return root


def _memory(counts: list[float], limit: float) -> Memory:
    return Memory(
        1.0 * GiB, max(counts), limit, "a", (), tuple((f"step <{i}>", count) for i, count in enumerate(counts))
    )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0, 1e12), min_size=1, max_size=40),
    st.floats(1e6, 2e11),
)
def test_a_timeline_stays_in_its_frame(counts: list[float], limit: float) -> None:
    _inside(memory_timeline(_memory(counts, limit)))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1, 1e16), st.floats(1, 1e13), st.floats(1e-9, 1e3)), min_size=1, max_size=10),
    st.sampled_from(["v4", "v6e", "h200"]),
)
def test_a_roofline_stays_in_its_frame(parts: list[tuple[float, float, float]], name: str) -> None:
    made = [Part(f"part {i}", *figures, "matrix") for i, figures in enumerate(parts)]
    root = _inside(roofline(made, chip(name)))
    assert sum(one.tag == "circle" for one in root.iter()) == len(parts)


def test_a_long_timeline_keeps_its_peak() -> None:
    counts = [10.0 * GiB] * 9999
    counts[7777] = 25.0 * GiB
    svg = memory_timeline(_memory(counts, 30 * GiB))
    root = _inside(svg)
    assert any(one.text == "26.00 GiB" for one in root.iter() if one.tag == "text")
    assert len(svg) < 100_000


def test_the_roof_is_the_chips() -> None:
    svg = roofline([Part("p", 275e12, 1e12, 1.0, "matrix")], chip("v4"))
    roof = next(one for one in ElementTree.fromstring(svg).iter() if one.get("class") == "roof")
    dot = next(one for one in ElementTree.fromstring(svg).iter() if one.tag == "circle")
    last = float(roof.attrib["points"].split()[-1].split(",")[1])
    assert float(dot.attrib["cy"]) == pytest.approx(last, abs=0.11), "work at the peak touches the roof"
