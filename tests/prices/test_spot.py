"""Spot runs: the interval against a search for the best one, the kept share against a simulation."""

from __future__ import annotations

import math
import random

import pytest

from capibara.prices.spot import SpotAssumptions, checkpoint_interval, spot_run


def _efficiency(interval: float, saving: float, mean: float, restart: float) -> float:
    """Daly's exact expectation: the share of time that is kept."""
    return interval / (mean * math.exp(restart / mean) * math.expm1((interval + saving) / mean))


@pytest.mark.parametrize(("saving", "mean"), [(5.0, 3600.0), (60.0, 36000.0), (300.0, 7200.0)])
def test_no_other_interval_keeps_more(saving: float, mean: float) -> None:
    """Daly's is a series: its next term is of the order (saving/mean)^1.5, far below 1 % of what is kept here."""
    best = max(_efficiency(interval, saving, mean, 600.0) for interval in range(1, int(4 * mean), 7))
    ours = _efficiency(checkpoint_interval(saving, mean), saving, mean, 600.0)
    assert ours >= best * (1 - 1e-3)


def test_the_square_root_of_young_is_its_first_term() -> None:
    assert checkpoint_interval(1.0, 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)


@pytest.mark.quick
def test_the_kept_share_is_what_a_simulation_gives() -> None:
    run = spot_run(
        100e9, 8, SpotAssumptions(preemptions_per_host_hour=0.05, storage_bytes_per_second=100e6, restart_seconds=300)
    )
    assert run.mean_seconds_between == pytest.approx(3600 / 0.05 / 8)
    assert run.checkpoint_seconds == pytest.approx(100e9 / (8 * 100e6))
    dice = random.Random(7)
    wall, kept = 0.0, 0.0
    segment = run.interval_seconds + run.checkpoint_seconds
    segments = 20_000
    for _ in range(segments):
        need = segment
        while (until := dice.expovariate(1 / run.mean_seconds_between)) < need:
            wall += until
            need = 300 + segment  # starting again can be interrupted too
        wall += need
        kept += run.interval_seconds
    # The spread of one segment's time is about its mean time to fail; 20,000 of them leave 1/141 of that: about 1 %
    # of a segment, of which two deviations are allowed.
    assert run.efficiency == pytest.approx(kept / wall, rel=0.03)
    assert run.efficiency + run.saving + run.lost == pytest.approx(1.0)


def test_more_hosts_are_taken_more_often_and_save_faster() -> None:
    few, many = spot_run(1e12, 4), spot_run(1e12, 64)
    assert many.mean_seconds_between == few.mean_seconds_between / 16
    assert many.checkpoint_seconds == few.checkpoint_seconds / 16
    assert many.interval_seconds < few.interval_seconds


def test_without_preemptions_everything_is_kept() -> None:
    run = spot_run(1e12, 4, SpotAssumptions(preemptions_per_host_hour=0.0))
    assert (run.efficiency, run.lost, run.interval_seconds) == (1.0, 0.0, math.inf)


def test_a_slice_that_never_lasts_keeps_nothing() -> None:
    run = spot_run(1e15, 1, SpotAssumptions(preemptions_per_host_hour=100.0))
    assert run.efficiency == 0.0
    assert run.lost == 1.0


def test_every_assumption_changes_the_answer() -> None:
    usual = spot_run(1e12, 4).efficiency
    for change in ({"preemptions_per_host_hour": 0.05}, {"storage_bytes_per_second": 1e8}, {"restart_seconds": 6000.0}):
        assert spot_run(1e12, 4, SpotAssumptions(**change)).efficiency < usual


def test_bad_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="storage_bytes_per_second is above 0"):
        SpotAssumptions(storage_bytes_per_second=0)
    with pytest.raises(ValueError, match="preemptions_per_host_hour"):
        SpotAssumptions(preemptions_per_host_hour=-1)
    with pytest.raises(ValueError, match="one host or more"):
        spot_run(1.0, 0)
    with pytest.raises(ValueError, match="more than 0 s apart"):
        checkpoint_interval(1.0, 0.0)
