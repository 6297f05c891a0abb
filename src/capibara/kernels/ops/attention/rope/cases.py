"""Queries and keys of published models, and shapes meant to break rope."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tune", "gpu"})
HOSTILE = frozenset({"test"})


def case(
    name: str, sizes: tuple[int, int, int, int], tags: frozenset[str], *, rotary: int | None = None,
    own: bool = False, dtype: str = "bfloat16", **params: Any,
) -> Case:  # fmt: skip
    """`sizes` are batch, length, heads and columns of a head; `own`: each sequence has positions of its own."""
    batch, length, heads, depth = sizes
    half = (depth if rotary is None else rotary) // 2
    at = (batch, length, half) if own else (length, half)
    x = (batch, heads, length, depth) if params.get("layout") == "bhtd" else sizes
    angles = np.random.default_rng(length).uniform(-np.pi, np.pi, at)
    draw: dict[int, Any] = {
        1: lambda generator, shape: np.cos(angles),
        2: lambda generator, shape: np.sin(angles),
    }
    return Case(name, (x, at, at), dtype, params, tags, dict.fromkeys((1, 2), "float32"), draw)


CASES = (
    case("llama-8b-4k", (4, 4096, 32, 128), REAL),
    case("llama-8b-keys-4k", (4, 4096, 8, 128), REAL),
    case("llama-1b-own-positions", (4, 4096, 32, 64), REAL, own=True),
    case("gemma-8k", (2, 8192, 16, 256), REAL),
    case("heads-first", (2, 4096, 32, 128), REAL, layout="bhtd"),
    case("one", (1, 1, 1, 2), HOSTILE, dtype="float32"),
    case("odd", (2, 7, 3, 10), HOSTILE, rotary=6),
    case("odd-interleaved", (3, 5, 1, 14), HOSTILE, rotary=6, own=True, style="interleaved", layout="bhtd"),
    case("no-heads", (2, 3, 0, 8), HOSTILE),
    case("not-whole-blocks", (2, 37, 6, 128), HOSTILE | {"gpu"}),
    case("own-positions", (3, 18, 5, 64), HOSTILE | {"gpu"}, own=True, dtype="float16"),
    case("part-of-a-head", (2, 70, 3, 96), HOSTILE | {"gpu"}, rotary=64, own=True, layout="bhtd"),
    case("wide", (1, 17, 7, 256), HOSTILE | {"gpu"}, dtype="float32", layout="bhtd"),
    case("shardable", (8, 32, 8, 64), frozenset({"shard", "gpu"})),
    case("shardable-interleaved", (8, 16, 8, 32), frozenset({"shard"}), own=True, style="interleaved", layout="bhtd"),
)  # fmt: skip
