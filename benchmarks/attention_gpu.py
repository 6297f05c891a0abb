"""Attention on a GPU beside cuDNN (by jax.nn) and tokamax, in one run, everybody on [batch, length, heads, head_dim].

    python benchmarks/attention_gpu.py --json attention.json

For every shape, forward and forward+backward: what dispatch takes, our own kernel alone, and the peers, interleaved.
Each output's error is against the reference in float32 at the highest precision, on the first batch element and key
head. Below the table: what a window and a block mask save, and the memory of forward+backward at 32k.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels import attention, explain
from capibara.kernels.lab.bench import versions
from capibara.kernels.lab.tuning import failures
from capibara.kernels.ops.attention.reference import reference

# name, batch, length, heads, key heads, head_dim, causal
SHAPES = (
    ("4k", 4, 4096, 16, 16, 128, True),
    ("8k", 2, 8192, 16, 16, 128, True),
    ("8k full", 2, 8192, 16, 16, 128, False),
    ("4k GQA", 4, 4096, 32, 8, 128, True),
    ("4k D64", 4, 4096, 32, 32, 64, True),
    ("4k D256", 2, 4096, 8, 8, 256, True),
    ("1k", 16, 1024, 16, 16, 128, True),
    ("1k full", 16, 1024, 16, 16, 128, False),
    ("16k GQA", 1, 16384, 32, 8, 128, True),
    ("32k", 1, 32768, 8, 8, 128, True),
    ("1k D64", 16, 1024, 32, 32, 64, True),
    ("16k D64 GQA", 1, 16384, 32, 8, 64, True),
    ("16k D256 GQA", 1, 16384, 8, 4, 256, True),
)
ROUNDS, SAMPLE_SECONDS = 5, 0.02
OUR_KERNEL = "hopper"


def programs(causal: bool) -> dict[str, Callable[..., Any]]:
    """The forward pass of everybody."""
    made: dict[str, Callable[..., Any]] = {
        "dispatch": lambda q, k, v: attention(q, k, v, causal=causal, layout="bthd"),
        OUR_KERNEL: lambda q, k, v: attention(q, k, v, causal=causal, layout="bthd", implementation=OUR_KERNEL),
        "cudnn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn"),
    }
    try:
        import tokamax
    except ImportError as error:
        print(f"no tokamax: {error}", file=sys.stderr)
        return made
    made["tokamax"] = lambda q, k, v: tokamax.dot_product_attention(q, k, v, is_causal=causal, implementation="mosaic")
    return made


def with_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(fn, q, k, v)
        return out, *pull(d_out)

    return both


def drawn(batch: int, length: int, heads: int, kv_heads: int, head_dim: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, length, h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def expected(arrays: Sequence[jax.Array], group: int, causal: bool) -> tuple[Any, ...]:
    """Output and gradients of the first batch element and key head, as everybody lays them out."""

    def exact(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            heads_first = [x.astype(jnp.float32).swapaxes(1, 2) for x in (q, k, v, d_out)]
            out, pull = jax.vjp(lambda *x: reference(*x, causal=causal), *heads_first[:3])
            return [x.swapaxes(1, 2) for x in (out, *pull(heads_first[3]))]

    # Plain products: searching for the fastest would take longer than running any.
    options = {"xla_gpu_autotune_level": 0}
    return jax.jit(exact, compiler_options=options)(*first_group(arrays, group))


def first_group(arrays: Sequence[jax.Array], group: int) -> list[jax.Array]:
    """Of q or out, k, v, and more of q's kind: batch element 0 and the heads that share key head 0."""
    sizes = [group, 1, 1, group]
    return [x[:1, :, :size] for x, size in zip(arrays, sizes, strict=False)]


def error(made: Any, wanted: Any) -> float:
    made, wanted = made.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm(made - wanted) / jnp.linalg.norm(wanted))


def timed(functions: dict[str, Any], arrays: Sequence[Any], rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of a call: the median of interleaved samples of queued calls."""

    def sample(fn: Any, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            last = fn(*arrays)
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / repeats

    repeats = {name: max(2, round(SAMPLE_SECONDS / sample(fn, 3))) for name, fn in functions.items()}
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, fn in functions.items():
            taken[name].append(sample(fn, repeats[name]))
    return {name: statistics.median(times) for name, times in taken.items()}


def compiling(pool: ThreadPoolExecutor, fn: Callable[..., Any], arrays: Sequence[Any]) -> Future[Any]:
    lowered = jax.jit(fn).lower(*arrays)
    return pool.submit(lowered.compile)


def prepared(pool: ThreadPoolExecutor, shape: tuple[Any, ...]) -> dict[str, dict[str, Any]]:
    """Every program of a shape, being compiled, by direction; or why there is none."""
    causal = shape[6]
    structs = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in jax.eval_shape(lambda: drawn(*shape[1:6]))]
    found: dict[str, dict[str, Any]] = {}
    for direction in ("forward", "forward+backward"):
        wrap, arrays = (lambda f: f, structs[:3]) if direction == "forward" else (with_gradient, structs)
        chosen = [s.implementation for s in explain(wrap(programs(causal)["dispatch"]), *arrays).selections]
        jobs: dict[str, Any] = {"chosen": "+".join(dict.fromkeys(chosen))}
        for name, fn in programs(causal).items():
            if name == OUR_KERNEL and set(chosen) == {OUR_KERNEL}:
                continue  # it is what dispatch takes
            try:
                jobs[name] = compiling(pool, wrap(fn), arrays)
            except failures() as failure:  # a peer that refuses is a row that says so
                jobs[name] = failure
        found[direction] = jobs
    return found


def measure(shape: tuple[Any, ...], jobs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    name, batch, length, heads, kv_heads, head_dim, causal = shape
    arrays, group = drawn(*shape[1:6]), heads // kv_heads
    wanted = expected(arrays, group, causal)
    rows = []
    for direction, found in jobs.items():
        given = arrays[:3] if direction == "forward" else arrays
        ready, errors, notes = {}, {}, {}
        for who, job in found.items():
            if who == "chosen":
                continue
            try:
                if isinstance(job, Exception):
                    raise job
                fn = job.result()
                out = jax.tree.leaves(jax.block_until_ready(fn(*given)))
                cut = first_group(out, group) if len(out) > 1 else [out[0][:1, :, :group]]
                # with_gradient returns (out, dq, dk, dv): out is q's kind, and so is dq.
                if len(out) > 1:
                    cut = [out[0][:1, :, :group], *first_group(out[1:], group)]
                errors[who] = [error(x, w) for x, w in zip(cut, wanted, strict=False)]
                ready[who] = fn
            except failures() as failure:
                notes[who] = str(failure).splitlines()[0][:200]
        seconds = timed(ready, given)
        if OUR_KERNEL not in seconds and found["chosen"] == OUR_KERNEL:
            seconds[OUR_KERNEL], errors[OUR_KERNEL] = seconds["dispatch"], errors["dispatch"]
        flops = 4.0 * batch * heads * length * length * head_dim * (0.5 if causal else 1.0)
        flops *= 1.0 if direction == "forward" else 3.5
        best = min((s for who, s in seconds.items() if who in ("cudnn", "tokamax")), default=None)
        rows.append(
            {
                "shape": name, "batch": batch, "length": length, "heads": heads, "kv_heads": kv_heads,
                "head_dim": head_dim, "causal": causal, "direction": direction, "dispatch_takes": found["chosen"],
                "microseconds": {who: s * 1e6 for who, s in seconds.items()},
                "tflops": {who: flops / s / 1e12 for who, s in seconds.items()},
                "ratio_to_best_peer": {who: best / s for who, s in seconds.items()} if best else {},
                "relative_errors": errors, "notes": notes,
            }
        )  # fmt: skip
        shown = "  ".join(f"{who} {flops / s / 1e12:5.0f} ({best / s:.3f}x)" for who, s in seconds.items())
        worst = "  ".join(f"{who} {max(e):.1e}" for who, e in errors.items())
        print(f"{name:13} {direction:17} {found['chosen']:17} {shown}   errors {worst} {notes or ''}", flush=True)
    return rows


def sparse(pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """What a window of 1024 at 32k and a block mask with a quarter of its blocks alive save, forward."""
    live = np.random.default_rng(0).permutation(16 * 16).reshape(1, 1, 16, 16) < 64
    jobs = {
        "window 1024 at 32k": (
            (1, 32768, 8, 8, 128),
            lambda q, k, v: attention(q, k, v, causal=True, layout="bthd"),
            lambda q, k, v: attention(q, k, v, causal=True, window=1024, layout="bthd"),
        ),
        "25 % of 512x512 blocks at 8k": (
            (2, 8192, 16, 16, 128),
            lambda q, k, v: attention(q, k, v, layout="bthd"),
            lambda q, k, v: attention(q, k, v, block_mask=jnp.asarray(live), block_size=512, layout="bthd"),
        ),
    }
    rows = []
    for name, (shape, dense, thin) in jobs.items():
        arrays = drawn(*shape)[:3]
        both = {k: compiling(pool, f, arrays).result() for k, f in (("dense", dense), ("sparse", thin))}
        seconds = timed(both, arrays)
        ratio = seconds["dense"] / seconds["sparse"]
        rows.append({"what": name, "microseconds": {k: s * 1e6 for k, s in seconds.items()}, "times_as_fast": ratio})
        print(f"{name}: {ratio:.2f}x ({seconds['dense'] * 1e6:.0f} to {seconds['sparse'] * 1e6:.0f} µs)", flush=True)
    return rows


def memory(pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """Bytes of forward+backward at 32k, by the compiler, over those of inputs, output and gradients."""
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(lambda: drawn(1, 32768, 8, 8, 128))]
    rows = []
    for name, fn in programs(True).items():
        try:
            used: Any = compiling(pool, with_gradient(fn), arrays).result().memory_analysis()
        except failures() as failure:
            print(f"memory of {name}: {failure}", flush=True)
            continue
        needed = used.argument_size_in_bytes + used.output_size_in_bytes
        ratio = (needed + used.temp_size_in_bytes) / needed
        rows.append({"who": name, "needed": needed, "temporary": used.temp_size_in_bytes, "ratio": ratio})
        print(f"memory at 32k, {name}: {ratio:.3f}x of {needed / 2**20:.0f} MiB", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--shapes", help="names of shapes, separated by commas")
    options = parser.parse_args()
    chosen = [s for s in SHAPES if options.shapes is None or s[0] in options.shapes.split(",")]
    document: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
    }

    def save() -> None:
        if options.json:
            with open(options.json, "w", encoding="utf-8") as out:
                json.dump(document, out, indent=1)

    with ThreadPoolExecutor(14) as pool:
        # Everything compiles while nothing is timed.
        jobs = [(shape, prepared(pool, shape)) for shape in chosen]
        for _, found in jobs:
            for direction in found.values():
                for job in direction.values():
                    if isinstance(job, Future):
                        job.exception()
        for shape, found in jobs:
            document["rows"] += measure(shape, found)
            save()
        document["sparse"] = sparse(pool)
        document["memory"] = memory(pool)
        save()


if __name__ == "__main__":
    main()
