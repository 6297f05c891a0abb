"""The planner's layout beside plain fully sharded and plain tensor parallel, by the same cost model, over a fixed list.

    python benchmarks/plan_layouts.py            # the table and the share of pairs where the planner's layout is faster
    python benchmarks/plan_layouts.py --only 7b  # those whose name has this in it

Plain fully sharded: all chips on one data axis, everything sharded. Plain tensor parallel: heads, feed-forward and
vocabulary over as many chips as divide them all, copies over the rest. Both take their best recomputation, and no
accumulation: the last two columns give them that too. Every time here is predicted; nothing ran on a TPU. A layout that
does not fit is beaten by one that does.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from capibara.hardware.topology import slice_by_name
from capibara.kernels.lab.bench import versions
from capibara.parallel.job import Job
from capibara.parallel.training_step import training_job
from capibara.plan.search.evaluation import PaperModel
from capibara.plan.search.exploration import Exploration
from capibara.plan.search.search import search
from capibara.plan.search.space import Point, Space


def _llama() -> ModuleType:
    path = Path(__file__).resolve().with_name("plain_llama.py")
    spec = importlib.util.spec_from_file_location("plain_llama", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_llama"] = module
    spec.loader.exec_module(module)
    return module


llama = _llama()
SHAPES = {
    **llama.SHAPES,
    "3b": llama.Config(hidden=3072, layers=28, heads=24, kv_heads=8, ffn=8192, vocab=128256),
    "8b": llama.Config(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256),
}

# (shape, slice, sequences in a batch, length). Batches are what such models were published with, one for all sizes of
# slice: 2 million tokens up to 3B and 4 million above; and a few small ones, where gathers cannot hide.
_SLICES = ("v4-32", "v4-64", "v4-128")
PAIRS = [
    *(("1b", on, 1024, 2048) for on in _SLICES),
    *((shape, on, 2048, 2048) for shape in ("7b", "13b", "70b") for on in _SLICES),
    ("3b", "v4-32", 1024, 2048),
    ("8b", "v4-64", 512, 8192),
    ("8b", "v4-128", 512, 8192),
    ("70b", "v4-256", 2048, 2048),
    ("70b", "v4-512", 2048, 2048),
    ("7b", "v4-64", 64, 2048),
    ("13b", "v4-128", 32, 4096),
    ("1b", "v4-64", 64, 2048),
]


def job_of(shape: str, batch: int, length: int) -> Job:
    """Training of one shape."""
    config = SHAPES[shape]
    params, data = llama.shapes(batch, length, config)
    return training_job(functools.partial(llama.loss, config=config), params, data, name=shape)


def plain(space: Space, cost: PaperModel, point: Point) -> tuple[float, float]:
    """Seconds of a plain layout with its best recomputation, and with accumulation too; infinite where none fits."""
    run = Exploration(space, cost)
    run.turn_knobs(point)
    for remat in space.knobs["remat"]:
        run.look(dataclasses.replace(point, choices=(("remat", remat), ("accumulate", 1))))
    fit = [one for one in run.results.values() if one.fits and one.estimate is not None]
    seconds = [(dict(one.point.choices)["accumulate"], one.estimate.seconds) for one in fit if one.estimate]
    return min((s for n, s in seconds if n == 1), default=math.inf), min((s for _, s in seconds), default=math.inf)


def compare(shape: str, on: str, batch: int, length: int) -> dict[str, Any]:
    """One line of the table."""
    job, where = job_of(shape, batch, length), slice_by_name(on)
    cost = PaperModel(job, where)
    started = time.process_time()
    plans = search(job, where, model=lambda _job, _slice: cost, fixes=False)
    took = time.process_time() - started
    space = Space(cost.anatomy(), where.chips, job.knobs, memory_limit=float(where.chip.capacity_bytes))
    sharded, accumulated = plain(space, cost, Point((("data", where.chips),), (), "full"))
    cut = space.anatomy.colours[0]
    most = math.gcd(where.chips, *(space.anatomy.sizes[group] for group in cut))
    mesh = tuple((name, size) for name, size in (("data", where.chips // most), ("model", most)) if size > 1)
    tensor, tensor_accumulated = plain(space, cost, Point(mesh, cut, "replicated"))
    best = plans.best
    return {
        "pair": f"{shape} {on} B{batch} T{length}",
        "planner": math.inf if best is None else best.estimate.seconds,
        "fully sharded": sharded,
        "tensor": tensor,
        "sharded, accumulated": accumulated,
        "tensor, accumulated": tensor_accumulated,
        "layout": "does not fit" if best is None else best.layout.name,
        "evaluations": plans.evaluations,
        "cpu seconds": took,
    }


COLUMNS = ("planner", "fully sharded", "tensor", "sharded, accumulated", "tensor, accumulated")


def _ms(seconds: float) -> str:
    return "does not fit" if math.isinf(seconds) else f"{seconds * 1e3:,.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="pairs whose name has this in it")
    parser.add_argument("--json", metavar="FILE", help="write the table there, with date and versions")
    asked = parser.parse_args()
    lines = []
    print(" | ".join(["pair", *COLUMNS, "the planner's layout", "layouts costed", "CPU"]))
    for pair in PAIRS:
        if asked.only not in " ".join(map(str, pair)):
            continue
        line = compare(*pair)
        lines.append(line)
        times = " | ".join(f"{_ms(line[name]):>12}" for name in COLUMNS)
        print(
            f"{line['pair']:24} | {times} | {line['layout']} | {line['evaluations']} | {line['cpu seconds']:.1f} s",
            flush=True,
        )
    if asked.json:
        # A layout that does not fit has no time: null, since JSON has no infinity.
        rows = [{k: None if v == math.inf else v for k, v in line.items()} for line in lines]
        document = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "command": "python benchmarks/plan_layouts.py --json FILE",
            "notes": ["seconds a step, predicted by the cost model; nothing was compiled or run for this table"],
            "rows": rows,
        }
        Path(asked.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    fit = [line for line in lines if not math.isinf(line["planner"])]
    # A thousandth: less is no win.
    for title, peers in (("plain", COLUMNS[1:3]), ("plain and accumulated", COLUMNS[3:])):
        won = [one for one in fit if one["planner"] < 0.999 * min(one[peer] for peer in peers)]
        lost = [one for one in fit if one["planner"] > 1.001 * min(one[peer] for peer in peers)]
        print(
            f"{len(fit)} of {len(lines)} pairs fit; the planner's is faster than both {title} layouts on {len(won)} "
            f"= {len(won) / max(1, len(fit)):.0%}, slower on {len(lost)}, else one of them is the best there is"
        )


if __name__ == "__main__":
    main()
