"""The ops behind `fft_convolve` in bfloat16: a long causal filter, and the gradient for its taps."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.op import Op, register
from capibara.kernels.core.spec import Case, Implementation
from capibara.kernels.ops.fft.causal import composed, hopper, rules
from capibara.kernels.ops.fft.causal.reference import reference, reference_taps


def _case(name: str, x: tuple[int, int, int], taps: int, *tags: str, dtype: str = "float32", **params: Any) -> Case:
    return Case(name, (x, (x[1], taps)), dtype, params, frozenset(tags))


def _taps_case(name: str, x: tuple[int, int, int], taps: int, *tags: str, dtype: str = "float32") -> Case:
    return Case(name, (x, x), dtype, {"taps": taps}, frozenset(tags))


CAUSAL_FILTER = Op(
    "causal_filter",
    family="fft",
    reference=reference,
    operands=("x", "h"),
    params={"conjugate": False},
    check=rules.check,
    cost=rules.cost,
    efficiency=rules.efficiency,
    tolerance=rules.tolerance,
    batch=rules.batch,
    partition=rules.PARTITION,
    cases=(
        _case("16k", (8, 768, 16384), 16384, "bench", "gpu"),
        _case("odd", (3, 2, 7), 5, "test", conjugate=True),
        _case("odd-bfloat16", (3, 2, 7), 5, "test", dtype="bfloat16"),
        _case("one", (1, 1, 1), 1, "test"),
        _case("shardable", (8, 8, 6), 6, "shard"),
    ),
)
CAUSAL_TAPS = Op(
    "causal_taps",
    family="fft",
    reference=reference_taps,
    operands=("flow", "x"),
    params={"taps": 1},
    check=rules.check_taps,
    cost=rules.cost_taps,
    efficiency=rules.efficiency,
    tolerance=rules.tolerance_taps,
    batch=rules.batch_taps,
    partition=rules.PARTITION_TAPS,
    cases=(
        _taps_case("16k", (8, 768, 16384), 16384, "bench", "gpu"),
        _taps_case("odd", (3, 2, 7), 5, "test"),
        _taps_case("odd-bfloat16", (3, 2, 7), 5, "test", dtype="bfloat16"),
        _taps_case("shardable", (8, 8, 6), 6, "shard"),
    ),
)
CAUSAL_FILTER.implement(composed.IMPLEMENTATION, hopper.IMPLEMENTATION, Implementation("reference", reference))
CAUSAL_TAPS.implement(composed.TAPS, hopper.TAPS_IMPLEMENTATION, Implementation("reference", reference_taps))
register(CAUSAL_FILTER)
register(CAUSAL_TAPS)
