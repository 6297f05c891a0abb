"""The shapes long_conv is built for: filters as long as the sequence, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "gpu", "tune"})
HOSTILE = frozenset({"test"})


def case(
    name: str, x: tuple[int, int, int], taps: int, tags: frozenset[str], dtype: str = "float32", **params: Any
) -> Case:
    return Case(name, (x, (taps, x[2])), dtype, params, tags)


CASES = (
    case("16k", (8, 16384, 768), 16384, REAL),
    case("short", (8, 16384, 768), 64, REAL),
    # Hostile: odd, prime, a filter longer than the sequence, one that reaches over several blocks.
    case("odd", (2, 7, 3), 5, HOSTILE),
    case("longer", (1, 37, 5), 131, HOSTILE, "bfloat16"),
    case("several-blocks", (2, 300, 4), 140, HOSTILE),
    case("narrow", (2, 60, 3), 9, HOSTILE, precision="bfloat16"),
    case("shardable", (8, 24, 16), 24, frozenset({"shard"})),
)
