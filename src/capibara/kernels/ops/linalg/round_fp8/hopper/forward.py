"""round_fp8 for Hopper: what is read, rounded both ways."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.trusting import trusted
from capibara.kernels.ops.linalg.round_fp8.hopper.both_ways import BothWaysConfig, both_ways, fitting, refuses


def candidates(call: Call) -> Sequence[BothWaysConfig]:
    shapes = ((3, 2, 128), (2, 2, 128), (4, 1, 128), (2, 4, 128), (4, 3, 64), (4, 2, 64))
    return fitting([BothWaysConfig(*shape) for shape in shapes], 1, 1)


def round_fp8_hopper(
    x: jax.Array, factor: jax.Array, *, config: BothWaysConfig, dtype: str
) -> tuple[jax.Array, ...]:  # fmt: skip
    [(values, turned)], largest = both_ways([x], factor, None, config, dtype, "round_fp8")
    return values, turned, largest


def ahead_of(call: Call) -> tuple[str, ...]:
    """Where predictions are trusted: no chip has run it yet. XLA's form took 282 us for 537 MB on an H200 in a training
    step, 1.9 TB/s, where a pass that reads and writes whole lines is held up by the memory alone, at 4."""
    return ("xla",) if trusted() == "predicted" and math.prod(call.need("x").shape) >= 1 << 22 else ()


IMPLEMENTATION = Implementation(
    "hopper",
    round_fp8_hopper,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    config_type=BothWaysConfig,
    candidates=candidates,
)
