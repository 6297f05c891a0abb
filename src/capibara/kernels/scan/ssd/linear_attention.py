"""gated_linear_attention: the public function, over two ops."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from capibara.errors import rule_error
from capibara.kernels.dispatch import run
from capibara.kernels.op import describe
from capibara.kernels.operands import as_array
from capibara.kernels.scan.selective.reference import wide_type
from capibara.kernels.scan.ssd.api import SSD
from capibara.kernels.scan.ssd.channel_decay import GATED_LINEAR_ATTENTION


def gated_linear_attention(
    q: Float[Array, "batch time heads keys"],
    k: Float[Array, "batch time heads keys"],
    v: Float[Array, "batch time heads values"],
    log_decay: Float[Array, "batch time heads"] | Float[Array, "batch time heads keys"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch heads keys values"] | None = None,
    return_final_state: bool = False,
    implementation: str | None = None,
) -> Any:
    """Causal attention without a softmax, as a state that fades: h = exp(log_decay)·h + k·vᵀ, y = scale·qᵀ·h.

    The state and every sum are float32; y has v's type. A log_decay of one number a head runs as `state_space_dual`
    does, and one of a number for each key channel in chunks and sub-chunks; neither overflows, however fast it fades.

    Args:
      q, k: [batch, time, heads, Dk].
      v: [batch, time, heads, Dv].
      log_decay: [batch, time, heads] or [batch, time, heads, Dk], 0 or less.
      scale: 1 / sqrt(Dk) by default.
      initial_state: [batch, heads, Dk, Dv]; zeros by default.
      return_final_state: return (y, the last state, [batch, heads, Dk, Dv] in float32).
      implementation: force one by name ("xla", "reference", and for one number a head "pallas_tpu" and "mosaic_gpu");
        a refusal is an error.

    >>> ones = jnp.ones((1, 3, 1, 1))
    >>> gated_linear_attention(ones, ones, ones, jnp.zeros((1, 3, 1))).ravel().tolist()
    [1.0, 2.0, 3.0]
    """
    names = ("q", "k", "v", "log_decay", "initial_state")
    q, k, v, log_decay, state = (
        as_array("gated_linear_attention", name, given, optional=name == "initial_state")
        for name, given in zip(names, (q, k, v, log_decay, initial_state), strict=True)
    )
    if q.ndim != 4 or k.shape != q.shape:
        raise rule_error(
            "q and k are [batch, time, heads, Dk]", f"{describe(q)} and {describe(k)}", "give both these four axes"
        )
    if log_decay.ndim not in (3, 4):
        raise rule_error(
            "log_decay is [batch, time, heads] or [batch, time, heads, Dk]", describe(log_decay), "check its axes"
        )
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    # On the product's operand, which is rounded anyway: a power of two, as for a Dk of 64 or 256, rounds nothing more.
    q = (q.astype(wide_type(q)) * jnp.asarray(factor, wide_type(q))).astype(q.dtype)
    params = {"return_final_state": bool(return_final_state)}
    if log_decay.ndim == 4:
        return run(GATED_LINEAR_ATTENTION, (q, k, v, log_decay, state), params, implementation=implementation)
    return run(SSD, (v, log_decay, k, q, None, None, state), params, implementation=implementation)
