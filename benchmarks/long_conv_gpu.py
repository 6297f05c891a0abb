"""Long causal convolutions on a GPU in bfloat16 mode, each beside `jnp.fft`, in one run.

    python benchmarks/long_conv_gpu.py --json long_conv.json

See side_by_side.py for what a row is. Lengths below the kernel's own are timed by name too, which dispatch's rules come
from. `jnp.fft` is as its users write it, at a length that cuFFT likes. `--small` shrinks everything, to see on any
machine that it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from side_by_side import Row, main

from capibara.kernels import fft_convolve, long_conv
from capibara.kernels.ops.fft.causal.api import CAUSAL_FILTER, CAUSAL_TAPS

bf16, f32 = jnp.bfloat16, jnp.float32


def normal(seed: int, shape: tuple[int, ...], dtype: Any = f32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, f32).astype(dtype)


def by_fft(x: Any, h: Any, axis: int = -1) -> Any:
    steps = x.shape[axis]
    size = 256 * -(-steps // 128)
    along = ((x, axis), (h, 0 if axis == 1 else -1))
    there, filters = (jnp.fft.rfft(v.astype(f32), size, axis=a) for v, a in along)
    return lax.slice_in_dim(jnp.fft.irfft(there * filters, size, axis=axis), 0, steps, axis=axis).astype(x.dtype)


def taps_by_fft(flow: Any, x: Any) -> Any:
    steps = x.shape[-1]
    there, here = (jnp.fft.rfft(v, 2 * steps) for v in (flow, x))
    return jnp.fft.irfft((there * here.conj()).sum(0), 2 * steps)[:, :steps]


def differences(arrays: Sequence[Any], outs: dict[str, Any]) -> dict[str, Any]:
    """How far everybody's results are from the peer's as a whole; of several the worst."""

    def apart(a: Any, b: Any) -> float:
        a, b = a.astype(f32), b.astype(f32)
        return float(jnp.sqrt(((a - b) ** 2).sum() / (b**2).sum()))

    *_, peer = (jax.tree.leaves(made) for made in outs.values())
    found = {who: [apart(*pair) for pair in zip(jax.tree.leaves(x), peer, strict=True)] for who, x in outs.items()}
    return {"relative_difference_to_peer": {who: max(each) for who, each in found.items()}}


OURS = ("dispatch", "float32", "bfloat16", "hopper", "composed")
NARROW = functools.partial(fft_convolve, precision="bfloat16")


def row(what: str, draw: Any, programs: dict[str, Any], aim: str = "") -> Row:
    return Row("long", what, draw, programs, 1.0, "ms", aim, differences, ours=OURS)


def by_name(op: Any, **params: Any) -> dict[str, Any]:
    return {who: functools.partial(op, implementation=who, **params) for who in ("hopper", "composed")}


def drawn(small: bool, steps: int, taps: int, dtype: Any = f32) -> Callable[[], list[Any]]:
    batch, channels = sizes(small)[:2]
    return lambda: [normal(0, (batch, channels, steps), dtype), normal(1, (channels, taps), dtype) / 128]


def sizes(small: bool) -> tuple[int, int, int]:
    return (2, 8, 64) if small else (8, 768, 16384)


def forward(small: bool) -> list[Row]:
    batch, channels, longest = sizes(small)
    made = []
    for dtype, taps in ((f32, longest), (bf16, longest), (f32, longest // 4)):
        what = f"long conv {batch}x{channels}x{longest} {jnp.dtype(dtype).name}, filter of {taps}"
        programs = {"dispatch": NARROW, "float32": fft_convolve, "jnp.fft": by_fft}
        made.append(row(what, drawn(small, longest, taps, dtype), programs, "3x jnp.fft" if taps == longest else ""))
    for dtype in (f32, bf16):
        made.append(
            row(f"long_conv {batch}x{longest}x{channels} {jnp.dtype(dtype).name}, filter of {longest}",
                lambda d=dtype: [normal(0, (batch, longest, channels), d), normal(1, (longest, channels), d) / 128],
                {"dispatch": long_conv, "bfloat16": functools.partial(long_conv, precision="bfloat16"),
                 "jnp.fft": functools.partial(by_fft, axis=1)}, "3x jnp.fft")
        )  # fmt: skip
    return made


def gradients(small: bool) -> list[Row]:
    batch, channels, longest = sizes(small)

    def backward(fn: Any) -> Any:
        return lambda x, h, flow: jax.vjp(fn, x, h)[1](flow)

    def flow(steps: int) -> Any:
        return normal(2, (batch, channels, steps))

    made = [
        row(f"its gradients {batch}x{channels}x{longest} float32",
            lambda: [*drawn(small, longest, longest)(), flow(longest)],
            {"dispatch": backward(NARROW), "jnp.fft": backward(by_fft)})
    ]  # fmt: skip
    for steps in (longest, longest // 2):
        programs = {"dispatch": functools.partial(CAUSAL_TAPS, taps=steps), **by_name(CAUSAL_TAPS, taps=steps)}
        made.append(
            row(f"the filters' gradient {batch}x{channels}x{steps} float32",
                lambda n=steps: [flow(n), normal(0, (batch, channels, n))], programs | {"jnp.fft": taps_by_fft})
        )  # fmt: skip
    return made


def lengths(small: bool) -> list[Row]:
    batch, channels, longest = sizes(small)
    quarter = longest // 4
    made = []
    for steps, taps in (
        (longest - 1, longest - 1), (3 * quarter, 3 * quarter), (3 * quarter, quarter), (2 * quarter + 128,) * 2,
        (2 * quarter, 2 * quarter), (3 * quarter // 2, 3 * quarter // 2), (quarter, quarter),
    ):  # fmt: skip
        programs = {"dispatch": NARROW, **by_name(CAUSAL_FILTER), "jnp.fft": by_fft}
        what = f"long conv {batch}x{channels}x{steps} float32, filter of {taps}"
        made.append(row(what, drawn(small, steps, taps), programs))
    return made


if __name__ == "__main__":
    main(__doc__, {"forward": forward, "gradients": gradients, "lengths": lengths})
