"""The Hopper kernels of the recurrence, emulated: their arithmetic and the synchronisation of their rings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from capibara.kernels.check import check_output, expected
from capibara.kernels.op import Case, Op
from capibara.kernels.scan import LINEAR_RECURRENCE, LINEAR_RECURRENCE_GRAD
from capibara.kernels.scan.recurrence.cases import LOWERED, _case, grad_case
from capibara.kernels.scan.recurrence.pallas_gpu import mosaic_gpu
from capibara.kernels.scan.recurrence.pallas_gpu_grad import mosaic_gpu_grad
from capibara.kernels.scan.recurrence.pallas_gpu_ring import TileConfig

pytestmark = pytest.mark.newest

EMULATED = [
    # More tiles than the ring holds; a short tile, which is last or, backwards, first; one step; segments of time.
    (_case("whole", (1, 24, 128), LOWERED), TileConfig(8, 2)),
    (
        _case("short-first", (1, 21, 128), LOWERED, "bfloat16", initial=True, reverse=True, return_final=True),
        TileConfig(9, 1),
    ),
    (_case("one-step-left", (1, 5, 256), LOWERED, initial=True), TileConfig(4, 3, width=256)),
    (_case("cut", (2, 12, 128), LOWERED, initial=True, return_final=True), TileConfig(4, 2, segments=3)),
    (_case("complex", (1, 11, 128), LOWERED, "complex64", initial=True, return_final=True), TileConfig(8, 2)),
]


@pytest.mark.parametrize(("case", "config"), [pytest.param(*x, id=x[0].name) for x in EMULATED])
def test_emulated(emulated_hopper: Callable[..., Any], case: Case, config: TileConfig) -> None:
    def right(op: Op, kernel: Callable[..., Any], case: Case) -> None:
        arrays = case.arrays()
        out = emulated_hopper(kernel, *arrays, config=config, **{**op.params, **case.params})
        result = check_output(out, expected(op, arrays, case.params))
        assert result.ok, result.why

    right(LINEAR_RECURRENCE, mosaic_gpu, case)
    right(LINEAR_RECURRENCE_GRAD, mosaic_gpu_grad, grad_case(case))
