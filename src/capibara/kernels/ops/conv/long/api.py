"""long_conv: the public function, and the op behind it."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Implementation
from capibara.kernels.ops.conv.long import rules
from capibara.kernels.ops.conv.long.cases import CASES
from capibara.kernels.ops.conv.long.forms import IMPLEMENTATIONS
from capibara.kernels.ops.conv.long.reference import reference

LONG_CONV = Op(
    "long_conv",
    family="conv",
    reference=reference,
    operands=("x", "h"),
    params={"precision": None},
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    cases=CASES,
)
LONG_CONV.implement(*IMPLEMENTATIONS, Implementation("reference", reference))


def long_conv(
    x: Float[Array, "B T C"],
    h: Float[Array, "L C"],
    *,
    precision: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T C"]:
    """Each channel of x convolved with its own long filter over the past: y[t] = Σ over s of h[s] · x[t - s].

    Args:
      x: [batch, time, channels].
      h: [taps, channels], the first for the present input; taps beyond the time reach no output.
      precision: None or "float32"; "bfloat16" rounds what the matrix units multiply, in the implementations that have
        matrix products ("xla_fft" and "xla_direct"), to bfloat16.
      implementation: force one by name: "xla" (XLA's transforms of real numbers, cuFFT on a GPU), "xla_packed" (complex
        ones forward, of half as many points, the default on a GPU), "xla_fft" (this library's), "xla_direct" (products
        with blocks of Toeplitz matrices, for short filters), "reference"; a refusal is an error. Each but "xla_packed",
        and "xla_fft", which precision="bfloat16" takes, has forward-mode derivatives.

    >>> y = long_conv(jnp.array([[[1.0], [2.0], [3.0]]]), jnp.array([[1.0], [10.0]]))
    >>> [round(number, 3) for number in y.ravel().tolist()]
    [1.0, 12.0, 23.0]
    """
    arrays = as_array("long_conv", "x", x), as_array("long_conv", "h", h)
    params: dict[str, Any] = {} if precision in (None, "float32") else {"precision": precision}
    return run(LONG_CONV, arrays, params, implementation=implementation)


LONG_CONV.public = long_conv
register(LONG_CONV)
