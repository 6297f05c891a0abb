"""Shapes that nobody tuned on a GPU: published models' head sizes, odd lengths, vocabularies, widths.

    python benchmarks/untuned_shapes_gpu.py --json untuned.json

Every row times what dispatch takes, each of our implementations that accepts, and the peers, in one run: how far the
default is behind the best peer, and behind the best of our own. Parts whose name begins with `held_back_` hold shapes
that no rule or table was made on. See side_by_side.py for what a row is; `--only` runs parts, `--small` shrinks
everything, to see on any machine that it runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_gpu import drawn, programs, with_gradient
from jax import lax
from layers_gpu import normal
from side_by_side import Row, main

from capibara.kernels import attention, gated_activation, nearest_code, rms_norm
from capibara.kernels.ops.layers import activation, cross_entropy

bf16, f32 = jnp.bfloat16, jnp.float32

# batch, length, heads, key heads, head_dim, causal; the model whose heads these are
ATTENTION = (
    (8, 1536, 20, 20, 96, True),  # Phi-3 mini's head size
    (6, 1500, 16, 16, 128, False),  # Whisper's length
    (4, 2048, 32, 32, 80, True),  # Phi-2
    (2, 4096, 16, 16, 192, True),  # DeepSeek's query heads
    (16, 577, 16, 16, 64, False),  # ViT-L at 336 pixels
    (8, 700, 12, 12, 64, False),
    (4, 4096, 28, 4, 128, True),  # Qwen2 7B
    (2, 8192, 28, 4, 128, True),
    (4, 2048, 64, 8, 128, True),  # Llama 70B
    (8, 1024, 12, 12, 64, True),  # GPT-2
)
HELD_BACK_ATTENTION = (
    (16, 729, 16, 16, 72, False),  # SigLIP so400m
    (4, 1025, 16, 16, 80, False),  # ViT-H
    (2, 2048, 8, 4, 256, True),  # Gemma 2
    (4, 1111, 32, 8, 128, True),
    (2, 6144, 14, 2, 64, True),  # Qwen2 0.5B
    (2, 3072, 40, 8, 128, True),  # Qwen2.5 14B
    (1, 4608, 24, 24, 128, False),  # Flux
    (3, 2500, 16, 16, 112, True),
)
# rows, codes, width
CODES = (
    (65536, 8192, 8), (262144, 512, 8), (1 << 20, 64, 8), (65536, 1024, 100), (65537, 1024, 256), (20000, 16384, 32),
    (65536, 256, 64),
)  # fmt: skip
HELD_BACK_CODES = ((100352, 4096, 18), (30001, 2048, 512), (500000, 128, 16), (65536, 65536, 8))
# tokens, width, vocabulary
ENTROPY = (
    (8192, 2048, 32000), (8192, 768, 50257), (4096, 3584, 151936), (16384, 2048, 128256), (2048, 4096, 128256),
    (8192, 1024, 50280), (32768, 1024, 32000),
)  # fmt: skip
HELD_BACK_ENTROPY = ((4096, 2304, 256000), (8192, 1600, 51865), (16384, 2880, 201088), (1024, 2048, 32768))
# kind, gated, dropout, rows, columns
ACTIVATIONS = (
    ("gelu", False, 0.0, 16384, 3072), ("gelu", False, 0.0, 8192, 14336), ("gelu", False, 0.0, 1024, 3072),
    ("gelu_tanh", False, 0.0, 16384, 3072), ("gelu_tanh", False, 0.0, 4096, 16384),
    ("gelu_tanh", False, 0.0, 512, 8192), ("silu", False, 0.0, 16384, 5504),
    ("silu", False, 0.0, 8192, 4096), ("silu", True, 0.0, 16384, 5504),
    ("gelu_tanh", True, 0.0, 8192, 9216), ("relu", False, 0.0, 16384, 4096), ("silu", True, 0.0, 2048, 14336),
    ("gelu", False, 0.1, 8192, 3072), ("gelu_tanh", False, 0.1, 8192, 3072), ("relu", False, 0.1, 8192, 4096),
    ("silu", True, 0.1, 8192, 8192), ("gelu", True, 0.1, 4096, 4096),
)  # fmt: skip
HELD_BACK_ACTIVATIONS = (
    ("gelu", False, 0.0, 12544, 4304), ("gelu_tanh", False, 0.0, 9000, 10240), ("silu", True, 0.0, 6000, 8960),
    ("gelu", True, 0.0, 8192, 8192), ("gelu", False, 0.0, 512, 4096), ("silu", False, 0.0, 4096, 6144),
    ("relu", False, 0.0, 20000, 2048), ("gelu", False, 0.1, 5000, 5120), ("silu", True, 0.1, 3000, 11008),
)  # fmt: skip
NORMS = (
    (8192, 8192), (16384, 5120), (4096, 16384), (256, 4096), (64, 8192), (1024, 2048), (16384, 2880), (2048, 7168),
)  # fmt: skip
HELD_BACK_NORMS = ((8192, 6144), (512, 5120), (32768, 3584), (128, 12288), (16384, 1536), (300, 16384))


def attention_rows(shapes: Sequence[tuple[Any, ...]], small: bool) -> list[Row]:
    made = []
    for batch, length, heads, kv_heads, head_dim, causal in shapes:
        batch, length = (1, length // 8) if small else (batch, length)
        forward = programs(causal)
        # "cudnn" is jax.nn's call, a peer; this is our op by that implementation.
        forward["by cudnn"] = functools.partial(attention, causal=causal, layout="bthd", implementation="cudnn")
        what = f"B{batch} T{length} H{heads}/{kv_heads} D{head_dim}{' causal' if causal else ''}"
        work = 4.0 * batch * heads * length * length * head_dim * (0.5 if causal else 1.0)
        draw = functools.partial(drawn, batch, length, heads, kv_heads, head_dim)
        ours = ("dispatch", "hopper", "by cudnn")
        made += [
            Row("attention", f"{what} forward", lambda draw=draw: draw()[:3], forward, work, "TFLOP/s", ours=ours,
                calls=4),
            Row("attention", f"{what} both", draw, {who: with_gradient(fn) for who, fn in forward.items()}, 3.5 * work,
                "TFLOP/s", ours=ours, calls=4),
        ]  # fmt: skip
    return made


def code_rows(shapes: Sequence[tuple[int, int, int]], small: bool) -> list[Row]:
    def plain(x: Any, codebook: Any, precision: Any = None) -> Any:
        product = jnp.matmul(x, codebook.T, precision=precision)
        return jnp.argmin(jnp.square(codebook).sum(-1) - 2 * product, axis=-1).astype(jnp.int32)

    def check(arrays: Sequence[Any], outs: dict[str, Any]) -> dict[str, Any]:
        """Of the first rows, those whose code is farther than the nearest, in float64."""
        x, codebook = (np.asarray(a, np.float64) for a in arrays[:2])
        rows = slice(0, 512)
        table = np.stack([np.square(row - codebook).sum(-1) for row in x[rows]])
        nearest = table.min(-1)
        at = {who: np.asarray(out)[rows] for who, out in outs.items()}
        return {
            "wrong_of_512": {
                who: int((table[np.arange(len(i)), i] > nearest * (1 + 1e-5)).sum()) for who, i in at.items()
            }
        }

    def drawn_codes(rows: int, codes: int, width: int) -> list[Any]:
        return [normal(0, (rows, width), f32), normal(1, (codes, width), f32)]

    made = []
    for rows, codes, width in shapes:
        rows = rows // 64 if small else rows
        programs = {
            "dispatch": nearest_code,
            "hopper": functools.partial(nearest_code, implementation="hopper"),
            "xla": functools.partial(nearest_code, implementation="xla"),
            "exact": functools.partial(plain, precision=lax.Precision.HIGHEST),
            "tf32, not exact": plain,
        }
        made.append(
            Row("vq", f"{rows} rows of {width}, {codes} codes",
                functools.partial(drawn_codes, rows, codes, width), programs, 1.0, "ms", check=check,
                ours=("dispatch", "hopper", "xla", "tf32, not exact"))
        )  # fmt: skip
    return made


def entropy_rows(shapes: Sequence[tuple[int, int, int]], small: bool) -> list[Row]:
    def plain(hidden: Any, weights: Any, labels: Any) -> Any:
        each = jax.nn.log_softmax((hidden @ weights).astype(f32))
        return -jnp.take_along_axis(each, labels[:, None], axis=-1).mean()

    def both(fn: Any) -> Any:
        return lambda h, w, labels: jax.value_and_grad(fn, (0, 1))(h, w, labels)

    made = []
    for tokens, width, words in shapes:
        tokens, words = (tokens // 64, words // 64) if small else (tokens, words)

        def draw(tokens: int = tokens, width: int = width, words: int = words) -> list[Any]:
            hidden, weights = normal(0, (tokens, width)) / math.sqrt(width), normal(1, (width, words))
            return [hidden.astype(bf16), weights, jax.random.randint(jax.random.key(2), (tokens,), 0, words)]

        kinds = ("recompute", "in_forward", "in_forward_narrow")
        forms = {kind: functools.partial(cross_entropy, gradient=kind) for kind in kinds}
        programs = {who: both(fn) for who, fn in {"dispatch": cross_entropy, **forms, "plain": plain}.items()}
        made.append(
            Row("entropy", f"{tokens}x{width}x{words}", draw, programs, 6.0 * tokens * width * words, "TFLOP/s",
                ours=("dispatch", *kinds))
        )  # fmt: skip
    return made


def activation_rows(shapes: Sequence[tuple[str, bool, float, int, int]], small: bool) -> list[Row]:
    plain = {
        "gelu": functools.partial(jax.nn.gelu, approximate=False), "gelu_tanh": jax.nn.gelu, "silu": jax.nn.silu,
        "relu": jax.nn.relu,
    }  # fmt: skip

    def backward(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda d_out, *x: jax.vjp(fn, *x)[1](d_out)

    made = []
    key = jax.random.key(3)
    for kind, gated, rate, rows, columns in shapes:
        rows = rows // 64 if small else rows
        given: dict[str, Any] = {"dropout_rate": rate, "key": key} if rate else {}
        ours = functools.partial(gated_activation if gated else activation, **given)

        def peer(x: Any, up: Any = None, kind: str = kind, rate: float = rate) -> Any:
            y = plain[kind](x) if up is None else plain[kind](x) * up
            return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), y / (1 - rate), 0) if rate else y

        forward = {
            "dispatch": functools.partial(ours, kind=kind),
            "hopper": functools.partial(ours, kind=kind, implementation="hopper"),
            "xla": functools.partial(ours, kind=kind, implementation="xla"),
            "plain": peer,
        }
        arrays = 2 if gated else 1
        what = f"{kind}{' gated' if gated else ''}{f' {rate}' if rate else ''} {rows}x{columns}"
        for name, wrap, count in (("forward", lambda fn: fn, arrays), ("backward", backward, arrays + 1)):
            moved = 2.0 * rows * columns * (count + (1 if name == "forward" else arrays))
            made.append(
                Row("activation", f"{what} {name}",
                    lambda n=count, r=rows, c=columns: [normal(i, (r, c)) for i in range(n)],
                    {who: wrap(fn) for who, fn in forward.items()}, moved, "GB/s",
                    ours=("dispatch", "hopper", "xla"), calls=4)
            )  # fmt: skip
    return made


def norm_rows(shapes: Sequence[tuple[int, int]], small: bool) -> list[Row]:
    def plain(x: Any, scale: Any) -> Any:
        wide = x.astype(f32)
        return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6) * scale.astype(f32)).astype(x.dtype)

    def both(fn: Callable[..., Any]) -> Callable[..., Any]:
        def made(x: Any, scale: Any, d_out: Any) -> Any:
            out, pull = jax.vjp(fn, x, scale)
            # A model's backward pass comes later: no kernel makes the output and the gradient together.
            out, d_out = lax.optimization_barrier((out, d_out))
            return out, pull(d_out)

        return made

    made = []
    for rows, columns in shapes:
        rows = max(rows // 64, 1) if small else rows
        forward = {
            "dispatch": rms_norm,
            "hopper": functools.partial(rms_norm, implementation="hopper"),
            "xla": functools.partial(rms_norm, implementation="xla"),
            "plain": plain,
        }
        # Enough calls in a program that the host's launches do not show.
        calls = max(1, min(16, (1 << 25) // (rows * columns)))
        for name, wrap, count in (("forward", lambda fn: fn, 1), ("both", both, 2)):

            def draw(rows: int = rows, columns: int = columns, count: int = count) -> list[Any]:
                return [normal(0, (rows, columns)), normal(1, (columns,)), *[normal(2, (rows, columns))][: count - 1]]

            made.append(
                Row("norm", f"rms {rows}x{columns} {name}", draw, {who: wrap(fn) for who, fn in forward.items()},
                    2.0 * rows * columns * (2 if count == 1 else 5), "GB/s", ours=("dispatch", "hopper", "xla"),
                    calls=calls)
            )  # fmt: skip
    return made


def _parts() -> dict[str, Callable[[bool], list[Row]]]:
    made: dict[str, Any] = {}
    for name, rows, shapes, held_back in (
        ("attention", attention_rows, ATTENTION, HELD_BACK_ATTENTION),
        ("vq", code_rows, CODES, HELD_BACK_CODES),
        ("entropy", entropy_rows, ENTROPY, HELD_BACK_ENTROPY),
        ("activation", activation_rows, ACTIVATIONS, HELD_BACK_ACTIVATIONS),
        ("norm", norm_rows, NORMS, HELD_BACK_NORMS),
    ):
        made[name] = functools.partial(rows, shapes)
        made[f"held_back_{name}"] = functools.partial(rows, held_back)
    return made


if __name__ == "__main__":
    main(__doc__, _parts())
