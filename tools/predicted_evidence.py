"""Make the table of predicted evidence of a chip out of what its compiler said of every op.

    capibara kernels compile --for v4-32 --json > compiled.json
    python tools/predicted_evidence.py benchmarks/results/2026-11-16-v4-32-every-op-compiled.json [compiled.json ...]

Of several files a later one speaks for the ops that it has.

Of XLA's program the least time is taken, of our kernel the most:

- XLA's: its bytes through the memory's bandwidth, or the op's matrix work at the peak. A loop's body is counted once by
  the compiler; where the flops it counts are fewer than the op's matrix work, the bytes are taken as many times over.
- ours: the bytes of operands, results and temporaries, or those that the compiler counts if they are more; or the
  schedule, grid steps times bundles over both cores, all branches of a body added up; or the matrix work at the peak.
  Where the steps are not known (several kernels, or a grid that the data decides), twice what the rest says.

Cases under 50 µs by either are left out, and so are collectives, whose time is the links'.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capibara import hardware
from capibara.kernels import lookup, target
from capibara.kernels.core.evidence import SHIPPED, params_key
from capibara.kernels.core.spec import describe
from capibara.kernels.core.tables import slug

ROOT = Path(__file__).resolve().parents[1]
LEAST_SECONDS = 50e-6
UNKNOWN_SCHEDULE = 2.0


def predicted(row: dict[str, Any], chip: hardware.Chip) -> dict[str, Any] | None:
    """One row of the table; None where there is nothing to compare."""
    ours, xla = row["ours"], row["xla"]
    op = lookup(row["op"])
    if not ours or not xla or not ours["ok"] or not xla["ok"] or op.mesh_axes is not None:
        return None
    case = op.case(row["case"])
    call = op.call(*case.args(), **dict(case.params))
    cost = op.cost(call)
    matrix = cost.matrix_flops / chip.peak_flops(cost.dtype) if cost.matrix_flops else 0.0
    loops = max(1.0, cost.matrix_flops / max(xla.get("flops") or 0.0, 1.0)) if cost.matrix_flops else 1.0
    temporaries = 2 * (ours.get("hbm_temp_bytes") or 0)
    moved = min(ours["hbm_argument_bytes"], cost.bytes) + ours["hbm_output_bytes"] + temporaries
    moved = max(moved, ours.get("bytes_accessed") or 0.0)
    cycles = (row["grid_steps"] or 0) * (row["bundles_a_step"] or 0) if chip.clock_hz else 0
    schedule = cycles / (chip.clock_hz or 1.0) / chip.cores_per_chip
    ours_s = max(moved / chip.hbm_bandwidth, schedule, matrix)
    ours_s *= 1.0 if cycles else UNKNOWN_SCHEDULE
    xla_s = max((xla.get("bytes_accessed") or 0.0) * loops / chip.hbm_bandwidth, matrix)
    if min(ours_s, xla_s) < LEAST_SECONDS:
        return None
    return {
        "case": row["case"],
        "operands": [describe(x) for x in call.args],
        "params": params_key(call),
        "us": {"xla": round(xla_s * 1e6, 1), row["implementation"]: round(ours_s * 1e6, 1)},
        "schedule_known": bool(cycles),
    }


def table(results: Sequence[Path]) -> dict[str, Any]:
    ops: dict[str, list[dict[str, Any]]] = {}
    sources: list[dict[str, str]] = []
    chips = set()
    for number, path in enumerate(results):
        document = json.loads(path.read_text(encoding="utf-8"))
        chip = hardware.chip(document["chip"])
        chips.add(chip)
        file = str(path.resolve().relative_to(ROOT))
        sources.append({"kind": "predicted", "file": file, "date": document["date"], "compiler": document["compiler"]})
        for op in {row["op"] for row in document["rows"]}:
            ops.pop(op, None)
        with target(chip.platform, chip.device_kinds[0]):
            for place, row in enumerate(document["rows"]):
                implementation = lookup(row["op"]).implementations.get(row["implementation"])
                if implementation is None or implementation.platforms != ("tpu",):
                    continue  # XLA's form, or a kernel that has gone since
                found = predicted(row, chip)
                if found is not None:
                    ops.setdefault(row["op"], []).append({"source": number, "row": place, **found})
    (chip,) = chips
    return {"chip": chip.name, "device_kind": chip.device_kinds[0], "sources": sources, "ops": ops}


def written(made: dict[str, Any]) -> str:
    """The table as a file has it: a line a row."""
    ops = ",\n".join(
        f"  {json.dumps(op)}: [\n" + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
        for op, rows in made["ops"].items()
    )
    head = "".join(f" {json.dumps(key)}: {json.dumps(made[key])},\n" for key in ("chip", "device_kind", "sources"))
    return f'{{\n{head} "ops": {{\n{ops}\n }}\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    made = table(parser.parse_args().results)
    (SHIPPED / f"{slug(made['device_kind'])}.json").write_text(written(made), encoding="utf-8")
    for op, rows in made["ops"].items():
        gains = sorted(row["us"]["xla"] / us for row in rows for name, us in row["us"].items() if name != "xla")
        print(f"{op}: {len(rows)} cases, gain {gains[0]:.2f} to {gains[-1]:.2f}")


if __name__ == "__main__":
    main()
