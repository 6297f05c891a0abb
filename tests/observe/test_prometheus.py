"""/metrics: the text, and a real Prometheus server that scrapes it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.observe.stand_ins import Chips, StandIn

from capibara.observe import TpuRealTimeMonitor
from capibara.observe.prometheus import PrometheusText
from capibara.observe.sensors import Reading
from capibara.observe.web.server import MonitorServer

pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install '.[monitor]'")


@pytest.fixture
def monitor() -> Iterator[TpuRealTimeMonitor]:
    def broken() -> list[Reading]:
        raise OSError("gone")

    run = StandIn(lambda: [Reading('a "run"\n', "train", {"loss": -0.5, "step": 7.0})], "run", accelerators=False)
    sensors = [Chips(2, memory_usage=0.95), run, StandIn(broken, "bus")]
    made = TpuRealTimeMonitor(100, {"memory_usage": 0.9}, sensors=sensors, deadline_s=10)
    yield made
    made.stop()


@pytest.mark.quick
def test_the_text_is_prometheus_own_form(monitor: TpuRealTimeMonitor) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    text = PrometheusText(monitor).text().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    told = {
        (sample.name, sample.labels.get("source") or sample.labels.get("sensor")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert told["capibara_memory_usage_ratio", "tpu:1"] == 0.95
    assert told["capibara_loss", 'a "run"\n'] == -0.5
    assert told["capibara_sensor_up", "tpus"] == 1.0
    assert told["capibara_sensor_up", "bus"] == 0.0
    assert told["capibara_alert", "tpu:0"] == 1.0
    assert told["capibara_alerts_raised_total", None] == 2.0
    assert told["capibara_samples_total", None] == 1.0
    chips = [sample.labels["chip"] for sample in families["capibara_memory_usage_ratio"].samples]
    assert chips == ["TPU v4", "TPU v4"]


def test_a_real_prometheus_scrapes_it(monitor: TpuRealTimeMonitor, tmp_path: Path) -> None:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("needs Prometheus: apt install prometheus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with monitor, MonitorServer(monitor, port=0, token="s3cret") as server:
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s}\n"
            "scrape_configs:\n"
            "- job_name: capibara\n"
            "  authorization: {credentials: s3cret}\n"
            f"  static_configs: [{{targets: ['127.0.0.1:{server.port}']}}]\n"
        )
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen(
                [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
                 f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log,
            )  # fmt: skip
        try:
            query = f"http://127.0.0.1:{port}/api/v1/query?query=capibara_memory_usage_ratio"
            result: list[dict[str, dict[str, str]]] = []
            deadline = time.monotonic() + 60
            while not result:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.2)
                try:
                    with urllib.request.urlopen(query, timeout=10) as answer:
                        result = json.load(answer)["data"]["result"]
                except OSError:
                    continue  # it is still starting
            told = {one["metric"]["source"]: one["value"][1] for one in result}
            assert told == {"tpu:0": "0.95", "tpu:1": "0.95"}
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/targets", timeout=10) as answer:
                [target] = json.load(answer)["data"]["activeTargets"]
            assert (target["health"], target["lastError"]) == ("up", "")
        finally:
            process.terminate()
            process.wait(30)
