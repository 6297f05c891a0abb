"""Predicted seconds of one call of an op, from the op's own cost and the chip's roofline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from capibara.cost.efficiency import Efficiency, efficiency_of
from capibara.cost.roofline import MATRIX_OPS, Work, attention_factors, fill, matrix_peak, whole_tiles
from capibara.hardware.chips import chip
from capibara.hardware.facts import Chip

if TYPE_CHECKING:
    from capibara.cost.calibration import Calibration
    from capibara.kernels.core.spec import Call

__all__ = ["op_seconds"]


def op_seconds(
    op_name: str, *args: Any, chip: str | Chip, calibration: Calibration | None = None, **params: Any
) -> float:
    """Predicted seconds of one call of a registered op on one chip. `args` are arrays or their shapes.

    Examples:
        >>> import jax
        >>> a = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
        >>> 150e-6 < op_seconds("gemm", a, a, chip="h200") < 250e-6
        True
    """
    from capibara.kernels.core.context import Target
    from capibara.kernels.core.op import lookup

    which = _chip(chip)
    table = efficiency_of(which)
    kind = which.device_kinds[0] if which.device_kinds else which.name
    call = lookup(op_name).call(*args, target=Target(which.platform, kind), **params)
    work = _work(call, which, table)
    seconds = work.seconds(table)
    if calibration is None:
        return seconds
    calibration.must_be_for(which)
    parts = work.parts(table)
    bound = max(parts, key=lambda part: parts[part])
    # One call has no step around it, whose own cost the runs also tell.
    return seconds * calibration.correction({bound: seconds}, seconds).factors[bound]


def _chip(which: str | Chip) -> Chip:
    return chip(which)


def _work(call: Call, which: Chip, table: Efficiency) -> Work:
    cost = call.op.cost(call)
    memory = cost.bytes / which.hbm_bandwidth
    fixed, own = table.launch_seconds, None
    if not any(word in call.op.name for word in MATRIX_OPS):
        if call.op.name in ("norm", "norm_grad"):
            memory *= _wide_rows(call, table) * _waiting(call)
        return Work(0.0, cost.flops / table.vector_flops, memory, fixed, True, None, cost.flops, cost.bytes)
    matrix = cost.flops / matrix_peak(which, cost.dtype)
    if call.op.name.startswith("attention"):
        q = call.need("q")
        backward = call.op.name.endswith("grad")
        own, extra = attention_factors(math.prod(q.shape[:3]), q.shape[3], backward, which, table)
        fixed += extra
        if call.params.get("causal"):
            matrix *= whole_tiles(call.need("k").shape[2])
    elif call.op.name == "gemm":
        from capibara.kernels.ops.linalg.gemm.rules import sizes as gemm_sizes

        matrix /= fill(which, gemm_sizes(call))
    return Work(matrix, 0.0, memory, fixed, True, own, cost.flops, cost.bytes)


def _wide_rows(call: Call, table: Efficiency) -> float:
    """How much longer a norm takes over rows that do not stay on the chip between its two looks at them."""
    longest, share = table.wide_rows
    # The backward pass holds two such rows, so it gives way one size earlier.
    width = call.need("x").shape[-1] + (1 if call.op.name == "norm_grad" else 0)
    return table.kernel_memory.mid / share if width > longest else 1.0


def _waiting(call: Call) -> float:
    """How much longer a norm's backward pass takes where its kernel has few registers left for what it reads."""
    if call.op.name != "norm_grad" or call.target.platform != "gpu":
        return 1.0
    from capibara.kernels.core.dispatch import select
    from capibara.kernels.ops.layers.norm.pallas_gpu_grad import waiting

    return waiting(call) if select(call).implementation == "hopper" else 1.0
