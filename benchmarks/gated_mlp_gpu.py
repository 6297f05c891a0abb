"""gated_mlp's kernels beside products of cuBLAS and a pass, in one run on one GPU, at published models' sizes.

    python benchmarks/gated_mlp_gpu.py --out gated_mlp.json

Each program runs again and again for a while before it is timed, and while it is: a chip that is held up by its power
slows down after the first tenths of a second, and a training step never leaves that state. Power and clock, as
nvidia-smi has them meanwhile, stand beside the times. "forward" keeps the products for the gradient, "alone" does not,
"grad" is the gradient of both products, and "mlp" all gradients of a layer of float32 weights, which are cast on the
way. Models that are held back are marked: no choice is to be made by them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from capibara.kernels import gated_activation
from capibara.kernels.core.dispatch import run
from capibara.kernels.ops.layers.activation.api import ACTIVATION_GRAD
from capibara.kernels.ops.layers.gated_mlp.api import GATED_PRODUCTS, GATED_PRODUCTS_GRAD, gated_mlp
from capibara.kernels.ops.layers.gated_mlp.pairs import paired, unpaired


class Shape(NamedTuple):
    model: str
    rows: int
    depth: int
    columns: int
    kind: str = "silu"
    held_back: bool = False


SHAPES = (
    Shape("llama-3.2-1b", 16384, 2048, 8192),
    Shape("llama-3.1-8b", 8192, 4096, 14336),
    Shape("qwen2-7b", 4096, 3584, 18944),
    Shape("tinyllama", 8192, 2048, 5632),
    Shape("gemma-2b", 4096, 2048, 16384, "gelu_tanh"),
    Shape("phi-3-mini", 12288, 3072, 8192, held_back=True),
    Shape("llama-3.2-1b", 2048, 2048, 8192),
    Shape("mistral-7b", 2104, 4096, 14336, held_back=True),
    Shape("llama-3.2-1b", 512, 2048, 8192),
    Shape("smollm-360m", 32768, 960, 2560, held_back=True),
)


def apart(x: jax.Array, gate: jax.Array, up: jax.Array, kind: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    first, second = x @ gate, x @ up
    return gated_activation(first, second, kind=kind), first, second


def all_gradients(layer: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda x, gate, up, down, d_out: jax.vjp(layer, x, gate, up, down)[1](d_out)


def programs(shape: Shape) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each program and its arguments, by its part and who computes it."""
    _, rows, depth, columns, kind, _ = shape
    keys = jax.random.split(jax.random.key(0), 6)

    def drawn(number: int, *lengths: int, deviation: float = 1.0) -> jax.Array:
        return (jax.random.normal(keys[number], lengths) * deviation).astype(jnp.bfloat16)

    x, d_out, products = drawn(0, rows, depth), drawn(1, rows, depth), drawn(2, rows, 2 * columns)
    gate, up = (drawn(number, depth, columns, deviation=depth**-0.5) for number in (3, 4))
    down = drawn(5, columns, depth, deviation=columns**-0.5)
    wide = [a.astype(jnp.float32) for a in (gate, up, down)]

    def grad_apart(d_out: Any, down: Any, first: Any, second: Any) -> Any:
        flow = jnp.tensordot(d_out, down, ((1,), (1,)))
        return run(ACTIVATION_GRAD, (first, second, None, None, flow), {"kind": kind})

    def layer_apart(x: Any, *weights: Any) -> Any:
        gate, up, down = (w.astype(x.dtype) for w in weights)
        return apart(x, gate, up, kind)[0] @ down

    def by_kernel(op: Any, **params: Any) -> Callable[..., Any]:
        return lambda *given: run(op, given, {"kind": kind, **params}, implementation="hopper")

    pairs = paired(gate, up)
    return {
        "forward xla": (lambda *given: apart(*given, kind), (x, gate, up)),
        "forward hopper": (by_kernel(GATED_PRODUCTS), (x, pairs)),
        "alone xla": (lambda *given: apart(*given, kind)[0], (x, gate, up)),
        "alone hopper": (by_kernel(GATED_PRODUCTS, keep=False), (x, pairs)),
        "grad xla": (grad_apart, (d_out, down, *unpaired(products))),
        "grad hopper": (by_kernel(GATED_PRODUCTS_GRAD), (d_out, down, products)),
        "mlp xla": (all_gradients(layer_apart), (x, *wide, d_out)),
        "mlp dispatch": (all_gradients(lambda *given: gated_mlp(*given, kind=kind)), (x, *wide, d_out)),
    }


def error(results: dict[str, Any]) -> float:
    """The largest difference between both ways, relative to the largest number."""
    forward, grad = results["forward hopper"], results["grad hopper"]
    both = [
        (forward[0], results["forward xla"][0]),
        (results["alone hopper"], results["forward xla"][0]),
        *zip(unpaired(forward[1]), results["forward xla"][1:], strict=True),
        *zip(unpaired(grad), results["grad xla"], strict=True),
        *zip(results["mlp dispatch"], results["mlp xla"], strict=True),
    ]
    return max(float(jnp.abs(a - b.astype(a.dtype)).max() / jnp.abs(b).max()) for a, b in both)


@contextlib.contextmanager
def sensors() -> Iterator[Path]:
    """A file that nvidia-smi adds a line of watts and megahertz to, 25 times a second."""
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        query = ["--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", "-lms", "40"]
        process = subprocess.Popen(["nvidia-smi", *query], stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield Path(file.name)
        finally:
            process.terminate()


def sustained(program: Any, given: Any, seconds: float, log: Path) -> tuple[float, float, float]:
    """Microseconds a call, watts and megahertz, after half of the time has gone by unseen."""

    def repeated(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            made = program(*given)
        jax.block_until_ready(made)
        return (time.perf_counter() - start) / times

    repeated(1)
    times = max(10, int(seconds / repeated(5)))
    repeated(times // 2)
    before = len(log.read_text().splitlines())
    took = repeated(times)
    seen = [line.split(",") for line in log.read_text().splitlines()[before + 1 : -1]]
    watts, clock = (statistics.mean(float(one[n]) for one in seen) if seen else float("nan") for n in (0, 1))
    return took * 1e6, watts, clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.25, help="that a program is timed for")
    parser.add_argument("--out", help="write the rows as JSON")
    asked = parser.parse_args()
    rows = []
    with sensors() as log, ThreadPoolExecutor(8) as pool:
        for shape in SHAPES:
            given = programs(shape)
            made = dict(zip(given, pool.map(lambda one: jax.jit(one[0]).lower(*one[1]).compile(), given.values()),
                            strict=True))  # fmt: skip
            results = {name: program(*given[name][1]) for name, program in made.items()}
            row: dict[str, Any] = {**shape._asdict(), "error": error(results), "us": {}, "watts": {}, "mhz": {}}
            del results
            for name, program in made.items():
                us, watts, clock = sustained(program, given[name][1], asked.seconds, log)
                row["us"][name], row["watts"][name], row["mhz"][name] = us, watts, clock
            rows.append(row)
            ratios = {
                part: row["us"][f"{part} xla"] / row["us"][f"{part} {who}"]
                for part, who in (("forward", "hopper"), ("alone", "hopper"), ("grad", "hopper"), ("mlp", "dispatch"))
            }
            said = ", ".join(f"{part} {ratio:.3f}" for part, ratio in ratios.items())
            held = " (held back)" if shape.held_back else ""
            print(f"{shape.model}{held} {shape.rows}x{shape.depth}x{shape.columns}: {said} times products and a pass; "
                  f"error {row['error']:.4f}, {row['watts']['forward hopper']:.0f} W", flush=True)  # fmt: skip
    if asked.out:
        document = {
            "date": time.strftime("%Y-%m-%d"),
            "device": jax.devices()[0].device_kind,
            "versions": {"jax": jax.__version__},
            "command": " ".join(["python", *sys.argv]),
            "rows": rows,
        }
        Path(asked.out).write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
