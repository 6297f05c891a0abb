"""round_fp8 for Hopper: what is read, rounded both ways."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.linalg.round_fp8.hopper.both_ways import MANY, BothWaysConfig, both_ways, fitting, refuses


def candidates(call: Call) -> Sequence[BothWaysConfig]:
    shapes = ((2, 3, 64), (2, 2, 128), (3, 2, 64), (4, 1, 128), (3, 2, 128), (2, 4, 64))
    return fitting([BothWaysConfig(*shape) for shape in shapes], 1, 1)


def round_fp8_hopper(
    x: jax.Array, factor: jax.Array, *, config: BothWaysConfig, dtype: str
) -> tuple[jax.Array, ...]:  # fmt: skip
    [(values, turned)], largest = both_ways([x], factor, None, config, dtype, "round_fp8")
    return values, turned, largest


def ahead_of(call: Call) -> tuple[str, ...]:
    """In a training step on an H200 it moves 3.2 TB/s, at 29 million numbers on the average, where XLA's passes move
    1.9. Of less than a million a launch is most of the time."""
    return ("xla",) if math.prod(call.need("x").shape) >= MANY else ()


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
