"""Every op's workloads on the attached chip, beside their peers: one table, and JSON with --out.

    python benchmarks/tpu_v4_performance.py                         # every op, forward
    python benchmarks/tpu_v4_performance.py gemm --grad             # one op, forward and backward
    python benchmarks/tpu_v4_performance.py --out results.json      # for the record

The cases, peers and figures are those of `capibara kernels bench`, which this calls. On a TPU v4 the limit is
the chip's published roofline; anywhere else it runs the same cases on what is attached and says so. No figure
for a v4 exists until this has run on one: `capibara kernels compile --for v4-32` predicts without a chip.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from capibara import hardware
from capibara.cli.kernels.bench import show
from capibara.cli.output import console
from capibara.errors import CapibaraError
from capibara.kernels.core.op import lookup, registry
from capibara.kernels.lab import bench


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="ops; all by default")
    parser.add_argument("--against", default="xla", help="implementations or peers, separated by commas")
    parser.add_argument("--case", action="append", help="a case by name; may be repeated")
    parser.add_argument("--grad", action="store_true", help="forward and backward together")
    parser.add_argument("--out", type=Path, help="write the rows as JSON here")
    given = parser.parse_args(argv)

    if hardware.default().device_kind != "TPU v4":
        print(f"Not a TPU v4: {hardware.summary()}. The figures below are for what is attached.")
    peers = [name for name in given.against.split(",") if name]
    rows = []
    try:
        for op in [lookup(name) for name in given.ops] or list(registry().values()):
            cases = [op.case(name) for name in given.case] if given.case else bench.bench_cases(op)
            if not given.case:
                cases, left = bench.affordable(op, cases)
                if left:
                    print(f"{op.name}: too large for this CPU: {', '.join(case.name for case in left)}")
            mine = [name for name in peers if given.ops or name in bench.peer_names(op)]
            rows += bench.bench(op, cases, mine, grad=given.grad)
    except (ValueError, CapibaraError) as error:
        print(error, file=sys.stderr)
        return 2
    show(console(), rows, peers)
    if given.out is not None:
        document = bench.document(rows, command=" ".join(["python", *sys.argv]))
        given.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
