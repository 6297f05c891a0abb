"""In which order the programs of our attention go over its tiles, on one GPU beside cuDNN.

    python benchmarks/attention_walks_gpu.py --out walks.json
    python benchmarks/attention_walks_gpu.py --calls '8,2048,16,8,128 causal;1,8192,64,8,64 causal window=128'
    python benchmarks/attention_walks_gpu.py --drawn 10 --seed 7      # calls that nobody chose, after the named ones

A call is batch, length, heads, key heads and head size. Each is timed with a program a tile, with programs that take
batch element after batch element, with sections of as many heads as there are programs, and with all heads at a time;
`taken` is what dispatch's own rule takes. All programs are compiled before any is timed, 4 calls each on arrays of
their own, in turns, and the least of the samples counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels import lookup
from capibara.kernels.core.spec import describe
from capibara.kernels.lab.bench import versions
from capibara.kernels.lab.lattice.measure import repeated
from capibara.kernels.ops.attention.hopper.calls import best_order
from capibara.kernels.ops.attention.hopper.forward import HopperConfig, default_config, fits
from capibara.kernels.pallas.hopper import multiprocessors

CALLS = (
    "8,2048,16,8,128 causal;26,512,32,8,128 causal;8,1024,32,8,128 causal;4,1024,64,8,128 causal;"
    "2,4096,32,8,128 causal;4,2048,32,32,128 causal;16,1024,16,16,64 causal;8,2048,16,16,64 causal;"
    "32,512,12,12,64 causal;4,512,128,128,192 causal;9,1536,24,24,128;4,577,16,16,64;15,2159,64,8,64 causal window=128;"
    "4,3000,32,8,128 causal window=512"
)
ROUNDS, RUNS, CALLS_A_PROGRAM = 5, 8, 4
ATTENTION = lookup("attention")


def read(text: str) -> tuple[tuple[int, ...], dict[str, Any]]:
    """`8,2048,16,8,128 causal window=128`."""
    sizes, *words = text.split()
    params: dict[str, Any] = {"causal": True} if "causal" in words else {}
    window = next((int(word.partition("=")[2]) for word in words if word.startswith("window=")), None)
    return tuple(map(int, sizes.split(","))), params | ({} if window is None else {"window": (window - 1, 0)})


def drawn(count: int, seed: int) -> list[str]:
    """Calls of about 2 to 20 billion pairs, the same for the same seed."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        head_dim, length = (
            draw.choice((64, 80, 96, 128, 128, 192)),
            draw.choice((384, 512, 900, 1024, 2048, 3072, 5000)),
        )
        kv_heads, group = draw.choice((4, 8, 16)), draw.choice((1, 1, 2, 4, 7))
        batch = max(1, min(32, 320_000_000 // (length * length * kv_heads * group)))
        words = draw.choice(("causal", "causal", "causal", "causal window=256", ""))
        made.append(f"{batch},{length},{kv_heads * group},{kv_heads},{head_dim} {words}")
    return made


def configs(call: Any) -> dict[str, HopperConfig]:
    batch, heads, _, head_dim = call.need("q").shape
    taken = default_config(call)
    order, programs = best_order(head_dim), multiprocessors(call.target.device_kind)
    made = {"taken": taken, "a program a tile": HopperConfig(64, taken.block_k, 2, order=order)}
    sections = {
        "batch element after batch element": 0,
        "as many heads as programs": programs,
        "all heads": batch * heads,
    }
    for name, section in sections.items():
        config = HopperConfig(64, taken.block_k, 2, True, programs, order, section)
        if section <= batch * heads and fits(config, head_dim, jnp.dtype(jnp.bfloat16), ()):
            made[name] = config
    return made


def prepared(text: str, pool: ThreadPoolExecutor) -> dict[str, Any]:
    (batch, length, heads, kv_heads, head_dim), params = read(text)
    call = ATTENTION.call(
        *(jax.ShapeDtypeStruct((batch, n, length, head_dim), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)),
        *(None,) * 6, **params,
    )  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(0), 3 * CALLS_A_PROGRAM))
    sets = [
        tuple(
            jax.random.normal(next(keys), (batch, length, n, head_dim), jnp.bfloat16)
            for n in (heads, kv_heads, kv_heads)
        )
        for _ in range(CALLS_A_PROGRAM)
    ]

    def program(implementation: str, config: Any) -> Any:
        def one(q: Any, k: Any, v: Any) -> Any:
            turned = (x.swapaxes(1, 2) for x in (q, k, v))
            made = ATTENTION(
                *turned, *(None,) * 6, implementation=implementation, physical="bthd", config=config, **params
            )
            return made.swapaxes(1, 2)

        return pool.submit(jax.jit(repeated(one)).lower(*sets).compile)

    jobs = {name: program("hopper", config) for name, config in configs(call).items()}
    jobs["cudnn"] = program("cudnn", None)
    return {"what": text, "call": call, "sets": sets, "programs": {name: job.result() for name, job in jobs.items()}}


def measure(row: dict[str, Any]) -> dict[str, Any]:
    us: dict[str, float] = {}
    for program in row["programs"].values():
        jax.block_until_ready(program(*row["sets"]))
    for _ in range(ROUNDS):
        for name, program in row["programs"].items():
            start = time.perf_counter()
            for _ in range(RUNS):
                last = program(*row["sets"])
            jax.block_until_ready(last)
            sample = 1e6 * (time.perf_counter() - start) / RUNS / CALLS_A_PROGRAM
            us[name] = min(sample, us.get(name, sample))
    call = row["call"]
    return {
        "what": row["what"], "operands": [describe(x) for x in call.args], "microseconds": us,
        "config": str(default_config(call)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", default=CALLS, help="apart by ;")
    parser.add_argument("--drawn", type=int, default=0, help="calls to draw, after the named ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    calls = [call for call in asked.calls.split(";") if call] + drawn(asked.drawn, asked.seed)
    with ThreadPoolExecutor(8) as pool:
        ready = [prepared(call, pool) for call in calls]
    rows = []
    for row in ready:
        rows.append(measure(row))
        print(rows[-1]["what"], {name: round(us, 1) for name, us in rows[-1]["microseconds"].items()}, flush=True)
    if asked.out:
        report = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": jax.devices()[0].device_kind, "versions": versions(), "rows": rows,
        }  # fmt: skip
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
