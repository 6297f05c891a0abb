"""Attention at long lengths on a CPU: the chunked XLA form beside jax.nn's, sample by sample in one run.

    python benchmarks/attention_cpu.py --json benchmarks/results/DATE-cpu-attention.json

jax.nn's XLA form computes every pair of query and key at once. The claim is temporaries under a tenth of its, by the
compiler's own count, and no more time. Both read and write [batch, length, heads, head_dim].
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels import explain
from capibara.kernels.core.spec import standard_normal
from capibara.kernels.lab.timing import compare, format_seconds
from capibara.kernels.ops.attention.api import attention

LENGTH, HEAD_DIM = 8192, 64
# (heads, dtype): one head, for the naive form takes seconds a head and 256 MiB for each copy of its scores.
SHAPES = ((1, "float32"), (1, "bfloat16"))
CHECKED = 1024  # the results are held against each other on so many positions
OURS, PEER = "capibara xla", "jax.nn xla"
MiB = 1 << 20


def forms(causal: bool) -> dict[str, Callable[..., jax.Array]]:
    def ours(q: Any, k: Any, v: Any) -> jax.Array:
        return attention(q, k, v, layout="bthd", causal=causal)

    def peer(q: Any, k: Any, v: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")

    return {OURS: ours, PEER: peer}


def with_gradients(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The result and its gradients, for the cotangent that is passed last."""

    def both(q: Any, k: Any, v: Any, flow: Any) -> Any:
        out, pull = jax.vjp(fn, q, k, v)
        return out, pull(flow)

    return both


def difference(made: Any, wanted: Any) -> float:
    """The largest difference of any output, as a fraction of that output's largest number."""
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True)
    wide = ((a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in wide)


def processor_seconds(fn: Callable[..., Any], args: list[Any]) -> float:
    """The time that this process's threads computed in one call: what other work on the machine does not stretch."""
    start = time.process_time()
    jax.block_until_ready(fn(*args))
    return time.process_time() - start


def measure(heads: int, dtype: str, causal: bool, backward: bool) -> dict[str, Any]:
    shape = (1, LENGTH, heads, HEAD_DIM)
    args = [standard_normal(shape, jnp.dtype(dtype), (0, i)) for i in range(4 if backward else 3)]
    found = explain(forms(causal)[OURS], *args[:3]).implementation
    assert found == "xla", f"dispatch took {found}; this script is about the XLA form on a CPU"
    made = {name: jax.jit(with_gradients(fn) if backward else fn) for name, fn in forms(causal).items()}
    apart = difference(*(fn(*(x[:, :CHECKED] for x in args)) for fn in made.values()))
    compiled = {name: fn.lower(*args).compile() for name, fn in made.items()}
    temporaries = {name: fn.memory_analysis().temp_size_in_bytes for name, fn in compiled.items()}
    # The inputs are read many times within one call, so copies that are not in the cache would change nothing.
    times = compare(compiled, *args, samples=3, budget_seconds=4.0, rotate=False, jit=False)
    busy = {name: processor_seconds(fn, args) for name, fn in compiled.items()}
    return {
        "shape": f"B1 T{LENGTH} H{heads} D{HEAD_DIM} {dtype}",
        "causal": causal,
        "pass": "forward+backward" if backward else "forward",
        "temporary_bytes": temporaries,
        "seconds": {name: timing.as_dict() for name, timing in times.items()},
        "temporaries_ratio": temporaries[OURS] / temporaries[PEER],
        "processor_seconds": busy,
        "processor_ratio": busy[OURS] / busy[PEER],
        "time_ratio": times[OURS].seconds / times[PEER].seconds,
        f"largest_difference_at_{CHECKED}": apart,
    }


def line(row: dict[str, Any]) -> str:
    seconds = {name: format_seconds(timing["seconds"]) for name, timing in row["seconds"].items()}
    temporaries = {name: f"{size / MiB:.0f} MiB" for name, size in row["temporary_bytes"].items()}
    cells = (row["shape"], "causal" if row["causal"] else "full", row["pass"], seconds[OURS], seconds[PEER])
    cells += (f"{row['time_ratio']:.2f}", f"{row['processor_ratio']:.2f}")
    cells += (temporaries[OURS], temporaries[PEER], f"{row['temporaries_ratio']:.3f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there, with date, device, versions and command")
    parser.add_argument("--notes", default="", help="kept with the rows: what else the machine was doing")
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print("| shape | mask | pass | ours | jax.nn | time ratio | processor ratio | our temporaries | its | ratio |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for heads, dtype in SHAPES:
        for causal in (True, False):
            for backward in (False, True):
                rows.append(measure(heads, dtype, causal, backward))
                print(line(rows[-1]), flush=True)
    if asked.json is None:
        return
    record = {
        "date": date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/attention_cpu.py --json PATH",
        "notes": asked.notes,
        "rows": rows,
    }
    asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
