"""The shapes attention is built for: the anchors, the layers of real models, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from capibara.kernels.core.spec import Case
from capibara.kernels.ops.attention.reference import reference

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test", "tpu"})
LOWERED = frozenset({"tpu", "gpu"})  # compiled for the accelerators, and run by this family's own tests
_DTYPES = {4: "bool", 5: "int32", 6: "int32", 7: "bool", 8: "uint32"}


def _mask(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.random(shape) < 0.7


def _segments(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Three packed sequences or so; boundaries drawn, so that they fall inside blocks."""
    return np.minimum(np.cumsum(generator.random(shape) < 3 / max(shape[1], 1), axis=1), 2)


def _seed(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.integers(0, 2**32, shape, np.uint32)


_DRAW = {4: _mask, 5: _segments, 6: _segments, 7: _mask, 8: _seed}


def _case(
    name: str, b: int, h: int, t: int, d: int, tags: frozenset[str], *, kv: int | None = None, s: int | None = None,
    dtype: str = "bfloat16", bias: Any = None, mask: Any = None, segments: bool = False, blocks: Any = None,
    **params: Any,
) -> Case:  # fmt: skip
    """`bias` and `mask` are their shapes; `blocks` is the block mask's (batch, heads, block of queries, of keys)."""
    kv, s = kv or h, s or t
    grid = None
    if blocks is not None:
        bq, bk = blocks[2:]
        grid = (*blocks[:2], -(-t // bq), -(-s // bk))
        params["block_size"] = (bq, bk)
    shapes = (
        (b, h, t, d), (b, kv, s, d), (b, kv, s, d), bias, mask,
        (b, t) if segments else None, (b, s) if segments else None, grid,
        (2,) if params.get("dropout_rate") else None,
    )  # fmt: skip
    return Case(name, shapes, dtype, params, tags, _DTYPES, _DRAW)


CASES = (
    _case("gpt-4k", 4, 16, 4096, 128, REAL, causal=True),
    _case("gpt-8k", 2, 16, 8192, 128, REAL, causal=True),
    _case("full-8k", 2, 16, 8192, 128, REAL),
    _case("llama-4k", 4, 32, 4096, 128, REAL, kv=8, causal=True),
    _case("narrow-4k", 4, 32, 4096, 64, REAL, causal=True),
    _case("wide-4k", 2, 8, 4096, 256, REAL, causal=True),
    _case("window-32k", 1, 8, 32768, 128, REAL, causal=True, window=(1023, 0)),
    _case("gpt-1k", 16, 16, 1024, 128, REAL, causal=True),
    _case("gpt-32k", 1, 8, 32768, 128, REAL, causal=True),
    _case("llama-16k", 1, 32, 16384, 128, REAL, kv=8, causal=True),
    _case("narrow-1k", 16, 32, 1024, 64, REAL, causal=True),
    _case("narrow-16k", 1, 32, 16384, 64, REAL, kv=8, causal=True),
    _case("wide-16k", 1, 8, 16384, 256, REAL, kv=4, causal=True),
    _case("full-1k", 16, 16, 1024, 128, REAL),
    _case("blocks-8k", 2, 16, 8192, 128, REAL, blocks=(1, 1, 512, 512)),
    _case("packed-4k", 4, 16, 4096, 128, REAL, causal=True, segments=True),
    _case("prefill-chunk", 4, 32, 512, 128, REAL, kv=8, s=8192, causal=True, q_offset=7680),
    # Hostile: one, odd, prime, more keys than queries and fewer, odd head sizes, and every feature.
    _case("one", 1, 1, 1, 32, HOSTILE, causal=True),
    _case("one-query", 2, 4, 1, 64, HOSTILE, kv=2, s=67, causal=True, q_offset=66, return_lse=True),
    _case("prime", 1, 2, 131, 64, LOWERED, dtype="float32"),
    _case("prime-causal", 2, 2, 127, 80, HOSTILE | {"gpu"}, causal=True),
    _case("more-keys", 1, 2, 33, 32, LOWERED, s=157, causal=True, q_offset=124, return_lse=True),
    _case("fewer-keys", 1, 2, 150, 64, LOWERED, s=35, dtype="float32"),
    _case("wide-heads", 1, 2, 65, 256, LOWERED, causal=True),
    _case("grouped", 2, 6, 70, 64, LOWERED, kv=2, causal=True, dtype="float32"),
    _case("one-key-head", 1, 4, 64, 128, LOWERED, kv=1, causal=True),
    _case("packed", 2, 2, 129, 64, HOSTILE | {"gpu"}, causal=True, segments=True),
    _case("windowed", 1, 2, 200, 64, HOSTILE | {"gpu"}, causal=True, window=(31, 0), dtype="float32"),
    _case("window-both-sides", 1, 2, 140, 64, LOWERED, window=(17, 5)),
    _case("biased", 2, 2, 66, 64, HOSTILE, bias=(1, 2, 66, 66), dtype="float32"),
    _case("biased-row", 2, 4, 40, 64, LOWERED, kv=2, bias=(2, 1, 1, 40), causal=True),
    _case("masked", 2, 2, 72, 64, LOWERED, mask=(2, 1, 72, 72)),
    _case("block-sparse", 1, 2, 256, 64, LOWERED, blocks=(1, 2, 64, 64), dtype="float32"),
    _case("block-sparse-ragged", 2, 2, 150, 64, HOSTILE, blocks=(1, 1, 64, 32), causal=True),
    _case("capped", 1, 2, 90, 64, LOWERED, softcap=1.5, scale=0.5, causal=True),
    _case("dropped", 2, 2, 64, 64, LOWERED, dropout_rate=0.3, dtype="float32", return_lse=True),
    _case("dropped-grouped", 1, 4, 75, 64, HOSTILE, kv=2, dropout_rate=0.1, causal=True),
    # The first 20 queries come before every key.
    _case("dead-rows", 1, 2, 64, 64, HOSTILE | {"gpu"}, causal=True, q_offset=-20, return_lse=True, dtype="float32"),
    _case(
        "everything", 2, 4, 100, 64, HOSTILE, kv=2, s=120, bias=(1, 4, 100, 120), mask=(2, 1, 1, 120), segments=True,
        blocks=(1, 4, 32, 64), causal=True, q_offset=20, window=(50, 3), softcap=4.0, scale=0.2, dropout_rate=0.2,
        return_lse=True, dtype="float32",
    ),
    # Divides over 32 devices, as 8 x 4 or 4 x 8: nothing but the batch and the heads is split.
    _case("shardable", 8, 16, 12, 32, LOWERED | {"shard"}, kv=8, causal=True, dtype="float32"),
)  # fmt: skip


GRAD_TESTED = ("one-query",)


def grad_case(case: Case) -> Case:
    """The backward pass of a forward case: its operands, what it returned, and the cotangent."""
    q = case.shapes[0]
    assert q is not None
    params = {name: value for name, value in case.params.items() if name != "return_lse"}
    wants_lse = bool(case.params.get("return_lse"))
    shapes = (*case.shapes, q, q[:3], q, q[:3] if wants_lse else None)
    dtypes = {**case.dtypes, 10: "float32", 12: "float32"}

    forward = jax.jit(lambda *xs: reference(*xs, **params, return_lse=True))  # type: ignore[arg-type]

    def complete(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        out, lse = forward(*arrays[:9])
        return (*arrays[:9], out, lse, *arrays[11:])

    # The forward op's cases are tested and benchmarked with their gradients, which run these programs; a few are
    # also tested on their own.
    tags = case.tags - {"bench"}
    if case.name not in GRAD_TESTED:
        tags -= {"test"}
    return Case(case.name, shapes, case.dtype, params, tags, dtypes, case.draw, complete)


GRAD_CASES = tuple(map(grad_case, CASES))
