"""A precision policy applied to the operands of a product."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from capibara import precision as precisions
from capibara.kernels.ops.linalg.gemm.rules import LAX_PRECISIONS


def rounded(a: Any, b: Any, precision: str | None, out_dtype: Any) -> tuple[Any, Any, str | None, str | None]:
    """(a, b, precision, out_dtype) for gemm: operands as the policy holds them, no parameter without effect.

    Tuned tables are keyed by the parameters that differ from the defaults. A result type that the operands
    have anyway, and a number of passes where nothing is float32, would hide the entry that was measured.
    """
    out = None if out_dtype is None else np.dtype(out_dtype).name
    if precision is not None and precision not in LAX_PRECISIONS:
        policy = precisions.policy(precision)
        a, b = policy.cast_to_compute(a), policy.cast_to_compute(b)
        out, precision = out or policy.output_dtype, policy.matmul_precision
    if out == np.dtype(jnp.result_type(a, b)).name:
        out = None
    if precision == "default" and jnp.float32 not in (a.dtype, b.dtype):
        precision = None
    return a, b, precision, out
