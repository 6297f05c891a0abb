"""capibara.jax.tpu_v4.monitoring, called as the documents write it."""

from __future__ import annotations

import pytest
from tests.observe.stand_ins import Chips

THRESHOLDS = {"memory_usage": 0.9, "temperature": 80.0, "utilization": 0.3}


@pytest.mark.quick
def test_real_time_monitoring_of_a_training_loop() -> None:
    from capibara.jax.tpu_v4.monitoring import TpuRealTimeMonitor

    monitor = TpuRealTimeMonitor(
        update_frequency_ms=100,
        alert_thresholds={"memory_usage": 0.9, "temperature": 80.0, "utilization": 0.3},
    )
    monitor.start_monitoring()
    told = set()
    for _ in range(3):  # the documents' batches
        current_metrics = monitor.get_current_metrics()
        if monitor.has_alerts():
            alerts = monitor.get_alerts()
            for alert in alerts:
                told.add(f"TPU Alert: {alert}")
    monitor.stop()
    assert 0 < current_metrics["sources"]["host"]["memory_usage"] < 1
    assert all(text.startswith("TPU Alert: ") and (" above " in text or " below " in text) for text in told)


@pytest.mark.quick
def test_each_threshold_of_the_documents_alerts_on_its_side() -> None:
    from capibara.jax.tpu_v4.monitoring import TpuRealTimeMonitor

    chips = Chips(1)
    with TpuRealTimeMonitor(
        update_frequency_ms=100, alert_thresholds=THRESHOLDS, sensors=[chips], deadline_s=10
    ) as monitor:
        seen = {}
        for name, well, ill in [("memory_usage", 0.89, 0.91), ("temperature", 79.0, 81.0), ("utilization", 0.31, 0.29)]:
            chips.figures = {name: well}
            monitor.sample()
            assert not monitor.has_alerts()
            chips.figures = {name: ill}
            monitor.sample()
            seen[name] = [str(alert) for alert in monitor.get_alerts()]
            chips.figures = {name: 0.5}
            monitor.sample()
            monitor.sample()
    assert seen == {
        "memory_usage": ["memory_usage of tpu:0 is 0.91, above 0.9"],
        "temperature": ["temperature of tpu:0 is 81, above 80"],
        "utilization": ["utilization of tpu:0 is 0.29, below 0.3"],
    }


@pytest.mark.quick
def test_update_frequency_ms_is_how_often_it_samples() -> None:
    from capibara.jax.tpu_v4.monitoring import TpuRealTimeMonitor

    fast, slow = (TpuRealTimeMonitor(update_frequency_ms=ms, sensors=[Chips(1)]) for ms in (20, 60_000))
    with fast, slow:
        assert fast.wait_for_sample(4, 60) > 4
        assert slow.wait_for_sample(-1) <= 1
