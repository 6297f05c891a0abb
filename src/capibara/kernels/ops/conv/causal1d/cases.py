"""The shapes causal_conv1d is built for: the layers of state-space models, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test", "tpu"})


def case(
    name: str, x: tuple[int, int, int], width: int, tags: frozenset[str], *, bias: bool = True, state: bool = False,
    dtype: str = "bfloat16", weights: str | None = None, **params: Any,
) -> Case:  # fmt: skip
    """`weights` is the type of the filters and the bias, x's own by default."""
    batch, _, channels = x
    shapes = (x, (width, channels), (channels,) if bias else None, (batch, width - 1, channels) if state else None)
    return Case(name, shapes, dtype, params, tags, {1: weights or dtype, 2: weights or dtype})


CASES = (
    case("mamba", (8, 4096, 2048), 4, REAL, activation="silu"),
    case("plain-f32", (8, 4096, 2048), 4, REAL, bias=False, dtype="float32"),
    # Hostile: odd, past a lane, several blocks, time shorter than the filter, every operand and both outputs.
    case("odd", (3, 7, 5), 4, HOSTILE, dtype="float32", activation="silu", state=True, return_final_state=True),
    case("shorter", (2, 2, 9), 8, HOSTILE, state=True, return_final_state=True, weights="float32"),
    case("several-blocks", (1, 272, 131), 3, HOSTILE, bias=False, activation="silu"),
    case("no-batch", (0, 4, 8), 4, HOSTILE, return_final_state=True),
    case(
        "shardable", (16, 16, 32), 4, frozenset({"shard", "tpu"}), dtype="float32", state=True, activation="silu",
        return_final_state=True,
    ),
)  # fmt: skip
