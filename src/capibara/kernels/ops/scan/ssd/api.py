"""state_space_dual and its single step: the public functions, and the two ops behind the first."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Gradient, Implementation, describe
from capibara.kernels.ops.scan.selective.reference import wide_type
from capibara.kernels.ops.scan.selective.rules import check_floats, flag
from capibara.kernels.ops.scan.ssd import gradient, hopper, mesh, rules, tpu, xla
from capibara.kernels.ops.scan.ssd.cases import CASES, GRAD_CASES
from capibara.kernels.ops.scan.ssd.decays import NOTHING, bounded
from capibara.kernels.ops.scan.ssd.reference import advance, per_head, reference, reference_grad, with_input

OPERANDS = ("x", "log_decay", "B", "C", "dt", "D", "initial_state")

SSD_GRAD = Op(
    "ssd_grad",
    family="scan",
    reference=reference_grad,
    operands=(*OPERANDS, "d_out", "d_final"),
    params={"chunk": None},
    hints=("chunk",),
    check=rules.check,
    cost=rules.cost_grad,
    tolerance=rules.tolerance_grad,
    batch=mesh.batch,
    partition=mesh.PARTITION_GRAD,
    cases=GRAD_CASES,
)

SSD = Op(
    "ssd",
    family="scan",
    reference=reference,
    operands=OPERANDS,
    params={"return_final_state": False, "chunk": None},
    hints=("chunk",),
    untuned=("return_final_state",),
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(SSD_GRAD, *args)),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
)

SSD.implement(
    xla.IMPLEMENTATION,
    tpu.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    Implementation("reference", reference, needs_local_types=True),
)
SSD_GRAD.implement(
    xla.GRAD_IMPLEMENTATION,
    tpu.GRAD_IMPLEMENTATION,
    hopper.GRAD_IMPLEMENTATION,
    Implementation("reference", reference_grad, needs_local_types=True),
)


_Result: TypeAlias = Float[Array, "batch time heads width"]


@overload
def state_space_dual(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, block_size: int | None = None,
    resets: Array | None = None, initial_state: Array | None = None, return_state: Literal[False] = False,
    implementation: str | None = None, config: Any = None,
) -> Array: ...  # fmt: skip


@overload
def state_space_dual(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, block_size: int | None = None,
    resets: Array | None = None, initial_state: Array | None = None, return_state: Literal[True],
    implementation: str | None = None, config: Any = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def state_space_dual(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, block_size: int | None = None,
    resets: Array | None = None, initial_state: Array | None = None, return_state: bool,
    implementation: str | None = None, config: Any = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def state_space_dual(
    x: Float[Array, "batch time heads width"],
    dt: Float[Array, "batch time heads"],
    A: Float[Array, " heads"],
    B: Float[Array, "batch time groups states"],
    C: Float[Array, "batch time groups states"],
    D: Float[Array, " heads"] | None = None,
    *,
    block_size: int | None = None,
    resets: Bool[Array, "batch time"] | None = None,
    initial_state: Float[Array, "batch heads width states"] | None = None,
    return_state: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> _Result | tuple[_Result, Float[Array, "batch heads width states"]]:
    """Mamba-2's recurrence as matrix products: h = exp(dt·A)·h + dt·x·Bᵀ, y = h·C + D·x, h being P x N a head.

    Sums, decays and the state are float32; the matrix units are given x's type (the widest of x's, B's and C's), and y
    has x's. The backward pass keeps the operands and computes the states again.

    Args:
      x: [batch, time, heads, P].
      dt: step sizes, one a head and time, positive.
      A: one number a head, negative. A dt·A below -104, whose exponential is 0 in float32, counts as -104.
      B, C: [batch, time, groups, N]; the groups divide the heads, and the heads of a group follow each other.
      D: one number a head: what of x is added to the result.
      block_size: steps of time that are one matrix product; each implementation's own choice by default. It changes
        speed and memory, and the result by rounding alone.
      resets: [batch, time], True where the state starts over, as at the first token of a packed document: the step's
        own input enters, and nothing of what came before it.
      initial_state: [batch, heads, P, N]; zeros by default.
      return_state: return (y, the last state, [batch, heads, P, N] in float32), with which
        `state_space_dual_step` goes on, or another call as its initial_state.
      implementation: force one by name ("xla", "pallas_tpu", "hopper", "reference"); a refusal is an error. For
        forward-mode derivatives ask for "reference".
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    >>> ones = jnp.ones((1, 3, 1, 1))
    >>> state_space_dual(ones, ones[..., 0], jnp.zeros(1), ones, ones).ravel().tolist()
    [1.0, 2.0, 3.0]
    """
    x, dt, A, B, C, D, state = _arrays("state_space_dual", x, dt, A, B, C, D, initial_state)
    return_state = flag("return_state", return_state)
    # Before anything is cast or turned, so that an error shows what was given.
    resets = None if resets is None else as_array("state_space_dual", "resets", resets)
    check_floats("State space duality", {"x": x, "dt": dt, "A": A, "B": B, "C": C, "initial_state": state})
    if x.ndim != 4:
        raise rule_error("x is [batch, time, heads, P]", describe(x), "give it these four axes")
    _check_steps(x, dt, A)
    wide = wide_type(x)
    dt = dt.astype(wide)
    decays = bounded(dt * A.astype(wide))
    if resets is not None:
        if resets.shape != x.shape[:2] or resets.dtype != jnp.bool_:
            raise rule_error(f"resets is bool {x.shape[:2]}, one a step", describe(resets), "check its axes and type")
        # A decay so fast that nothing is left of it in float32.
        decays = jnp.where(resets[..., None], jnp.asarray(NOTHING, wide), decays)
    # An op's parameters are Python's own numbers.
    chunk = int(block_size) if isinstance(block_size, np.integer) else block_size
    made = run(
        SSD,
        (x, decays, B, C, dt, D, _turned("initial_state", state, x, B)),
        {"return_final_state": return_state, "chunk": chunk},
        implementation=implementation,
        config=config,
    )
    return (made[0], made[1].mT) if return_state else made


def _arrays(what: str, *given: Any) -> tuple[Any, ...]:
    names = ("x", "dt", "A", "B", "C", "D", "initial_state")
    optional = ("D", "initial_state")
    return tuple(as_array(what, n, v, optional=n in optional) for n, v in zip(names, given, strict=True))


def _check_steps(x: Any, dt: Any, A: Any) -> None:
    """dt and A by x, [..., heads, P]: the op sees their product alone."""
    if dt.shape != x.shape[:-1]:
        raise rule_error(f"dt is one number a step and head, {x.shape[:-1]} by x", describe(dt), "check its axes")
    if A.shape != x.shape[-2:-1]:
        raise rule_error(f"A is one number a head, {x.shape[-2:-1]} by x", describe(A), "check its axes")


def _turned(name: str, state: Any, x: Any, B: Any) -> Any:
    """[batch, heads, P, N] as [batch, heads, N, P]: the op's own order, in which a chunk's product makes it."""
    if state is None:
        return None
    wanted = (x.shape[0], *x.shape[-2:], *B.shape[-1:])
    if state.shape != wanted:
        raise rule_error(f"{name} is [batch, heads, P, N], {wanted} by x and B", describe(state), "check its axes")
    return state.mT


def state_space_dual_step(
    state: Float[Array, "batch heads width states"],
    x: Float[Array, "batch heads width"],
    dt: Float[Array, "batch heads"],
    A: Float[Array, " heads"],
    B: Float[Array, "batch groups states"],
    C: Float[Array, "batch groups states"],
    D: Float[Array, " heads"] | None = None,
) -> tuple[Float[Array, "batch heads width"], Float[Array, "batch heads width states"]]:
    """One step of `state_space_dual`, for decoding: (y [batch, heads, P], the next state).

    The state is what `state_space_dual(..., return_state=True)` returned, or a step before; the other operands
    are its own without their time. It is a few operations on each number of the state, which XLA makes one pass of.

    >>> state, ones = jnp.full((1, 1, 1, 1), 3.0), jnp.ones((1, 1, 1))
    >>> y, state = state_space_dual_step(state, ones, ones[0], jnp.zeros(1), ones, ones)
    >>> float(y[0, 0, 0]), float(state[0, 0, 0, 0])
    (4.0, 4.0)
    """
    x, dt, A, B, C, D, state = _arrays("state_space_dual_step", x, dt, A, B, C, D, state)
    for name, given, axes in (("x", x, 3), ("dt", dt, 2), ("B", B, 3), ("C", C, 3)):
        if given.ndim != axes:
            raise rule_error(
                f"A step's {name} has {axes} axes, the first the batch", describe(given), "leave out its time"
            )
    check_floats("State space duality", {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C})
    _check_steps(x, dt, A)
    if state is None:
        raise rule_error("state is [batch, heads, P, N]", "None", "pass zeros for the first step")
    wide = wide_type(x)
    dt, turned = dt.astype(wide), _turned("state", state, x, B)
    log_decay = bounded(dt * A.astype(wide))
    SSD.call(x[:, None], log_decay[:, None], B[:, None], C[:, None], dt[:, None], D, turned)  # the scan's own rules
    b, c = (per_head(v, x.shape[1]).astype(wide) for v in (B, C))
    h, y = advance(turned.astype(wide), x.astype(wide), log_decay, b, c, dt)
    return with_input(y, x, D).astype(x.dtype), h.mT


SSD.functions = {"state_space_dual": (state_space_dual, {})}
register(SSD_GRAD)
register(SSD)
