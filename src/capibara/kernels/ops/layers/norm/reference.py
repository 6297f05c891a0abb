"""Layer norm and RMS norm in plain JAX: the specification."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp


def wide_type(x: Any) -> Any:
    """What statistics and sums are computed in: float32, or wider where x is."""
    return jnp.promote_types(jnp.float32, x.dtype)


def across(vector: jax.Array, x: jax.Array) -> jax.Array:
    """A scale or bias in the wide type, shaped to meet x [..., columns].

    It is [columns]; or [groups, columns], one for each element of x's first axis, which is what vmap makes of it.
    """
    vector = vector.astype(wide_type(x))
    if vector.ndim == 1:
        return vector
    return vector.reshape(vector.shape[0], *(1,) * (x.ndim - 2), vector.shape[1])


def residual_sum(x: jax.Array, residual: jax.Array | None) -> jax.Array:
    """x + residual, rounded once to x's type."""
    if residual is None:
        return x
    wide = wide_type(x)
    return (x.astype(wide) + residual.astype(wide)).astype(x.dtype)


def shrink_of(eps: float) -> float:
    """A power of two that numbers are multiplied by before they are squared: large ones overflow float32 less soon.

    It is as small as eps allows: a number whose square is below eps · 2^-24 does not count, so any larger one keeps a
    square that float32 has (2^-126). With eps of 1e-6 it is 2^-41, and rows of up to 1e29 have a finite variance.
    Powers of two change no digit: what is not that large has the bits that it had without.
    """
    return 2.0 ** -max(0, (126 - 24 + math.floor(math.log2(eps))) // 2) if eps > 0 else 1.0


def outputs(y: Any, total: Any, mean: Any, rstd: Any, kind: str, return_residual: bool, return_stats: bool) -> Any:
    """What the op returns: y alone, or (y, the sum, mean, rstd), each where it is asked for; RMS norm has no mean."""
    made = [y]
    if return_residual:
        made.append(total)
    if return_stats:
        made += [mean, rstd] if kind == "layer" else [rstd]
    return tuple(made) if len(made) > 1 else y


def reference(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    kind: str = "layer",
    eps: float = 1e-6,
    offset: float = 0.0,
    return_residual: bool = False,
    return_stats: bool = False,
) -> Any:
    """(s - mean) · rstd · (scale + offset) + bias over the last axis of s = x + residual, rounded to x's type.

    kind "layer": mean is the row's mean and rstd = 1 / sqrt(variance + eps). kind "rms": mean is 0, and rstd =
    1 / sqrt(mean of squares + eps). s is rounded to x's type before it is normalised; `return_residual` returns it
    too. `return_stats` returns the rows' mean (layer norm) and rstd, in float32.
    """
    total = residual_sum(x, residual)
    wide = total.astype(wide_type(x))
    mean = wide.mean(-1) if kind == "layer" else None
    centred = wide if mean is None else wide - mean[..., None]
    shrink = shrink_of(eps)
    # JAX's derivative has the variance to the power of -3/2, which vanishes where the variance is large: such rows are
    # made smaller once more.
    variance = jax.lax.stop_gradient(jnp.square(centred * shrink).mean(-1))
    factor = jnp.where(variance > 2.0**40, shrink * 2.0**-40, shrink).astype(wide.dtype)
    smaller = centred * factor[..., None]
    spread = 1 / jnp.sqrt(jnp.square(smaller).mean(-1) + eps * factor**2)
    rstd = factor * spread
    y = smaller * spread[..., None]
    if scale is not None:
        y = y * (across(scale, x) + offset)
    if bias is not None:
        y = y + across(bias, x)
    return outputs(y.astype(x.dtype), total, mean, rstd, kind, return_residual, return_stats)


def reference_grad(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array | None,
    rstd: jax.Array,
    d_out: jax.Array,
    d_sum: jax.Array | None = None,
    *,
    kind: str = "layer",
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Any, Any, Any]:
    """(dx, dscale, dbias) by differentiating the reference; None for an absent scale or bias.

    `x` is what was normalised, the sum where there was a residual; `d_sum` is that sum's own cotangent, and is added
    to dx. `mean` and `rstd` are what the forward pass returned: implementations save work with them, the
    specification does not need them.
    """

    def forward(x: Any, scale: Any, bias: Any) -> Any:
        return reference(x, scale, bias, kind=kind, eps=eps, offset=offset)

    made, pull = jax.vjp(forward, x, scale, bias)
    dx, dscale, dbias = pull(d_out.astype(made.dtype))
    return residual_sum(dx, d_sum), dscale, dbias
