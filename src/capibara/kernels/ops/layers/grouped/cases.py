"""The shapes the grouped products are built for: layers of real mixtures, and group sizes meant to break them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test", "tpu"})
LOWERED = frozenset({"tpu", "gpu"})  # compiled for the accelerators, and run by this family's own tests
SHARD = frozenset({"shard", "tpu", "gpu"})

Draw = Callable[[np.random.Generator, tuple[int, ...]], Any]


def even(rows: int) -> Draw:
    """As many rows to each group, but for a few that chance gives to others: what a balanced router makes."""
    return lambda generator, shape: generator.multinomial(rows, np.full(shape, 1 / shape[0]))


def skewed(rows: int) -> Draw:
    """Half of the rows to the second group, the rest unevenly to all."""

    def draw(generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
        found = generator.multinomial(rows - rows // 2, generator.dirichlet(np.ones(shape)))
        found[min(1, shape[0] - 1)] += rows // 2
        return found

    return draw


def exactly(*sizes: int) -> Draw:
    return lambda generator, shape: np.array(sizes).reshape(shape)


def _case(
    name: str, rows: int, inner: int, columns: int, draw: Draw, groups: int, tags: frozenset[str], *,
    dtype: str = "bfloat16", **params: Any,
) -> Case:  # fmt: skip
    weight = (groups, columns, inner) if params.get("transpose_rhs") else (groups, inner, columns)
    return Case(name, ((rows, inner), weight, (groups,)), dtype, params, tags, {2: "int32"}, {2: draw})


def _listed(
    name: str, inner: int, columns: int, sizes: tuple[int, ...], *, rest: int = 0, tags: Any = HOSTILE, **more: Any
) -> Case:
    """Hostile: these sizes, and `rest` rows that no group has."""
    return _case(name, sum(sizes) + rest, inner, columns, exactly(*sizes), len(sizes), tags, **more)


CASES = (
    _case("moe-32", 16384, 4096, 2048, even(16384), 32, REAL),
    _case("moe-32-skewed", 16384, 4096, 2048, skewed(16384), 32, REAL),
    _case("moe-32-back", 16384, 2048, 4096, even(16384), 32, REAL, transpose_rhs=True),
    _case("mixtral-up", 8192, 4096, 14336, even(8192), 8, REAL),
    _case("decode-32", 256, 4096, 2048, even(256), 32, REAL),
    # Hostile: one of everything, odd, no rows for the first, the last or a middle group, all rows for one, a rest.
    _listed("one", 1, 1, (1,), dtype="float32"),
    _listed("one-row", 40, 24, (0, 1, 0), tags=LOWERED),
    _listed("one-group", 37, 129, (43,), tags=LOWERED),
    _listed("odd", 5, 7, (3, 1, 5), dtype="float32"),
    _listed("empty-ends", 136, 72, (0, 19, 0, 0, 45, 0), transpose_rhs=True),
    _listed("all-in-one", 64, 48, (0, 0, 50, 0), dtype="float32", tags=LOWERED, transpose_rhs=True),
    _listed("padded", 72, 200, (17, 0, 60), rest=55, out_dtype="float32"),
    _listed("no-group-has-rows", 24, 16, (0, 0), rest=9, tags=LOWERED),
    _listed("hopper-edges", 320, 448, (1, 130, 0, 63, 5), rest=7, tags=LOWERED),
    _listed("hopper-back", 320, 448, (200, 0, 57), tags=LOWERED, transpose_rhs=True),
    _case("shardable", 96, 256, 128, even(96), 4, SHARD),
)


def weights_case(case: Case) -> Case:
    """The gradient of a case's weights: the same rows with the cotangent of its product."""
    lhs, rhs, sizes = case.shapes
    assert lhs is not None
    assert rhs is not None
    flipped = bool(case.params.get("transpose_rhs"))
    params: dict[str, Any] = {"transpose": True} if flipped else {}
    if "out_dtype" in case.params:
        params["out_dtype"] = case.params["out_dtype"]
    d_out = (lhs[0], rhs[1 if flipped else 2])
    return Case(case.name, (lhs, d_out, sizes), case.dtype, params, case.tags, case.dtypes, case.draw)


ACTIVATION_OF = {
    "one-row": "gelu", "one-group": "gelu_tanh", "odd": "relu", "empty-ends": "sigmoid", "hopper-edges": "gelu",
}  # fmt: skip
WITH_PRODUCTS = ("odd", "padded", "hopper-edges", "shardable")


def gated_case(case: Case) -> Case:
    """The same groups with two weights each."""
    lhs, rhs, sizes = case.shapes
    assert lhs is not None
    assert rhs is not None
    flipped = bool(case.params.get("transpose_rhs"))
    weight = (rhs[0], rhs[2], rhs[1]) if flipped else rhs
    params: dict[str, Any] = {}
    if case.name in ACTIVATION_OF:
        params["activation"] = ACTIVATION_OF[case.name]
    if case.name in WITH_PRODUCTS:
        params["return_products"] = True
    return Case(
        case.name, (lhs, weight, weight, sizes), case.dtype, params, case.tags, {3: "int32"}, {3: case.draw[2]}
    )  # fmt: skip


# The product's cases are tested and benchmarked with their gradients, which run these programs; a few are also tested
# on their own.
WEIGHTS_TESTED = ("odd", "empty-ends", "padded")
GATED_TESTED = ("one", "odd", "empty-ends", "padded")


def _only(tested: tuple[str, ...], cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases, the shared tests' tag left to these; the others are still lowered, and run by this family's tests."""

    def tags(case: Case) -> frozenset[str]:
        return (case.tags - {"test"}) | LOWERED if "test" in case.tags and case.name not in tested else case.tags

    return tuple(dataclasses.replace(case, tags=tags(case)) for case in cases)


WEIGHTS_CASES = _only(
    WEIGHTS_TESTED,
    tuple(dataclasses.replace(weights_case(case), tags=case.tags - {"bench"}) for case in CASES),
)
GATED_CASES = _only(GATED_TESTED, tuple(gated_case(case) for case in CASES if case.name != "moe-32-back"))
