"""Vector quantization by nearest codes: plain, residual and product, with straight-through gradients."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from capibara.errors import rule_error
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import FLOATS, describe
from capibara.kernels.ops.vq.nearest.api import nearest_code


@jax.custom_vjp
def straight_through(x: jax.Array, value: jax.Array) -> jax.Array:
    """`value`, bit for bit, whose gradient goes to x unchanged and to `value` not at all."""
    return value


def _forward(x: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
    return value, (jnp.zeros((0,), x.dtype), value)


def _backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    like, value = kept
    return cotangent.astype(like.dtype), jnp.zeros_like(value)


straight_through.defvjp(_forward, _backward)


def look_up(codebook: Float[Array, "K D"], indices: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
    """The codes of these indices; NaN for index -1, a row that has no nearest code."""
    codes = codebook[jnp.maximum(indices, 0)]
    return jnp.where((indices >= 0)[..., None], codes, jnp.asarray(jnp.nan, codes.dtype))


@overload
def quantize(
    x: Array, codebook: Array, *, return_indices: Literal[False] = False, implementation: str | None = None,
    config: Any = None,
) -> Array: ...  # fmt: skip


@overload
def quantize(
    x: Array, codebook: Array, *, return_indices: Literal[True], implementation: str | None = None, config: Any = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def quantize(
    x: Array, codebook: Array, *, return_indices: bool, implementation: str | None = None, config: Any = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def quantize(
    x: Float[Array, "*rows D"],
    codebook: Float[Array, "K D"],
    *,
    return_indices: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "*rows D"] | tuple[Float[Array, "*rows D"], Int[Array, "*rows"]]:
    """Each row of x replaced by its nearest code, of x's type; the gradient passes to x unchanged.

    The codebook gets no gradient here: a loss on the distance between the two teaches it. A row that has no nearest
    code (NaN, infinity) becomes NaN. With `return_indices`, (quantized, indices). The other keywords are
    `nearest_code`'s.

    >>> quantize(jnp.array([0.2, 0.9]), jnp.array([[0.0, 0.0], [0.0, 1.0]])).tolist()
    [0.0, 1.0]
    """
    x, codebook = as_array("quantize", "x", x), as_array("quantize", "codebook", codebook)
    indices = nearest_code(
        lax.stop_gradient(x), lax.stop_gradient(codebook), implementation=implementation, config=config
    )
    quantized = straight_through(x, look_up(codebook, indices).astype(x.dtype))
    return (quantized, indices) if return_indices else quantized


def residual_vq(
    x: Float[Array, "*rows D"], codebooks: Float[Array, "L K D"], *, implementation: str | None = None
) -> tuple[Float[Array, "*rows D"], Int[Array, "*rows L"]]:
    """Quantize x, then what is left of it, L times: (the sum of the codes, indices [..., L]).

    The sum and what is left are kept in float32. The gradient passes to x unchanged.

    >>> codebooks = jnp.array([[[0.0], [8.0]], [[-1.0], [1.0]]])
    >>> quantized, indices = residual_vq(jnp.array([[7.2], [0.7]]), codebooks)
    >>> quantized.tolist(), indices.tolist()
    ([[7.0], [1.0]], [[1, 0], [0, 1]])
    """
    x, codebooks = as_array("residual_vq", "x", x), as_array("residual_vq", "codebooks", codebooks)
    _check_codebooks(codebooks, "residual_vq", "[L, K, D]")
    # What is searched for is float32 by then: nearest_code would not see that x holds no fractions.
    for name, given in (("x", x), ("codebooks", codebooks)):
        if np.dtype(given.dtype).name not in FLOATS:
            raise rule_error(
                f"residual_vq takes {', '.join(FLOATS)}",
                f"{name} of {describe(given)}",
                f"convert {name} with .astype(jnp.float32)",
            )
    wide = jnp.result_type(jnp.float32, x, codebooks)
    left = lax.stop_gradient(x).astype(wide)
    total = jnp.zeros_like(left)
    found = []
    for level in range(codebooks.shape[0]):
        codebook = lax.stop_gradient(codebooks[level]).astype(wide)
        indices = nearest_code(left, codebook, implementation=implementation)
        codes = look_up(codebook, indices)
        total, left = total + codes, left - codes
        found.append(indices)
    return straight_through(x, total.astype(x.dtype)), jnp.stack(found, axis=-1)


def product_vq(
    x: Float[Array, "*rows D"], codebooks: Float[Array, "P K part"], *, implementation: str | None = None
) -> tuple[Float[Array, "*rows D"], Int[Array, "*rows P"]]:
    """Quantize each of P equal parts of a row by a codebook of its own: (quantized, indices [..., P]).

    The gradient passes to x unchanged.

    >>> codebooks = jnp.array([[[0.0], [1.0]], [[5.0], [6.0]]])
    >>> quantized, indices = product_vq(jnp.array([0.9, 5.2]), codebooks)
    >>> quantized.tolist(), indices.tolist()
    ([1.0, 5.0], [1, 0])
    """
    x, codebooks = as_array("product_vq", "x", x), as_array("product_vq", "codebooks", codebooks)
    _check_codebooks(codebooks, "product_vq", "[P, K, D/P]")
    parts, _, width = codebooks.shape
    if x.ndim == 0 or x.shape[-1] != parts * width:
        raise rule_error(
            "A row has as many numbers as the codebooks' parts together",
            f"{describe(x)} for {parts} parts of {width}",
            f"give x a last axis of {parts * width}",
        )
    pieces = lax.stop_gradient(x).reshape(*x.shape[:-1], parts, width)
    found, codes = [], []
    for part in range(parts):
        codebook = lax.stop_gradient(codebooks[part])
        found.append(nearest_code(pieces[..., part, :], codebook, implementation=implementation))
        codes.append(look_up(codebook, found[-1]))
    quantized = jnp.concatenate(codes, axis=-1).astype(x.dtype)
    return straight_through(x, quantized), jnp.stack(found, axis=-1)


def _check_codebooks(codebooks: jax.Array, name: str, shape: str) -> None:
    if codebooks.ndim != 3 or 0 in codebooks.shape:
        raise rule_error(f"{name} takes codebooks {shape}", describe(codebooks), "stack one or more codebooks")
