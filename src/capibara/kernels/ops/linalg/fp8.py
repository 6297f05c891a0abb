"""Products of fp8 operands with their gradients, for linear layers: one input, one or several weights.

The input and the weights are float8_e4m3fn, the gradient that comes back is float8_e5m2, sums are float32:

    y  = x @ w            e4m3 e4m3
    dx = dy @ w^T         e5m2 e4m3, summed over the weights
    dw = x^T @ dy         e4m3 e5m2

Scales are powers of two (`capibara.precision.fp8_scale`), so that a value is the same fp8 number times its scale in any
arithmetic: what a chip with fp8 units sums, the emulation in bfloat16 sums too, to the last product. What the backward
pass reads is kept in fp8.

Written so that XLA makes of a product one call of cuBLASLt's fp8 kernels: bare fp8 operands, and the two scales as one
factor after it, which is folded into the call. Those kernels want both operands along the sum, so that the weight in
the forward pass, and both operands of dw, are written transposed when they are rounded: by XLA, or where there is a
kernel for it by `round_fp8`, which gives them both ways.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from capibara.errors import rule_error, say_once
from capibara.hardware.chips import chip_for
from capibara.kernels.core.context import current_target
from capibara.kernels.ops.linalg.round_fp8.api import both_ways
from capibara.precision import FP8_LARGEST, Fp8Settings, fp8_scale

__all__ = ["BLOCK", "fp8_products", "has_fp8_units"]

_log = logging.getLogger(__name__)

BLOCK = 128
"""Numbers along the sum that share a scale where scales are of blocks, and the side of a weight's square."""
VALUES, GRADIENTS = "float8_e4m3fn", "float8_e5m2"
_WHOLE_SUMS = jax.lax.Precision.HIGHEST
"""Of the gradients' products: Hopper's units keep about 14 bits of a running sum, and cuBLASLt adds parts of it up in
float32 where it is asked for more than the default. dw is a sum over all rows."""
_FIRST_INPUT = 64.0
"""What the input is taken to be at the most where its history is empty: norms give a tenth of that, and e4m3 has twelve
powers of two to spare below."""
_FIRST_GRADIENT = 16.0
"""The same of a gradient, of the mean of so many rows: over their number. e5m2 has thirty powers of two below."""


class Quantized(NamedTuple):
    """`values * scale`: one scale, or one a block, spread out to the values' shape."""

    values: jax.Array
    scale: jax.Array
    turned: jax.Array | None = None
    """The values as a matrix of rows, transposed, where a kernel wrote them so, too."""

    def kept_turned(self) -> Quantized:
        """The transposed values alone, which are all that dw reads; nothing of `turned` but that it was there."""
        assert self.turned is not None
        return Quantized(self.turned, self.scale, self.turned[:0])


class Rounded(NamedTuple):
    """What a product takes of an array, and the largest magnitude that the array had."""

    narrow: Quantized
    largest: jax.Array


def has_fp8_units() -> bool:
    """Whether products of fp8 operands run on matrix units for them, by XLA, on the chip that is traced for."""
    here = current_target()
    chip = chip_for(here.device_kind)
    return here.platform == "gpu" and chip is not None and "float8" in chip.flops


def fp8_products(
    x: jax.Array,
    weights: Sequence[jax.Array],
    settings: Fp8Settings | None = None,
    *,
    inputs: int = 1,
    history: jax.Array | None = None,
) -> list[jax.Array]:
    """x times each of the weights, in x's type, over so many of x's last axes and of the weights' first.

    Args:
      x: bfloat16 or float32, [..., *inputs].
      weights: [*inputs, ...] each, of any floating type.
      settings: how operands are scaled; `Fp8Settings()` by default.
      history: [1 + len(weights), steps] float32, the largest magnitudes of the last steps, of x and of the gradient of
        each product, 0 where there is none yet; what "delayed" scales by. Without it the scaling is "current". Its
        gradient is no gradient: [:, 0] of it has this step's magnitudes.

    >>> x, w = jnp.ones((2, 16)), jnp.full((16, 4), 0.25)
    >>> fp8_products(x, [w])[0].tolist()
    [[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]
    """
    settings = settings or Fp8Settings()
    wide = x.shape[x.ndim - inputs :]
    for weight in weights:
        if weight.shape[:inputs] != wide:
            raise rule_error(
                f"x and its weights are summed over {inputs} axes of the same sizes",
                f"x {list(x.shape)} and a weight {list(weight.shape)}",
                "transpose the weight, or pass inputs=",
            )
    if history is not None and history.shape[:1] != (1 + len(weights),):
        raise rule_error(
            f"A history has a row of x and one of each of {len(weights)} weights",
            list(history.shape),
            f"pass [{1 + len(weights)}, steps]",
        )
    units = settings.scales == "tensor" and has_fp8_units()
    _say_what_runs(settings, units)
    if settings.scaling == "current":
        history = None
    flat = [weight.reshape(math.prod(wide), -1) for weight in weights]
    rows = x.reshape(*x.shape[: x.ndim - inputs], -1)
    results = _products(settings.scales == "block", units, rows, tuple(flat), history)
    lead = x.shape[: x.ndim - inputs]
    return [y.reshape(*lead, *weight.shape[inputs:]) for y, weight in zip(results, weights, strict=True)]


def _say_what_runs(settings: Fp8Settings, units: bool) -> None:
    if units:
        return
    here = current_target().device_kind
    if settings.scales == "block" and has_fp8_units():
        why = 'XLA has no product with scales of blocks there; scales = "tensor" runs on the units for fp8'
    else:
        why = "it has no matrix units for fp8 that XLA uses"
    say_once(
        _log,
        (here, settings.scales),
        "fp8 products are emulated on %s: operands are rounded to fp8 and multiplied in bfloat16, which is no faster "
        "than bfloat16 (%s)",
        here,
        why,
    )


# Rounding.


def _magnitude(x: jax.Array) -> jax.Array:
    """The largest magnitude; NaN where there is one."""
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)


def _rounded(x: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    # In x's own type, where a power of two is exact: as float32 it would be written to memory as such.
    return (x * (1 / scale).astype(x.dtype)).astype(dtype)


def by_tensor(x: jax.Array, dtype: str, expected: jax.Array | None = None, *, both: bool = False) -> Rounded:
    """Rounded by the scale of its largest magnitude, or of an expected one.

    What is larger than expected is cut off. With `both` the values may come turned, too.
    """
    if expected is None:
        largest = _magnitude(x)
        scale = fp8_scale(largest, dtype)
        made = both_ways(x.reshape(-1, x.shape[-1]), 1 / scale, dtype) if both else None
        if made is None:
            return Rounded(Quantized(_rounded(x, scale, dtype), scale), largest)
        return Rounded(Quantized(made[0].reshape(x.shape), scale, made[1]), largest)
    scale = fp8_scale(expected, dtype)
    made = both_ways(x.reshape(-1, x.shape[-1]), 1 / scale, dtype) if both else None
    if made is not None:
        values, turned, largest = made
        return Rounded(Quantized(values.reshape(x.shape), unless_infinite(scale, largest), turned), largest)
    top, largest = (FP8_LARGEST[dtype] * scale).astype(x.dtype), _magnitude(x)
    values = _rounded(jnp.maximum(jnp.minimum(x, top), -top), scale, dtype)
    return Rounded(Quantized(values, unless_infinite(scale, largest)), largest)


def unless_infinite(scale: jax.Array, largest: jax.Array) -> jax.Array:
    """The scale of values that were cut off at what was expected. Infinity was, too: the scale is NaN then, which no
    product hides, and no element is asked about for it."""
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _by_block(x: jax.Array, dtype: str, axes: Sequence[int]) -> Quantized:
    """A scale for every 128 numbers along these axes; the last block of an axis has what is left."""
    padded = jnp.abs(x)
    for axis in axes:
        axis %= x.ndim
        blocks = -(-x.shape[axis] // BLOCK)
        padded = jnp.pad(padded, [(0, blocks * BLOCK - x.shape[axis] if n == axis else 0) for n in range(x.ndim)])
        shape = (*padded.shape[:axis], blocks, BLOCK, *padded.shape[axis + 1 :])
        padded = jnp.max(padded.reshape(shape), axis=axis + 1)
    scale = fp8_scale(padded, dtype)
    for axis in axes:
        axis %= x.ndim
        scale = jax.lax.slice_in_dim(jnp.repeat(scale, BLOCK, axis=axis), 0, x.shape[axis], axis=axis)
    return Quantized(_rounded(x, scale, dtype), scale)


# The product and its gradients, [..., K] times [K, N] each.


def _dot(
    a: Quantized,
    b: Quantized,
    over: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: Any,
    units: bool,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
) -> jax.Array:
    dimensions = (over, ((), ()))
    if a.scale.ndim or b.scale.ndim:
        # Exact in bfloat16: 4 bits and a power of two.
        left, right = ((q.values.astype(jnp.bfloat16) * q.scale.astype(jnp.bfloat16)) for q in (a, b))
        return jax.lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32).astype(dtype)
    left, right = (a.values, b.values) if units else (a.values.astype(jnp.bfloat16), b.values.astype(jnp.bfloat16))
    y = jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=dtype)
    return y * (a.scale * b.scale).astype(dtype)


def _forward(
    blocks: bool, units: bool, x: jax.Array, weights: tuple[jax.Array, ...], history: jax.Array | None
) -> tuple[tuple[jax.Array, ...], Any]:
    if not blocks:
        return forward(units, by_tensor(x, VALUES, expected_input(history), both=units), weights, history, x.dtype)
    narrow = _by_block(x, VALUES, (-1,))
    narrow_weights = tuple(_by_block(w, VALUES, (0, 1)) for w in weights)
    # For dw the sum is over the rows, and so are the blocks: from x itself.
    return _multiplied(units, narrow, x, narrow_weights, weights, history, x.dtype, None)


def forward(
    units: bool, x: Rounded, weights: tuple[jax.Array, ...], history: jax.Array | None, dtype: Any
) -> tuple[tuple[jax.Array, ...], Any]:
    """(x times each of the weights, what `backward` needs), where x is rounded already, by the scale of a tensor."""
    narrow_weights = tuple(by_tensor(w, VALUES).narrow for w in weights)
    kept_x = x.narrow if x.narrow.turned is None else x.narrow.kept_turned()
    return _multiplied(units, x.narrow, kept_x, narrow_weights, weights, history, dtype, x.largest)


def _multiplied(
    units: bool, x: Quantized, kept_x: Any, narrow_weights: tuple[Quantized, ...], weights: tuple[jax.Array, ...],
    history: jax.Array | None, dtype: Any, seen: jax.Array | None,
) -> tuple[tuple[jax.Array, ...], Any]:  # fmt: skip
    last = (x.values.ndim - 1,)
    y = tuple(_dot(x, w, (last, (0,)), dtype, units) for w in narrow_weights)
    # Empty slices keep the types without keeping the weights.
    types = tuple(jnp.zeros((0,), w.dtype) for w in weights)
    return y, (kept_x, narrow_weights, types, jnp.zeros((0,), dtype), history, seen)


def backward(blocks: bool, units: bool, kept: Any, gradients: tuple[Any, ...]) -> Any:
    """(dx, each dw, the history's): of gradients of the products, which may be `Rounded` already."""
    x, weights, types, of_x, history, seen = kept
    shape = (gradients[0].narrow.values if isinstance(gradients[0], Rounded) else gradients[0]).shape
    leading, last = tuple(range(len(shape) - 1)), len(shape) - 1
    rows = math.prod(shape[:-1])
    dx, dw, magnitudes = None, [], [seen]
    for number, (dy, w, like) in enumerate(zip(gradients, weights, types, strict=True)):
        if blocks:
            narrow = _by_block(dy, GRADIENTS, (-1,))
            flat = _by_block(dy.reshape(rows, -1), GRADIENTS, (0,))
            tall = _by_block(x.reshape(rows, -1), VALUES, (0,))
            change = _dot(tall, flat, ((0,), (0,)), of_x.dtype, units)
        else:
            expected = expected_gradient(history, number, rows)
            if not isinstance(dy, Rounded):
                dy = by_tensor(dy, GRADIENTS, expected, both=x.turned is not None)
            narrow, largest = dy
            magnitudes.append(largest)
            if x.turned is None:
                change = _dot(x, narrow, (leading, leading), of_x.dtype, units, _WHOLE_SUMS)
            elif narrow.turned is None:
                flat = narrow._replace(values=narrow.values.reshape(rows, -1))
                change = _dot(x, flat, ((1,), (0,)), of_x.dtype, units, _WHOLE_SUMS)
            else:
                change = _dot(x, narrow.kept_turned(), ((1,), (1,)), of_x.dtype, units, _WHOLE_SUMS)
        dw.append(change.astype(like.dtype))  # written in x's type, as a product of bfloat16 is
        part = _dot(narrow, w, ((last,), (1,)), of_x.dtype, units, _WHOLE_SUMS)
        dx = part if dx is None else dx + part
    new = None
    if history is not None:
        # What is not finite is nothing to scale by: the step that it is of is skipped, or lost.
        step = jnp.stack(magnitudes)
        new = jnp.zeros_like(history).at[:, 0].set(jnp.where(jnp.isfinite(step), step, 0))
    return dx, tuple(dw), new


def expected_input(history: jax.Array | None) -> jax.Array | None:
    """The largest magnitude that x is scaled by, of the last steps; None where its own is."""
    return None if history is None else _expected(history[0], _FIRST_INPUT)


def expected_gradient(history: jax.Array | None, number: int, rows: int) -> jax.Array | None:
    """The same of the gradient of a product of so many rows."""
    return None if history is None else _expected(history[1 + number], _FIRST_GRADIENT / rows)


def _expected(history: jax.Array, first: float) -> jax.Array:
    largest = jnp.max(history)
    return jnp.where(largest > 0, largest, first)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(
    blocks: bool, units: bool, x: jax.Array, weights: tuple[jax.Array, ...], history: jax.Array | None
) -> tuple[jax.Array, ...]:
    return _forward(blocks, units, x, weights, history)[0]


_products.defvjp(_forward, backward)
