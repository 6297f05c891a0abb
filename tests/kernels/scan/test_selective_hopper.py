"""The Hopper kernel of the selective scan, emulated: its arithmetic and the synchronisation of its ring."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from capibara.kernels.check import check_output, expected
from capibara.kernels.op import Case
from capibara.kernels.scan import SELECTIVE_SCAN
from capibara.kernels.scan.selective.cases import ALL, make_case
from capibara.kernels.scan.selective.pallas_gpu import TimeConfig, _softplus, mosaic_gpu

NONE: frozenset[str] = frozenset()
CASES = [
    # A tile and a piece of another, an odd N, every operand; whole tiles, more than the ring holds; less than a tile.
    (make_case("all", 1, 11, 128, 3, NONE, dtype="float32", **ALL), TimeConfig(8, 2, 2)),
    (make_case("ring", 1, 16, 256, 4, NONE, D=False), TimeConfig(4, 2, 1)),
    (make_case("short", 2, 3, 128, 4, NONE, z=True), TimeConfig(8, 3, 4)),
]


@pytest.mark.newest
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX emulates these kernels from 0.12 on")
@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda given: getattr(given, "name", ""))
def test_emulated(case: Case, config: TimeConfig) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

    arrays = case.arrays()
    with force_gpu_interpret_mode(InterpretGPUParams(detect_races=True)):
        params = {**SELECTIVE_SCAN.params, **case.params}
        out = jax.block_until_ready(mosaic_gpu(*arrays, config=config, **params))
    result = check_output(out, expected(SELECTIVE_SCAN, arrays, case.params))
    assert result.ok, result.why
    assert not interpret_pallas_call.get_races().races_found, "unsynchronised accesses"


def test_softplus_is_exact_where_it_is_small() -> None:
    v = np.concatenate([np.linspace(-30, 30, 4001), [-80.0, 0.0, 80.0]]).astype(np.float32)
    wanted = np.logaddexp(0, v.astype(np.float64))
    # A few units of float32, relative to a result that may be as small as 1e-35.
    np.testing.assert_allclose(_softplus(v), wanted, rtol=3e-6)
