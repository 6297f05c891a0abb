"""What the filter takes, what it costs, how exact it is, and how it is split."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.core.batching import one_by_one
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Cost, Partition, Prefer, describe
from capibara.kernels.ops.fft.rules import check_names, tolerance_of, transform_cost

PARAMS = {"conjugate": False, "precision": "float32"}


def _fit(signal: tuple[int, ...], spectrum: tuple[int, ...]) -> bool:
    if len(signal) != 3 or len(spectrum) != 2:
        return False
    return signal[1] == spectrum[0] and 1 <= signal[2] <= spectrum[1]


def check(call: Call) -> None:
    present = [x for x in call.args if x is not None and x.dtype == jnp.dtype("float32")]
    shapes = [x.shape for x in present]
    if len(shapes) < 4 or shapes[0] != shapes[1] or shapes[2] != shapes[3] or not _fit(shapes[0], shapes[2]):
        raise rule_error(
            "fft_filter takes float32 planes [P, C, T] and spectra [C, n] with n of T or more",
            ", ".join(f"{name}={describe(x)}" for name, x in zip(call.op.operands, call.args, strict=True)),
            "call capibara.kernels.fft_convolve, which makes them",
        )
    check_names(call, "precision")


def cost(call: Call) -> Cost:
    """Two transforms and a product; the planes in and out, and the spectra once."""
    pairs, channels, time = call.need("re").shape
    n = call.need("h_re").shape[-1]
    flops = max(pairs * channels, 1) * (10.0 * n * max(math.log2(n), 1) + 6.0 * n)
    return transform_cost(flops, 16.0 * pairs * channels * time + 8.0 * channels * n, call.params["precision"])


def tolerance(call: Call) -> float:
    """Two transforms and, in bfloat16, a spectrum that may be rounded between them."""
    return 3 * tolerance_of(call.need("h_re").shape[-1:], call.params["precision"])


def batch(
    op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: dict[str, Any], prefer: Prefer
) -> Any:
    """vmap: more pairs where the spectra are shared; else one element after another."""
    if any(batched[2:]):
        return one_by_one(op, batched, arrays, params, prefer)
    planes = [
        x if own else jnp.broadcast_to(x, (size, *x.shape)) for x, own in zip(arrays[:2], batched[:2], strict=True)
    ]
    shape = planes[0].shape
    folded = (x.reshape(shape[0] * shape[1], *shape[2:]) for x in planes)

    made = run(op, (*folded, *arrays[2:]), params, prefer=prefer)
    return tuple(x.reshape(shape) for x in made)


PARTITION = Partition(
    lambda call: "p c t, p c t, c n, c n -> p c t, p c t",
    replicated=lambda call: ("t", "n"),
    logical={"p": "batch", "c": "mlp"},
)
