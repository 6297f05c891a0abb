"""Grids of shapes on one GPU, for the models of times: what the lattice's draws leave thin.

    python benchmarks/shapes_gpu.py --part norm --out shapes.json
    python benchmarks/shapes_gpu.py --part attention --minutes 2

Rows are those of `capibara kernels bench --models`: compiled by several processes, timed by one at a time on the
device's clock, right before fast, dispatch's choice beside every implementation and what a user would write.
`tools/fitted_times.py` reads them. No shape of a model that the lattice holds back is here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capibara import hardware
from capibara.cli.kernels.lattice import told
from capibara.kernels.core.op import lookup
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.lattice import peers, report, run
from capibara.kernels.lab.lattice.workloads import Workload, attention_of, with_op

# columns and rows of each
NORMS = {
    128: (65536, 400000), 768: (300, 16384), 1024: (3000,), 1280: (8192,), 1600: (600, 13312), 2048: (200, 4096, 16384),
    2304: (6000,), 2880: (2000, 12288), 3072: (8192,), 3584: (12000,), 4096: (100, 3000, 16384), 5120: (6000,),
    8192: (2048,),
}  # fmt: skip
LAYER_NORMS = (768, 1280, 1600, 5120)
# rows, columns: few rows, whose time is a launch and what a core does at a time
ACTIVATIONS = (
    (16, 5120), (100, 3072), (64, 16384), (300, 3072), (387, 10240), (700, 4096), (1000, 5120), (2000, 3072),
    (1500, 10240),
)  # fmt: skip
# batch, length, heads, key heads, head_dim
ATTENTION = (
    (2, 3100, 32, 8, 64), (1, 3260, 32, 8, 64), (4, 1450, 32, 8, 64), (2, 2700, 16, 16, 64), (1, 5300, 14, 2, 64),
    (3, 1900, 32, 8, 128), (1, 4500, 28, 4, 128), (2, 2700, 32, 32, 96), (2, 1111, 40, 8, 128), (8, 700, 12, 12, 64),
)  # fmt: skip


def norms() -> Iterator[Workload]:
    op = lookup("norm")
    for columns, counts in NORMS.items():
        for rows in counts:
            for kind in ("rms", "layer")[: 2 if columns in LAYER_NORMS else 1]:
                vectors = ((columns,), (columns,) if kind == "layer" else None)
                for residual in (False, True)[: 2 if kind == "rms" and columns > 128 else 1]:
                    params: dict[str, Any] = {"kind": kind} | ({"return_residual": True} if residual else {})
                    shapes = ((rows, columns), *vectors, (rows, columns) if residual else None)
                    case = Case("grid", shapes, "bfloat16", params)
                    for grad in (False, True):
                        what = f"{kind} {rows}x{columns}{' +residual' if residual else ''}"
                        plain = {} if residual else {"plain": peers.norm(kind)}
                        yield with_op("norm", "grid", what, op.name, case, grad, peers=plain)


def attentions() -> Iterator[Workload]:
    for sizes in ATTENTION:
        for grad in (False, True):
            yield attention_of("grid", sizes, {"causal": True}, grad)


def activations() -> Iterator[Workload]:
    for kind in ("gelu", "gelu_tanh"):
        for shape in ACTIVATIONS:
            for grad in (False, True):
                case = Case("grid", (shape, None, None, None), "bfloat16", {"kind": kind})
                what = f"{kind} {shape[0]}x{shape[1]}"
                plain = {"plain": peers.activation(kind)}
                yield with_op("activation", "grid", what, "activation", case, grad, peers=plain)


PARTS = {"norm": norms, "attention": attentions, "activation": activations}


def chosen(settings: run.Settings) -> Iterator[Workload]:
    assert settings.families is not None
    for part in settings.families:
        yield from PARTS[part]()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    asked = parser.parse_args()
    parts = tuple(asked.part or PARTS)
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    settings = run.Settings(minutes=asked.minutes, families=parts, workers=workers, workloads=chosen)
    count = sum(1 for _ in chosen(settings))
    results = None

    def on_row(row: run.Row) -> None:
        assert results is not None
        results.add(row)
        print(told(row), flush=True)

    command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the workers' memory is what this process leaves
    results = report.Results(asked.out, hardware.default().device_kind, command, 0, asked.commit)
    run.run(run.dataclasses.replace(settings, most_rows=count), on_row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
