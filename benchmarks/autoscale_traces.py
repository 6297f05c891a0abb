"""What the autoscaler's policies cost on load traces, beside the best fixed slice and beside the least possible.

    python benchmarks/autoscale_traces.py --json benchmarks/results/DATE-autoscale-traces.json

Six fixed traces, on which the policy was made, and others that are drawn from seeds which were chosen after it was
done: 9001, 9002 and so on, until six of them count. A trace counts where the fixed slice costs 1.3 times the least
possible or more; those that do not are shown too. Nobody's fleet was recorded for them:
`capibara.fleet.scaling.drawn` says how they are drawn. "Late" is work that waited longer than the trace allows: only
without it is the work the same as the oracle's, which is never late.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from capibara.fleet.scaling.drawn import FIXED_TRACES, draw_kind, draw_trace, fixed_trace
from capibara.fleet.scaling.scaler import TpuAutoScaler
from capibara.fleet.scaling.trace import Trace

HELD_BACK = 9001
COUNTS_FROM = 1.3
COLUMNS = ("of_oracle", "fixed_of_oracle", "late", "redone", "changes", "highest_hourly")


def row(trace: Trace, policy: str, held_back: bool, settings: dict[str, Any]) -> dict[str, Any]:
    started = time.process_time()
    scaler = TpuAutoScaler(scaling_policy=policy, **settings)
    simulation = scaler.simulate(trace)
    gaps = np.diff(simulation.outcome.changes) * trace.interval_minutes
    return {
        **simulation.as_dict(),
        "policy": policy,
        "held_back": held_back,
        "counts": simulation.fixed_of_oracle >= COUNTS_FROM,
        "least_minutes_between_changes": int(gaps.min()) if len(gaps) else None,
        "cpu_seconds": round(time.process_time() - started, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there, with date, versions and command")
    parser.add_argument("--policies", default="cost_aware,utilization")
    parser.add_argument("--first-seed", type=int, default=HELD_BACK, help="of the traces that are drawn")
    parser.add_argument("--drawn", type=int, default=6, help="how many of them are to count")
    parser.add_argument("--target-utilization", type=float, default=0.95)
    asked = parser.parse_args()
    settings = {
        "min_chips": 4,
        "max_chips": 32,
        "target_utilization": asked.target_utilization,
        "cost_limit_per_hour": 110.0,
        "cooldown_minutes": 30.0,
    }
    print("| trace | policy | of the least | fixed slice | late | redone | changes | USD an hour at most |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for policy in asked.policies.split(","):
        seeds, counted = itertools.count(asked.first_seed), 0
        names = iter(FIXED_TRACES)
        while True:
            name = next(names, None)
            if name is None and counted == asked.drawn:
                break
            seed = next(seeds) if name is None else 0
            trace = draw_trace(draw_kind(seed), seed) if name is None else fixed_trace(name)
            made = row(trace, policy, name is None, settings)
            counted += made["held_back"] and made["counts"]
            rows.append(made)
            print(
                f"| {trace.name} | {policy} | {made['of_oracle']:.3f} | {made['fixed_of_oracle']:.2f} | {made['late']} "
                f"| {made['redone']} | {made['changes']} | {made['highest_hourly']:.2f} |",
                flush=True,
            )
    if asked.json is not None:
        record = {
            "date": date.today().isoformat(),
            "device": f"simulated; computed on {platform.machine()}",
            "numpy": np.__version__,
            "python": platform.python_version(),
            "command": "python benchmarks/autoscale_traces.py --json PATH",
            "notes": "work, late and redone are chip-minutes; seeds of held-back traces were chosen after the policy",
            "settings": settings,
            "rows": rows,
        }
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
