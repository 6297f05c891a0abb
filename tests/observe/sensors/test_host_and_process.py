"""The machine and its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tests.observe.stand_ins import Clock

from capibara.errors import CapibaraError
from capibara.observe.sensors import HostSensor, ProcessSensor


@pytest.mark.quick
def test_the_hottest_zone_that_answers(tmp_path: Path) -> None:
    for name, text in {"0": "45000\n", "1": "61500\n", "2": "-274000\n", "3": "broken"}.items():
        (tmp_path / f"thermal_zone{name}").mkdir()
        (tmp_path / f"thermal_zone{name}" / "temp").write_text(text)
    (tmp_path / "thermal_zone4" / "temp").mkdir(parents=True)  # there, and cannot be read
    clock = Clock()
    sensor = HostSensor(tmp_path, clock)
    assert sensor.read()[0].values["temperature"] == 61.5
    (tmp_path / "thermal_zone1" / "temp").write_text("70000")
    clock.go(0.5)
    assert sensor.read()[0].values["temperature"] == 61.5, "once a second is enough"
    clock.go(0.5)
    assert sensor.read()[0].values["temperature"] == 70.0


@pytest.mark.quick
def test_processors_are_counted_between_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Times(SimpleNamespace):
        _fields = ("user", "system", "idle", "iowait", "guest")

    moments = iter(
        [
            Times(user=10.0, system=5.0, idle=100.0, iowait=1.0, guest=2.0),
            Times(user=12.0, system=6.0, idle=106.0, iowait=2.0, guest=4.0),  # 3 of 10 at work
            Times(user=12.0, system=6.0, idle=106.0, iowait=2.0, guest=4.0),  # no time has gone by
        ]
    )
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(moments))
    sensor = HostSensor()
    assert sensor.read()[0].values["utilization"] == pytest.approx(0.3)
    assert "utilization" not in sensor.read()[0].values


@pytest.mark.quick
def test_a_process_its_children_and_its_end() -> None:
    program = "import subprocess, sys; x = b'x' * 50_000_000; print(flush=True); sys.stdin.read()"
    parent = (
        "import subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {program!r}], stdin=sys.stdin); child.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        sensor = ProcessSensor(process.pid)
        process.stdout.readline()  # the child is there
        [reading] = sensor.read()
        assert reading.source == f"pid {process.pid}"
        assert reading.values["memory_used"] > 50e6, "the child's memory is counted"
        assert reading.values["memory_total"] == psutil.virtual_memory().total
        assert 0 <= reading.values["utilization"] <= 1.05
    finally:
        process.stdin.close()
        process.wait(30)
    with pytest.raises(CapibaraError, match="has ended"):
        sensor.read()


@pytest.mark.quick
def test_a_process_that_is_not_there() -> None:
    for pid in (2**22 + 5, 10**30):
        with pytest.raises(ValueError, match="A process is one that runs"):
            ProcessSensor(pid)
    assert ProcessSensor(os.getpid()).read()[0].kind == "process"
