"""What the profiler says, held against measurements that do not use it.

    python benchmarks/profile_gpu.py --out profile.json        # on one H200: all of it, about 15 minutes
    python benchmarks/profile_gpu.py --tiny --pairs 2          # on a CPU: that it runs; its figures mean little
    python benchmarks/profile_gpu.py --parts gemm,overhead
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python benchmarks/profile_gpu.py --parts step   # rows name instructions

gemm      the TFLOP/s of an 8192^3 product by both modes and by the clock, in turns
overhead  what counting costs a product, a training step and a call that does next to nothing, call by call in turns
step      a training step: whether the rows of its operations add up to the step's wall clock, and whether the three
          largest products, run alone at the same shapes, take as long
gate      `capibara profile --against`, by benchmarks/profile_gate.py: quiet on two equal runs, and names the operation
          that was made 10 % longer (a half on a CPU)
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from capibara.observe.profiler import profile

sys.path.insert(0, str(Path(__file__).parent))
import plain_llama
import profile_gate


def seconds_of(call: Callable[[], Any], few: int = 20, more: int = 40) -> float:
    """Of one call on the device: what more calls take beyond a few, so that starting and waiting cancel out."""

    def together(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            result = call()
        jax.block_until_ready(result)
        return time.perf_counter() - start

    together(3)
    return statistics.median((together(few + more) - together(few)) / more for _ in range(5))


def gemm(tiny: bool) -> dict[str, Any]:
    """Each burst of products by the clock around it, and inside of a profile by both: what the profiler says of a burst
    is held against that burst's own time, which no other clock rate of the GPU can explain, and against the bursts that
    ran without it. First rounds before any trace of the process, then with one in every round."""
    size, calls, rounds = (256, 50, 3) if tiny else (8192, 50, 5)
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))

    def rate(seconds: float) -> float:
        return calls * 2 * size**3 / seconds / 1e12

    def burst() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            y = product(x, x)
        jax.block_until_ready(y)
        return time.perf_counter() - start

    def by_the_clock() -> dict[str, Any]:
        seconds = burst()
        return {"tflops": rate(seconds), "burst_seconds": seconds}

    def by_the_profiler(mode: str) -> dict[str, Any]:
        with profile("gemm", mode) as recording:
            seconds = burst()
        found = recording.profile
        assert found is not None
        return {
            "tflops": found.tflops,
            "burst_seconds": seconds,
            "tflops_of_the_burst": rate(seconds),
            "runs": found.runs,
            "seconds": found.seconds,
            "window": dict(found.window),
        }

    # In turns: a GPU that has run for a while is slower than one that rested.
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "by_the_clock": by_the_clock,
        "counting": functools.partial(by_the_profiler, "counting"),
        "tracing": functools.partial(by_the_profiler, "tracing"),
    }
    seen = []
    for traced in (False, True):
        for number in range(rounds):
            for name in ways if traced else ("by_the_clock", "counting"):
                seen.append({"way": name, "round": number, "after_a_trace": traced and number > 0, **ways[name]()})

    def middle(name: str, key: str = "tflops", **only: Any) -> float:
        rows = [one for one in seen if one["way"] == name and all(one[k] == v for k, v in only.items())]
        return statistics.median(one[key] for one in rows)

    found: dict[str, Any] = {name: middle(name) for name in ways}
    for mode in ("counting", "tracing"):
        found[f"{mode}_off_by"] = middle(mode) / middle("by_the_clock") - 1
        found[f"{mode}_off_by_its_own_burst"] = statistics.median(
            one["tflops"] / one["tflops_of_the_burst"] - 1 for one in seen if one["way"] == mode
        )
    for after, words in ((False, "before_any_trace"), (True, "after_a_trace")):
        found[f"counting_off_by_{words}"] = (
            middle("counting", after_a_trace=after) / middle("by_the_clock", after_a_trace=after) - 1
        )
    return {**found, "calls": calls, "rounds": seen, "promise": "within 3 %"}


def overhead(tiny: bool) -> dict[str, Any]:
    size = 256 if tiny else 8192
    x = jnp.ones((size, size), jnp.bfloat16)
    product, little = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)
    small = jnp.ones((8,))
    update, arguments = training(tiny)
    held = list(arguments)

    def step() -> Any:
        held[0], held[1], loss = update(held[0], held[1], held[2])
        return loss

    found = {}
    calls = {
        "product": (lambda: product(x, x), 20),
        "training_step": (step, 5),
        "next_to_nothing": (lambda: little(small), 2000),
    }
    for name, (call, times) in calls.items():
        jax.block_until_ready(call())

        def timed(call: Callable[[], Any] = call, times: int = times) -> float:
            start = time.perf_counter()
            for _ in range(times):
                result = call()
            jax.block_until_ready(result)
            return (time.perf_counter() - start) / times

        timed()
        ratios, extra = [], []
        for _ in range(15):
            plain = timed()
            with profile():
                counted = timed()
            ratios.append(counted / plain - 1)
            extra.append(counted - plain)
        found[name] = {"share": statistics.median(ratios), "microseconds_a_call": 1e6 * statistics.median(extra)}
    return {**found, "promise": "under 3 % of a product and of a training step"}


def training(tiny: bool) -> tuple[Any, tuple[Any, Any, Any]]:
    config = plain_llama.SHAPES["tiny" if tiny else "1b"]
    rows, length = (2, 64) if tiny else (8, 2048)
    params = jax.jit(functools.partial(plain_llama.init, config))(jax.random.key(0))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), plain_llama.state_shapes(params))
    ids = jax.random.randint(jax.random.key(1), (rows, length + 1), 0, config.vocab)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    return jax.jit(functools.partial(plain_llama.step, config=config), donate_argnums=(0, 1)), (params, state, batch)


def step(tiny: bool) -> dict[str, Any]:
    update, (params, state, batch) = training(tiny)
    params, state, loss = jax.block_until_ready(update(params, state, batch))
    steps = 5
    start = time.perf_counter()
    for _ in range(steps):
        params, state, loss = update(params, state, batch)
    jax.block_until_ready(loss)
    wall = (time.perf_counter() - start) / steps
    with profile("step", "tracing") as recording:
        for _ in range(steps):
            params, state, loss = update(params, state, batch)
    found = recording.profile
    assert found is not None
    rows = sum(op.seconds or 0.0 for op in found.ops) / steps
    alone = []
    largest = [op for op in found.ops if op.seconds and len(op.products) == 1][:3]
    for op in largest:
        b, m, n, k = op.products[0]
        # Drawn, as in a model: of ones a GPU makes a product faster, for it takes less power.
        keys = jax.random.split(jax.random.key(0))
        left = jax.random.normal(keys[0], (b, m, k), op.written_dtype or op.dtype)
        right = jax.random.normal(keys[1], (b, k, n), op.written_dtype or op.dtype)
        product = jax.jit(jnp.matmul)
        inside = op.median_seconds or 0.0
        by_itself = seconds_of(functools.partial(product, left, right), 5, 10)
        # Traced too, which leaves the host's part out and says what the compiler made of it: inside of a step a product
        # may have taken in what stands around it, or have its operands the other way round.
        with profile("alone", "tracing") as recording:
            for _ in range(10):
                product(left, right)
        assert recording.profile is not None
        own = next(one for one in recording.profile.ops if one.products)
        traced = own.median_seconds or 0.0
        alone.append(
            {"op": op.source or op.op, "instruction": op.op, "count": op.count, "dtype": op.dtype,
             "written_dtype": op.written_dtype, "sizes": op.products[0], "vector_flops": op.flops - op.matrix_flops,
             "inside": inside, "alone": by_itself, "off_by": inside / by_itself - 1, "alone_instruction": own.op,
             "alone_dtype": own.dtype, "alone_sizes": own.products, "alone_traced": traced,
             "off_by_traced": inside / traced - 1 if traced else None}
        )  # fmt: skip
    return {
        "wall_seconds": wall,
        "rows_seconds": rows,
        "off_by": rows / wall - 1,
        "busy_seconds": (found.busy_seconds or 0.0) / steps,
        "tflops": found.tflops,
        "compute_efficiency": found.compute_efficiency,
        "largest": alone,
        "notes": list(found.notes),
        "promise": "rows within 3 % of the wall clock; the three largest within 10 % of themselves alone",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="gemm,overhead,step,gate")
    parser.add_argument("--pairs", type=int, default=20, help="equal runs of the gate, and slowed ones")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "gemm": lambda: gemm(asked.tiny),
        "overhead": lambda: overhead(asked.tiny),
        "step": lambda: step(asked.tiny),
        "gate": lambda: profile_gate.gate(asked.tiny, bases=max(asked.pairs // 5, 1), pairs=min(asked.pairs, 5)),
    }
    found = {
        "date": date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python", "benchmarks/profile_gpu.py", *sys.argv[1:]]),
        **{name: parts[name]() for name in asked.parts.split(",")},
    }
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
