"""What dispatch costs: an eager `gemm` against calling the implementation it picks, sample by sample in one run.

    python benchmarks/dispatch_overhead.py

Operands are tiny, so that the host's work is what is timed. The promise is under 30 µs a call.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from datetime import date

import jax
import jax.numpy as jnp

from capibara.kernels import explain, gemm
from capibara.kernels.ops.linalg.gemm.xla import xla

CALLS, SAMPLES = 500, 21


def seconds_a_call(fn: object, *args: jax.Array) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        out = fn(*args)  # type: ignore[operator]
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    x = jnp.ones((8, 8), jnp.float32)
    assert explain(gemm, x, x).implementation == "xla"
    direct = jax.jit(xla)
    contenders = {"implementation called directly": direct, "gemm": gemm, "jnp.matmul": jnp.matmul}
    for fn in contenders.values():
        seconds_a_call(fn, x, x)  # compile, and warm the caches
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(SAMPLES):
        for name, fn in contenders.items():
            samples[name].append(seconds_a_call(fn, x, x))
    median = {name: statistics.median(taken) * 1e6 for name, taken in samples.items()}
    # Paired by sample, so that a slow moment of the machine hits both sides of a difference.
    paired = zip(samples["gemm"], samples["implementation called directly"], strict=True)
    overhead = statistics.median(ours - theirs for ours, theirs in paired) * 1e6
    print(
        json.dumps(
            {
                "date": date.today().isoformat(),
                "device": jax.devices()[0].device_kind,
                "host": platform.machine(),
                "jax": jax.__version__,
                "python": platform.python_version(),
                "command": "python benchmarks/dispatch_overhead.py",
                "microseconds_a_call": {name: round(value, 2) for name, value in median.items()},
                "overhead_microseconds": round(overhead, 2),
                "promise_microseconds": 30,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
