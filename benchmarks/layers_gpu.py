"""Layers, mixture of experts, vector quantisation and SVD on a GPU, each beside what a user would write, in one run.

    python benchmarks/layers_gpu.py --json layers.json

A row times what dispatch takes and its peers, interleaved, and holds the figure against the aim. Rates count each
operand and result once, and the operations that the result needs. `--only norm,route` runs parts; `--small` shrinks
everything, to see on any machine that it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_gpu import timed
from jax import lax

from capibara.kernels import explain
from capibara.kernels.bench import versions
from capibara.kernels.layers import (
    GROUPED_GEMM_WEIGHTS,
    NORM_GRAD,
    activation,
    cross_entropy,
    grouped_gemm,
    layer_norm,
    rms_norm,
    route,
)
from capibara.kernels.linalg import fast_svd
from capibara.kernels.tuning import failures
from capibara.kernels.vq import nearest_code

bf16, f32 = jnp.bfloat16, jnp.float32
OURS = ("dispatch", "xla", "in_forward", "in_forward_narrow")  # "xla": our op by that implementation


@dataclasses.dataclass
class Row:
    """One thing to time: `programs` by name, ours first, all on the same arrays."""

    part: str
    what: str
    draw: Callable[[], Sequence[Any]]
    programs: dict[str, Callable[..., Any]]
    work: float  # bytes or operations
    unit: str  # "GB/s", "TFLOP/s" or "ms"
    aim: str = ""
    check: Callable[[Sequence[Any], dict[str, Any]], dict[str, Any]] | None = None
    jobs: dict[str, Any] = dataclasses.field(default_factory=dict)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = bf16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def norms(small: bool) -> list[Row]:
    def plain(kind: str) -> Callable[..., Any]:
        def layer(x: Any, scale: Any, bias: Any) -> Any:
            wide = x.astype(f32)
            centred = wide - wide.mean(-1, keepdims=True)
            unit = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
            return (unit * scale.astype(f32) + bias.astype(f32)).astype(x.dtype)

        def rms(x: Any, scale: Any) -> Any:
            wide = x.astype(f32)
            return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6) * scale.astype(f32)).astype(
                x.dtype
            )

        return layer if kind == "layer" else rms

    made = []
    for kind, rows, columns in [
        ("layer", 16384, 4096), ("rms", 16384, 4096), ("layer", 65536, 1024), ("layer", 32768, 2048),
        ("layer", 8192, 8192), ("rms", 8192, 8192), ("rms", 4096, 16384), ("layer", 2048, 32768),
    ]:  # fmt: skip
        rows = rows // 64 if small else rows
        vectors = 2 if kind == "layer" else 1
        ours = layer_norm if kind == "layer" else rms_norm

        def draw(rows: int = rows, columns: int = columns, vectors: int = vectors) -> list[Any]:
            return [normal(0, (rows, columns)), *(normal(1 + i, (columns,)) for i in range(vectors))]

        def draw_grad(rows: int = rows, columns: int = columns, kind: str = kind, draw: Any = draw) -> list[Any]:
            x, *vectors = draw()
            wide = x.astype(f32)
            mean = wide.mean(-1) if kind == "layer" else jnp.zeros(())
            rstd = lax.rsqrt(jnp.square(wide - jnp.reshape(mean, (-1, 1))).mean(-1) + 1e-5)
            return [x, *vectors, mean, rstd, normal(9, (rows, columns))]

        def grad(*given: Any, kind: str = kind) -> Any:
            if kind == "layer":
                x, scale, bias, mean, rstd, d_out = given
                return NORM_GRAD(x, scale, bias, mean, rstd, d_out, kind=kind, eps=1e-5)
            x, scale, _, rstd, d_out = given
            return NORM_GRAD(x, scale, None, None, rstd, d_out, kind=kind, eps=1e-5)

        def peer_grad(*given: Any, kind: str = kind) -> Any:
            *operands, _, _, d_out = given
            return jax.vjp(plain(kind), *operands)[1](d_out)

        size = f"{kind} {rows}x{columns}"
        made.append(
            Row("norm", f"{size} forward", draw, {"dispatch": ours, "plain": plain(kind)}, 4.0 * rows * columns,
                "GB/s", "3300" if columns == 4096 else "")
        )  # fmt: skip
        made.append(
            Row("norm", f"{size} backward", draw_grad, {"dispatch": grad, "plain": peer_grad}, 6.0 * rows * columns,
                "GB/s", "2400" if columns == 4096 else "")
        )  # fmt: skip
    return made


def activations(small: bool) -> list[Row]:
    side = 512 if small else 16384
    key = jax.random.key(3)

    def ours(x: Any, kind: str, implementation: str | None = None) -> Any:
        return activation(x, kind=kind, dropout_rate=0.1, dropout_rng=key, implementation=implementation)

    def plain(x: Any, kind: str) -> Any:
        y = jax.nn.gelu(x, approximate=kind == "gelu_tanh")
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), y / 0.9, 0).astype(x.dtype)

    def backward(fn: Any) -> Any:
        return lambda x, d_out, kind: jax.vjp(lambda x: fn(x, kind), x)[1](d_out)[0]

    made = []
    for kind in ("gelu", "gelu_tanh"):
        for name, count, wrap in (("forward", 1, lambda fn: fn), ("backward", 2, backward)):
            programs = {"dispatch": ours, "xla": functools.partial(ours, implementation="xla"), "plain": plain}
            fixed = {who: functools.partial(wrap(fn), kind=kind) for who, fn in programs.items()}
            made.append(
                Row("activation", f"{kind}+dropout {side}x{side} {name}",
                    lambda count=count: [normal(i, (side, side)) for i in range(count)],
                    fixed, 2.0 * (count + 1) * side * side, "GB/s", "3000" if name == "forward" else "")
            )  # fmt: skip
    return made


def grouped(small: bool) -> list[Row]:
    rows, inner, columns, groups = (512, 256, 256, 8) if small else (16384, 4096, 2048, 32)

    def sizes(how: str) -> np.ndarray:
        if how == "uniform":
            return np.full(groups, rows // groups)
        generator = np.random.default_rng(0)
        found = generator.multinomial(rows - rows // 2, generator.dirichlet(np.ones(groups)))
        found[1] += rows // 2
        return found

    def products() -> dict[str, Callable[..., Any]]:
        made: dict[str, Callable[..., Any]] = {"dispatch": grouped_gemm, "ragged_dot": lax.ragged_dot}
        try:
            import tokamax
        except ImportError as error:
            print(f"no tokamax: {error}", file=sys.stderr)
            return made
        made["tokamax"] = lambda a, b, s: tokamax.ragged_dot(a, b, s, implementation="mosaic")
        return made

    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    work, made = 2.0 * rows * inner * columns, []
    for how in ("uniform", "skewed"):
        counts = jnp.asarray(sizes(how), jnp.int32)

        def operands(left: int, right: tuple[int, ...], counts: Any = counts) -> Callable[[], list[Any]]:
            return lambda: [normal(0, (rows, left)), normal(1, right), counts]

        size = f"{rows}x{inner}x{columns}, {groups} groups, {how}"
        made += [
            Row("grouped", f"{size} forward", operands(inner, (groups, inner, columns)), products(), work, "TFLOP/s",
                "600"),
            Row("grouped", f"{size} d_lhs", operands(columns, (groups, inner, columns)),
                {"dispatch": lambda d, w, s: grouped_gemm(d, w, s, transpose_rhs=True),
                 "ragged_dot": lambda d, w, s: lax.ragged_dot(d, w.swapaxes(1, 2), s)}, work, "TFLOP/s", "550"),
            Row("grouped", f"{size} d_rhs", operands(inner, (rows, columns)),
                {"dispatch": GROUPED_GEMM_WEIGHTS, "ragged_dot": lambda a, d, s: lax.ragged_dot_general(a, d, s, dims)},
                work, "TFLOP/s", "550"),
        ]  # fmt: skip
    return made


def routing(small: bool) -> list[Row]:
    def plain(logits: Any, k: int) -> Any:
        weights, indices = lax.top_k(jax.nn.softmax(logits.astype(f32), -1), k)
        return weights / weights.sum(-1, keepdims=True), indices

    made = []
    for tokens, experts, k in ((65536, 32, 4), (16384, 128, 8), (65536, 8, 2)):
        tokens = tokens // 64 if small else tokens
        made.append(
            Row("route", f"{tokens}x{experts} top-{k}", lambda t=tokens, e=experts: [normal(0, (t, e), f32)],
                {"dispatch": lambda x, k=k: tuple(route(x, top_k=k)[:2]),
                 "xla": lambda x, k=k: tuple(route(x, top_k=k, implementation="xla")[:2]),
                 "plain": lambda x, k=k: plain(x, k)},
                1.0, "ms", "3x plain" if k == 4 else "")
        )  # fmt: skip
    return made


def codes(small: bool) -> list[Row]:
    rows, width = (2048, 128) if small else (65536, 768)

    def plain(x: Any, codebook: Any) -> Any:
        return jnp.argmin(jnp.square(codebook).sum(-1) - 2 * x @ codebook.T, axis=-1)

    def check(arrays: Sequence[Any], outs: dict[str, Any]) -> dict[str, Any]:
        """Rows of a sample whose index is not the nearest in float64, by more than float32 can tell."""
        x, book = (np.asarray(a, np.float64) for a in (arrays[0][:1024], arrays[1]))
        distance = (x * x).sum(-1)[:, None] - 2 * x @ book.T + (book * book).sum(-1)
        best, wrong = distance.min(-1), {}
        for who, found in outs.items():
            taken = np.take_along_axis(distance, np.asarray(found[:1024])[:, None].astype(np.int64), -1)[:, 0]
            wrong[who] = int((taken > best * (1 + 2.0**-22)).sum())
        return {"wrong_of_1024": wrong}

    return [
        Row("vq", f"nearest of {count}, {rows}x{width} float32",
            lambda count=count: [normal(0, (rows, width), f32), normal(1, (count, width), f32)],
            {"dispatch": nearest_code, "xla": functools.partial(nearest_code, implementation="xla"), "plain": plain},
            1.0, "ms", "1.5x plain", check)
        for count in (64, 1024, 8192)
    ]  # fmt: skip


def entropy(small: bool) -> list[Row]:
    tokens, width, words = (256, 128, 1000) if small else (16384, 4096, 128256)

    def plain(hidden: Any, weights: Any, labels: Any) -> Any:
        each = jax.nn.log_softmax((hidden @ weights).astype(f32))
        return -jnp.take_along_axis(each, labels[:, None], axis=-1).mean()

    def both(fn: Any) -> Any:
        return lambda h, w, labels: jax.value_and_grad(fn, (0, 1))(h, w, labels)

    def draw() -> list[Any]:
        hidden, weights = normal(0, (tokens, width)) / math.sqrt(width), normal(1, (width, words))
        return [hidden.astype(bf16), weights, jax.random.randint(jax.random.key(2), (tokens,), 0, words)]

    programs = {
        "dispatch": both(cross_entropy),
        "in_forward": both(lambda *x: cross_entropy(*x, gradient="in_forward")),
        "in_forward_narrow": both(lambda *x: cross_entropy(*x, gradient="in_forward_narrow")),
        "plain": both(plain),
    }
    what = f"cross-entropy {tokens}x{width}x{words} forward+backward"
    return [Row("entropy", what, draw, programs, 6.0 * tokens * width * words, "TFLOP/s", "0.9x plain, 1/20 of memory")]


def decompositions(small: bool) -> list[Row]:
    rows, columns, rank = (256, 128, 16) if small else (4096, 1024, 64)

    def matrix(spectrum: np.ndarray) -> list[Any]:
        generator = np.random.default_rng(0)
        u, v = (np.linalg.qr(generator.standard_normal((n, columns)))[0] for n in (rows, columns))
        return [jnp.asarray((u * spectrum) @ v.T, f32)]

    def check(spectrum: np.ndarray) -> Any:
        def errors(arrays: Sequence[Any], outs: dict[str, Any]) -> dict[str, Any]:
            u, s, vh = (np.asarray(x, np.float64) for x in outs["dispatch"])
            left = np.asarray(arrays[0], np.float64) - (u * s) @ vh
            best = float(np.linalg.norm(spectrum[rank:]))
            return {
                "error_over_best_frobenius": float(np.linalg.norm(left)) / best,
                "error_over_best_spectral": float(np.linalg.norm(left, 2)) / float(spectrum[rank]),
            }

        return errors

    made = []
    for name, spectrum in (("1/i", 1.0 / np.arange(1, columns + 1)), ("0.9^i", 0.9 ** np.arange(columns))):
        made.append(
            Row("svd", f"rank {rank} of {rows}x{columns}, spectrum {name}", lambda s=spectrum: matrix(s),
                {"dispatch": lambda a: fast_svd(a, rank=rank),
                 "plain": lambda a: jnp.linalg.svd(a, full_matrices=False)},
                1.0, "ms", "30x plain, error 1.05x of the best", check(spectrum))
        )  # fmt: skip
    return made


PARTS = {
    "norm": norms, "activation": activations, "grouped": grouped, "route": routing, "vq": codes, "entropy": entropy,
    "svd": decompositions,
}  # fmt: skip


def taken(row: Row, structs: Sequence[Any]) -> str:
    found = explain(row.programs["dispatch"], *structs).selections
    return "+".join(dict.fromkeys(f"{s.call.op.name}:{s.implementation}" for s in found))


def prepare(pool: ThreadPoolExecutor, row: Row, structs: Sequence[Any]) -> None:
    for who, fn in row.programs.items():
        try:
            row.jobs[who] = pool.submit(jax.jit(fn).lower(*structs).compile)
        except failures() as failure:
            row.jobs[who] = failure


def measure(row: Row, structs: Sequence[Any]) -> dict[str, Any]:
    arrays, ready, notes, outs = list(row.draw()), {}, {}, {}
    for who, job in row.jobs.items():
        try:
            if not isinstance(job, Future):
                raise job
            ready[who] = job.result()
            outs[who] = jax.block_until_ready(ready[who](*arrays))
        except failures() as failure:
            notes[who] = str(failure).splitlines()[0][:200]
            ready.pop(who, None)
    found = row.check(arrays, outs) if row.check and "dispatch" in outs else {}
    outs.clear()
    seconds = timed(ready, arrays)
    scale = {"GB/s": 1e9, "TFLOP/s": 1e12}.get(row.unit)
    figures = {who: s * 1e3 if scale is None else row.work / s / scale for who, s in seconds.items()}
    peers = [s for who, s in seconds.items() if who not in OURS]
    memory = {who: fn.memory_analysis().temp_size_in_bytes for who, fn in ready.items()}
    result = {
        "part": row.part, "what": row.what, "aim": row.aim, "dispatch_takes": taken(row, structs), "unit": row.unit,
        "figures": figures, "microseconds": {who: s * 1e6 for who, s in seconds.items()},
        "times_as_fast_as_best_peer": {who: min(peers) / s for who, s in seconds.items()} if peers else {},
        "temporary_bytes": memory, "notes": notes, **found,
    }  # fmt: skip
    shown = "  ".join(
        f"{who} {figures[who]:.4g} ({min(peers) / seconds[who]:.2f}x, {memory[who] / 2**20:.0f} MiB)"
        for who in figures
        if peers
    )
    print(f"{row.what:58} {row.unit:8} {shown}  aim {row.aim or '-'}  {found or ''} {notes or ''}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--only", help="parts, separated by commas")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that it runs")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(PARTS)
    document: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
    }
    with ThreadPoolExecutor(14) as pool:
        rows = [row for name in chosen for row in PARTS[name](options.small)]
        shapes = [[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.eval_shape(row.draw)] for row in rows]
        for row, structs in zip(rows, shapes, strict=True):
            prepare(pool, row, structs)
        # Everything compiles while nothing is timed.
        for row in rows:
            for job in row.jobs.values():
                if isinstance(job, Future):
                    job.exception()
        for row, structs in zip(rows, shapes, strict=True):
            document["rows"].append(measure(row, structs))
            if options.json:
                with open(options.json, "w", encoding="utf-8") as out:
                    json.dump(document, out, indent=1)


if __name__ == "__main__":
    main()
