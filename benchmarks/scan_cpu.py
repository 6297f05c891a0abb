"""parallel_scan on a CPU beside lax.scan, in one run: time of an affine step, memory of a gradient step by step.

python benchmarks/scan_cpu.py --json scan.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp
from attention_gpu import timed
from jax import lax

from capibara.kernels import explain_scan, parallel_scan
from capibara.kernels.lab.bench import versions

STEPS = 4096


def elementwise(h: Any, x: Any) -> Any:
    h = x[0] * h + x[1]
    return h, h


def projected(weights: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jax.nn.sigmoid(x[0]) * h + x[1] @ weights
        return h, jnp.tanh(h)

    return step


def curved(h: Any, x: Any) -> Any:
    h = jnp.tanh(x[0] * h + x[1])
    return h, h


def draw(shape: tuple[int, ...], steps: int = STEPS) -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return jax.random.uniform(keys[0], (steps, *shape), minval=0.9), jax.random.normal(keys[1], (steps, *shape))


SHAPES = (("elementwise", (64,)), ("elementwise", (8, 256)), ("projected", (64,)), ("projected", (8, 64)))


def programs(step: Any, init: Any, direction: str) -> dict[str, Any]:
    def made(scan: Any) -> Any:
        if direction == "forward":
            return jax.jit(lambda xs: scan(step, init, xs)[1])
        return jax.jit(jax.grad(lambda xs: scan(step, init, xs)[1].sum()))

    return {"parallel_scan": made(parallel_scan), "lax.scan": made(lax.scan)}


def times() -> list[dict[str, Any]]:
    rows = []
    for name, shape in SHAPES:
        step = elementwise if name == "elementwise" else projected(jnp.eye(shape[-1]) * 0.5)
        xs, init = draw(shape), jnp.zeros(shape)
        for direction in ("forward", "gradient"):
            seconds = timed(programs(step, init, direction), [xs], rounds=9)
            rows.append(
                {"step": name, "carry": shape, "direction": direction, "path": explain_scan(step, init, xs).path,
                 "milliseconds": {who: 1e3 * s for who, s in seconds.items()},
                 "times_as_fast": seconds["lax.scan"] / seconds["parallel_scan"]}
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def memory() -> list[dict[str, Any]]:
    """Temporaries of the gradient of a step that is not affine, by the compiler's account."""
    rows = []
    for steps in (1024, 4096, 16384):
        xs, init = draw((256,), steps), jnp.zeros(256)
        compiled = {who: fn.lower(xs).compile() for who, fn in programs(curved, init, "gradient").items()}
        found = {who: fn.memory_analysis().temp_size_in_bytes for who, fn in compiled.items()}
        rows.append({"steps": steps, "step_bytes": 4 * 256, "temporary_bytes": found})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    document = {
        "device": f"{platform.machine()}, CPU",
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "memory": memory(),
        "rows": times(),
    }
    if options.json:
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump(document, out, indent=1)


if __name__ == "__main__":
    main()
