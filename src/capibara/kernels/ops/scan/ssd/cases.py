"""The shapes state space duality is built for, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case
from capibara.kernels.ops.scan.selective.cases import draw_steps

REAL = frozenset({"bench", "gpu", "tpu"})
LOWERED = frozenset({"gpu", "tpu"})
TEST = frozenset({"test", "tpu"})
SHARD = frozenset({"shard"})  # divides over 8 and 32 devices


def draw_log_decays(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Never positive: from none to a thousandth of what was, most of them small."""
    return -7.0 * generator.random(shape, np.float32) ** 4


def make_case(
    name: str, batch: int, time: int, heads: int, width: int, groups: int, states: int, tags: frozenset[str], *,
    dtype: str = "bfloat16", dt: bool = True, D: bool = True, initial: bool = False, **params: Any,
) -> Case:  # fmt: skip
    """x, B and C of one type; the decays, dt, D and the state in float32."""
    head, group = (batch, time, heads), (batch, time, groups, states)
    shapes = (
        (*head, width), head, group, group, head if dt else None, (heads,) if D else None,
        (batch, heads, states, width) if initial else None,
    )  # fmt: skip
    dtypes = dict.fromkeys((1, 4, 5, 6), "float32")
    return Case(name, shapes, dtype, params, tags, dtypes, {1: draw_log_decays, 4: draw_steps})


ALL: dict[str, Any] = {"initial": True, "return_final_state": True}

CASES = (
    make_case("mamba2-p64", 8, 4096, 32, 64, 1, 128, REAL),
    make_case("mamba2-p128", 8, 4096, 32, 128, 1, 128, REAL),
    make_case("mamba2-groups", 8, 4096, 32, 64, 8, 128, LOWERED),
    # Hostile: one of everything, no time, odd times, one head, several groups, every operand and every output.
    make_case("one", 1, 1, 1, 1, 1, 1, TEST, dtype="float32"),
    make_case("no-time", 2, 0, 2, 3, 1, 4, TEST, dtype="float32", **ALL),
    make_case("odd", 2, 7, 3, 5, 3, 4, TEST, dtype="float32", dt=False, D=False),
    make_case("chunks", 1, 131, 4, 8, 2, 4, TEST, dtype="float32", **ALL),
    make_case("narrow", 1, 100, 2, 16, 1, 32, TEST, **ALL),
    make_case("hopper-edges", 2, 201, 4, 64, 2, 64, LOWERED, **ALL),
    make_case("shardable", 8, 6, 8, 8, 1, 4, SHARD, dtype="float32"),
)


def grad_case(case: Case) -> Case:
    """The backward pass of a forward case: its operands, and the cotangents of what it returns."""
    x, b = case.shapes[0], case.shapes[2]
    assert x is not None
    assert b is not None
    params = dict(case.params)
    d_final = (x[0], x[2], b[3], x[3]) if params.pop("return_final_state", False) else None
    # The forward op's cases are tested and benchmarked with their gradients, which run these programs. Heads and batch
    # are summed away in the gradients of B and of D, which inside shard_map is the caller's matter: meshes are tested
    # apart.
    tags = case.tags - {"bench", "test", "shard"}
    shapes, dtypes = (*case.shapes, x, d_final), {**case.dtypes, 8: "float32"}
    return Case(case.name, shapes, case.dtype, params, tags, dtypes, case.draw)


GRAD_CASES = tuple(map(grad_case, CASES))
