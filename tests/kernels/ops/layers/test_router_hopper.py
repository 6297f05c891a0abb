"""The Hopper kernel of route, emulated: its lists, its loops over experts, its padding."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import target
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.layers.router.api import ROUTE
from capibara.kernels.ops.layers.router.hopper.forward import RowsConfig, route_forward

pytestmark = pytest.mark.quick
emulates = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX emulates these kernels from 0.12 on")


def _emulated(arrays: tuple[Any, ...], config: RowsConfig, **params: Any) -> Any:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode

    # Where 128 does not divide the tokens the last two programs share some, and write the same results to the same
    # places.
    tokens = math.prod(arrays[0].shape[:-1])
    apart = tokens <= 128 or tokens % 128 == 0
    with force_gpu_interpret_mode(InterpretGPUParams(detect_races=apart)):
        out = jax.block_until_ready(route_forward(*arrays, config=config, **{**ROUTE.params, **params}))
    if apart:
        assert not interpret_pallas_call.get_races().races_found, "unsynchronised accesses"
    return out


@emulates
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("all-of-five", RowsConfig(8)),
        ("holes", RowsConfig(32)),
        ("bias-softmax", RowsConfig(16)),
        ("bias-topk", RowsConfig(8)),
    ],
    ids=str,
)
def test_emulated(name: str, config: RowsConfig) -> None:
    case = ROUTE.case(name)
    arrays = case.arrays()
    out = _emulated(arrays, config, **case.params)
    result = check_output(out, expected(ROUTE, arrays, case.params))
    assert result.ok, result.why


@emulates
def test_a_loop_over_many_experts_with_a_rest_and_ties() -> None:
    """90 experts, few distinct logits: the first eight fill the lists, the loop takes eight at a time, two remain."""
    logits = jnp.asarray(np.random.default_rng(0).integers(0, 3, (40, 90)), jnp.float32)
    params = {"top_k": 5, "gate": "sigmoid", "normalize": False}
    wanted = expected(ROUTE, (logits, None), params)
    result = check_output(_emulated((logits, None), RowsConfig(8), **params), wanted)
    assert result.ok, result.why


@emulates
def test_a_nan_spoils_its_own_token_alone() -> None:
    logits = np.random.default_rng(1).standard_normal((5, 6)).astype(np.float32)
    logits[2, 3] = np.nan
    weights, indices = _emulated((jnp.asarray(logits), None), RowsConfig(8), top_k=2)
    wanted, wanted_indices = ROUTE.reference(jnp.asarray(logits), top_k=2)
    np.testing.assert_array_equal(np.isnan(weights).all(-1), [False, False, True, False, False])
    np.testing.assert_array_equal(indices, wanted_indices)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)


@pytest.mark.parametrize(("experts", "top_k"), [(24, 3), (65, 8), (17, 2)])
def test_every_config_lowers_for_cuda(experts: int, top_k: int) -> None:
    """Also where the last piece of the experts is a single one."""
    logits = jax.ShapeDtypeStruct((300, experts), jnp.bfloat16)
    params = {"top_k": top_k, "normalize": False}
    with target("gpu"):
        for config in ROUTE.implementations["hopper"].candidates(ROUTE.call(logits, **params)):
            asked = functools.partial(ROUTE, implementation="hopper", config=config, **params)
            assert "mosaic_gpu" in jax.export.export(jax.jit(asked), platforms=["cuda"])(logits).mlir_module()


def test_a_single_expert_is_refused() -> None:
    call = ROUTE.call(jax.ShapeDtypeStruct((300, 1), jnp.bfloat16), top_k=1)
    reason = ROUTE.implementations["hopper"].refuses(call)
    assert reason is not None


@emulates
def test_a_last_expert_alone_and_many_programs() -> None:
    """Two programs that share no token: races are looked for."""
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((256, 17)), jnp.float32)
    params = {"top_k": 3}
    result = check_output(_emulated((logits, None), RowsConfig(16), **params), expected(ROUTE, (logits, None), params))
    assert result.ok, result.why
