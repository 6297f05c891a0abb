"""The monitor over HTTP: tokens, names, events, viewers that go away."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from collections.abc import Iterator

import pytest
from tests.observe.stand_ins import Chips

from capibara.observe import TpuRealTimeMonitor
from capibara.observe.web.server import MonitorServer


@pytest.fixture
def monitor() -> Iterator[TpuRealTimeMonitor]:
    with TpuRealTimeMonitor(50, sensors=[Chips(2)], deadline_s=10) as made:
        yield made


def _get(server: MonitorServer, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


@pytest.mark.quick
def test_paths_and_headers(monitor: TpuRealTimeMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
    with MonitorServer(monitor, port=0) as server:
        status, page, headers = _get(server, "/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        for path in ("/monitor.js", "/monitor.css"):
            assert path.strip("/") in page
            assert _get(server, path)[0] == 200
        status, body, _ = _get(server, "/api/now")
        assert json.loads(body)["utilization"] == 0.8
        for path in ("/../server.py", "/nothing", "/page/index.html"):
            assert _get(server, path)[0] == 404
        assert "capibara_utilization_ratio" in _get(server, "/metrics")[1]
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with MonitorServer(monitor, port=0) as server:
        status, body, _ = _get(server, "/metrics")
        assert (status, "pip install 'capibara-jax[monitor]'" in body) == (501, True)


@pytest.mark.quick
def test_a_token_is_needed_where_others_reach_it(monitor: TpuRealTimeMonitor) -> None:
    for host in ("0.0.0.0", "::", "example.com"):
        with pytest.raises(ValueError, match=r"needs a token.*--token SECRET"):
            MonitorServer(monitor, host, 0)
    with MonitorServer(monitor, "0.0.0.0", 0, token="s3cret") as server:
        for path in ("/", "/monitor.js", "/events", "/api/now", "/metrics"):
            assert _get(server, path)[0] == 401
        assert _get(server, "/?token=wrong")[0] == 401
        assert _get(server, "/api/now", Authorization="Bearer wrong")[0] == 401
        assert _get(server, "/api/now", Cookie="capibara_monitor=s3cret; ;;=")[0] == 401
        assert _get(server, "/api/now", Cookie="capibara_monitor=\xe9")[0] == 401
        assert _get(server, "/api/now", Authorization="Bearer s3cret")[0] == 200
        status, _, headers = _get(server, "/?token=s3cret")
        assert (status, headers["location"]) == (303, "/")
        assert "HttpOnly" in headers["set-cookie"]
        assert "s3cret" not in headers["set-cookie"]
        assert _get(server, "/", Cookie=headers["set-cookie"].partition(";")[0])[0] == 200


def test_a_token_of_any_letters_and_one_that_is_empty(monitor: TpuRealTimeMonitor) -> None:
    with MonitorServer(monitor, port=0, token="sécret") as server:
        sent = "Bearer sécret".encode().decode("latin-1")  # how UTF-8 goes over the wire
        assert _get(server, "/api/now", Authorization=sent)[0] == 200
        assert _get(server, "/?token=s%C3%A9cret")[0] == 303
    with MonitorServer(monitor, port=0, token="") as server:  # of a variable that is set to nothing
        assert _get(server, "/api/now")[0] == 200
    with pytest.raises(ValueError, match="needs a token"):
        MonitorServer(monitor, "0.0.0.0", 0, token="")


@pytest.mark.quick
def test_a_name_that_was_made_to_lead_here_is_refused(monitor: TpuRealTimeMonitor) -> None:
    with MonitorServer(monitor, port=0) as server:
        assert _get(server, "/api/now", Host="evil.example")[0] == 403
        assert _get(server, "/api/now", Host=f"localhost:{server.port}")[0] == 200
        assert _get(server, "/api/now", Host="[bad")[0] == 403


@pytest.mark.quick
def test_a_port_that_is_taken(monitor: TpuRealTimeMonitor) -> None:
    with MonitorServer(monitor, port=0) as server:
        with pytest.raises(ValueError, match=r"a port that nobody else has.*use --port 0"):
            MonitorServer(monitor, port=server.port)
        with pytest.raises(ValueError, match="an address of this machine"):
            MonitorServer(monitor, "192.0.2.1", 0, token="t")


@pytest.mark.quick
def test_events_come_as_samples_do_and_viewers_that_leave_cost_nothing(monitor: TpuRealTimeMonitor) -> None:
    with MonitorServer(monitor, port=0) as server:
        for _ in range(3):
            viewer = socket.create_connection(("127.0.0.1", server.port))
            viewer.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            viewer.recv(100)
            viewer.close()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as viewer:
            viewer.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            lines = viewer.makefile("r", encoding="utf-8")
            told = []
            for line in lines:
                if line.startswith("event: "):
                    event = line.split()[1]
                elif line.startswith("data: "):
                    told.append((event, json.loads(line[6:])))
                    if len(told) == 4:
                        break
        assert [event for event, _ in told] == ["history", "sample", "sample", "sample"]
        assert told[0][1]["all"]["memory_used"][0][1] == 16e9, "of both chips"
        times = [sample["time"] for _, sample in told[1:]]
        assert times == sorted(set(times)), "each is a new one"


@pytest.mark.quick
def test_connections_are_bounded(monitor: TpuRealTimeMonitor) -> None:
    with MonitorServer(monitor, port=0) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(64)]
        try:
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as one_more:
                one_more.settimeout(60)
                assert one_more.recv(10) == b"", "it is closed"
        finally:
            for connection in idle:
                connection.close()
