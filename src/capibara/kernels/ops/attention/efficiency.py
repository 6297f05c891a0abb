"""What flash attention reaches of a chip's matrix peak, and what its blocks cost beside their products."""

from __future__ import annotations

import math
from typing import NamedTuple

from capibara.hardware.facts import Chip
from capibara.kernels.core.spec import Call, CallEfficiency

# Rows of queries that one block of a kernel takes.
_ROWS = 128


class _Reached(NamedTuple):
    shares: tuple[tuple[int, float, float], ...]
    """(head size, forward, backward): share of the matrix peak that long sequences reach."""
    block_seconds: tuple[float, float]
    """What one block of queries costs beside its products, forward and backward."""
    source: str
    core_flops: float | None = None
    """Matrix peak of the core that the blocks were seen on, where others run the same schedule faster or slower."""


_REACHED = {
    # What 8k to 32k approach, as a share of 989 TFLOP/s. 2048 blocks on 132 units take 36 µs longer than the products
    # alone, backward 149 µs.
    "gpu": _Reached(
        ((64, 0.51, 0.475), (128, 0.612, 0.495), (256, 0.645, 0.42)),
        (2.3e-6, 9.6e-6),
        "h200-attention.json, 2026-11-15",
    ),
    # Stock flash attention schedules 2602 cycles for 1024 of products in a block of 512 x 512; backward 6557 for 3584.
    "tpu": _Reached(
        ((64, 0.25, 0.3), (128, 0.42, 0.5), (256, 0.55, 0.55)),
        (0.5e-6, 1e-6),
        "schedules of jax's flash attention compiled for v4",
        core_flops=137.5e12,
    ),
    "cpu": _Reached(((128, 0.3, 0.3),), (5e-6, 10e-6), "assumed"),
}


def efficiency(call: Call, chip: Chip) -> CallEfficiency:
    """By the nearest head size. A causal mask or a window cuts blocks in half, and the halves are computed whole."""
    backward = "d_out" in call.op.operands
    batch, heads, rows, head = call.need("q").shape
    reached = _REACHED[chip.platform]
    nearest = min(reached.shares, key=lambda row: abs(math.log2(max(head, 1) / row[0])))
    each = reached.block_seconds[backward] * max(1.0, head / 128)
    if reached.core_flops is not None:
        each *= reached.core_flops * chip.cores_per_chip / chip.peak_flops("bfloat16")
    cut = call.params["causal"] or call.params["window"] is not None
    return CallEfficiency(
        matrix=nearest[1 + backward],
        filled=1 / (1 + _ROWS / max(call.need("k").shape[2], _ROWS)) if cut else 1.0,
        # A GPU runs one block a unit at a time; a TPU's two cores take blocks in turn.
        seconds=each * batch * heads * rows / _ROWS / max(chip.cores_per_chip, 1),
        source=f"{'measured' if chip.name == 'h200' else 'predicted'}: {reached.source}",
    )
