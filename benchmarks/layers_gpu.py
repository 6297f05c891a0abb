"""Layers, mixture of experts, vector quantisation and SVD on a GPU, each beside what a user would write, in one run.

    python benchmarks/layers_gpu.py --json layers.json

See side_by_side.py for what a row is. `--only norm,route` runs parts; `--small` shrinks everything, to see on any
machine that it runs.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from side_by_side import Row, main

from capibara.kernels import fast_svd, grouped_gemm, layer_norm, nearest_code, rms_norm, route
from capibara.kernels.ops.layers import GROUPED_GEMM_WEIGHTS, NORM_GRAD, activation, cross_entropy

bf16, f32 = jnp.bfloat16, jnp.float32
WITH_XLA = ("dispatch", "xla")  # "xla": our op by that implementation
CALLS = 16  # in one program, where the host's launch takes longer than the device's work


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
        return activation(x, kind=kind, dropout_rate=0.1, key=key, implementation=implementation)

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
                    fixed, 2.0 * (count + 1) * side * side, "GB/s", "3000" if name == "forward" else "",
                    ours=WITH_XLA)
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

    def check(arrays: Sequence[Any], outs: dict[str, Any]) -> dict[str, Any]:
        """Tokens whose experts are not the plain form's, and the largest difference of a weight."""
        weights, indices = (np.asarray(x) for x in outs["plain"])
        found = {who: [np.asarray(x) for x in made] for who, made in outs.items()}
        return {
            "tokens_with_other_experts": {who: int((x[1] != indices).any(-1).sum()) for who, x in found.items()},
            "largest_difference": {who: float(abs(x[0] - weights).max()) for who, x in found.items()},
        }

    made = []
    for tokens, experts, k in ((65536, 32, 4), (16384, 128, 8), (65536, 8, 2)):
        tokens = tokens // 64 if small else tokens
        for calls in (1, CALLS):
            several = "" if calls == 1 else f", {calls} calls a program"
            made.append(
                Row("route", f"{tokens}x{experts} top-{k}{several}",
                    lambda t=tokens, e=experts: [normal(0, (t, e), f32)],
                    {"dispatch": lambda x, k=k: tuple(route(x, top_k=k)[:2]),
                     "xla": lambda x, k=k: tuple(route(x, top_k=k, implementation="xla")[:2]),
                     "plain": lambda x, k=k: plain(x, k)},
                    1.0, "ms", "3x plain" if k == 4 else "", check if calls == 1 else None, calls=calls, ours=WITH_XLA)
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
            1.0, "ms", "1.5x plain", check, ours=WITH_XLA)
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
    return [
        Row("entropy", what, draw, programs, 6.0 * tokens * width * words, "TFLOP/s", "0.9x plain, 1/20 of memory",
            ours=tuple(who for who in programs if who != "plain"))
    ]  # fmt: skip


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


if __name__ == "__main__":
    main(__doc__, PARTS)
