"""Predicted seconds of one call of an op, from the op's own cost and efficiency and the chip's row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.cost.links import ring_seconds
from capibara.cost.roofline import call_work
from capibara.hardware import chips
from capibara.hardware.facts import Chip
from capibara.kernels.core.context import Target
from capibara.kernels.core.op import lookup

if TYPE_CHECKING:
    from capibara.cost.calibration import Calibration

__all__ = ["op_seconds"]


def op_seconds(
    op_name: str, *args: Any, chip: str | Chip, calibration: Calibration | None = None, **params: Any
) -> float:
    """Predicted seconds of one call of a registered op on one chip. `args` are arrays or their shapes.

    What a collective sends goes round a ring, as it would while it computes: the longer of the two is its time. How
    an axis lies on a slice is for `capibara.cost.links.exchange`, which plans go by.

    Examples:
        >>> import jax
        >>> a = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
        >>> 150e-6 < op_seconds("gemm", a, a, chip="h200") < 250e-6
        True
    """
    which = chips.chip(chip)
    kind = which.device_kinds[0] if which.device_kinds else which.name
    call = lookup(op_name).call(*args, target=Target(which.platform, kind), **params)
    work, links = call_work(call, which), ring_seconds(which, call.op.cost(call).link_bytes)
    seconds = work.seconds()
    if calibration is None:
        return max(seconds, links)
    calibration.must_be_for(which)
    parts = work.parts()
    bound = max(parts, key=lambda part: parts[part])
    # One call has no step around it, whose own cost the runs also tell.
    return max(seconds * calibration.correction({bound: seconds}, seconds).factors[bound], links)
