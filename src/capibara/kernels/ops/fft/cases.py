"""The shapes the transforms are built for, and shapes meant to break them."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tpu", "gpu", "tune"})
HOSTILE = frozenset({"test", "tpu"})


def _case(name: str, shape: tuple[int, ...], tags: frozenset[str], dtype: str = "float32", **params: Any) -> Case:
    return Case(name, (shape, shape), dtype, params, tags)


CASES = (
    _case("4096-4096", (4096, 4096), REAL),
    _case("64-256k", (64, 1 << 18), REAL),
    _case("4096-4096-bf16", (4096, 4096), REAL, precision="bfloat16"),
    _case("64-256k-bf16", (64, 1 << 18), REAL, precision="bfloat16"),
    _case("64-256k-bf16-planes", (64, 1 << 18), REAL, "bfloat16", precision="bfloat16"),
    _case("16384-1024-bf16", (16384, 1024), REAL, precision="bfloat16"),
    _case("2d-2048", (4, 2048, 2048), REAL, axes=2),
    # Hostile: one point, no signals, a large prime, a product of three radices, both ways, every norm.
    _case("one", (3, 1), HOSTILE),
    _case("none", (0, 12), HOSTILE),
    _case("prime", (1, 131), HOSTILE, inverse=True),
    _case("two-radices", (3, 160), HOSTILE, norm="ortho"),
    _case("three-radices", (1, 1, 30), HOSTILE, factors=(2, 5, 3), inverse=True, norm="forward", precision="bfloat16"),
    _case("two-axes", (2, 6, 10), HOSTILE, axes=2, inverse=True),
    _case("bf16-planes", (8, 8, 144), HOSTILE | {"shard"}, "bfloat16", inverse=True, precision="bfloat16"),
    # Small ones of what the Hopper kernels take.
    _case("hopper-1024", (3, 1024), frozenset({"gpu"}), precision="bfloat16", inverse=True),
    _case("hopper-16k", (1, 1 << 14), frozenset({"gpu"}), precision="bfloat16"),
    _case("shardable", (8, 8, 144), frozenset({"tpu", "gpu", "shard"})),
)

RFFT_CASES = (
    Case("16384-4096", ((16384, 4096),), "float32", {}, REAL - {"tune"}),
    Case("even", ((3, 20),), "float32", {"norm": "ortho"}, frozenset({"test"})),
    Case("odd-bf16", ((2, 45),), "float32", {"precision": "bfloat16"}, frozenset({"test"})),
    Case("shardable", ((8, 8, 12),), "float32", {}, frozenset({"shard"})),
)


def _inverse(case: Case) -> Case:
    (shape,) = case.shapes
    assert shape is not None
    half = (*shape[:-1], shape[-1] // 2 + 1)
    return Case(case.name, (half, half), "float32", {**case.params, "n": shape[-1]}, case.tags)


IRFFT_CASES = tuple(map(_inverse, RFFT_CASES))
