"""Callbacks: what they are sent, and that one which hangs or fails holds up nobody."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.observe.stand_ins import Chips

from capibara.errors import CapibaraError
from capibara.observe import Alert, AlertEvent, TpuRealTimeMonitor, command, log_alerts, webhook
from capibara.observe.notify import Notifier

ALERT = Alert("memory_usage", "tpu:0", 0.95, 0.9, "above", 10.0)
RAISED, CLEARED = AlertEvent("raised", ALERT, 10.0), AlertEvent("cleared", ALERT, 20.0)


@pytest.mark.quick
def test_a_webhook_is_posted_the_event() -> None:
    bodies: list[dict[str, Any]] = []

    class Takes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Takes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tell = webhook(f"http://127.0.0.1:{server.server_address[1]}/hook", timeout_s=30)
    tell(RAISED)
    server.shutdown()
    server.server_close()
    assert bodies == [
        {
            "event": "raised", "time": 10.0, "name": "memory_usage", "source": "tpu:0", "value": 0.95,
            "threshold": 0.9, "side": "above", "since": 10.0, "text": "memory_usage of tpu:0 is 0.95, above 0.9",
        }
    ]  # fmt: skip


@pytest.mark.quick
def test_a_webhook_that_hangs_blocks_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes the connection, and says nothing
        told: list[AlertEvent] = []
        chips = Chips(1, memory_usage=0.95)
        hung = webhook(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_s=600)
        monitor = TpuRealTimeMonitor(
            100, {"memory_usage": 0.9}, sensors=[chips], callbacks=[hung, told.append], deadline_s=10
        )
        monitor.sample()
        chips.figures["memory_usage"] = 0.1
        monitor.sample()
        deadline = time.monotonic() + 30
        while len(told) < 2:
            assert time.monotonic() < deadline, "the other callback is told"
            time.sleep(0.01)
        monitor.stop()
    assert [event.what for event in told] == ["raised", "cleared"]


@pytest.mark.quick
def test_a_webhook_waits_no_longer_than_it_is_told_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(CapibaraError, match="timed out"):
        webhook(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_s=0.1)(RAISED)


@pytest.mark.quick
def test_one_that_fails_is_told_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def fails_once(event: AlertEvent) -> None:
        told.append(event.what)
        if len(told) == 1:
            raise RuntimeError("no network")

    notifier = Notifier(fails_once)
    notifier.tell(RAISED)
    notifier.tell(CLEARED)
    notifier.close(30)
    assert told == ["raised", "cleared"]
    assert notifier.failed == 1
    assert "an alert could not be told: RuntimeError: no network" in caplog.text


@pytest.mark.quick
def test_what_waits_is_bounded() -> None:
    let_go, told = threading.Event(), []

    def slow(event: AlertEvent) -> None:
        let_go.wait(30)
        told.append(event.time)

    notifier = Notifier(slow)
    for i in range(1000):
        notifier.tell(AlertEvent("raised", ALERT, float(i)))
    let_go.set()
    notifier.close(30)
    assert len(told) in (256, 257), "one was being told"
    assert told[-1] == 999.0, "the oldest go"
    assert notifier.dropped == 1000 - len(told)


@pytest.mark.quick
def test_a_command_gets_the_event(tmp_path: Path) -> None:
    file = tmp_path / "told"
    program = f"import os, sys; open({str(file)!r}, 'w').write(os.environ['CAPIBARA_ALERT'] + sys.stdin.read())"
    command([sys.executable, "-c", program])(RAISED)
    text, _, rest = file.read_text().partition("{")
    assert text == "memory_usage of tpu:0 is 0.95, above 0.9"
    assert json.loads("{" + rest)["event"] == "raised"
    with pytest.raises(Exception, match="ended with 3: oh"):
        command([sys.executable, "-c", "import sys; print('oh', file=sys.stderr); sys.exit(3)"])(RAISED)
    with pytest.raises(Exception, match="timed out"):
        command([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)(RAISED)
    with pytest.raises(Exception, match="no-such-program"):
        command(["no-such-program"])(RAISED)


@pytest.mark.quick
def test_the_log_and_bad_input(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_alerts()(RAISED)
        log_alerts()(CLEARED)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "memory_usage of tpu:0 is 0.95, above 0.9"),
        ("INFO", "memory_usage of tpu:0 is 0.95: the alert is cleared"),
    ]
    with pytest.raises(ValueError, match="A webhook is an http address"):
        webhook("example.com")
    with pytest.raises(ValueError, match="A command is a list of words"):
        command("rm -rf")  # type: ignore[arg-type]
