"""The load generator: its trace, its arrivals, what it counts and how it counts it."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from capibara.serve.load import run
from capibara.serve.load.client import Address, Record
from capibara.serve.load.report import chart, gaps, summary
from capibara.serve.load.run import Load
from capibara.serve.load.trace import Lengths, fixed_trace, scaled


@pytest.mark.quick
def test_the_trace_is_what_it_is_said_to_be() -> None:
    prompts = [lengths.prompt for lengths in fixed_trace()]
    assert len(prompts) == 1000
    assert np.median(prompts) == 400
    assert abs(np.percentile(prompts, 95) - 2000) < 20
    assert max(prompts) == 8000
    outputs = [lengths.output for lengths in fixed_trace()]
    assert (np.median(outputs), max(outputs)) == (128, 1024)
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.1


def test_a_trace_is_scaled_to_a_context_and_never_stretched() -> None:
    trace = fixed_trace()
    short = scaled(trace, 512)
    assert max(one.prompt + one.output for one in short) <= 512
    assert min(min(one.prompt, one.output - 1) for one in short) >= 1
    ratio = np.median([one.prompt for one in short]) / 400
    assert abs(ratio - 512 / max(one.prompt + one.output for one in trace)) < 0.01
    assert scaled(trace, 1 << 20) == trace
    with pytest.raises(ValueError, match="A context has 4 tokens"):
        scaled([Lengths(1, 1)], 3)


def _record(*events: tuple[float, int], due: float = 0.0, status: int = 200) -> Record:
    total = events[-1][1] if events else 0
    return Record(due, due, list(events), 10, total, events[-1][0] if events else due, status)


def test_a_wait_for_several_tokens_is_shared_out_among_them() -> None:
    assert gaps(_record((1.0, 1), (1.5, 2), (2.5, 4))) == [0.5, 0.5, 0.5]


@pytest.mark.quick
def test_figures_of_a_run_counted_by_hand() -> None:
    records = [
        _record((1.0, 1), (1.1, 2), (1.2, 3)),
        _record((0.5, 1), (1.5, 2), due=0.2),
        _record(status=429),
    ]
    figures = summary(records, 0.0, target_latency_ms=150, target_first_ms=5000)
    assert (figures["requests"], figures["answered"], figures["failed"]) == (3, 2, {"429": 1})
    assert figures["seconds"] == 1.5
    assert figures["output_tokens_per_second"] == pytest.approx(5 / 1.5)
    assert figures["first_token_ms"]["max"] == pytest.approx(1000)
    assert figures["first_token_ms"]["mean"] == pytest.approx((1000 + 300) / 2)
    assert figures["inter_token_ms"]["p50"] == pytest.approx(100)
    assert figures["inter_token_ms"]["max"] == pytest.approx(1000)
    assert figures["most_at_a_time"] == 2
    goodput = figures["goodput"]
    assert (goodput["requests"], goodput["share"]) == (1, pytest.approx(1 / 3)), "of all that were asked"
    assert summary(records, 0.0, target_first_ms=400)["goodput"]["requests"] == 1
    assert "goodput" not in summary(records, 0.0)


def test_a_chart_has_the_run_from_left_to_right() -> None:
    records = [_record((0.1, 1), (0.9, 101)), _record((9.0, 1), (9.9, 11), due=8.0)]
    lines = chart(records, 0.0, width=10).splitlines()
    on_their_way, tokens = lines[0].split(" ", 3)[-1], lines[1]
    assert "█" in tokens
    assert on_their_way.rstrip().endswith("1")
    assert "9.9 s" in lines[3]
    assert chart(records, 0.0, width=10, unicode=False).isascii()


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps are exponential: their mean and their spread are the same, and one says nothing of the next."""
    moments: list[float] = []

    async def one(body: object, record: Record) -> None:
        moments.append(record.due)

    asyncio.run(run._arriving([None] * 3000, 1e5, random.Random(3), 0.0, one))
    between = np.diff(moments)
    assert between.mean() == pytest.approx(1e-5, rel=0.06)
    assert between.std() == pytest.approx(between.mean(), rel=0.08)
    assert abs(np.corrcoef(between[1:], between[:-1])[0, 1]) < 0.06


def test_what_a_load_may_be() -> None:
    for wrong in ({"rate": 1.0, "users": 2}, {}, {"rate": 0.0}, {"users": 0}):
        with pytest.raises(ValueError, match="Fix"):
            Load(10, **wrong)


def test_addresses() -> None:
    assert Address.parse("http://localhost:8000").base == "/v1"
    secure = Address.parse("https://example.com/api/v1/", "k")
    assert (secure.port, secure.base, secure.api_key) == (443, "/api/v1", "k")
    with pytest.raises(ValueError, match="An address is http"):
        Address.parse("localhost:8000")
