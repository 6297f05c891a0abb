"""The shapes nearest_code is built for: codebooks of image and audio tokenizers, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test", "tpu"})
LOWERED = frozenset({"tpu", "gpu"})


def _duplicates(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Every code four times over: the lowest index is the right one."""
    codes = generator.standard_normal((-(-shape[0] // 4), shape[1]), np.float32)
    return np.tile(codes, (4, 1))[: shape[0]]


def _with_broken_rows(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    rows = generator.standard_normal(shape, np.float32)
    rows[1, 0], rows[2, -1], rows[3] = np.nan, np.inf, -np.inf
    return rows


def _with_broken_codes(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    codes = generator.standard_normal(shape, np.float32)
    codes[0], codes[2, 0] = np.nan, np.inf
    return codes


def _case(
    name: str, lead: tuple[int, ...], codes: int, width: int, tags: frozenset[str], *, dtype: str = "float32",
    draw: dict[int, Any] | None = None, dtypes: dict[int, str] | None = None, **params: Any,
) -> Case:  # fmt: skip
    return Case(name, ((*lead, width), (codes, width)), dtype, params, tags, dtypes or {}, draw or {})


EVERYTHING: dict[str, Any] = {"return_distances": True, "return_stats": True}

CASES = (
    _case("64", (65536,), 64, 768, REAL),
    _case("1024", (65536,), 1024, 768, REAL),
    _case("8192", (65536,), 8192, 768, REAL),
    _case("64-bf16", (65536,), 64, 768, REAL, dtype="bfloat16"),
    _case("1024-bf16", (65536,), 1024, 768, REAL, dtype="bfloat16"),
    _case("8192-bf16", (65536,), 8192, 768, REAL, dtype="bfloat16"),
    # Hostile: one of everything, odd and prime sizes, ties, rows and codes that are no numbers, no rows.
    _case("one", (1,), 1, 1, HOSTILE, **EVERYTHING),
    _case("one-code", (5,), 1, 3, HOSTILE, return_distances=True),
    _case("one-number", (33,), 7, 1, HOSTILE, return_distances=True),
    _case("one-axis", (), 6, 9, HOSTILE, return_distances=True),
    _case("prime", (131,), 37, 67, HOSTILE, **EVERYTHING),
    _case("prime-bf16", (3, 43), 257, 129, HOSTILE, dtype="bfloat16", **EVERYTHING),
    _case("mixed", (40,), 24, 32, HOSTILE, dtype="bfloat16", dtypes={1: "float32"}, return_distances=True),
    _case("ties", (70,), 90, 16, HOSTILE, draw={1: _duplicates}),
    _case("broken-rows", (9,), 5, 8, HOSTILE, draw={0: _with_broken_rows}, **EVERYTHING),
    _case("broken-codes", (9,), 5, 8, HOSTILE, draw={1: _with_broken_codes}),
    _case("no-rows", (0,), 4, 8, HOSTILE, **EVERYTHING),
    _case("hopper-edges", (200,), 72, 128, LOWERED, return_distances=True),
    _case("hopper-wide", (336,), 1000, 768, LOWERED, dtype="bfloat16"),
    _case("shardable", (16, 8), 64, 128, LOWERED | {"shard"}, return_distances=True),
)
