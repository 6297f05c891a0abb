"""A decoded row's products between attentions, layer after layer: as one kernel, and one by one, in one run.

    python benchmarks/between_attentions_gpu.py [--weights bfloat16,int8] [--layers 16] [--out PATH]

Every layer has weights of its own, more than any cache holds. Microseconds are a layer's, of the device's clock by a
profile, and of the wall clock of a program of all layers; `error` is a layer's product against float32 sums.
"""

from __future__ import annotations

import argparse
import functools
import glob
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels import few_rows, summed_row
from capibara.kernels.ops.layers.between_attentions.api import between_attentions, kernel_parts, new_board
from capibara.kernels.ops.layers.between_attentions.reference import reference
from capibara.kernels.ops.layers.few_rows.api import parts_to_leave
from capibara.kernels.ops.layers.summed_row import api as summed

SAMPLES, PROGRAMS = 7, 5


def layer(key: jax.Array, hidden: int, ffn: int, outputs: int, int8: bool) -> tuple[Any, ...]:
    """Operands of a layer after x and the residual, but for the board."""
    keys = jax.random.split(key, 6)
    shapes = (hidden, hidden), (2 * ffn, hidden), (hidden, ffn), (outputs, hidden)
    wide = [jax.random.normal(k, s) * s[1] ** -0.5 for k, s in zip(keys, shapes, strict=False)]
    first, second = ((1 + 0.1 * jax.random.normal(k, (hidden,))).astype(jnp.bfloat16) for k in keys[4:])
    scales: list[Any] = [None] * 4
    if int8:
        scales = [jnp.max(jnp.abs(w), axis=1) / 127 for w in wide]
        wide = [jnp.round(w / s[:, None]).astype(jnp.int8) for w, s in zip(wide, scales, strict=True)]
    else:
        wide = [w.astype(jnp.bfloat16) for w in wide]
    return wide[0], first, wide[1], wide[2], second, wide[3], *scales


def together(x: jax.Array, residual: jax.Array, layers: list[Any]) -> Any:
    hidden, ffn = layers[0][3].shape
    board = new_board(hidden, ffn)
    parts = kernel_parts(x, residual, *layers[0], board, gate="silu", eps=1e-6)
    for operands in layers:
        residual, made, board = between_attentions(x, residual, *operands, board, out_parts=parts)
        x = made.sum(0)[:, : x.shape[1]].astype(x.dtype)
    return residual, made.sum(0)


def one_by_one(x: jax.Array, residual: jax.Array, layers: list[Any]) -> Any:
    """As decoding does where no kernel takes all of it: parts of a product are added up by who takes it next."""
    for out, first, up, down, second, following, *scales in layers:
        parts = few_rows(x, out, weight_scale=scales[0], out_parts=parts_to_leave(x, out) or 1)
        residual, inner = summed_row(parts, residual, first, up, scales[1], gate="silu")
        parts = few_rows(inner, down, weight_scale=scales[2], out_parts=parts_to_leave(inner, down) or 1)
        left = summed.parts_to_leave(parts, residual, second, following, scales[3])
        residual, made = summed_row(parts, residual, second, following, scales[3], out_parts=left or 1)
        x = made.sum(0)[:, : x.shape[1]].astype(x.dtype)
    return residual, made.sum(0)


def timed(program: Callable[[], Any], layers: int) -> dict[str, float]:
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(PROGRAMS):
            out = program()
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start) / PROGRAMS / layers * 1e6)
    busy = 0.0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROGRAMS):
                out = program()
            jax.block_until_ready(out)
        for file in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
            planes = jax.profiler.ProfileData.from_file(file).planes
            lines = [line for plane in planes if "/device:GPU" in plane.name for line in plane.lines]
            busy += sum(e.duration_ns for line in lines if line.name.startswith("Stream") for e in line.events)
    return {"wall_us": round(statistics.median(samples), 2), "busy_us": round(busy / PROGRAMS / layers / 1e3, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="bfloat16,int8")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sizes", default="2048,8192,4096", help="hidden, mlp, outputs of the next projection")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    hidden, ffn, outputs = map(int, asked.sizes.split(","))
    rows = []
    for weights in asked.weights.split(","):
        make = jax.jit(lambda key, int8=weights == "int8": layer(key, hidden, ffn, outputs, int8))
        layers = [make(jax.random.key(n)) for n in range(asked.layers)]
        x, residual = (jax.random.normal(jax.random.key(90 + n), (1, hidden)).astype(jnp.bfloat16) for n in range(2))
        right = np.asarray(jax.jit(reference)(x, residual, *layers[0])[1][0], np.float64)
        for name, form in {"together": together, "one by one": one_by_one}.items():
            run = jax.jit(form)
            made = np.asarray(run(x, residual, layers[:1])[1], np.float64)
            error = float(np.linalg.norm(made - right) / np.linalg.norm(right))
            jax.block_until_ready(run(x, residual, layers))
            row = {"weights": weights, "form": name, "error": round(error, 5)}
            rows.append({**row, **timed(functools.partial(run, x, residual, layers), asked.layers)})
            print(json.dumps(rows[-1]), flush=True)
    if asked.out is not None:
        device, versions = jax.devices()[0].device_kind, {"jax": jax.__version__}
        document = {"date": str(date.today()), "device": device, "versions": versions, "rows": rows}
        asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
