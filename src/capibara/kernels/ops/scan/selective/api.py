"""selective_scan and selective_step: the public functions, and the two ops behind the first."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, overload

from jaxtyping import Array, Float

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Gradient, Implementation, describe
from capibara.kernels.ops.scan.selective import gradient, hopper, mesh, rules, tpu, xla
from capibara.kernels.ops.scan.selective.cases import CASES, GRAD_CASES
from capibara.kernels.ops.scan.selective.reference import (
    advance,
    gated,
    reference,
    reference_grad,
    step_sizes,
    wide_type,
)

OPERANDS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
REQUIRED = OPERANDS[:5]

SELECTIVE_SCAN_GRAD = Op(
    "selective_scan_grad",
    family="scan",
    reference=reference_grad,
    operands=(*OPERANDS, "d_out", "d_final"),
    params={"dt_softplus": False},
    untuned=("dt_softplus",),
    check=rules.check,
    cost=rules.cost_grad,
    tolerance=rules.tolerance_grad,
    batch=mesh.batch_grad,
    partition=mesh.PARTITION_GRAD,
    cases=GRAD_CASES,
)

SELECTIVE_SCAN = Op(
    "selective_scan",
    family="scan",
    reference=reference,
    operands=OPERANDS,
    params={"dt_softplus": False, "return_final_state": False},
    untuned=("dt_softplus", "return_final_state"),
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(SELECTIVE_SCAN_GRAD, *args)),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
)

SELECTIVE_SCAN.implement(
    xla.IMPLEMENTATION,
    tpu.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    Implementation("reference", reference, needs_local_types=True),
)
SELECTIVE_SCAN_GRAD.implement(
    xla.GRAD_IMPLEMENTATION,
    tpu.GRAD_IMPLEMENTATION,
    hopper.GRAD_IMPLEMENTATION,
    Implementation("reference", reference_grad, needs_local_types=True),
)


_Result: TypeAlias = Float[Array, "batch time channels"]


@overload
def selective_scan(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None,
    dt_bias: Array | None = None, dt_softplus: bool = False, initial_state: Array | None = None,
    return_state: Literal[False] = False, implementation: str | None = None, config: Any = None,
) -> Array: ...  # fmt: skip


@overload
def selective_scan(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None,
    dt_bias: Array | None = None, dt_softplus: bool = False, initial_state: Array | None = None,
    return_state: Literal[True], implementation: str | None = None, config: Any = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def selective_scan(
    x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array | None = None, *, z: Array | None = None,
    dt_bias: Array | None = None, dt_softplus: bool = False, initial_state: Array | None = None, return_state: bool,
    implementation: str | None = None, config: Any = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def selective_scan(
    x: Float[Array, "batch time channels"],
    dt: Float[Array, "batch time channels"],
    A: Float[Array, "channels states"],
    B: Float[Array, "batch time states"],
    C: Float[Array, "batch time states"],
    D: Float[Array, " channels"] | None = None,
    *,
    z: Float[Array, "batch time channels"] | None = None,
    dt_bias: Float[Array, " channels"] | None = None,
    dt_softplus: bool = False,
    initial_state: Float[Array, "batch channels states"] | None = None,
    return_state: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> _Result | tuple[_Result, Float[Array, "batch channels states"]]:
    """Mamba's recurrence along time: h = exp(dt·A)·h + dt·x·B, y = (h·C + D·x) · silu(z), h being N numbers a channel.

    The state and every sum are float32; y has x's type. The backward pass keeps the operands alone and computes the
    states again, so that no array grows with time times N.

    Args:
      x: [batch, time, channels].
      dt: step sizes, of x's shape.
      A: [channels, N], negative for a state that fades.
      B, C: [batch, time, N].
      D: one number a channel: what of x is added to the result.
      z: the gate, of x's shape.
      dt_bias: one number a channel, added to dt.
      dt_softplus: the step size is softplus(dt + dt_bias).
      initial_state: [batch, channels, N]; zeros by default.
      return_state: return (y, the last state, [batch, channels, N] in float32), with which `selective_step` goes
        on, or another call as its initial_state.
      implementation: force one by name ("xla", "pallas_tpu", "hopper", "reference"); a refusal is an error. For
        forward-mode derivatives ask for "reference".
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    >>> ones = jnp.ones((1, 3, 1))
    >>> selective_scan(ones, ones, jnp.zeros((1, 1)), ones, ones)[0, :, 0].tolist()
    [1.0, 2.0, 3.0]
    """
    operands = _arrays("selective_scan", (x, dt, A, B, C, D, z, dt_bias, initial_state))
    params = {
        "dt_softplus": rules.flag("dt_softplus", dt_softplus),
        "return_final_state": rules.flag("return_state", return_state),
    }
    return run(SELECTIVE_SCAN, operands, params, implementation=implementation, config=config)


def _arrays(what: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        as_array(what, name, value, optional=name not in REQUIRED) for name, value in zip(OPERANDS, given, strict=True)
    )


def selective_step(
    state: Float[Array, "batch channels states"],
    x: Float[Array, "batch channels"],
    dt: Float[Array, "batch channels"],
    A: Float[Array, "channels states"],
    B: Float[Array, "batch states"],
    C: Float[Array, "batch states"],
    D: Float[Array, " channels"] | None = None,
    *,
    z: Float[Array, "batch channels"] | None = None,
    dt_bias: Float[Array, " channels"] | None = None,
    dt_softplus: bool = False,
) -> tuple[Float[Array, "batch channels"], Float[Array, "batch channels states"]]:
    """One step of `selective_scan`, for decoding: (y [batch, channels], the next state).

    The state is what `selective_scan(..., return_state=True)` returned, or a step before; the other operands are
    the scan's without their time. It is a few operations on each number of the state, which XLA makes one pass of.

    >>> state = jnp.full((1, 1, 1), 3.0)
    >>> y, state = selective_step(state, *[jnp.ones((1, 1))] * 2, jnp.zeros((1, 1)), *[jnp.ones((1, 1))] * 2)
    >>> float(y[0, 0]), float(state[0, 0, 0])
    (4.0, 4.0)
    """
    state = as_array("selective_step", "state", state)
    x, dt, A, B, C, D, z, dt_bias, _ = _arrays("selective_step", (x, dt, A, B, C, D, z, dt_bias, None))
    dt_softplus = rules.flag("dt_softplus", dt_softplus)
    for name, given in (("x", x), ("dt", dt), ("B", B), ("C", C), ("z", z)):
        if given is not None and given.ndim != 2:
            raise rule_error(
                f"A step's {name} is one row a batch element, of two axes", f"shape {given.shape}", "leave out its time"
            )
    over_time = (x[:, None], dt[:, None], A, B[:, None], C[:, None], D, None if z is None else z[:, None], dt_bias)
    SELECTIVE_SCAN.call(*over_time, None)  # the scan's own rules; the state has another name here
    rules.check_floats("A selective scan", {"state": state})
    wanted = (*x.shape, A.shape[1])
    if state.shape != wanted:
        raise rule_error(f"state is [batch, channels, N], {wanted} by x and A", describe(state), "check its axes")
    wide = wide_type(x)
    delta = step_sizes(dt, dt_bias, dt_softplus, wide)
    h, y = advance(state.astype(wide), *(v.astype(wide) for v in (x, delta, A, B, C)))
    return gated(y, x, D, z).astype(x.dtype), h


SELECTIVE_SCAN.public = selective_scan
register(SELECTIVE_SCAN_GRAD)
register(SELECTIVE_SCAN)
