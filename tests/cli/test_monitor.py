"""`capibara monitor` as people start it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capibara.cli.main import app
from capibara.observe.sensors import METRICS

SOURCE = Path(__file__).resolve().parents[2] / "src"
ROW = {"step": 12, "loss": 2.5, "tokens_per_second": 4096.0, "mfu": 0.4, "seconds": 0.125}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    return tmp_path


def _start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "capibara", "monitor", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip


@pytest.mark.quick
def test_once(run: Path) -> None:
    words = ["monitor", str(run), str(os.getpid()), "--once", "--interval-ms", "20"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    for text in ("host", f"pid {os.getpid()}", "tokens/s", "4,096", "125.0 ms", "2.5000"):
        assert text in shown.output
    told = CliRunner().invoke(app, [*words, "--json", "--alert", "loss=2", "--alert", "since_step=1e9"])
    document = json.loads(told.output)
    assert METRICS.keys() <= document.keys()
    assert (document["step"], document["loss"]) == (12, 2.5)
    assert [alert["text"] for alert in document["alerts"]] == [f"loss of {run} is 2.5, above 2"]


@pytest.mark.quick
def test_prices_and_how_long_an_alert_has_to_last(run: Path) -> None:
    life = {"devices": 4, "device_kind": "TPU v4", "platform": "tpu"}
    (run / "run.json").write_text(json.dumps({"processes": [life]}))
    own = run / "own.toml"
    own.write_text('[[price]]\nchip = "v4"\nregion = "here"\non_demand = 36.0\nspot = 18.0\n')
    words = ["monitor", str(run), "--once", "--json", "--interval-ms", "20", "--pricing", str(own), "--region", "here"]
    told = json.loads(CliRunner().invoke(app, [*words, "--alert", "loss=2", "--sustain-s", "1000000"]).output)
    assert told["dollars_per_token"] == pytest.approx(4 * 36 / 3600 / 4096)
    assert told["alerts"] == []
    spot = json.loads(CliRunner().invoke(app, [*words, "--price-kind", "spot"]).output)
    assert spot["dollars_per_token"] == pytest.approx(4 * 18 / 3600 / 4096)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--alert", "memory=0.9"], "Did you mean 'memory_usage'"),
        (["--alert", "memory_usage"], "A threshold is NAME=VALUE"),
        (["--alert", "utilization=-0.3"], "above 0"),
        (["nowhere"], "a run's folder, a server's http address, or a process's number"),
        (["--webhook", "example.com"], "A webhook is an http address"),
        (["--on-alert", "notify 'open"], "close its quotes"),
        (["--web", "--once"], "leave one out"),
        (["--web", "--host", "0.0.0.0"], "needs a token"),
        (["--price-kind", "free"], "kind of price"),
        (["--region", "atlantis"], "region"),
    ],
)
def test_bad_input(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAPIBARA_MONITOR_TOKEN", raising=False)
    shown = CliRunner().invoke(app, ["monitor", *words, "--json"])
    assert shown.exit_code == 2
    assert said in json.loads(shown.output)["error"]["message"]


@pytest.mark.quick
def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        shown = CliRunner().invoke(app, ["monitor", "--web", "--port", str(taken.getsockname()[1])])
    assert shown.exit_code == 2
    assert "a port that nobody else has" in shown.output


def test_a_table_that_is_drawn_anew_on_a_terminal(run: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "capibara", "monitor", str(run), "--interval-ms", "50"],
        stdout=theirs, stderr=theirs, env={**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while shown.count(b"device") < 3:
            assert select.select([ours], [], [], 60)[0], shown
            shown += os.read(ours, 1 << 16)
        assert b"4,096" in shown
        assert b"\x1b[1A" in shown, "the cursor goes up, and the table is written over"
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # what a terminal says when its last program is gone
            while select.select([ours], [], [], 60)[0] and os.read(ours, 1 << 16):
                pass
        os.close(ours)
        assert process.wait(60) == 0


def test_lines_of_json_until_it_is_told_to_stop(run: Path) -> None:
    file = run / "told"
    process = _start(
        str(run), "--json", "--interval-ms", "50", "--alert", "loss=2",
        "--on-alert", f"{sys.executable} -c \"import sys; open('{file}', 'w').write(sys.stdin.read())\"",
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert lines[0]["time"] < lines[1]["time"] < lines[2]["time"]
        for _ in range(1000):
            if file.exists() and file.read_text():
                break
            process.stdout.readline()
        assert json.loads(file.read_text())["name"] == "loss", "the command was run"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_the_page_and_its_end(run: Path) -> None:
    process = _start(str(run), "--web", "--port", "0", "--host", "localhost", "--token", "s3cret", "--json")
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        assert address.startswith("http://localhost:")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{address}/api/now", timeout=60)
        known = {"Authorization": "Bearer s3cret"}
        with urllib.request.urlopen(urllib.request.Request(f"{address}/api/now", headers=known), timeout=60) as answer:
            assert json.load(answer)["tokens_per_second"] == 4096.0
        with urllib.request.urlopen(urllib.request.Request(f"{address}/", headers=known), timeout=60) as answer:
            assert b"capibara monitor" in answer.read()
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
