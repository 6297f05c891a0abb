"""linear_recurrence: the public function, and the two ops behind it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, overload

from jaxtyping import Array, Inexact

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.spec import Gradient, Implementation
from capibara.kernels.ops.scan.recurrence import gradient, hopper, mesh, rules, tpu, xla
from capibara.kernels.ops.scan.recurrence.cases import CASES, GRAD_CASES
from capibara.kernels.ops.scan.recurrence.layout import read_flag, read_operands
from capibara.kernels.ops.scan.recurrence.reference import reference, reference_grad

LINEAR_RECURRENCE_GRAD = Op(
    "linear_recurrence_grad",
    family="scan",
    reference=reference_grad,
    operands=("a", "h", "initial", "d_h", "d_final"),
    params={"reverse": False},
    untuned=("reverse",),
    check=rules.check_grad,
    cost=rules.cost_grad,
    tolerance=rules.tolerance_grad,
    batch=mesh.batch,
    partition=mesh.PARTITION_GRAD,
    cases=GRAD_CASES,
)

LINEAR_RECURRENCE = Op(
    "linear_recurrence",
    family="scan",
    reference=reference,
    operands=("a", "b", "initial"),
    params={"reverse": False, "return_final": False},
    untuned=("reverse", "return_final"),
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, lambda *args: gradient.backward(LINEAR_RECURRENCE_GRAD, *args)),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
)

LINEAR_RECURRENCE.implement(
    xla.IMPLEMENTATION,
    tpu.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    Implementation("reference", reference, needs_local_types=True),
)
LINEAR_RECURRENCE_GRAD.implement(
    xla.GRAD_IMPLEMENTATION,
    tpu.GRAD_IMPLEMENTATION,
    hopper.GRAD_IMPLEMENTATION,
    Implementation("reference", reference_grad, needs_local_types=True),
)


@overload
def linear_recurrence(
    a: Array, b: Array, initial_state: Array | None = None, *, reverse: bool = False, axis: int = 1,
    return_state: Literal[False] = False, implementation: str | None = None, config: Any = None,
) -> Array: ...  # fmt: skip


@overload
def linear_recurrence(
    a: Array, b: Array, initial_state: Array | None = None, *, reverse: bool = False, axis: int = 1,
    return_state: Literal[True], implementation: str | None = None, config: Any = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def linear_recurrence(
    a: Array, b: Array, initial_state: Array | None = None, *, reverse: bool = False, axis: int = 1, return_state: bool,
    implementation: str | None = None, config: Any = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def linear_recurrence(
    a: Inexact[Array, " ..."],
    b: Inexact[Array, " ..."],
    initial_state: Inexact[Array, " ..."] | None = None,
    *,
    reverse: bool = False,
    axis: int = 1,
    return_state: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Array | tuple[Array, Array]:
    """h_t = a_t · h_{t-1} + b_t along one axis, element by element: gated and state-space layers, filters, decays.

    The state is kept in float32 (complex64 where the operands are complex); h has b's type. The backward pass keeps a
    and h, and computes every gradient in one pass the other way. Complex numbers are one op with real ones; kernels are
    given their real and imaginary parts as two arrays, which XLA splits and joins around them.

    Args:
      a: the decays, of b's shape, or of one that broadcasts to it (decays that the batch shares, or that do not change
        with time). Broadcast decays are written out in full before a kernel reads them.
      b: what is added at each step; it has the result's shape. Real, or complex where a or b is.
      initial_state: the state before the first step, of b's shape without `axis`; zero where it is absent.
      reverse: run from the last step to the first, h_t = a_t · h_{t+1} + b_t; `initial_state` is then after the end.
      axis: the axis of time. What lies behind it are the channels that a kernel computes side by side; where nothing
        does, the array is transposed first.
      return_state: return (h, final), final being the state after the last step, in float32 (complex64): what the next
        piece of a long sequence takes as its `initial_state`.
      implementation: force one by name ("xla", "pallas_tpu", "hopper", "reference"); a refusal is an error. For
        forward-mode derivatives (`jvp`, `jacfwd`) ask for "reference", which is plain JAX to JAX as well.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    >>> a, b = jnp.full((1, 4, 1), 0.5), jnp.ones((1, 4, 1))
    >>> linear_recurrence(a, b)[0, :, 0].tolist()
    [1.0, 1.5, 1.75, 1.875]

    A sequence in two pieces:

    >>> first, state = linear_recurrence(a[:, :2], b[:, :2], return_state=True)
    >>> linear_recurrence(a[:, 2:], b[:, 2:], state)[0, :, 0].tolist()
    [1.75, 1.875]
    """
    a, b, initial_state, layout = read_operands("linear_recurrence", a, b, initial_state, axis)
    flags = {"reverse": read_flag("reverse", reverse), "return_final": read_flag("return_state", return_state)}
    params: dict[str, Hashable] = {name: value for name, value in flags.items() if value}
    operands = (layout.flatten(a), layout.flatten(b), layout.flatten_state(initial_state))
    out = run(LINEAR_RECURRENCE, operands, params, implementation=implementation, config=config)
    h, *final = out if return_state else (out,)
    return (layout.restore(h), layout.restore_state(final[0])) if return_state else layout.restore(h)


LINEAR_RECURRENCE.public = linear_recurrence
register(LINEAR_RECURRENCE_GRAD)
register(LINEAR_RECURRENCE)
