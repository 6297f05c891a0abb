"""Predicted bytes and exchanges of mixtures of experts on meshes against the TPU compiler's.

    python benchmarks/plan_mixtures.py                    # predicted, in minutes
    python benchmarks/plan_mixtures.py --compile          # and the TPU compiler's (libtpu on x86-64 Linux, no TPU)
    python benchmarks/plan_mixtures.py --only "data=32" --compile --json FILE

Training steps of the presets with AdamW on v4-64, everything recomputed and fully sharded where that is the best: the
layout that `capibara plan PRESET --on v4-64 --mesh MESH --remat full --accumulate 1` finds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

from compiled_work import work_of

from capibara.compile.availability import tpu_compiler
from capibara.hardware.topology import abstract_devices, slice_by_name
from capibara.kernels.lab.bench import versions
from capibara.models.preset import load_preset
from capibara.parallel.run import lower_layout
from capibara.plan import plan
from capibara.plan.target import preset_job

ON = "v4-64"
SIXTY_FOUR = ("model.layers=8", "model.blocks.moe.experts=64", "model.blocks.moe.top_k=6", "model.blocks.moe.ffn=768")
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "moe, data=32": ("moe", "data=32", ("train.batch_size=64",)),
    "hybrid, data=32": ("hybrid", "data=32", ("train.batch_size=64",)),
    "moe, data=4 expert=8": ("moe", "data=4,expert=8", ("train.batch_size=64",)),
    "moe, data=8 model=4": ("moe", "data=8,model=4", ("train.batch_size=64",)),
    "moe of 64 experts, data=16 sequence=2": ("moe", "data=16,sequence=2", ("train.batch_size=32", *SIXTY_FOUR)),
    "hybrid, data=4 expert=4 model=2": ("hybrid", "data=4,expert=4,model=2", ("train.batch_size=64",)),
}
"""Name -> preset, mesh, changed keys."""


def row_of(name: str, compile: bool) -> dict[str, Any]:
    preset, mesh, changed = CASES[name]
    job = preset_job(load_preset(preset, list(changed)), knobs={"remat": ("full",), "accumulate": (1,)})
    best = plan(job, on=ON, mesh=mesh).best
    assert best is not None
    estimate = best.estimate
    row: dict[str, Any] = {
        "case": name,
        "layout": best.layout.name,
        "predicted_bytes": estimate.memory.total,
        "predicted_seconds": estimate.seconds,
        "predicted_compute_seconds": estimate.compute_seconds,
        "predicted_link_seconds": estimate.link_seconds,
        "predicted_flops": estimate.flops,
    }
    if compile:
        where, start = slice_by_name(ON), time.perf_counter()
        built = best.layout.mesh.build(abstract_devices(where))
        compiled = lower_layout(job, best.layout, built).compile()
        work = work_of(compiled.as_text(), best.layout.mesh, where)
        peak = compiled.memory_analysis().peak_memory_in_bytes
        row |= {
            "compiled_bytes": peak,
            "bytes_ratio": estimate.memory.total / peak,
            "compiled_compute_seconds": work.compute_seconds,
            "compiled_link_seconds": work.link_seconds,
            "compiled_flops": work.flops,
            "compiled_exchanges_bytes": dict(work.sent),
            "kernels_not_in_compiled_compute": dict(work.unread),
            "compile_seconds": time.perf_counter() - start,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--compile", action="store_true", help="ask the TPU compiler too, minutes a case")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, in place of rows of the same names")
    asked = parser.parse_args()
    file = None if asked.json is None else Path(asked.json)
    kept = json.loads(file.read_text(encoding="utf-8"))["rows"] if file is not None and file.exists() else []
    rows = {row["case"]: row for row in kept}
    for name in CASES:
        if asked.only not in name:
            continue
        rows[name] = row_of(name, asked.compile)
        print(json.dumps(rows[name], indent=1), flush=True)
        if file is not None:
            document = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "versions": {**versions(), "libtpu": tpu_compiler().version},
                "command": "python benchmarks/plan_mixtures.py --compile --json FILE",
                "rows": [rows[one] for one in CASES if one in rows],
            }
            file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
