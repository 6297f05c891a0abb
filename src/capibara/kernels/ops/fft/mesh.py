"""Gradients, batching and mesh rules of the transforms: they are linear, and every axis but their own is a batch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Partition, Prefer
from capibara.kernels.ops.fft.rules import transposed_norm

Params = dict[str, Any]


def forward(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """The result; a linear map's gradient needs nothing of it."""
    return run(op, arrays, params, prefer=prefer), None


def forward_rfft(op: Op, arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """The result, and the length, which half a spectrum does not tell."""
    return run(op, arrays, params, prefer=prefer), jnp.zeros((arrays[0].shape[-1], 0))


def backward(op: Op, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """The DFT matrix is symmetric, so the gradient is the transform the other way, with the same scale."""
    back = {"inverse": not params["inverse"], "norm": transposed_norm(params["norm"])}
    return run(op, tuple(cotangent), params | back, prefer=prefer)


def backward_rfft(irfft: Op, length: Any, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any]:
    """The inverse counts each point but the first, and the middle of an even length, twice: here it is once."""
    n = length.shape[0]
    re, im = cotangent
    weight = jnp.asarray(1 / _times_counted(n), re.dtype)
    back = {"n": n, "norm": transposed_norm(params["norm"]), "precision": params["precision"]}
    return (run(irfft, (re * weight, im * weight), back, prefer=prefer),)


def backward_irfft(rfft: Op, cotangent: Any, params: Params, prefer: Prefer) -> tuple[Any, Any]:
    """A point that is counted twice has twice the gradient; the imaginary parts that do not enter have none."""
    n = params["n"]
    counted = _times_counted(n)
    back = {"norm": transposed_norm(params["norm"]), "precision": params["precision"]}
    re, im = run(rfft, (cotangent,), back, prefer=prefer)
    return re * jnp.asarray(counted, re.dtype), im * jnp.asarray(np.where(counted == 1, 0, 2), im.dtype)


def _times_counted(n: int) -> np.ndarray[Any, Any]:
    index = np.arange(n // 2 + 1)
    return np.where((index == 0) | (2 * index == n), 1.0, 2.0)


def batch(op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: Params, prefer: Prefer) -> Any:
    """vmap is one more leading axis."""
    stacked = tuple(
        x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in zip(arrays, batched, strict=True)
    )
    return run(op, stacked, params, prefer=prefer)


def _rows(call: Call, own: int) -> str:
    present = next(x for x in call.args if x is not None)
    return " ".join(f"r{axis}" for axis in range(len(present.shape) - own))


def rule(call: Call) -> str:
    axes = call.params["axes"]
    assert isinstance(axes, int)
    term = f"{_rows(call, axes)} {' '.join(f'c{axis}' for axis in range(axes))}".strip()
    return f"{term}, {term} -> {term}, {term}"


def rule_rfft(call: Call) -> str:
    rows = _rows(call, 1)
    return f"{rows} c -> {rows} k, {rows} k"


def rule_irfft(call: Call) -> str:
    rows = _rows(call, 1)
    return f"{rows} k, {rows} k -> {rows} c"


PARTITION = Partition(rule, replicated=lambda call: tuple(f"c{axis}" for axis in range(3)))
PARTITION_RFFT = Partition(rule_rfft, replicated=lambda call: ("c", "k"))
PARTITION_IRFFT = Partition(rule_irfft, replicated=lambda call: ("c", "k"))
