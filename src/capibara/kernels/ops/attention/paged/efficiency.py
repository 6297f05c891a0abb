"""What paged attention reaches of a chip's bandwidth."""

from __future__ import annotations

from capibara.hardware.facts import Chip
from capibara.kernels.core.dispatch import select
from capibara.kernels.core.spec import Call, CallEfficiency

# Chip -> (head size below which a row is narrow, share of the bandwidth of wide ones, of narrow ones).
# h200-paged-attention.json, 2026-11-15: 64 x 8k, 16 x 32k and 256 x 2k keys of 128 at 0.83 to 0.85, 64 x 4k of 64 at
# 0.61, each with its launch, by the kernel of that day; today's took 0.94 of its time at 256 x 576 and was not timed at
# those. No other chip was measured, and no other head size.
_SHARES = {"h200": (128, 0.84, 0.61)}
_MEASURED_HEADS = (64, 128)


def efficiency(call: Call, chip: Chip) -> CallEfficiency:
    """Relative to what kernels reach on the chip; of the kernel alone."""
    if chip.name not in _SHARES or select(call).implementation != "hopper":
        return CallEfficiency()
    narrow, wide_share, narrow_share = _SHARES[chip.name]
    head_dim = call.need("query").shape[-1]
    share = narrow_share if head_dim < narrow else wide_share
    source = "measured: h200-paged-attention.json, 2026-11-15"
    if head_dim not in _MEASURED_HEADS:
        source = "predicted: as heads of 64 and 128 were measured"
    return CallEfficiency(memory=share / chip.efficiency.kernel_memory.mid, source=source)
