"""Workloads of the collectives: one device's operands, and how many devices there are.

"test" cases are what the family's own suite runs on virtual devices; "tpu" cases are compiled for a slice, over all
of its chips, whose number then takes the place of `devices`.
"""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.spec import Case

TEST, TPU = frozenset({"test"}), frozenset({"tpu"})


def _case(
    name: str, *shapes: tuple[int, ...], dtype: str = "bfloat16", tags: Any = TPU, n: int = 16, **more: Any
) -> Case:
    return Case(name, shapes, dtype, {"axis_name": ("x",), "devices": n, **more}, tags)


# A gradient of a 4096 x 4096 layer; an activation of 4096 tokens; and what is left when 4 devices share 8 rows.
ALL_REDUCE = (
    _case("gradient_4096", (4096, 4096)),
    _case("gradient_4096_f32", (4096, 4096), dtype="float32"),
    _case("small_mean", (128, 128), tags=TEST, n=4, op="mean"),
)
REDUCE_SCATTER = (
    _case("gradient_4096", (4096, 4096)),
    _case("gradient_4096_f32", (4096, 4096), dtype="float32"),
    _case("small_f32", (128, 128), dtype="float32", tags=TEST, n=8),
    _case("small_bf16", (96, 128), tags=TEST, n=3),
)
ALL_GATHER = (
    _case("weights_256x4096", (256, 4096)),
    _case("weights_256x4096_f32", (256, 4096), dtype="float32"),
    _case("small_f32", (16, 128), dtype="float32", tags=TEST, n=8),
    _case("stacked", (32, 256), tags=TEST, n=3, tiled=False),
)
ALL_TO_ALL = (
    _case("experts_4096x1024", (4096, 1024)),
    _case("small", (16, 6), tags=TEST, n=4, split_axis=0, concat_axis=1),
)
PERMUTE = (
    _case("neighbour_4096", (4096, 1024), pairs=((0, 1), (1, 0))),
    _case("small", (3, 5), tags=TEST, n=4, pairs=((0, 1), (1, 2), (2, 0))),
)
ALL_GATHER_MATMUL = (
    _case("tokens_4096_columns_1024", (256, 4096), (4096, 1024)),
    _case("small_bf16", (32, 256), (256, 128), tags=TEST, n=3),
)
MATMUL_REDUCE_SCATTER = (
    _case("tokens_4096_columns_4096", (4096, 1024), (1024, 4096)),
    _case("small_f32", (64, 128), (128, 256), dtype="float32", tags=TEST, n=4),
)
