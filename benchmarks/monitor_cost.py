"""What watching costs: a day of samples, ten a second, on a virtual clock; and samples of this machine's own sensors.

    python benchmarks/monitor_cost.py                       # 864,000 samples
    python benchmarks/monitor_cost.py --samples 20000

The day has four chips whose alerts come and go, a run whose steps go on, and a listener; memory is this process's
resident set, read at ten moments of it. The promises are 2 ms of processor time a sample, and memory that stays.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from datetime import date

import psutil

from capibara.observe import TpuRealTimeMonitor
from capibara.observe.sensors import Reading, default_sensors


class _Day:
    """Four chips and a run, at the moment that `step` says."""

    name, accelerators = "day", True

    def __init__(self) -> None:
        self.step = 0

    def __call__(self) -> float:
        return 1.7e9 + self.step / 10

    def read(self) -> Sequence[Reading]:
        used = 31e9 if self.step % 60 < 30 else 8e9
        figures = {"utilization": 0.9, "memory_used": used, "memory_total": 32e9}
        run = {"step": self.step, "loss": 1 + 1 / (1 + self.step), "tokens_per_second": 1e5, "step_time": 0.1}
        chips = [Reading(f"tpu:{i}", "tpu", figures, "TPU v4") for i in range(4)]
        return [*chips, Reading("run", "train", run, "TPU v4", 4)]

    def close(self) -> None:
        pass


def virtual_day(samples: int) -> dict[str, object]:
    day, told = _Day(), [0]

    def listen(_: object) -> None:
        told[0] += 1

    monitor = TpuRealTimeMonitor(
        100, {"memory_usage": 0.9, "utilization": 0.3}, sensors=[day], callbacks=[listen], clock=day, deadline_s=10
    )
    process = psutil.Process()
    resident = []
    every = max(1, samples // 10)
    warm = 12_000  # the ring of 6,000 samples and the thousand events are full then
    for day.step in range(warm):
        monitor.sample()
    started, processor = time.perf_counter(), time.process_time()
    for day.step in range(warm, warm + samples):
        monitor.sample()
        if (day.step - warm) % every == 0:
            resident.append(process.memory_info().rss)
    resident.append(process.memory_info().rss)
    processor, wall = time.process_time() - processor, time.perf_counter() - started
    monitor.stop()
    return {
        "samples": samples,
        "processor_ms_a_sample": round(1e3 * processor / samples, 4),
        "wall_s": round(wall, 1),
        "alerts_raised": monitor.alerts_raised,
        "events_told": told[0],
        "history_bytes": monitor.history.nbytes,
        "resident_mib": [round(one / 2**20, 2) for one in resident],
        "resident_grew_mib": round((resident[-1] - resident[0]) / 2**20, 2),
    }


def own_sensors(samples: int) -> dict[str, object]:
    monitor = TpuRealTimeMonitor(100, {"memory_usage": 0.9}, sensors=default_sensors(), deadline_s=10)
    monitor.sample()
    processor = time.process_time()
    for _ in range(samples):
        monitor.sample()
    processor = time.process_time() - processor
    now = monitor.get_current_metrics()
    monitor.stop()
    states = {name: told["state"] for name, told in now["sensors"].items()}
    return {
        "samples": samples,
        "processor_ms_a_sample": round(1e3 * processor / samples, 4),
        "sensors": states,
        "accelerators": {name: told for name, told in now["sources"].items() if told["kind"] in ("tpu", "gpu")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=864_000)
    asked = parser.parse_args()
    print(
        json.dumps(
            {
                "date": date.today().isoformat(),
                "host": f"{platform.machine()}, {psutil.cpu_count()} processors",
                "python": platform.python_version(),
                "command": f"python benchmarks/monitor_cost.py --samples {asked.samples}",
                "promise_processor_ms_a_sample": 2,
                "own_sensors": own_sensors(500),
                "virtual_day": virtual_day(asked.samples),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
