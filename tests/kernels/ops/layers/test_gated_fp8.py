"""gated_fp8 and its gradient: the Hopper kernels by emulation, what they refuse, and an mlp that is made of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import fp8_products, gated_activation, lookup, target
from capibara.kernels.ops.layers.gated_fp8 import api, hopper
from capibara.kernels.ops.layers.gated_fp8.reference import reference, reference_grad
from capibara.kernels.ops.linalg import fp8
from capibara.kernels.ops.linalg.round_fp8.hopper import both_ways
from capibara.kernels.ops.linalg.round_fp8.hopper.both_ways import BothWaysConfig
from capibara.precision import Fp8Settings

BF16 = jnp.dtype("bfloat16")
EPS = float(ml_dtypes.finfo(BF16).eps)


def _normal(seed: int, *shape: int, dtype: Any = BF16) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def _close_in_fp8(found: Any, wanted: Any, dtype: str) -> None:
    """What is rounded is within two units of bfloat16 of the reference's, by the tanh that it is made of: another fp8
    number for a few, the next one; and where it is small beside the factor's range, within a subnormal of fp8."""
    kind = ml_dtypes.finfo(dtype)
    a, b = (np.asarray(x, np.float32) for x in (found, wanted))
    np.testing.assert_allclose(a, b, rtol=float(kind.eps), atol=4 * float(kind.smallest_subnormal))
    assert (a != b).mean() < 0.1


@pytest.mark.parametrize("kind", ["silu", "gelu", "relu"])
@pytest.mark.parametrize(
    ("rows", "columns", "programs", "config"),
    [
        pytest.param(256, 256, 3, BothWaysConfig(1, 2, 64), marks=pytest.mark.quick),
        (256, 384, 5, BothWaysConfig(1, 1, 128)),
        (384, 256, 32, BothWaysConfig(1, 2, 128)),  # programs without a unit
    ],
)
def test_kernels_round_what_they_make(
    rows: int, columns: int, programs: int, config: BothWaysConfig, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, up, flow = (_normal(seed, rows, columns) for seed in range(3))
    up = up.at[5, 9].set(700.0)  # past the largest
    factor, factors = jnp.full(1, 64.0), jnp.array([2.0**9, 2.0**12])
    monkeypatch.setattr(both_ways, "multiprocessors", lambda chip: programs)
    with emulator.emulated(both_ways):
        made = hopper.gated_fp8_hopper(gate, up, factor, config=config, kind=kind, dtype=fp8.VALUES)
        grads = hopper.gated_fp8_grad_hopper(gate, up, flow, factors, config=config, kind=kind, dtype=fp8.GRADIENTS)
        made, grads = jax.block_until_ready((made, grads))
    wanted = reference(gate, up, factor, kind=kind)
    wanted_grads = reference_grad(gate, up, flow, factors, kind=kind)
    for found, right, dtype in ((made, wanted, fp8.VALUES), (grads, wanted_grads, fp8.GRADIENTS)):
        *arrays, largest = found
        np.testing.assert_allclose(largest, right[-1], rtol=2 * EPS)
        for number, (one, other) in enumerate(zip(arrays, right[:-1], strict=True)):
            assert one.dtype == dtype
            _close_in_fp8(one, other, dtype)
            if number % 2:  # one rounding, both ways
                np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(arrays[number - 1], np.float32).T)


@pytest.mark.quick
def test_a_number_that_is_none_is_seen() -> None:
    gate, up = _normal(0, 4, 4).at[1, 2].set(jnp.nan), _normal(1, 4, 4)
    assert jnp.isnan(reference(gate, up, jnp.ones(1))[2]).all()


@pytest.mark.parametrize("op", ["gated_fp8", "gated_fp8_grad"])
def test_they_lower_for_a_gpu(op: str) -> None:
    from capibara.compile import lower_for

    case = next(case for case in lookup(op).cases if case.name == "units")
    with target("gpu", "NVIDIA H200"):
        lower_for(lambda *given: lookup(op)(*given, implementation="hopper"), case.args(), "cuda")


@pytest.mark.quick
def test_what_is_refused() -> None:
    x, one = jnp.ones((4, 4)), jnp.ones(1)
    for op, arrays, match in (
        (api.GATED_FP8, (x, x[:2], one), "matrices of one shape"),
        (api.GATED_FP8, (x, x, jnp.ones(2)), "has 1 float32 to multiply by"),
        (api.GATED_FP8_GRAD, (x, x, x, one), "has 2 float32 to multiply by"),
    ):
        with pytest.raises(ValueError, match=match):
            op.call(*arrays)
    with pytest.raises(ValueError, match="kind of gated_fp8"):
        api.GATED_FP8.call(x, x, one, kind="swish")
    with pytest.raises(ValueError, match="dtype of gated_fp8"):
        api.GATED_FP8.call(x, x, one, dtype="int8")
    with pytest.raises(ValueError, match="Units take up to 220 KiB"):
        hopper.gated_fp8_hopper(x, x, one, config=BothWaysConfig(4, 4, 128), kind="silu", dtype=fp8.VALUES)


@pytest.mark.quick
def test_an_mlp_has_the_values_and_gradients_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels' results by XLA's forms, beside fp8 products with an activation between them."""
    x = _normal(0, 2, 128, 64)
    gate, up, down = (
        _normal(1 + n, *shape, dtype=jnp.float32) / 8 for n, shape in enumerate(((64, 96), (64, 96), (96, 64)))
    )
    # Of a gradient that is larger than the last steps' something is cut off, in both.
    histories = jnp.full((3, 4), 3.0).at[1:].set(2e-3), jnp.full((2, 4), 4.0).at[1:].set(1e-2)
    settings = Fp8Settings(scaling="delayed")

    def apart(x: Any, weights: Any, histories: Any) -> Any:
        gate, up, down = weights
        gated, raised = fp8_products(x, [gate, up], settings, history=histories[0])
        inner = gated_activation(gated, raised, kind="silu")
        return fp8_products(inner, [down], settings, history=histories[1])[0]

    def loss(fn: Any, *given: Any) -> Any:
        return (fn(*given).astype(jnp.float32) ** 2).mean()

    monkeypatch.setattr(fp8, "has_fp8_units", lambda: True)
    given = (x, (gate, up, down), histories)
    wanted = jax.value_and_grad(lambda *given: loss(apart, *given), (0, 1, 2))(*given)
    found = jax.value_and_grad(lambda *given: loss(lambda *a: api.fp8_gated_mlp("silu", *a), *given), (0, 1, 2))(*given)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # An activation and its gradients are computed alike; sums of dw over rows are in another order.
        size = float(jnp.abs(other).max())
        assert size > 0
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2 * EPS, atol=2 * EPS * size
        )


@pytest.mark.quick
def test_where_there_are_kernels() -> None:
    x, up = jax.ShapeDtypeStruct((16384, 2048), BF16), jax.ShapeDtypeStruct((2048, 8192), jnp.float32)
    with target("gpu", "NVIDIA H200"):
        assert api.has_kernels(x, up, kind="silu")
        assert not api.has_kernels(jax.ShapeDtypeStruct((1000, 2048), BF16), up, kind="silu")
    with target("cpu"):
        assert not api.has_kernels(x, up, kind="silu")
