"""gated_linear_attention: the public function, over two ops."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, overload

import jax.numpy as jnp
from jaxtyping import Array, Float

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.scan.selective.reference import wide_type
from capibara.kernels.ops.scan.selective.rules import check_floats, flag
from capibara.kernels.ops.scan.ssd.api import SSD
from capibara.kernels.ops.scan.ssd.channel_decay import GATED_LINEAR_ATTENTION
from capibara.kernels.ops.scan.ssd.decays import bounded

_Result: TypeAlias = Float[Array, "batch time heads values"]


@overload
def gated_linear_attention(
    q: Array, k: Array, v: Array, log_decay: Array, *, scale: float | None = None, initial_state: Array | None = None,
    return_state: Literal[False] = False, implementation: str | None = None,
) -> Array: ...  # fmt: skip


@overload
def gated_linear_attention(
    q: Array, k: Array, v: Array, log_decay: Array, *, scale: float | None = None, initial_state: Array | None = None,
    return_state: Literal[True], implementation: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def gated_linear_attention(
    q: Array, k: Array, v: Array, log_decay: Array, *, scale: float | None = None, initial_state: Array | None = None,
    return_state: bool, implementation: str | None = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def gated_linear_attention(
    q: Float[Array, "batch time heads keys"],
    k: Float[Array, "batch time heads keys"],
    v: Float[Array, "batch time heads values"],
    log_decay: Float[Array, "batch time heads"] | Float[Array, "batch time heads keys"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch heads keys values"] | None = None,
    return_state: bool = False,
    implementation: str | None = None,
) -> _Result | tuple[_Result, Float[Array, "batch heads keys values"]]:
    """Causal attention without a softmax, as a state that fades: h = exp(log_decay)·h + k·vᵀ, y = scale·qᵀ·h.

    The state and every sum are float32; y has v's type. A log_decay of one number a head runs as `state_space_dual`
    does, and one of a number for each key channel in chunks and sub-chunks; neither overflows, however fast it fades.
    A log_decay below -104, whose exponential is 0 in float32, counts as -104; -inf forgets all that was before.

    Args:
      q, k: [batch, time, heads, Dk].
      v: [batch, time, heads, Dv].
      log_decay: [batch, time, heads] or [batch, time, heads, Dk], 0 or less.
      scale: 1 / sqrt(Dk) by default.
      initial_state: [batch, heads, Dk, Dv]; zeros by default.
      return_state: return (y, the last state, [batch, heads, Dk, Dv] in float32).
      implementation: force one by name ("xla", "reference", and for one number a head "pallas_tpu" and "hopper");
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
    return_state = flag("return_state", return_state)
    _check(q, k, v, log_decay, state)
    op = GATED_LINEAR_ATTENTION if log_decay.ndim == 4 else SSD
    if implementation is not None and implementation not in tuple(op.implementations):
        raise unknown_name("implementation of gated_linear_attention", implementation, op.implementations)
    if scale is not None and jnp.iscomplexobj(as_array("gated_linear_attention", "scale", scale)):
        raise rule_error("scale is a real number", repr(scale), "pass its real part")
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    # On the product's operand, which is rounded anyway: a power of two, as for a Dk of 64 or 256, rounds nothing more.
    q = (q.astype(wide_type(q)) * jnp.asarray(factor, wide_type(q))).astype(q.dtype)
    params = {"return_final_state": return_state}
    log_decay = bounded(log_decay)
    if log_decay.ndim == 4:
        return run(GATED_LINEAR_ATTENTION, (q, k, v, log_decay, state), params, implementation=implementation)
    return run(SSD, (v, log_decay, k, q, None, None, state), params, implementation=implementation)


def _check(q: Any, k: Any, v: Any, log_decay: Any, state: Any) -> None:
    """The rules of both ops in this function's own names: the one of state space duality has others."""
    given = {"q": q, "k": k, "v": v, "log_decay": log_decay, "initial_state": state}
    check_floats("Gated linear attention", given)
    if q.ndim != 4 or k.shape != q.shape or q.shape[3] == 0:
        raise rule_error(
            "q and k are [batch, time, heads, Dk], Dk being 1 or more",
            f"{describe(q)} and {describe(k)}",
            "give both these four axes",
        )
    batch, time, heads, keys = q.shape
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise rule_error(
            f"v is [batch, time, heads, Dv], ({batch}, {time}, {heads}, Dv) by q", describe(v), "check its axes"
        )
    if log_decay.shape not in (q.shape[:3], q.shape):
        raise rule_error(
            f"log_decay is [batch, time, heads] or [batch, time, heads, Dk], {q.shape[:3]} or {q.shape} by q",
            describe(log_decay),
            "check its axes",
        )
    if log_decay.ndim == 3 and 0 in v.shape[2:]:
        raise rule_error("v has a head and a column at least", describe(v), "leave out the call")
    wanted = (batch, heads, keys, v.shape[3])
    if state is not None and state.shape != wanted:
        raise rule_error(
            f"initial_state is [batch, heads, Dk, Dv], {wanted} by q and v", describe(state), "check its axes"
        )
