"""The shapes activation is built for: the feed-forward layers of real models, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test", "tpu"})
LOWERED = frozenset({"tpu", "gpu"})


def _seed(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.integers(0, 1 << 32, shape, dtype=np.uint32)


def _offsets(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.integers(0, 1 << 20, shape, dtype=np.int32)


def _case(
    name: str, shape: tuple[int, ...], tags: frozenset[str], *, dtype: str = "bfloat16", gated: bool = False,
    seeds: int | None = None, offsets: bool = False, **params: Any,
) -> Case:  # fmt: skip
    """`seeds`: a seed for each element of the first axis, so many; by default one, where something is dropped."""
    seed = None if not params.get("rate") else (2,) if seeds is None else (seeds, 2)
    shapes = (shape, shape if gated else None, seed, (2,) if offsets else None)
    return Case(name, shapes, dtype, params, tags, {2: "uint32", 3: "int32"}, {2: _seed, 3: _offsets})


CASES = (
    _case("gelu-dropout-16k", (16384, 16384), REAL, rate=0.1),
    _case("gelu-16k", (16384, 16384), REAL),
    _case("swiglu-14k", (8192, 14336), REAL, gated=True, kind="silu"),
    _case("geglu-dropout-8k", (8192, 8192), REAL, gated=True, kind="gelu_tanh", rate=0.1),
    _case("dropout-4k", (16384, 4096), REAL, kind="identity", rate=0.1),
    # Hostile: one, odd, prime, no rows, every kind.
    _case("one", (1, 1), HOSTILE, dtype="float32"),
    _case("odd", (3, 5), HOSTILE, dtype="float32", kind="gelu_tanh", rate=0.5),
    _case("prime", (37, 257), HOSTILE, gated=True, kind="silu", rate=0.3),
    _case("one-axis", (96,), HOSTILE, kind="relu", rate=0.25, dtype="float32"),
    _case("no-rows", (0, 64), HOSTILE, kind="tanh"),
    _case("past-a-tile", (2, 3, 2100), HOSTILE, gated=True),
    _case("offset", (5, 40), HOSTILE, kind="identity", rate=0.5, offsets=True, dtype="float32"),
    _case("seeds", (3, 2, 40), HOSTILE, kind="sigmoid", rate=0.5, seeds=3, strides=(0, 1), dtype="float32"),
    _case("tanh", (19, 130), LOWERED, kind="tanh", gated=True, dtype="float32"),
    _case("half", (16, 256), LOWERED, dtype="float16", rate=0.1),
    _case("shardable", (32, 256), LOWERED | {"shard"}, gated=True, kind="gelu"),
    # For Hopper's kernels: seeds and places of their own.
    _case("seeds-256", (3, 4, 256), frozenset({"gpu"}), kind="silu", rate=0.5, seeds=3, strides=(0, 1)),
    _case("columns-4304", (7, 4304), frozenset({"gpu"}), kind="gelu_tanh"),
    _case("offset-768", (6, 768), frozenset({"gpu"}), gated=True, rate=0.2, offsets=True),
)

GRAD_TESTED = ("odd", "prime", "seeds")


def grad_case(case: Case) -> Case:
    """The backward pass of a forward case."""
    tags = case.tags - {"bench"}
    if case.name not in GRAD_TESTED:
        tags -= {"test"}
    return Case(case.name, (*case.shapes, case.shapes[0]), case.dtype, case.params, tags, case.dtypes, case.draw)


GRAD_CASES = tuple(map(grad_case, CASES))
