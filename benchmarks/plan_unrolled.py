"""How long a plan takes for programs whose layers are written out: a ResNet-50 and a ViT of 24 layers, in plain JAX.

    python benchmarks/plan_unrolled.py               # seconds of this process, and layouts costed
    python benchmarks/plan_unrolled.py --on v4-8

A program that scans over its layers has tens of nodes to cost; these have thousands. The ResNet is what the planner's
model was profiled on, the ViT is not. `step` is the whole training step as a function of its own, whose arguments'
roles have to be found. Seconds are the processor's, not the clock's: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.parallel.job import Job, program_job
from capibara.parallel.training_step import training_job
from capibara.plan.search.search import search

STAGES = (3, 4, 6, 3)
LAYERS, WIDE, HEADS, FFN, PATCH = 24, 1024, 16, 4096, 16


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _batch(rows: int = 256) -> dict[str, Any]:
    return {"image": _f32(rows, 224, 224, 3), "label": jax.ShapeDtypeStruct((rows,), jnp.int32)}


def _nll(scores: jax.Array, label: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), label[:, None], 1))


def _normed(x: jax.Array, p: Any, axes: tuple[int, ...]) -> jax.Array:
    y = x.astype(jnp.float32)
    mean, square = (one.mean(axes, keepdims=True) for one in (y, y * y))
    return ((y - mean) * lax.rsqrt(square - mean * mean + 1e-5) * p["scale"] + p["bias"]).astype(x.dtype)


def _conv(x: jax.Array, p: Any, stride: int = 1) -> jax.Array:
    y = lax.conv_general_dilated(
        x, p["w"].astype(x.dtype), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return _normed(y, p, (0, 1, 2))


def resnet(params: Any, batch: Any) -> jax.Array:
    x = jax.nn.relu(_conv(batch["image"].astype(jnp.bfloat16), params["stem"], 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, blocks in enumerate(params["stages"]):
        for position, p in enumerate(blocks):
            stride = 2 if stage and not position else 1
            y = jax.nn.relu(_conv(x, p["first"]))
            y = _conv(jax.nn.relu(_conv(y, p["second"], stride)), p["third"])
            x = jax.nn.relu(y + (_conv(x, p["short"], stride) if "short" in p else x))
    return _nll(x.mean((1, 2)).astype(jnp.float32) @ params["head"], batch["label"])


def _resnet_params() -> dict[str, Any]:
    def conv(size: int, given: int, made: int) -> dict[str, Any]:
        return {"w": _f32(size, size, given, made), "scale": _f32(made), "bias": _f32(made)}

    given, stages = 64, []
    for stage, count in enumerate(STAGES):
        inner, made, blocks = 64 << stage, 256 << stage, []
        for position in range(count):
            block = {"first": conv(1, given, inner), "second": conv(3, inner, inner), "third": conv(1, inner, made)}
            blocks.append(block if position else {**block, "short": conv(1, given, made)})
            given = made
        stages.append(blocks)
    return {"stem": conv(7, 3, 64), "stages": stages, "head": _f32(2048, 1000)}


def vit(params: Any, batch: Any) -> jax.Array:
    x = batch["image"].astype(jnp.bfloat16)
    rows, side = x.shape[0], x.shape[1] // PATCH
    x = x.reshape(rows, side, PATCH, side, PATCH, 3).transpose(0, 1, 3, 2, 4, 5).reshape(rows, side * side, -1)
    x = x @ params["patch"].astype(x.dtype) + params["place"].astype(x.dtype)
    for p in params["layers"]:
        w = {name: one.astype(x.dtype) for name, one in p.items() if name not in ("before", "between")}
        y = _normed(x, p["before"], (-1,))
        q, k, v = (one.reshape(*one.shape[:2], HEADS, -1) for one in jnp.split(y @ w["qkv"], 3, -1))
        mixed = jax.nn.dot_product_attention(q, k, v)
        x = x + mixed.reshape(x.shape) @ w["out"]
        x = x + jax.nn.gelu(_normed(x, p["between"], (-1,)) @ w["up"]) @ w["down"]
    return _nll(x.mean(1).astype(jnp.float32) @ params["head"], batch["label"])


def _vit_params() -> dict[str, Any]:
    norm = {"scale": _f32(WIDE), "bias": _f32(WIDE)}
    layer = {
        "before": norm,
        "between": norm,
        "qkv": _f32(WIDE, 3 * WIDE),
        "out": _f32(WIDE, WIDE),
        "up": _f32(WIDE, FFN),
        "down": _f32(FFN, WIDE),
    }
    tokens = (224 // PATCH) ** 2
    return {
        "patch": _f32(PATCH * PATCH * 3, WIDE),
        "place": _f32(tokens, WIDE),
        "layers": [layer for _ in range(LAYERS)],
        "head": _f32(WIDE, 1000),
    }


def _step(params: Any, moments: Any, batch: Any) -> Any:
    value, gradients = jax.value_and_grad(resnet)(params, batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value


JOBS: dict[str, Callable[[], Job]] = {
    "resnet-50, loss": lambda: training_job(resnet, _resnet_params(), _batch()),
    "resnet-50, step": lambda: program_job(_step, (_resnet_params(), _resnet_params(), _batch()), donate=(0, 1)),
    "vit-24, loss": lambda: training_job(vit, _vit_params(), _batch()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="v4-32", help="the slice to plan for")
    slice_name = parser.parse_args().on
    print(f"{'program':18} {'seconds':>8} {'layouts':>8}  best, on {slice_name}")
    for name, make in JOBS.items():
        started = time.process_time()
        plans = search(make(), slice_name)
        spent = time.process_time() - started
        best = "none fits" if plans.best is None else plans.best.layout.name
        print(f"{name:18} {spent:8.1f} {plans.evaluations:8}  {best}", flush=True)


if __name__ == "__main__":
    main()
