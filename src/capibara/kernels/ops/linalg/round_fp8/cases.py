"""What the products of a training step round, and shapes meant to break the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tune"})
HOSTILE = frozenset({"test"})


def _case(name: str, rows: int, columns: int, tags: frozenset[str], dtype: str = "bfloat16", to: str = "") -> Case:
    def power_of_two(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return np.full(shape, 2.0 ** generator.integers(2, 6), np.float32)

    params = {"dtype": to} if to else {}
    return Case(name, ((rows, columns), (1,)), dtype, params, tags, {1: "float32"}, {1: power_of_two})


CASES = (
    _case("llama-1b-inner", 16384, 8192, REAL | {"gpu"}),
    _case("llama-1b-gradient", 16384, 8192, REAL, to="float8_e5m2"),
    _case("llama-1b-hidden", 16384, 2048, REAL),
    _case("odd", 3, 5, HOSTILE, "float32"),
    _case("tiles", 256, 384, HOSTILE | {"gpu"}),
    _case("gradients", 384, 256, HOSTILE | {"gpu", "shard"}, to="float8_e5m2"),
)
