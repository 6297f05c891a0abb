"""The ring of samples."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from capibara.observe.history import History


@pytest.mark.quick
def test_it_keeps_the_last_samples_in_order_and_in_the_memory_it_had() -> None:
    history = History(capacity=100)
    sizes = set()
    for i in range(1050):
        figures = {("tpu:0", "utilization"): i / 1050}
        if i % 2:
            figures["tpu:1", "temperature"] = float(i)
        history.append(float(i), figures)
        sizes.add(history.nbytes)
    assert len(history) == 100
    assert len(sizes) == 1
    times, values = history.series("tpu:0", "utilization")
    np.testing.assert_array_equal(times, np.arange(950, 1050))
    np.testing.assert_allclose(values, np.arange(950, 1050) / 1050)
    times, values = history.series("tpu:1", "temperature", last=4)
    np.testing.assert_array_equal(values, [np.nan, 1047, np.nan, 1049])
    assert np.isnan(history.series("tpu:7", "loss")[1]).all()


def test_series_are_bounded(caplog: pytest.LogCaptureFixture, nothing_said_yet: None) -> None:
    history = History(capacity=4, most_series=20)
    with caplog.at_level(logging.WARNING):
        history.append(0.0, {(f"pid {i}", "loss"): float(i) for i in range(50)})
    assert len(history.keys()) == 20
    assert history.series("pid 19", "loss")[1].tolist() == [19.0]
    assert "more than 20 series" in caplog.text
    with pytest.raises(ValueError, match="at least one sample"):
        History(0)
