"""The Hopper kernels of norm, emulated: their arithmetic and the synchronisation of their rings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from capibara.kernels.check import check_output, expected
from capibara.kernels.layers import NORM, NORM_GRAD
from capibara.kernels.layers.norm.cases import grad_case
from capibara.kernels.layers.norm.pallas_gpu import mosaic_gpu
from capibara.kernels.layers.norm.pallas_gpu_grad import mosaic_gpu_grad
from capibara.kernels.layers.norm.pallas_gpu_ring import RingConfig
from capibara.kernels.op import Case, Op

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX emulates these kernels from 0.12 on"),
]

NONE: frozenset[str] = frozenset()


def _emulated(op: Op, kernel: Callable[..., Any], case: Case, config: RingConfig) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

    arrays = case.arrays()
    with force_gpu_interpret_mode(InterpretGPUParams(detect_races=True)):
        out = jax.block_until_ready(kernel(*arrays, config=config, **{**op.params, **case.params}))
    result = check_output(out, expected(op, arrays, case.params))
    assert result.ok, result.why
    assert not interpret_pallas_call.get_races().races_found, "unsynchronised accesses"


CASES = [
    # (rows, columns, parameters): more rows than a ring holds, rows of one piece and of several, every operand.
    Case("layer", ((7, 256), (256,), (256,), None)),
    Case("rms", ((5, 768), (768,), None, (5, 768)), params={"kind": "rms", "offset": 1.0, "return_residual": True}),
    Case(
        "five-pieces",
        ((3, 5120), (5120,), (5120,), (3, 5120)),
        params={"return_residual": True, "return_stats": True},
        dtypes={1: "float32", 2: "float32"},
    ),
    Case("plain", ((2, 3, 128), None, None, None), "float32"),
    Case("grouped", ((3, 4, 128), (3, 128), (3, 128), None)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("config", [RingConfig(2, 2), RingConfig(3, 1)], ids=str)
def test_emulated(case: Case, config: RingConfig) -> None:
    _emulated(NORM, mosaic_gpu, case, config)
    _emulated(NORM_GRAD, mosaic_gpu_grad, grad_case(case), config)
