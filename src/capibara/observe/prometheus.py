"""The monitor's figures in Prometheus' form, as its server scrapes them."""

from __future__ import annotations

from typing import Any

from capibara.distribution import NAME
from capibara.errors import CapibaraError
from capibara.observe.monitor import TpuRealTimeMonitor
from capibara.observe.sensors.reading import METRICS

__all__ = ["PrometheusText"]


class PrometheusText:
    """Gives `capibara_utilization_ratio{source="tpu:0",kind="tpu",chip="TPU v4"} 0.97` and the rest, as text.

    A registry of its own, so that several monitors may be in one process, beside a server's.
    """

    def __init__(self, monitor: TpuRealTimeMonitor) -> None:
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
        except ImportError as missing:
            raise CapibaraError(f"/metrics needs prometheus-client: pip install '{NAME}[monitor]'") from missing
        self._monitor = monitor
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.content_type: str = CONTENT_TYPE_LATEST

    def collect(self) -> Any:
        """What prometheus_client asks a collector for."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._monitor.get_current_metrics()
        for name, metric in METRICS.items():
            unit = f"_{metric.unit}" if metric.unit else ""
            gauge = GaugeMetricFamily(f"capibara_{name}{unit}", metric.text, labels=["source", "kind", "chip"])
            for source, figures in now["sources"].items():
                if name in figures:
                    gauge.add_metric([source, figures["kind"], figures["chip"] or ""], figures[name])
            if gauge.samples:
                yield gauge
        up = GaugeMetricFamily("capibara_sensor_up", "Whether a sensor answers.", labels=["sensor"])
        refused = CounterMetricFamily(
            "capibara_sensor_refused", "Figures that could not be true, and were left out.", labels=["sensor"]
        )
        for name, sensor in now["sensors"].items():
            up.add_metric([name], float(sensor["state"] == "ok"))
            refused.add_metric([name], sensor["refused"])
        yield up
        yield refused
        alert = GaugeMetricFamily("capibara_alert", "1 for each alert that is raised.", labels=["name", "source"])
        for raised in now["alerts"]:
            alert.add_metric([raised["name"], raised["source"]], 1.0)
        yield alert
        yield CounterMetricFamily("capibara_alerts_raised", "Alerts so far.", value=self._monitor.alerts_raised)
        yield CounterMetricFamily("capibara_samples", "Samples so far.", value=self._monitor.wait_for_sample(-1))

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self._registry)
