"""What a norm reaches of a chip's bandwidth, where rows are wide or registers are few."""

from __future__ import annotations

from capibara.hardware.facts import Chip
from capibara.kernels.core.dispatch import select
from capibara.kernels.core.spec import Call, CallEfficiency
from capibara.kernels.ops.layers.norm.hopper.backward import waiting

# Chip -> the longest row that stays on the chip between a norm's two looks at it, and the share of the bandwidth that
# longer ones reach. h200-layers.json, 2026-11-15: 32768 wide forward 2.08 TB/s, 16384 and 32768 wide backward 2.05 to
# 2.17. No other chip was measured.
_WIDE_ROWS = {"h200": (16384, 0.44)}


def efficiency(call: Call, chip: Chip) -> CallEfficiency:
    """Relative to what kernels reach on the chip."""
    backward, memory, source = "d_out" in call.op.operands, 1.0, "predicted: the chip's own factors"
    if chip.name in _WIDE_ROWS:
        longest, share = _WIDE_ROWS[chip.name]
        source = "measured: h200-layers.json, 2026-11-15"
        # The backward pass holds two such rows, so it gives way one size earlier.
        if call.need("x").shape[-1] + backward > longest:
            memory = share / chip.efficiency.kernel_memory.mid
    if backward and call.target.platform == "gpu" and select(call).implementation == "hopper":
        memory /= waiting(call)
    return CallEfficiency(memory=memory, source=source)
