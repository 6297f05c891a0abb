"""Recurrences, state space models, Fourier transforms and convolutions on a GPU, each beside its peers, in one run.

    python benchmarks/sequences_gpu.py --json sequences.json

See side_by_side.py for what a row is. `--only scan,fft` runs parts; `--small` shrinks everything, to see on any machine
that it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from side_by_side import Row, main

from capibara.kernels import (
    causal_conv1d,
    fft,
    fft_planes,
    linear_recurrence,
    long_conv,
    parallel_scan,
    selective_scan,
    state_space_dual,
)
from capibara.kernels.ops.conv import conv2d
from capibara.kernels.ops.scan import LINEAR_RECURRENCE_GRAD

bf16, f32 = jnp.bfloat16, jnp.float32
OURS = ("dispatch", "xla", "hopper", "xla_winograd4", "hopper")  # our op by that implementation


def normal(seed: int, shape: tuple[int, ...], dtype: Any = f32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, f32).astype(dtype)


def decays(seed: int, shape: tuple[int, ...], dtype: Any = f32) -> jax.Array:
    return (1 - 0.1 * jax.random.uniform(jax.random.key(seed), shape)).astype(dtype)


def associative(a: Any, b: Any, axis: int = 1) -> Any:
    """A recurrence as a user of JAX writes it."""
    return lax.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b), axis=axis)[1]


def recurrences(small: bool) -> list[Row]:
    made = []
    for batch, steps, channels, dtype in ((8, 4096, 2048, f32), (8, 4096, 2048, bf16), (1, 65536, 256, f32)):
        steps = steps // 64 if small else steps
        shape = (batch, steps, channels)
        size = f"{batch}x{steps}x{channels} {jnp.dtype(dtype).name}"
        item = batch * steps * channels * jnp.dtype(dtype).itemsize
        wanted = dtype == f32 and batch == 8
        made.append(
            Row("scan", f"recurrence {size} forward", lambda s=shape, d=dtype: [decays(0, s, d), normal(1, s, d)],
                {"dispatch": linear_recurrence, "xla": functools.partial(linear_recurrence, implementation="xla"),
                 "associative_scan": associative}, 3.0 * item, "GB/s", "3200" if wanted else "", ours=OURS)
        )  # fmt: skip
        made.append(
            Row("scan", f"recurrence {size} backward",
                lambda s=shape, d=dtype: [decays(0, s, d), normal(1, s, d), normal(2, s, d)],
                {"dispatch": lambda a, h, g: LINEAR_RECURRENCE_GRAD(a, h, None, g, None, reverse=False)[:2],
                 "associative_scan": lambda a, h, g: jax.vjp(associative, a, h)[1](g)},
                5.0 * item, "GB/s", "2800" if wanted else "")
        )  # fmt: skip
    steps, batch, channels = (64, 2, 256) if small else (4096, 8, 2048)

    def step(h: Any, x: Any) -> Any:
        h = x[0] * h + x[1]
        return h, h

    def start(a: Any) -> Any:
        return jnp.zeros(a.shape[1:], a.dtype)

    shape = (steps, batch, channels)
    made.append(
        Row("scan", f"parallel_scan of a plain step, {steps}x{batch}x{channels} float32",
            lambda: [decays(0, shape), normal(1, shape)],
            {"dispatch": lambda a, b: parallel_scan(step, start(a), (a, b))[1],
             "recurrence": lambda a, b: linear_recurrence(a, b, axis=0),
             "associative_scan": functools.partial(associative, axis=0)},
            12.0 * steps * batch * channels, "GB/s", "90 % of the recurrence", ours=("dispatch", "recurrence"))
    )  # fmt: skip
    return made


def by(name: str, fn: Any = selective_scan) -> Any:
    return functools.partial(fn, implementation=name)


def agree(arrays: Sequence[Any], outs: dict[str, Any]) -> dict[str, Any]:
    """How far everybody is from the peer, over the first of the batch."""
    found = {who: np.asarray(jax.tree.leaves(made)[0][:1], np.float64) for who, made in outs.items()}
    *_, peer = found.values()
    size = np.linalg.norm(peer)
    return {"relative_difference_to_peer": {who: float(np.linalg.norm(x - peer) / size) for who, x in found.items()}}


def with_gradients(fn: Any) -> Any:
    """(cotangent, *operands) to the gradients of all operands, x's first, which is what is compared, and the result,
    so that the forward pass is not left out."""

    def both(flow: Any, *operands: Any) -> Any:
        y, pull = jax.vjp(fn, *operands)
        return *pull(flow), y

    return both


def state_spaces(small: bool) -> list[Row]:
    batch, steps, channels, states = (2, 64, 128, 4) if small else (8, 4096, 2048, 16)

    def by_associative_scan(x: Any, dt: Any, A: Any, B: Any, C: Any) -> Any:
        x, dt, B, C = (v.astype(f32) for v in (x, dt, B, C))
        decay = jnp.exp(dt[..., None] * A)
        h = associative(decay, (dt * x)[..., None] * B[:, :, None])
        return jnp.einsum("btdn,btn->btd", h, C)

    def draw(dtype: Any = bf16) -> list[Any]:
        shape = (batch, steps, channels)
        return [
            normal(0, shape, dtype), jnp.abs(normal(1, shape, dtype)) * 0.1, -jnp.abs(normal(2, (channels, states))),
            normal(3, (batch, steps, states), dtype), normal(4, (batch, steps, states), dtype),
        ]  # fmt: skip

    def plain(*x: Any) -> Any:
        return by_associative_scan(*x).astype(bf16)

    moved = 2.0 * batch * steps * (3 * channels + 2 * states)
    size = f"selective scan {batch}x{steps}x{channels}, {states} states, bfloat16"

    made = [
        Row("ssm", size, draw,
            {"dispatch": selective_scan, "xla": by("xla"), "hopper": by("hopper"), "associative_scan": plain},
            moved, "GB/s",
            "8x associative_scan, memory independent of states", agree, ours=OURS),
        Row("ssm", f"{size}, forward and backward", lambda: [normal(5, (batch, steps, channels), bf16), *draw()],
            {who: with_gradients(fn) for who, fn in (
                ("dispatch", selective_scan), ("xla", by("xla")), ("hopper", by("hopper")),
                ("associative_scan", plain))},
            1.0, "ms", "", agree, ours=OURS),
    ]  # fmt: skip

    return [*made, *dual(small)]


def dual(small: bool) -> list[Row]:
    heads, width, states, chunk = (2, 16, 16, 32) if small else (32, 64, 128, 128)
    batch, steps = (1, 64) if small else (8, 4096)

    def chunked(x: Any, dt: Any, A: Any, B: Any, C: Any) -> Any:
        """The dual form as its authors publish it: chunks by einsum, states passed from chunk to chunk."""
        parts = steps // chunk
        x, B, C = (v.reshape(batch, parts, chunk, *v.shape[2:]) for v in (x, B, C))
        dt = dt.astype(f32).reshape(batch, parts, chunk, heads)
        decay = jnp.cumsum(dt * A, axis=2)
        apart = decay[:, :, :, None] - decay[:, :, None]  # b c q k h
        seen = jnp.tril(jnp.ones((chunk, chunk), bool))[None, None, :, :, None]
        weights = jnp.exp(jnp.where(seen, apart, -jnp.inf))
        scores = jnp.einsum("bcqgn,bckgn->bcqk", C, B, preferred_element_type=f32)
        scores = (scores[..., None] * weights * dt[:, :, None]).astype(x.dtype)
        inside = jnp.einsum("bcqkh,bckhp->bcqhp", scores, x, preferred_element_type=f32)
        left = (jnp.exp(decay[:, :, -1:] - decay) * dt).astype(x.dtype)
        added = jnp.einsum("bckgn,bckh,bckhp->bchpn", B, left, x, preferred_element_type=f32)
        whole = jnp.exp(decay[:, :, -1])

        def pass_on(state: Any, given: Any) -> Any:
            shrink, more = given
            return state * shrink[..., None, None] + more, state

        zero = jnp.zeros(added.shape[:1] + added.shape[2:], f32)
        _, before = lax.scan(pass_on, zero, (whole.swapaxes(0, 1), added.swapaxes(0, 1)))
        carried = jnp.einsum("bcqgn,cbhpn->bcqhp", C, before.astype(x.dtype), preferred_element_type=f32)
        return (inside + carried * jnp.exp(decay)[..., None]).reshape(batch, steps, heads, width).astype(x.dtype)

    def draw_dual() -> list[Any]:
        return [
            normal(0, (batch, steps, heads, width), bf16), jnp.abs(normal(1, (batch, steps, heads))) * 0.1,
            -jnp.abs(normal(2, (heads,))), normal(3, (batch, steps, 1, states), bf16),
            normal(4, (batch, steps, 1, states), bf16),
        ]  # fmt: skip

    # A chunk's scores, their use, its state made and its state used.
    work = 2.0 * batch * steps * heads * (chunk * states + chunk * width + 2 * states * width)
    size = f"state space dual {batch}x{steps}, {heads} heads of {width}, {states} states, bfloat16"
    programs = {
        "dispatch": state_space_dual, "xla": by("xla", state_space_dual),
        "hopper": by("hopper", state_space_dual), "chunked einsum": chunked,
    }  # fmt: skip

    return [
        Row("ssm", size, draw_dual, programs, work, "TFLOP/s", "300", agree, ours=OURS),
        Row("ssm", f"{size}, with gradient", lambda: [normal(5, (batch, steps, heads, width), bf16), *draw_dual()],
            {who: with_gradients(fn) for who, fn in programs.items()}, 3 * work, "TFLOP/s", "", agree, ours=OURS),
    ]  # fmt: skip


def in_planes(transform: Callable[[Any], Any], re: Any, im: Any) -> tuple[Any, Any]:
    """A transform of complex64 arrays on planes of any type."""
    made = transform(lax.complex(re.astype(f32), im.astype(f32)))
    return made.real.astype(re.dtype), made.imag.astype(im.dtype)


def transforms(small: bool) -> list[Row]:
    def draw(shape: tuple[int, int]) -> Callable[[], list[Any]]:
        return lambda: [lax.complex(normal(0, shape), normal(1, shape))]

    def check(arrays: Sequence[Any], outs: dict[str, Any]) -> dict[str, Any]:
        exact = np.fft.fft(np.asarray(arrays[0][:4], np.complex128))
        size = np.linalg.norm(exact)
        return {
            "relative_errors": {k: float(np.linalg.norm(np.asarray(v[:4]) - exact) / size) for k, v in outs.items()}
        }

    made = []
    for rows, length in ((4096, 4096), (64, 2**18), (16384, 1024)):
        shape = (max(1, rows // 64), length // 16) if small else (rows, length)
        moved = 16.0 * shape[0] * shape[1]
        aim = "1.0x" if length != 2**18 else "1.0x; bfloat16 1.3x"
        size = f"{shape[0]}x{shape[1]}"
        made.append(
            Row("fft", f"fft {size} complex64", draw(shape),
                {"dispatch": fft, "bfloat16": functools.partial(fft, precision="bfloat16"), "jnp.fft": jnp.fft.fft},
                moved, "GB/s", aim, check, ours=("dispatch", "bfloat16"))
        )  # fmt: skip
        for kind in (f32, bf16):
            made.append(
                Row("fft", f"fft {size}, planes in {jnp.dtype(kind).name}",
                    lambda s=shape, kind=kind: [normal(0, s, kind), normal(1, s, kind)],
                    {"dispatch": functools.partial(fft_planes, precision="bfloat16"),
                     "jnp.fft": lambda re, im: in_planes(jnp.fft.fft, re, im)},
                    moved * jnp.dtype(kind).itemsize / 4, "GB/s", "1.3x" if length == 2**18 else "")
            )  # fmt: skip
    return made


def convolutions(small: bool) -> list[Row]:
    def vendor(x: Any, w: Any, precision: Any = None) -> Any:
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=precision
        )

    def exact(name: str | None) -> Any:
        return lambda x, w: conv2d(x, w, precision="highest", implementation=name)

    made = []
    for images, side, channels, dtype in (
        (64, 56, 256, f32), (64, 56, 256, bf16), (32, 28, 512, bf16), (16, 112, 128, bf16)
    ):  # fmt: skip
        images, channels = (1, 16) if small else (images, channels)
        name = jnp.dtype(dtype).name

        def draw(shape: Any = (images, side, side, channels), dtype: Any = dtype) -> list[Any]:
            return [normal(0, shape, dtype), normal(1, (3, 3, shape[-1], shape[-1]), dtype) / 48]

        work = 2.0 * images * side * side * channels * channels * 9
        made.append(
            Row("conv", f"conv 3x3 {images}x{side}x{side}x{channels} {name}", draw,
                {"dispatch": conv2d, "cudnn": vendor}, work, "TFLOP/s", "1.0x")
        )  # fmt: skip
        if dtype == f32:
            made.append(
                Row("conv", f"conv 3x3 {images}x{side}x{side}x{channels} {name}, exact", draw,
                    {"dispatch": exact(None), "xla_winograd4": exact("xla_winograd4"), "hopper": exact("hopper"),
                     "cudnn": functools.partial(vendor, precision=lax.Precision.HIGHEST)},
                    work, "TFLOP/s", "1.3x", agree, ours=OURS)
            )  # fmt: skip
    batch, steps, channels, taps = (2, 64, 128, 4) if small else (8, 4096, 2048, 4)

    def depthwise(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, w[:, None], (1,), [(w.shape[0] - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=w.shape[1],
        )  # fmt: skip

    made.append(
        Row("conv", f"causal conv1d {batch}x{steps}x{channels}, {taps} taps, bfloat16",
            lambda: [normal(0, (batch, steps, channels), bf16), normal(1, (taps, channels), bf16)],
            {"dispatch": causal_conv1d, "lax.conv": depthwise}, 4.0 * batch * steps * channels, "GB/s")
    )  # fmt: skip
    batch, steps, channels = (2, 64, 8) if small else (8, 16384, 768)

    def by_fft(x: Any, h: Any) -> Any:
        size = 2 * x.shape[1]
        product = jnp.fft.rfft(x, size, axis=1) * jnp.fft.rfft(h, size, axis=0)
        return jnp.fft.irfft(product, size, axis=1)[:, : x.shape[1]]

    made.append(
        Row("conv", f"long conv {batch}x{steps}x{channels}, filter of {steps}",
            lambda: [normal(0, (batch, steps, channels)), normal(1, (steps, channels)) / 128],
            {"dispatch": long_conv, "bfloat16": functools.partial(long_conv, precision="bfloat16"), "jnp.fft": by_fft},
            1.0, "ms", "3x jnp.fft", ours=("dispatch", "bfloat16"))
    )  # fmt: skip
    return made


PARTS = {"scan": recurrences, "ssm": state_spaces, "fft": transforms, "conv": convolutions}

if __name__ == "__main__":
    main(__doc__, PARTS)
