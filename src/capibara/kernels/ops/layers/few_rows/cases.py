"""The products of decoding: a model's projections at a few rows, and shapes meant to break them."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tune"})
HOSTILE = frozenset({"test"})


def _case(
    name: str, rows: int, inner: int, outputs: int, tags: frozenset[str], *, gate: str | None = None,
    residual: bool = False, dtype: str = "bfloat16", int8: bool = False, out_dtype: str | None = None,
) -> Case:  # fmt: skip
    held = 2 * outputs if gate else outputs
    added = ((rows, outputs), (outputs,)) if residual else (None, None)
    params = {"gate": gate, "out_dtype": out_dtype}
    given = {key: value for key, value in params.items() if value}
    shapes = (rows, inner), (held, inner), *added, (held,) if int8 else None
    if not int8:
        return Case(name, shapes, dtype, given, tags)
    draw = {1: eight_bits, 4: lambda generator, shape: generator.uniform(0.5, 2, shape) / (64 * inner**0.5)}
    return Case(name, shapes, dtype, given, tags, {1: "int8", 4: "float32"}, draw)


def eight_bits(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return generator.integers(-128, 128, shape, np.int8)


def _layer(
    name: str, rows: int, hidden: int, ffn: int, heads: int, tags: frozenset[str] = REAL, *, int8: bool = False
) -> tuple[Case, ...]:  # fmt: skip
    """A decoder layer's four products; `heads` counts the columns of queries, keys and values together."""
    name = f"{name}-int8" if int8 else name
    return (
        _case(f"{name}-qkv-{rows}", rows, hidden, heads, tags, int8=int8),
        _case(f"{name}-out-{rows}", rows, hidden, hidden, tags, residual=True, int8=int8),
        _case(f"{name}-gated-{rows}", rows, hidden, ffn, tags, gate="silu", int8=int8),
        _case(f"{name}-down-{rows}", rows, ffn, hidden, tags, residual=True, int8=int8),
    )


def _head(name: str, rows: int, hidden: int, vocab: int, *, int8: bool) -> Case:
    kind = f"{name}-int8" if int8 else name
    return _case(f"{kind}-head-{rows}", rows, hidden, vocab, REAL, int8=int8, out_dtype="float32")


CASES = (
    *_layer("llama-1b", 32, 2048, 8192, 4096, REAL | {"gpu"}),
    *(case for rows in (1, 8, 64) for case in _layer("llama-1b", rows, 2048, 8192, 4096)),
    *(case for rows in (1, 32) for case in _layer("llama-8b", rows, 4096, 14336, 6144)),
    *(case for rows in (1, 32) for case in _layer("llama-1b", rows, 2048, 8192, 4096, REAL | {"gpu"}, int8=True)),
    *(case for rows in (1, 32) for case in _layer("llama-8b", rows, 4096, 14336, 6144, int8=True)),
    *(_head("llama-1b", rows, 2048, 32000, int8=int8) for rows in (1, 32) for int8 in (False, True)),
    *(_head("llama-8b", rows, 4096, 128256, int8=int8) for rows in (1, 32) for int8 in (False, True)),
    _case("one", 1, 1, 1, HOSTILE, dtype="float32"),
    _case("odd", 3, 130, 65, HOSTILE, residual=True),
    _case("a-tile", 1, 128, 128, HOSTILE | {"gpu"}, gate="gelu"),
    _case("steps-that-do-not-divide", 12, 320, 256, HOSTILE | {"gpu"}, residual=True),
    _case("float16", 5, 192, 256, HOSTILE | {"gpu"}, gate="relu", dtype="float16"),
    _case("wide-result", 3, 128, 192, HOSTILE | {"gpu"}, out_dtype="float32"),
    _case("int8-odd", 3, 130, 65, HOSTILE, residual=True, int8=True),
    _case("int8-a-tile", 1, 256, 128, HOSTILE | {"gpu"}, gate="silu", int8=True),
    _case("int8-one-warpgroup", 9, 384, 256, HOSTILE | {"gpu"}, residual=True, int8=True),
    _case("int8-float16", 5, 256, 128, HOSTILE | {"gpu"}, dtype="float16", int8=True, out_dtype="float32"),
)
