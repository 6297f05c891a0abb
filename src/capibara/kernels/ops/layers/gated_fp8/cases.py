"""Feed-forward layers of published models, and shapes meant to break the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tune"})
HOSTILE = frozenset({"test"})


def _cases(operands: int, results: int) -> tuple[Case, ...]:
    def powers_of_two(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return np.exp2(generator.integers(2, 6, shape)).astype(np.float32)

    def case(
        name: str, rows: int, columns: int, tags: frozenset[str], kind: str = "silu", dtype: str = "bfloat16"
    ) -> Case:
        shapes = ((rows, columns),) * operands + ((results,),)
        given = {} if kind == "silu" else {"kind": kind}
        return Case(name, shapes, dtype, given, tags, {operands: "float32"}, {operands: powers_of_two})

    return (
        case("llama-1b", 16384, 8192, REAL | {"gpu"}),
        case("llama-8b", 8192, 14336, REAL),
        case("gemma-2b", 4096, 16384, REAL, "gelu_tanh"),
        case("odd", 3, 5, HOSTILE, "gelu", "float32"),
        case("units", 256, 384, HOSTILE | {"gpu"}),
        case("shards", 384, 256, HOSTILE | {"gpu", "shard"}, "gelu_tanh"),
    )


CASES = _cases(2, 1)
GRAD_CASES = _cases(3, 2)
