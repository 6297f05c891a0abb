"""A real Ray cluster of this machine: lines, restarts, signals, nobody left over; and training as in one process."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.cli.test_train import TINY
from tests.train.test_supervisor import command, eventually, is_running, marks

from capibara.errors import CapibaraError
from capibara.fleet.launch import launch
from capibara.fleet.ray import RayCluster, cluster, request_chips
from capibara.train.logs import read_metrics
from capibara.train.supervisor import Supervisor

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra `ray`")


def _ray_processes() -> list[str]:
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    return [name for name in names if name in ("raylet", "gcs_server") or name.startswith("ray::")]


@pytest.fixture(scope="module")
def place() -> Iterator[RayCluster]:
    """One cluster for all tests of this file that do not start their own."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        opened = cluster(2, {"CPU": 0.5, "GPU": 0})
        try:
            workers = opened.__enter__()
        except CapibaraError as error:
            pytest.skip(f"Ray does not start here: {error}")
        yield workers
        opened.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == before
    assert eventually(lambda: not _ray_processes()), _ray_processes()


def _pids(tmp_path: Path, name: str) -> list[int]:
    return [int((tmp_path / "marks" / mark).read_text(encoding="utf-8")) for mark in marks(tmp_path, name)]


def test_workers_know_their_places_and_one_that_dies_restarts_all(place: RayCluster, tmp_path: Path) -> None:
    output = io.StringIO()
    code = """
        import subprocess
        print("hello", me, "of", count, os.getcwd(), os.environ["MINE"], sys.argv[2:])
        print("on stderr", file=sys.stderr)
        left = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        mark("left", str(left.pid))
        mark("started")
        wait_for("started", 1 - me)
        if start == 0:
            if me == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        mark("done", os.environ["CAPIBARA_COORDINATOR"])
    """
    supervisor = Supervisor(
        command(tmp_path, code), 2, place=place, backoff_seconds=0.01, stop_seconds=0.5, restart_words=["--resume"],
        environment={"MINE": "x"}, output=output,
    )  # fmt: skip
    assert supervisor.run() == 0, output.getvalue()
    text = output.getvalue()
    assert supervisor.starts == 2
    assert {(end.process, end.code) for end in supervisor.exits if end.start == 0} == {(0, 137), (1, 137)}
    for number in range(2):
        assert f"[{number}] hello {number} of 2 {os.getcwd()} x []\n" in text
        assert f"[{number}] hello {number} of 2 {os.getcwd()} x ['--resume']\n" in text
        assert f"[{number}] on stderr\n" in text
    assert "process 1 ended after" in text
    assert "killed by SIGKILL" in text
    coordinators = {(tmp_path / "marks" / name).read_text(encoding="utf-8") for name in marks(tmp_path, "done")}
    assert len(coordinators) == 1
    for name in ("started", "left"):  # also what the command itself left behind
        assert len(_pids(tmp_path, name)) == 4
        assert eventually(lambda name=name: not any(map(is_running, _pids(tmp_path, name))))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_code_comes_back(place: RayCluster, tmp_path: Path, number: int) -> None:
    code = """
        def stop(number, frame):
            mark("told", str(number))
            sys.exit(42)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        mark("started")
        time.sleep(60)
    """
    supervisor = Supervisor(command(tmp_path, code), 2, place=place, output=io.StringIO())

    def tell() -> None:
        eventually(lambda: len(marks(tmp_path, "started")) == 2, 60)
        os.kill(os.getpid(), number)

    teller = threading.Thread(target=tell)
    teller.start()
    assert supervisor.run() == 42
    teller.join()
    assert supervisor.starts == 1
    assert _pids(tmp_path, "told") == [number, number]


def test_a_lost_worker_and_a_folder_that_is_not_there(
    place: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    lost = """
        mark("started")
        wait_for("started", 1 - me)
        if start == 0 and me == 0:
            os.kill(os.getppid(), signal.SIGKILL)  # Ray's worker: as if its machine had gone
        if start == 0:
            time.sleep(60)
    """
    supervisor = Supervisor(
        command(tmp_path, lost), 2, place=place, backoff_seconds=0.01, stop_seconds=0.5, output=output
    )
    assert supervisor.run() == 0, output.getvalue()
    assert supervisor.starts == 2
    assert "worker 0 is lost: " in output.getvalue()
    assert not any(map(is_running, _pids(tmp_path, "started")))

    monkeypatch.setattr(place, "_folder", str(tmp_path / "none"))
    nowhere = Supervisor(["true"], 2, place=place, max_restarts=1, backoff_seconds=0.01, output=output)
    assert nowhere.run() == 1
    assert nowhere.starts == 2
    assert f"there is no folder {tmp_path / 'none'}" in output.getvalue()


def test_a_cluster_that_is_there_is_joined_and_stays(place: RayCluster, tmp_path: Path) -> None:
    import ray

    def reserved() -> int:
        return sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())

    before = reserved()
    (tmp_path / "work").mkdir()
    words = ["--address", ray.get_runtime_context().gcs_address, "--processes", "2", "--cpus", "0.25"]
    words += ["--workdir", str(tmp_path / "work"), "--env", "MINE=x", "--json"]
    code = 'print("in", os.getcwd(), os.environ["MINE"]); sys.exit(42)'
    ran = subprocess.run(
        [sys.executable, "-m", "capibara", "launch", "--engine", "ray", *words, "--", *command(tmp_path, code)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 42, ran.stderr
    document = json.loads(ran.stdout)
    assert (document["processes"], document["starts"], document["error"]["exit_code"]) == (2, 1, 42)
    assert f"[1] in {tmp_path / 'work'} x" in ran.stderr
    assert eventually(lambda: reserved() == before)  # its share of the cluster is given back


def test_a_wait_for_resources_ends(place: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    greedy = RayCluster({"CPU": 10_000}, os.getcwd(), wait_seconds=0.5)
    try:
        assert Supervisor(["true"], 2, place=greedy, max_restarts=0, output=output).run() == 1
        assert "2 workers of 10000 CPU were not free within 0.5 s" in output.getvalue()
        monkeypatch.setattr(greedy, "_wait_seconds", 60.0)
        before = signal.getsignal(signal.SIGTERM)

        def tell() -> None:
            # Not before it listens: the signal would end the tests.
            if eventually(lambda: signal.getsignal(signal.SIGTERM) is not before):
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=tell).start()
        assert Supervisor(["true"], 2, place=greedy, output=output).run() == 128 + signal.SIGTERM
        assert "told to stop while waiting" in output.getvalue()
    finally:
        greedy.release()


def test_more_than_the_machine_has_is_refused() -> None:
    from capibara.fleet.ray import _check_it_fits

    with pytest.raises(ValueError, match=r"2 workers of 4 TPU each, and 0 TPU.*--tpus"):
        _check_it_fits(2, {"CPU": 1, "GPU": 0, "TPU": 4}, {"CPU": 2.0})
    with pytest.raises(CapibaraError, match=r"is not reached at 127\.0\.0\.1:1"):
        launch("ray", ["true"], address="127.0.0.1:1")


def test_two_workers_train_as_one_process(tmp_path: Path) -> None:
    """By the command line, each with a device of its own; the single process beside it has one."""
    settings = [word for setting in (*TINY, "train.precision=float32") for word in ("--set", setting)]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "CAPIBARA_CACHE_DIR": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
    }

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "capibara", *words],
            env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    ray = ("launch", "--engine", "ray", "--processes", "2", "--cpus", "0.5", "--")
    many = start(*ray, "capibara", "train", "dev", "--devices", "2", "--out", "many", *settings)
    alone = start("train", "dev", "--devices", "1", "--out", "alone", *settings)
    told, _ = many.communicate()
    assert many.returncode == 0, told
    assert alone.wait() == 0, alone.communicate()[0]
    losses = {
        name: [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row]
        for name in ("many", "alone")
    }
    assert len(losses["many"]) == 4
    assert losses["many"] == pytest.approx(losses["alone"], rel=1e-5)
    assert "[0] " in told


@pytest.mark.slow
def test_chips_are_asked_of_the_cluster() -> None:
    """What Ray's autoscaler reads is there, and the last request is the one that stands."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_get

    with pytest.raises(ValueError, match="chips is a whole number from 0"):
        request_chips(-4)
    with pytest.raises(ValueError, match="the cluster that it has joined"):
        request_chips(8)
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    try:
        request_chips(10)
        request_chips(6, chips_per_host=4, resource="TPU")
        asked = json.loads(_internal_kv_get(b"autoscaler_resource_request"))
        assert [one.get("resources", one) for one in asked] == [{"TPU": 4}, {"TPU": 2}]
    finally:
        ray.shutdown()
