"""What the filters' ops take, what they cost, how exact they are, and how they are split."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.hardware.facts import Chip
from capibara.kernels.core.batching import one_by_one
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, CallEfficiency, Cost, Partition, Prefer, describe, unit_roundoff
from capibara.kernels.ops.fft.plan import smooth_length
from capibara.kernels.ops.fft.rules import by_products, tolerance_of, transform_cost

TYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"))


def _refuse(call: Call, rule: str) -> None:
    raise rule_error(
        rule,
        ", ".join(f"{name}={describe(x)}" for name, x in zip(call.op.operands, call.args, strict=True)),
        "call capibara.kernels.fft_convolve, which makes them",
    )


def _shapes(call: Call) -> list[tuple[int, ...]]:
    """The shapes of the operands that are there and of a type that is taken."""
    return [x.shape for x in call.args if x is not None and x.dtype in TYPES]


def check(call: Call) -> None:
    shapes = _shapes(call)
    fits = len(shapes) == 2 and len(shapes[0]) == 3 and len(shapes[1]) == 2 and shapes[0][1] == shapes[1][0]
    if not fits or not 1 <= shapes[1][1] <= shapes[0][2]:
        _refuse(call, "causal_filter takes float32 or bfloat16 x [B, C, T] and h [C, L] with 1 to T taps")


def check_taps(call: Call) -> None:
    shapes, taps = _shapes(call), call.params["taps"]
    fits = len(shapes) == 2 and len(shapes[0]) == 3 and shapes[0] == shapes[1] and isinstance(taps, int)
    if not fits or not 1 <= int(taps) <= shapes[0][2]:  # type: ignore[call-overload]
        _refuse(call, f"causal_taps takes float32 or bfloat16 flow and x [B, C, T] and 1 to T taps, here taps={taps!r}")


def _cost(call: Call, length: int, each: float, moved: float) -> Cost:
    """Two real transforms for each signal and one for each filter, and `each` operations for a point between them."""
    batch, channels, _ = call.need("x").shape
    transforms = max(channels * (2 * batch + 1), 1) * 2.5 * length * max(math.log2(length), 1)
    return transform_cost(transforms + each * batch * channels * length, moved, "bfloat16")


def cost(call: Call) -> Cost:
    """A signal's transform, its product with the filter's, and back; every number moved once."""
    batch, channels, time = call.need("x").shape
    taps = call.need("h").shape[1]
    moved = 2.0 * batch * channels * time * call.need("x").dtype.itemsize
    moved += channels * taps * call.need("h").dtype.itemsize
    return _cost(call, max(time + taps - 1, 1), 3.0, moved)


def cost_taps(call: Call) -> Cost:
    """The transforms of both, their product, summed over the batch, and back."""
    batch, channels, time = call.need("x").shape
    taps = call.params["taps"]
    assert isinstance(taps, int)
    moved = batch * channels * time * sum(call.need(name).dtype.itemsize for name in ("flow", "x"))
    moved += 4.0 * channels * taps
    return _cost(call, max(time + taps - 1, 1), 4.0, moved)


def _length(call: Call) -> int:
    """Of the transforms: a convenient one that no end of the filter wraps around in."""
    taps = call.params["taps"] if "taps" in call.params else call.need("h").shape[1]
    assert isinstance(taps, int)
    return smooth_length(call.need("x").shape[2] + taps - 1)


def efficiency(call: Call, chip: Chip) -> CallEfficiency:
    return by_products((_length(call),))


def tolerance(call: Call) -> float:
    """Three transforms: of the signal, of the filter, and back; and the rounding to x's type."""
    return unit_roundoff(call.need("x").dtype) + tolerance_taps(call)


def tolerance_taps(call: Call) -> float:
    return 3 * tolerance_of((_length(call),), "bfloat16")


def batch(
    op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: dict[str, Any], prefer: Prefer
) -> Any:
    """vmap: more signals of a channel where the filters are shared; else more channels."""
    x, h = (a if own else jnp.broadcast_to(a, (size, *a.shape)) for a, own in zip(arrays, batched, strict=True))
    if not batched[1]:
        made = run(op, (x.reshape(-1, *x.shape[2:]), arrays[1]), params, prefer=prefer)
        return made.reshape(x.shape)
    turned = jnp.moveaxis(x, 0, 1)  # [B, size, C, T]
    wide = turned.reshape(turned.shape[0], -1, turned.shape[3])
    made = run(op, (wide, h.reshape(-1, h.shape[2])), params, prefer=prefer)
    return jnp.moveaxis(made.reshape(turned.shape), 1, 0)


def batch_taps(
    op: Op, size: int, batched: tuple[bool, ...], arrays: tuple[Any, ...], params: dict[str, Any], prefer: Prefer
) -> Any:
    del size
    return one_by_one(op, batched, arrays, params, prefer)


def _combine(op: Op, arrays: tuple[Any, ...], params: dict[str, Any], axes: tuple[str, ...], prefer: Prefer) -> Any:
    """The batch is split over `axes`: each device's sum, summed."""
    return jax.lax.psum(run(op, arrays, params, prefer=prefer, local=True), axes)


PARTITION = Partition(lambda call: "b c t, c l -> b c t", replicated=lambda call: ("t", "l"))
PARTITION_TAPS = Partition(
    lambda call: "b c t, b c t -> c l", reduced=("b",), combine=_combine, replicated=lambda call: ("t", "l")
)
