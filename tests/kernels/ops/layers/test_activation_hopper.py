"""The Hopper kernels of activation: their formulas, their arithmetic emulated, and that every config lowers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import target
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.check import check_output, expected
from capibara.kernels.ops.layers import ACTIVATION, ACTIVATION_GRAD
from capibara.kernels.ops.layers.activation.cases import _case, grad_case
from capibara.kernels.ops.layers.activation.formulas import KINDS
from capibara.kernels.ops.layers.activation.hopper.both_passes import (
    StreamConfig,
    activation_backward,
    activation_forward,
)
from capibara.kernels.ops.layers.activation.reference import FUNCTIONS
from capibara.kernels.ops.layers.activation.tanh_formulas import TANH_ERROR, value, value_and_slope

NONE: frozenset[str] = frozenset()


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_slopes_against_float64(kind: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 1e-30, -80.0, 80.0, 1e30]])
    with jax.enable_x64(True):
        wanted, slopes = (np.asarray(v) for v in jax.jvp(FUNCTIONS[kind], (jnp.asarray(x),), (jnp.ones_like(x),)))
    got, slope = value_and_slope(kind, jnp.asarray(x, jnp.float32))
    np.testing.assert_array_equal(value(kind, jnp.asarray(x, jnp.float32)), got)
    # tanh is exact here. The polynomial of gelu is within 1.9e-5 of the probability, times x where that is not 0 or 1;
    # otherwise some roundings of float32, and where 1 - share is 0 for x beyond 12.
    np.testing.assert_allclose(got, wanted, atol=6e-5 if kind == "gelu" else 4e-6, rtol=2e-6)
    np.testing.assert_allclose(jnp.ones(x.shape) if slope is None else slope, slopes, atol=3e-5)


def test_the_polynomial_of_gelu_adds_little_to_the_error_of_tanh() -> None:
    x = np.linspace(-15, 15, 6001)
    right = np.array([0.5 * math.erfc(-v * math.sqrt(0.5)) for v in x])
    share = np.asarray(value("gelu", jnp.asarray(x, jnp.float32)), float) / np.where(x == 0, 1, x)
    assert np.abs(share - right)[x != 0].max() < 2e-5 < TANH_ERROR / 2 / 10


@pytest.mark.quick
@pytest.mark.parametrize(
    ("case", "config"),
    [
        # Two pieces of two chunks, five rows for two programs each; a gate and an odd place; seeds of their own.
        (_case("pieces", (5, 1024), NONE, rate=0.3), StreamConfig(4, 2, 2)),
        (
            _case("gate", (3, 1, 256), NONE, rate=0.3, gated=True, kind="silu", offsets=True),
            StreamConfig(3, 1, 2, False),
        ),
        (
            _case("seeds", (2, 2, 512), NONE, rate=0.3, kind="identity", seeds=2, strides=(0, 1)),
            StreamConfig(1, 1, 4),
        ),
        # Nothing dropped: rows do not matter, and the last piece starts early.
        (_case("flat", (5, 412), NONE, kind="silu"), StreamConfig(2, 2, 2)),
        (_case("flat-gate", (3, 7, 200), NONE, gated=True), StreamConfig(9, 1, 4, False)),
        (_case("flat-one-piece", (2, 512), NONE, kind="gelu_tanh"), StreamConfig(264, 1, 8)),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_emulated(emulated_hopper: Callable[..., Any], case: Case, config: StreamConfig) -> None:
    def right(op: Op, kernel: Callable[..., Any], case: Case) -> None:
        arrays = case.arrays()
        out = emulated_hopper(kernel, *arrays, config=config, **{**op.params, **case.params})
        result = check_output(out, expected(op, arrays, case.params))
        assert result.ok, result.why
        # The mask is the reference's to the bit; few elements of these draws are so small that they round to 0.
        wanted = op.reference(*arrays, **case.params)
        for mine, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(np.asarray(mine) != 0, np.asarray(theirs) != 0)

    right(ACTIVATION, activation_forward, case)
    right(ACTIVATION_GRAD, activation_backward, grad_case(case))


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize("kind", KINDS)
def test_every_config_lowers_for_cuda(kind: str) -> None:
    x, seed = jax.ShapeDtypeStruct((600, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.uint32)
    params = {"rate": 0.1, "kind": kind}
    with target("gpu"):
        for op, args in ((ACTIVATION, (x, None, seed)), (ACTIVATION_GRAD, (x, None, seed, None, x))):
            configs = op.implementations["hopper"].candidates(op.call(*args, **params))
            assert {(c.ahead, c.vector) for c in configs} == {(True, 8), (False, 8), (False, 4), (False, 2)}
            # Every config once, by way of one kind; of the others the first.
            for config in configs if kind == "gelu" else configs[:1]:
                asked = functools.partial(op, implementation="hopper", config=config, **params)

                def call(*given: Any, asked: Any = asked, args: Any = args) -> Any:
                    present = iter(given)
                    return asked(*(None if a is None else next(present) for a in args))

                lowered = jax.export.export(jax.jit(call), platforms=["cuda"])(*(a for a in args if a is not None))
                assert "mosaic_gpu" in lowered.mlir_module()


def test_it_says_why_not() -> None:
    def reason(shape: tuple[int, ...], dtype: Any, device: str = "NVIDIA H200", rate: float = 0.0) -> str:
        seed = jax.ShapeDtypeStruct((2,), jnp.uint32) if rate else None
        with target("gpu", device):
            call = ACTIVATION.call(jax.ShapeDtypeStruct(shape, dtype), None, seed, rate=rate)
            said = ACTIVATION.implementations["hopper"].refusal(call)
        assert said is not None
        return said

    assert "enough for bfloat16; x is float16" in reason((4, 512), jnp.float16)
    assert "256 or more and an even count; not 254" in reason((2, 127), jnp.bfloat16)
    assert "even count; not 381" in reason((3, 127), jnp.bfloat16)
    assert "counts numbers in 32 bits" in reason((1 << 16, 1 << 15), jnp.bfloat16)
    assert "multiple of 256; not 384" in reason((4, 384), jnp.bfloat16, rate=0.1)
    assert "empty" in reason((0, 512), jnp.bfloat16)
    assert "written for Hopper" in reason((4, 512), jnp.bfloat16, "NVIDIA A100")
    with pytest.raises(ValueError, match="vector is 8, 4 or 2"):
        StreamConfig(8, 1, 3)
    with pytest.raises(ValueError, match="1024 numbers and StreamConfig"):
        activation_forward(
            jnp.zeros((2, 512), jnp.bfloat16), config=StreamConfig(1, 2), kind="silu", rate=0.0, strides=None
        )
