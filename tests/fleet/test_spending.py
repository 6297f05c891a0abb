"""`TpuCostOptimizer`: what it chooses is what trying everything gives; what it counts is chips, hours and price."""

from __future__ import annotations

import datetime
import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest

from capibara.fleet.spending import FlexStart, Placement, PlannedJob, TpuCostOptimizer
from capibara.hardware.topology import slice_by_name
from capibara.prices.spot import SpotAssumptions
from capibara.prices.table import price_table

PRICES = {"on_demand": 3.0, "spot": 1.0, "flex_start": 1.5, "committed_1y": 2.0, "committed_3y": 1.4}
SPOT = SpotAssumptions(preemptions_per_host_hour=0.02, storage_bytes_per_second=1e9, restart_seconds=900.0)
FLEX = FlexStart(wait_hours=3.0, most_hours=100.0)


@pytest.fixture
def pricing(tmp_path: Path) -> Path:
    file = tmp_path / "pricing.toml"
    rows = "\n".join(f"{kind} = {usd}" for kind, usd in PRICES.items())
    file.write_text(f'[[price]]\nchip = "tpu_v4"\nregion = "us-central2"\n{rows}\n')
    return file


def a_job(seed: int) -> PlannedJob:
    """Slices of 4 to 64 chips that take the job the better the larger they are; the smallest do not hold it."""
    draw = random.Random(seed)
    work = draw.uniform(20, 400)  # seconds of a step on one chip
    loss = draw.uniform(0.75, 0.98)  # of every doubling
    too_small = draw.choice((0, 0, 4, 8))
    placements = []
    for name in ("v4-8", "v4-16", "v4-32", "v4-64", "v4-128"):
        where = slice_by_name(name)
        for layout, slower in (("data", 1.0), ("data, model", draw.uniform(0.9, 1.3))):
            seconds = slower * work / (where.chips * loss ** math.log2(where.chips))
            placements.append(Placement(where, layout, seconds, 1e9, where.chips > too_small))
    return PlannedJob(f"job {seed}", draw.choice((500, 2000, 8000)), tuple(placements), draw.choice((1e9, 1e11)))


def tried_by_hand(job: PlannedJob, limit: float, deadline: float | None, target: str) -> Any:
    """(dollars, hours, chips, layout, kind) of the best of all; None where there is none. Written from the rules, with
    Daly's interval and the expectation of a restarted run as the papers have them."""
    best = None
    for placement, (kind, usd) in itertools.product(job.placements, PRICES.items()):
        chips = placement.where.chips
        hours = job.steps * placement.step_seconds / 3600
        billed, waits = hours, 0.0
        if kind == "spot":
            hosts = chips // 4
            mean = 3600 / (0.02 * hosts)
            saving = job.state_bytes / (1e9 * hosts)
            if saving < 2 * mean:
                half = saving / (2 * mean)
                interval = math.sqrt(2 * saving * mean) * (1 + math.sqrt(half) / 3 + half / 9) - saving
            else:
                interval = mean
            interval = max(interval, 1.0)
            each = mean * math.exp(900 / mean) * (math.exp((interval + saving) / mean) - 1)
            billed = hours * each / interval
        if kind == "flex_start":
            waits = 3.0
            if billed > 100:
                continue
        if not placement.fits or usd * chips > limit or (deadline is not None and billed + waits > deadline):
            continue
        dollars = usd * chips * billed
        found = (dollars, billed + waits, chips, placement.layout, kind)
        key = found[:3] if target == "cost_efficiency" else (found[1], found[0], chips)
        if best is None or key < best[0]:
            best = key, found
    return None if best is None else best[1]


TRIPLES = [
    (seed, limit, deadline)
    for seed in range(6)
    for limit, deadline in ((500.0, None), (40.0, 20.0), (200.0, 6.0), (10.0, None), (100.0, 2.0))
]


def test_thirty_choices_are_what_trying_everything_gives(pricing: Path) -> None:
    bound = 0
    for target in ("cost_efficiency", "deadline"):
        for seed, limit, deadline in TRIPLES:
            job = a_job(seed)
            optimizer = TpuCostOptimizer(
                max_cost_per_hour=limit, cost_model="tpu_v4_pricing", optimization_target=target,
                pricing=pricing, spot=SPOT, flex_start=FLEX,
            )  # fmt: skip
            chosen, expected = optimizer.choose(job, deadline).best, tried_by_hand(job, limit, deadline, target)
            if target == "cost_efficiency":
                without = tried_by_hand(job, limit, None, target)
                bound += expected is None or expected != without
            if expected is None:
                assert chosen is None
                continue
            assert chosen is not None
            got = (chosen.dollars, chosen.hours, chosen.placement.where.chips, chosen.placement.layout, chosen.kind)
            assert got[:2] == pytest.approx(expected[:2])
            assert got[2:] == expected[2:]
    assert len(TRIPLES) == 30
    assert bound >= 10, f"{bound} are infeasible or bound by the deadline"


@pytest.mark.quick
def test_limit_deadline_target_and_kind_each_change_the_choice(pricing: Path) -> None:
    job = a_job(0)

    def best(deadline: Any = None, model: str = "tpu_v4_pricing", **more: Any) -> Any:
        settings = {"max_cost_per_hour": 500.0, "pricing": pricing, "spot": SPOT, "flex_start": FLEX, **more}
        return TpuCostOptimizer(cost_model=model, **settings).choose(job, deadline).best

    usual = best()
    assert best(optimization_target="deadline").hours < usual.hours
    assert best(optimization_target="deadline").dollars > usual.dollars
    tight = best(deadline=datetime.timedelta(hours=usual.hours * 0.6))
    assert tight.hours <= usual.hours * 0.6
    assert tight.dollars > usual.dollars
    fast = best(optimization_target="deadline", max_cost_per_hour=20.0)
    assert fast.usd_per_hour <= 20
    assert {best(model=f"tpu_v4_{kind}").kind for kind in PRICES} == set(PRICES)
    calm = best(model="tpu_v4_spot", spot=SpotAssumptions(preemptions_per_host_hour=0.0))
    assert calm.dollars < best(model="tpu_v4_spot").dollars
    waits = best(model="tpu_v4_flex_start", flex_start=FlexStart(wait_hours=30.0))
    assert waits.hours == pytest.approx(waits.paid_hours + 30)


@pytest.mark.quick
def test_what_is_refused_says_why(pricing: Path) -> None:
    optimizer = TpuCostOptimizer(max_cost_per_hour=13.0, pricing=pricing, flex_start=FLEX)
    nothing = optimizer.choose(a_job(2), deadline=0.01)
    assert nothing.best is None
    assert "over the deadline of 0.01" in str(nothing)
    assert "USD an hour, over 13" in str(nothing)
    assert nothing.as_dict()["best"] is None
    other = TpuCostOptimizer(cost_model="tpu_v5e_pricing").choose(a_job(2))
    assert "no price for tpu_v4" in str(other)


class _Clock:
    def __init__(self) -> None:
        self.hours = 0.0

    def __call__(self) -> float:
        return self.hours * 3600


@pytest.mark.quick
def test_what_was_spent_against_a_budget(caplog: pytest.LogCaptureFixture) -> None:
    clock, told = _Clock(), []

    def tell(text: str) -> None:
        told.append(text)
        raise OSError("the webhook is down")

    optimizer = TpuCostOptimizer(max_cost_per_hour=30.0, budget=40.0, on_alert=tell, clock=clock)
    assert optimizer.spent().hours_left is None
    with optimizer.rented("v4-8"):  # 4 chips
        clock.hours = 1.0
        now = optimizer.spent()
        assert (now.dollars, now.usd_per_hour) == (pytest.approx(12.88), pytest.approx(12.88))
        assert now.hours_left == pytest.approx((40 - 12.88) / 12.88)
        assert now.alerts == ()
        with optimizer.rented(4, "spot"):
            clock.hours = 2.0
            assert optimizer.spent().dollars == pytest.approx(2 * 12.88 + 4 * 0.9215)
            assert len(told) == 1
            assert "50%" in told[0]
    clock.hours = 9.0
    assert optimizer.spent().dollars == pytest.approx(2 * 12.88 + 4 * 0.9215)
    assert optimizer.spent().share == pytest.approx(optimizer.spent().dollars / 40)
    with optimizer.rented("v4-32"):
        assert "51.52 USD an hour are being paid, over the limit of 30" in told[-1]
        clock.hours = 9.5
        alerts = optimizer.spent().alerts
        optimizer.spent()
    assert [text.split("%")[0][-3:].strip() for text in alerts if "%" in text] == ["50", "80", "100"]
    assert len(told) == len(alerts) == 4  # each once, though every callback failed
    assert "on_alert failed" in caplog.text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"max_cost_per_hour": -1.0}, "max_cost_per_hour is a number of dollars above 0"),
        ({"max_cost_per_hour": float("nan")}, "max_cost_per_hour"),
        ({"budget": 0.0}, "budget is a number of dollars above 0"),
        ({"optimization_target": "throughput"}, "'cost_efficiency', 'deadline'"),
        ({"cost_model": "tpu_v4"}, "Unknown cost model"),
        ({"alert_at": (0.5, -1)}, "alert_at"),
    ],
)
def test_bad_input(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TpuCostOptimizer(**keywords)


@pytest.mark.quick
def test_bad_calls() -> None:
    optimizer = TpuCostOptimizer()
    for deadline in (0, -3, float("inf"), "soon", True):
        with pytest.raises(ValueError, match="A deadline is hours from now above 0"):
            optimizer.choose(a_job(0), deadline)
    with pytest.raises(ValueError, match="one or more at a time"):
        optimizer.rent(0)
    with pytest.raises(ValueError, match=r"h200, of h200.*h200_pricing"):
        optimizer.rent("h200")  # a v4's price is not an H200's
    offer = optimizer.choose(a_job(0)).best
    assert offer is not None
    with pytest.raises(ValueError, match="An offer says how it is paid"):
        optimizer.rent(offer, "spot")
    for length in ({"steps": 5}, {"tokens": 5.0}, {"on": ["v4-8"]}):
        with pytest.raises(ValueError, match="A PlannedJob has its length"):
            optimizer.choose(a_job(0), **length)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wait_hours"):
        FlexStart(wait_hours=-1)
    with pytest.raises(ValueError, match="pays for the smallest slice"):
        TpuCostOptimizer(max_cost_per_hour=1.0).choose("llama-1b", steps=10)
    with pytest.raises(ValueError, match="A job has a plan or more"):
        optimizer.choose([], steps=10)


def test_a_job_of_the_planner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A function is planned on each slice, and the offers are of those plans."""
    import jax
    import jax.numpy as jnp

    from capibara.fleet.spending import planned_job
    from capibara.plan.api import plan

    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CAPIBARA_PRICING", raising=False)
    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    plans = [plan(lambda x, w: x @ w, (shape, shape), on=name, tokens=4096) for name in ("v4-8", "v4-16")]
    optimizer = TpuCostOptimizer(100.0, "tpu_v4_pricing", "cost_efficiency", pricing=price_table())
    choice = optimizer.choose(plans, steps=1_000_000)
    assert {offer.kind for offer in choice.offers} == {"on_demand", "spot"}
    assert {offer.placement.where.name for offer in choice.offers} == {"v4-8", "v4-16"}
    first = next(o for o in choice.offers if (o.placement.where.name, o.kind) == ("v4-8", "on_demand"))
    seconds = plans[0].best.estimate.seconds
    assert first.dollars == pytest.approx(4 * 3.22 * 1_000_000 * seconds / 3600)
    assert planned_job(plans, tokens=8192).steps == 2
    with pytest.raises(ValueError, match="steps or tokens, one of them"):
        planned_job(plans)
    with pytest.raises(ValueError, match="Plans say which slices"):
        optimizer.choose(plans, steps=1, on=["v4-8"])
