"""Runs by their folders, servers by their /metrics, and what a token takes."""

from __future__ import annotations

import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.observe.stand_ins import Clock

from capibara.errors import CapibaraError
from capibara.observe import Goodput
from capibara.observe.economy import Economy
from capibara.observe.sensors import ProcessSensor, Reading, RunSensor, ServerSensor, sensor_for
from capibara.prices import price


def _row(step: int, **more: Any) -> str:
    row = {"step": step, "loss": 4.0 / step, "tokens_per_second": 1000.0 * step, "mfu": 0.4, "seconds": 0.25}
    return json.dumps({**row, "grad_norm": 1.0, **more}) + "\n"


@pytest.mark.quick
def test_the_last_step_of_a_run_that_goes_on(tmp_path: Path) -> None:
    clock, metrics = Clock(), tmp_path / "metrics.jsonl"
    sensor = RunSensor(tmp_path, clock)
    with pytest.raises(CapibaraError, match="no step yet"):
        sensor.read()
    metrics.write_text(_row(1) + _row(2) + '{"step": 2, "eval_loss": 3.0}\n' + '{"step": 3, "lo')
    os.utime(metrics, (clock.now - 7, clock.now - 7))
    [reading] = sensor.read()
    assert (reading.source, reading.kind) == (str(tmp_path), "train")
    assert reading.values == {
        "step": 2.0, "loss": 2.0, "tokens_per_second": 2000.0, "mfu": 0.4, "step_time": 0.25, "since_step": 7.0,
    }  # fmt: skip
    clock.go(3)
    assert sensor.read()[0].values["since_step"] == 10.0, "a run that hangs shows"
    with metrics.open("a") as file:
        file.write('ss": 1}\n' + _row(4, loss=None, mfu=1.7))
    assert sensor.read()[0].values.keys() == {"step", "tokens_per_second", "step_time", "since_step"}
    draft = tmp_path / "draft"
    draft.write_text(_row(1))  # resumed from an earlier step: the file is another
    os.replace(draft, metrics)
    assert sensor.read()[0].values["step"] == 1.0


@pytest.mark.quick
def test_a_long_run_costs_what_a_short_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end is read, and only when something is new."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(_row(step) for step in range(1, 5000)))
    assert metrics.stat().st_size > 1 << 19
    sensor = RunSensor(tmp_path)
    assert sensor.read()[0].values["step"] == 4999
    opened: list[Any] = []
    real = open
    monkeypatch.setattr("builtins.open", lambda *args, **named: (opened.append(args), real(*args, **named))[1])
    sensor.read()
    assert not opened


@pytest.mark.quick
def test_goodput_and_chips_of_a_run(tmp_path: Path) -> None:
    clock = Clock()
    (tmp_path / "metrics.jsonl").write_text(_row(1))
    with Goodput(tmp_path / "goodput.jsonl", clock=clock) as goodput:
        with goodput.phase("step", step=1):
            clock.go(9)
        clock.go(1)
    (tmp_path / "run.json").write_text("{")  # being written
    sensor = RunSensor(tmp_path, clock)
    [reading] = sensor.read()
    assert reading.values["goodput"] == pytest.approx(0.9)
    assert (reading.chip, reading.chips) == (None, None)
    life = {"devices": 32, "device_kind": "TPU v4", "platform": "tpu"}
    (tmp_path / "run.json").write_text(json.dumps({"processes": [{"devices": 1}, life]}))
    [reading] = sensor.read()
    assert (reading.chip, reading.chips) == ("TPU v4", 32)


@pytest.mark.quick
def test_a_server_by_its_metrics() -> None:
    told = {"tokens": 100.0, "count": 10.0, "sum": 0.5}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = (
                "# HELP vllm:num_requests_running x\n"
                'vllm:num_requests_running{model_name="a b{}"} 3.0\n'
                'vllm:num_requests_waiting{model_name="m"} 2.0\nvllm:kv_cache_usage_perc 0.25\nnonsense\n'
                f'vllm:generation_tokens_total{{model_name="m"}} {told["tokens"]}\n'
                f"vllm:inter_token_latency_seconds_count {told['count']}\n"
                f"vllm:inter_token_latency_seconds_sum {told['sum']}\n"
            )
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    clock = Clock()
    sensor = ServerSensor(f"{address}/metrics", timeout_s=30, clock=clock)
    assert sensor.name == address
    [first] = sensor.read()
    assert first.values == {"requests_running": 3.0, "requests_waiting": 2.0, "kv_cache_usage": 0.25}
    clock.go(2.0)
    told.update(tokens=300.0, count=60.0, sum=1.5)
    [second] = sensor.read()
    assert second.values["tokens_per_second"] == 100.0
    assert second.values["step_time"] == pytest.approx(0.02)
    clock.go(2.0)
    told.update(tokens=5.0, count=1.0, sum=0.1)  # it was started anew
    assert "tokens_per_second" not in sensor.read()[0].values
    server.shutdown()
    server.server_close()
    with pytest.raises(CapibaraError, match="does not answer"):
        sensor.read()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(CapibaraError, match="timed out"):
        ServerSensor(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1).read()


def test_our_own_server() -> None:
    """`capibara serve`'s HTTP process; its engine is a stand-in, which counts no tokens."""
    pytest.importorskip("starlette", reason="needs the serve extra")
    from tests.serve.http.wire import ask, post
    from tests.serve.stand_in import served

    with served(api_keys=("k",)) as (server, _):
        sensor = ServerSensor(server.address, timeout_s=60)
        sensor.read()
        assert post(server.address, ask("hello " * 20), headers={"Authorization": "Bearer k"})[0] == 200
        [reading] = sensor.read()
        told = {"requests_running", "requests_waiting", "kv_cache_usage", "tokens_per_second", "step_time"}
        assert reading.values.keys() == told
        assert reading.values["step_time"] > 0


def test_what_the_trainer_writes_has_the_names_that_are_read(tmp_path: Path) -> None:
    from capibara.train.logs import MetricsLog
    from capibara.train.report.facts import Life

    with MetricsLog(tmp_path) as log:
        log.write({**json.loads(_row(3)), "loss": float("nan")})
        log.write(json.loads(_row(4)))
    assert RunSensor(tmp_path).read()[0].values["step"] == 4
    assert {"devices", "device_kind", "platform"} <= Life.__dataclass_fields__.keys()


@pytest.mark.quick
def test_what_is_watched_by_what_is_named(tmp_path: Path) -> None:
    assert type(sensor_for(str(os.getpid()))) is ProcessSensor
    assert type(sensor_for("http://127.0.0.1:1")) is ServerSensor
    assert type(sensor_for(str(tmp_path))) is RunSensor
    for nonsense in ("nowhere", "-3", "4.5", "ftp://a", ""):
        with pytest.raises(ValueError, match=r"write runs/dev, http://.* or 4711"):
            sensor_for(nonsense)
    with pytest.raises(ValueError, match="http address"):
        ServerSensor("http://")


@pytest.mark.quick
def test_joules_and_dollars_a_token(tmp_path: Path) -> None:
    gpus = [Reading(f"gpu:{i}", "gpu", {"power": 600.0}, "NVIDIA H200") for i in range(8)]
    run = Reading("run", "train", {"tokens_per_second": 1200.0})
    assert Economy().of(run, gpus)["joules_per_token"] == 4.0
    pod = Reading("run", "train", {"tokens_per_second": 1e6}, "TPU v4", 32)
    four = [Reading(f"tpu:{i}", "tpu", {"utilization": 1.0}, "TPU v4") for i in range(4)]
    usd = price("v4").usd
    assert Economy().of(pod, four) == {"dollars_per_token": pytest.approx(32 * usd / 3600 / 1e6)}, "TPUs tell no power"
    spot = Economy("us-central2", "spot").of(pod, four)["dollars_per_token"]
    assert spot == pytest.approx(32 * price("v4", "us-central2", "spot").usd / 3600 / 1e6)
    two_devices_a_chip = Reading("run", "train", {"tokens_per_second": 1e6}, "TPU v3", 8)
    own = tmp_path / "own.toml"
    own.write_text(
        '[[price]]\nchip = "v4"\nregion = "here"\non_demand = 36.0\n'
        '[[price]]\nchip = "v3"\nregion = "here"\non_demand = 9.0\n'
    )
    by_device = Economy(pricing=own).of(two_devices_a_chip, [])
    assert by_device == {"dollars_per_token": pytest.approx(4 * 9 / 3600 / 1e6)}
    assert Economy("here", pricing=own).of(pod, four)["dollars_per_token"] == pytest.approx(32 * 36 / 3600 / 1e6)
    # A hole in the table, a chip that nobody knows, no tokens, chips of which some are elsewhere: not known.
    assert Economy("here", "spot", own).of(pod, four) == {}
    assert Economy().of(Reading("run", "train", {"tokens_per_second": 1.0}, "TPU v99", 4), four) == {}
    assert Economy().of(Reading("run", "train", {"tokens_per_second": 0.0}), gpus) == {}
    part = Reading("run", "train", {"tokens_per_second": 1200.0}, "NVIDIA H200", 16)
    assert "joules_per_token" not in Economy().of(part, gpus)
