"""A layer of decoding one token on a GPU, attention included: products that leave and take a row in parts beside those
that add up and norm in passes of their own.

    python benchmarks/decode_layer_gpu.py --out decode_layer.json      # 1b and 8b, bf16 and int8, about a minute
    python benchmarks/decode_layer_gpu.py --models 1b --weights int8
    JAX_PLATFORMS=cpu python benchmarks/decode_layer_gpu.py --tiny

A program is a step of several layers, each with weights and pools of its own, which are donated. `busy_us` is the sum
of its kernels' times a layer, by the profiler; `kernels` has each kernel's count and median time in a step. `differs`
is the largest difference of the last residual from that of the form before, over the largest value: sums in another
order, rounded to bfloat16 in every layer. `--tiny` tries the script on any machine; its figures are of no use.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from few_rows_gpu import PAUSE_S, device_events

from capibara.kernels import few_rows, paged_attention, paged_write, rms_norm, summed_row, trust
from capibara.kernels.lab.bench import versions
from capibara.kernels.ops.attention.rope import rope_angles
from capibara.kernels.ops.layers.few_rows import api as few_rows_api
from capibara.kernels.ops.layers.summed_row import api as summed_row_api

PAGES, PAGE_SIZE, CONTEXT = 64, 64, 572
RUNS = 4  # under the profiler
EPS = 1e-6


class Model(NamedTuple):
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    depth: int = 128


MODELS = {"1b": Model(16, 2048, 8192, 16, 8), "8b": Model(8, 4096, 14336, 32, 8)}
TINY = Model(2, 256, 512, 2, 2)

Weights = dict[str, tuple[jax.Array, jax.Array | None]]


def draw_weights(model: Model, kind: str) -> list[Weights]:
    """Each layer's, held by output; of int8 with a scale an output."""
    n, all_heads = model, (model.heads + 2 * model.kv_heads) * model.depth
    shapes = {
        "qkv": (all_heads, n.hidden), "out": (n.hidden, n.heads * n.depth), "gate_up": (2 * n.ffn, n.hidden),
        "down": (n.hidden, n.ffn),
    }  # fmt: skip

    @functools.partial(jax.jit, static_argnums=1)
    def drawn(key: jax.Array, shape: tuple[int, int]) -> Any:
        if kind == "int8":
            scale = jnp.full(shape[0], 1 / (73 * shape[1] ** 0.5), jnp.float32)
            return jax.random.randint(key, shape, -127, 128, jnp.int8), scale
        return (jax.random.normal(key, shape) * shape[1] ** -0.5).astype(jnp.bfloat16), None

    keys = iter(jax.random.split(jax.random.key(0), len(shapes) * n.layers))
    return [{name: drawn(next(keys), shape) for name, shape in shapes.items()} for _ in range(n.layers)]


def layer(parts: bool, model: Model, x: Any, y: Any, weights: Weights, pools: Any, at: Any) -> tuple[Any, Any, Any]:
    """(the residual, what the next layer is given, the pools): its norm, or in parts what is to be added first."""
    scale, angles, page, slot, table, lengths = at
    of = {name: {"weight": weight, "weight_scale": s} for name, (weight, s) in weights.items()}
    shape = (x.shape[0], model.heads + 2 * model.kv_heads, model.depth)
    if parts:
        leave = summed_row_api.parts_to_leave(y, x, scale, *weights["qkv"]) or 1
        x, projected = summed_row(y, x, scale, **of["qkv"], eps=EPS, out_parts=leave)
        projected = projected.reshape(-1, *shape)
    else:
        projected = few_rows(y, **of["qkv"]).reshape(shape)
    query, *kept = paged_write(projected, *pools, *angles, page, slot, spare_page=True)
    mixed = paged_attention(query, *kept, table, lengths).reshape(x.shape[0], -1)
    if parts:
        x, inner = summed_row(in_parts(mixed, of["out"]), x, scale, **of["gate_up"], eps=EPS, gate="silu")
        return x, in_parts(inner, of["down"]), tuple(kept)
    x, y = few_rows(mixed, of["out"]["weight"], x, scale, of["out"]["weight_scale"], eps=EPS)
    inner = few_rows(y, **of["gate_up"], gate="silu")
    x, y = few_rows(inner, of["down"]["weight"], x, scale, of["down"]["weight_scale"], eps=EPS)
    return x, y, tuple(kept)


def in_parts(x: jax.Array, weight: dict[str, Any]) -> jax.Array:
    return few_rows(x, **weight, out_parts=few_rows_api.parts_to_leave(x, weight["weight"]) or 1)


def step(parts: bool, model: Model, x: Any, weights: list[Weights], pools: Any, positions: Any, *places: Any) -> Any:
    scale = jnp.full(model.hidden, 1.25, x.dtype)
    at = (scale, rope_angles(positions, model.depth, base=10000.0), *places)
    of_layer = jax.jit(functools.partial(layer, parts, model))
    y = jnp.zeros((1, *x.shape), jnp.float32) if parts else rms_norm(x, scale, eps=EPS)
    after = []
    for own, kept in zip(weights, pools, strict=True):
        x, y, kept = of_layer(x, y, own, kept, at)
        after.append(kept)
    return (x + y.sum(0)).astype(x.dtype) if parts else x, after


def measure(model: Model, kind: str, trusted: str) -> list[dict[str, Any]]:
    weights = draw_weights(model, kind)
    pool = jax.jit(lambda key: jax.random.normal(key, (PAGES, PAGE_SIZE, model.kv_heads * model.depth), jnp.bfloat16))
    keys = iter(jax.random.split(jax.random.key(1), 2 * model.layers))
    pools = [(pool(next(keys)), pool(next(keys))) for _ in range(model.layers)]
    table = jnp.arange(-(-CONTEXT // PAGE_SIZE), dtype=jnp.int32)[None] * 7 % (PAGES - 1)
    position = jnp.array([CONTEXT - 1], jnp.int32)
    places = position, table[:, -1], position % PAGE_SIZE, table, position + 1
    x = jax.random.normal(jax.random.key(2), (1, model.hidden), jnp.bfloat16)
    rows, first = [], None
    for name, parts in (("added up in passes", False), ("in parts", True)):
        with trust(trusted):
            jitted = jax.jit(functools.partial(step, parts, model), donate_argnums=2)
            program = jitted.lower(x, weights, pools, *places).compile()

        def run(times: int, program: Any = program) -> Any:
            nonlocal pools
            for _ in range(times):
                y, pools = program(x, weights, pools, *places)
            return jax.block_until_ready(y)

        got = np.asarray(run(2), np.float32)
        first = got if first is None else first
        row = {"form": name, "differs": float(np.abs(got - first).max() / np.abs(first).max())}
        rows.append(row | (profiled(run, model.layers) if jax.default_backend() == "gpu" else {}))
        print(f"  {name}: {json.dumps({key: rows[-1].get(key) for key in ('busy_us', 'differs')})}", flush=True)
    return rows


def profiled(run: Any, layers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            time.sleep(PAUSE_S)
            run(RUNS)
            time.sleep(PAUSE_S)
        events = [event for one in device_events(folder) for event in one]
    each = len(events) // RUNS
    events = events[each * (RUNS // 2) : each * (RUNS // 2 + 1)]
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        kernels[event.name[:40]].append(event.duration / 1e3)
    return {
        "busy_us": sum(map(sum, kernels.values())) / layers,
        "kernels": {name: [len(us), statistics.median(us)] for name, us in kernels.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1b,8b", help="of these, separated by commas")
    parser.add_argument("--weights", default="bf16,int8", help="of these, separated by commas")
    parser.add_argument("--trust", choices=("measured", "predicted"), default="predicted",
                        help="by default also what is not ahead runs, to be seen")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="two layers of a few thousand numbers, to see that it runs")
    parser.add_argument("--out", help="write the figures here")
    asked = parser.parse_args()
    found = []
    for name in ("tiny",) if asked.tiny else asked.models.split(","):
        for kind in asked.weights.split(","):
            print(f"{name}, {kind}", flush=True)
            rows = measure(TINY if asked.tiny else MODELS[name], kind, asked.trust)
            found += [{"model": name, "weights": kind, **row} for row in rows]
    if asked.out:
        report = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": jax.devices()[0].device_kind,
            "versions": versions(),
            "rows": found,
        }
        Path(asked.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
