"""Attention of head sizes from 64 to 256, at a length that tiles divide and at one they do not, by the TPU compiler.

    python benchmarks/v4_head_sizes.py --json FILE          # libtpu on x86-64 Linux; no TPU

Forward and backward in one program, as dispatch takes them inside an optimisation context. Nothing runs on a TPU: what
comes back is whether it compiles, and the memory that it takes beside its operands.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from capibara.compile.availability import tpu_compiler
from capibara.compile.pool import CompileJob, compile_many
from capibara.compile.report import CompileReport
from capibara.kernels import attention
from capibara.kernels.core import context
from capibara.kernels.core.trusting import trust
from capibara.kernels.lab.bench import versions

BATCH, HEADS, KV_HEADS = 2, 16, 4
LENGTHS = (2048, 1500)


def program(head_dim: int, length: int, device_kind: str = "TPU v4") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A job's target."""
    q, k = (jax.ShapeDtypeStruct((BATCH, length, heads, head_dim), jnp.bfloat16) for heads in (HEADS, KV_HEADS))

    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        with context.target("tpu", device_kind), trust("predicted"):
            out, pull = jax.vjp(lambda *operands: attention(*operands, causal=True), q, k, v)
            return out, pull(out)

    return fn, (q, k, k)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", default="v4-8")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sizes = [(head_dim, length) for length in LENGTHS for head_dim in range(64, 257, 16)]
    target = f"{Path(__file__).stem}:program"
    jobs = [CompileJob(target, {"head_dim": d, "length": t}, f"D{d} T{t}") for d, t in sizes]

    def tell(_: int, report: CompileReport) -> None:
        said = "ok" if report.ok else f"FAILS: {report.error}"
        print(f"{report.name}: {said}, temporaries {report.hbm_temp_bytes}, VMEM {report.vmem_bytes}", flush=True)

    reports = compile_many(jobs, given.slice, workers=given.workers, on_result=tell)
    kept = (
        "name",
        "ok",
        "compiled",
        "error",
        "seconds",
        "hbm_argument_bytes",
        "hbm_temp_bytes",
        "vmem_bytes",
        "bundles",
    )
    document = {
        "date": datetime.date.today().isoformat(), "command": f"python benchmarks/{Path(__file__).name}",
        "versions": versions(), "slice": given.slice, "compiler": str(tpu_compiler()),
        "notes": [f"B{BATCH} H{HEADS}/{KV_HEADS} causal bfloat16, forward and backward; predicted, not run on a chip"],
        "rows": [{name: getattr(report, name) for name in kept} for report in reports],
    }  # fmt: skip
    print(f"{sum(report.ok for report in reports)} of {len(reports)} compile")
    if given.json:
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
