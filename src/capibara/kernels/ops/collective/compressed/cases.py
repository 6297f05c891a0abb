"""The shapes the codec is built for: gradient buckets of one device, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test"})
TILED = frozenset({"test", "tpu"})  # what the TPU kernel takes
SHARDED = frozenset({"tpu", "shard"})
SEED = {"dtypes": {1: "uint32"}, "draw": {1: lambda generator, shape: generator.integers(0, 1 << 32, shape)}}


def _mixed(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Magnitudes over sixteen decades, zeros, and numbers that are not finite."""
    x = generator.standard_normal(shape) * 10.0 ** generator.integers(-8, 9, shape)
    x[generator.random(shape) < 0.1] = 0.0
    for bad in (np.nan, np.inf, -np.inf):
        x[generator.random(shape) < 0.01] = bad
    return x


def _encode(name: str, shape: tuple[int, ...], tags: frozenset[str], *, block: int = 256, dtype: str = "float32",
            seed: bool = False, draw: Any = None) -> Case:  # fmt: skip
    dtypes: dict[int, str] = dict(SEED["dtypes"]) if seed else {}  # type: ignore[call-overload]
    draws: dict[int, Any] = dict(SEED["draw"]) if seed else {}  # type: ignore[call-overload]
    if draw is not None:
        draws[0] = draw
    params = {} if block == 256 else {"block": block}
    return Case(name, (shape, (2,) if seed else None), dtype, params, tags, dtypes, draws)


CASES = (
    # A bucket of 64 MiB in float32, a row for each of 32 devices.
    _encode("bucket-64MiB", (32, 524288), REAL),
    _encode("bucket-64MiB-unbiased", (32, 524288), REAL, seed=True),
    _encode("bucket-32MiB-bf16", (32, 524288), REAL, dtype="bfloat16"),
    _encode("shard-2MiB", (524288,), REAL),
    _encode("one", (1,), HOSTILE),
    _encode("odd", (3, 5), HOSTILE, block=2),
    _encode("few-blocks", (3, 384), TILED, block=128, dtype="bfloat16"),
    _encode("prime", (7, 257), HOSTILE, block=37, dtype="bfloat16"),
    _encode("empty", (0, 64), HOSTILE),
    _encode("mixed", (5, 515), HOSTILE, block=128, draw=_mixed),
    _encode("past-a-tile", (2, 65 * 128), TILED, block=128, draw=_mixed),
    _encode("past-a-tile-unbiased", (130 * 128,), TILED, block=128, seed=True),
    # A matrix whose rows and blocks end inside a tile. Slow to emulate with every check; the codec's tests do.
    _encode("rows-past-a-tile", (36, 130 * 128), frozenset({"tpu"}), block=128, draw=_mixed),
    _encode("rows-unbiased", (9, 3 * 256), TILED, dtype="bfloat16", seed=True),
    _encode("narrow-unbiased", (3, 77), HOSTILE, block=16, dtype="bfloat16", seed=True),
    _encode("shardable", (8, 8, 512), SHARDED, block=128),
)


def decode_case(case: Case) -> Case:
    """Any codes of an encode case's shape, -128 among them, and positive scales."""
    (*lead, count), _ = case.shapes  # type: ignore[misc]
    block: int = case.params.get("block", 256)  # type: ignore[assignment]
    params: dict[str, Any] = dict(case.params)
    if case.dtype != "float32":
        params["out_dtype"] = case.dtype
    return Case(
        case.name,
        ((*lead, count), (*lead, -(-count // block))),
        "float32",
        params,
        case.tags,
        {0: "int8"},
        {
            0: lambda generator, shape: generator.integers(-128, 128, shape),
            1: lambda generator, shape: generator.random(shape) + 0.5,
        },
    )


DECODE_CASES = tuple(decode_case(case) for case in CASES if case.shapes[1] is None)
