"""What the autoscaler's policies cost on load traces, beside the best fixed slice and beside the least possible.

    python benchmarks/autoscale_traces.py --json benchmarks/results/DATE-autoscale-traces.json

Six fixed traces, and two sets of six that are drawn: from seeds 9001, 9002 and so on, until six of them count, which an
earlier policy was measured on and which this one was not made by; and from 12001 on, which nobody had looked at when
the policy was done. It was made on the fixed traces and on seeds 1 to 200. A trace counts where the fixed slice costs
1.3 times the least possible or more; those that do not are shown too. Nobody's fleet was recorded for them:
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

HELD_BACK = (9001, 12001)
COUNTS_FROM = 1.3


def row(trace: Trace, policy: str, traces: str, settings: dict[str, Any]) -> dict[str, Any]:
    started = time.process_time()
    scaler = TpuAutoScaler(scaling_policy=policy, **settings)
    simulation = scaler.simulate(trace)
    gaps = np.diff(simulation.outcome.changes) * trace.interval_minutes
    return {
        **simulation.as_dict(),
        "policy": policy,
        "traces": traces,
        "counts": simulation.fixed_of_oracle >= COUNTS_FROM,
        "least_minutes_between_changes": int(gaps.min()) if len(gaps) else None,
        "cpu_seconds": round(time.process_time() - started, 2),
    }


def show(row: dict[str, Any]) -> None:
    print(
        f"| {row['trace']} | {row['policy']} | {row['of_oracle']:.3f} | {row['fixed_of_oracle']:.2f} | {row['late']} "
        f"| {row['redone']} | {row['changes']} | {row['highest_hourly']:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there, with date, versions and command")
    parser.add_argument("--policies", default="cost_aware,utilization")
    parser.add_argument("--first-seeds", type=int, nargs="*", default=HELD_BACK, help="of the sets that are drawn")
    parser.add_argument("--drawn", type=int, default=6, help="how many of each are to count")
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
        for name in FIXED_TRACES:
            rows.append(row(fixed_trace(name), policy, "fixed", settings))
            show(rows[-1])
        for first in asked.first_seeds:
            counted = 0
            for seed in itertools.count(first):
                if counted == asked.drawn:
                    break
                rows.append(row(draw_trace(draw_kind(seed), seed), policy, f"from seed {first}", settings))
                counted += rows[-1]["counts"]
                show(rows[-1])
    if asked.json is not None:
        record = {
            "date": date.today().isoformat(),
            "device": f"simulated; computed on {platform.machine()}",
            "numpy": np.__version__,
            "python": platform.python_version(),
            "command": "python benchmarks/autoscale_traces.py --json PATH",
            "notes": "work, late and redone are chip-minutes; the policy was made on the fixed traces, seeds 1 to 200",
            "settings": settings,
            "rows": rows,
        }
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
