"""What an operation costs: chips by memory and flops, times price, times time; prices from the table or the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from capibara.fleet.cost_models import cost_model, cost_model_names
from capibara.fleet.operation_cost import estimate_operation_cost
from capibara.prices.table import price_table

HOUR = 3600.0


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flops", "memory", "seconds", "utilization", "chips"),
    [
        (1e12, 16.0, 10.0, 0.8, 1),
        (0.0, 30.75, HOUR, 1.0, 1),
        (0.0, 31.0, HOUR, 1.0, 2),  # a program can have 30.75 GiB of a v4 chip
        (275e12 * 10, 1.0, 10.0, 1.0, 1),
        (275e12 * 10, 1.0, 10.0, 0.5, 2),
        (275e12 * 10, 1.0, 5.0, 0.5, 4),
        (275e12 * 10, 300.0, 5.0, 0.5, 10),  # memory decides
    ],
)
def test_chips_times_price_times_time(
    flops: float, memory: float, seconds: float, utilization: float, chips: int
) -> None:
    dollars = estimate_operation_cost(
        operation_flops=flops, memory_gb=memory, duration_seconds=seconds, tpu_utilization=utilization
    )
    assert dollars == pytest.approx(chips * 3.22 * seconds / HOUR)


@pytest.mark.quick
def test_cost_models_by_name(tmp_path: Path) -> None:
    hour = {"operation_flops": 1e12, "memory_gb": 1.0, "duration_seconds": HOUR, "tpu_utilization": 0.8}
    assert estimate_operation_cost(**hour, cost_model="tpu_v4_spot") == pytest.approx(0.9215)
    assert estimate_operation_cost(**hour, cost_model="tpu_v5e_pricing") == pytest.approx(1.20)
    assert estimate_operation_cost(**hour, cost_model="tpu_v5e_pricing", region="europe-west4") == pytest.approx(1.56)
    mine = tmp_path / "mine.toml"
    mine.write_text('[[price]]\nchip = "v4"\nregion = "us-central2"\non_demand = 2.0\nflex_start = 1.1\n')
    assert estimate_operation_cost(**hour, pricing=mine) == pytest.approx(2.0)
    assert estimate_operation_cost(**hour, pricing=mine, cost_model="tpu_v4_flex_start") == pytest.approx(1.1)
    names = cost_model_names(price_table())
    assert {"tpu_v4_pricing", "tpu_v4_spot", "h200_on_demand"} <= set(names)
    assert all(cost_model(name).prices for name in names)
    assert [one.kind for one in cost_model("tpu_v4_pricing", pricing=mine).prices] == [
        "on_demand", "spot", "flex_start"
    ]  # fmt: skip


@pytest.mark.quick
def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Unknown cost model 'tpu_v4_price'. Did you mean 'tpu_v4_pricing'"):
        cost_model("tpu_v4_price")
    with pytest.raises(ValueError, match="Unknown cost model 'tpu_v99_spot'"):
        cost_model("tpu_v99_spot")
    with pytest.raises(ValueError, match=r"no committed_1y price for tpu_v4.*\[\[price\]\] row"):
        cost_model("tpu_v4_committed_1y")
    with pytest.raises(ValueError, match=r"no on_demand price for tpu_v2.*\[\[price\]\] row"):
        cost_model("tpu_v2_pricing")
    with pytest.raises(ValueError, match=r"tpu_v4_pricing has a price.*flex_start, and it has on_demand, spot"):
        cost_model("tpu_v4_pricing").price("flex_start")
    with pytest.raises(ValueError, match="Unknown kind of price 'lease'"):
        cost_model("tpu_v4_pricing").price("lease")
    right = {"operation_flops": 1e12, "memory_gb": 16.0, "duration_seconds": 10.0, "tpu_utilization": 0.8}
    for name, wrong in (
        ("operation_flops", -1.0),
        ("memory_gb", float("nan")),
        ("duration_seconds", 0.0),
        ("tpu_utilization", 0.0),
        ("tpu_utilization", 80.0),
    ):
        with pytest.raises(ValueError, match=name):
            estimate_operation_cost(**(right | {name: wrong}))
