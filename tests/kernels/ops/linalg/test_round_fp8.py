"""round_fp8: the Hopper kernel by emulation, what it refuses, and what fp8 products make of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import explain, fp8_products, lookup, target
from capibara.kernels.ops.linalg import fp8
from capibara.kernels.ops.linalg.round_fp8.api import ROUND_FP8
from capibara.kernels.ops.linalg.round_fp8.hopper import both_ways, forward
from capibara.kernels.ops.linalg.round_fp8.hopper.both_ways import BothWaysConfig
from capibara.kernels.ops.linalg.round_fp8.hopper.forward import round_fp8_hopper
from capibara.kernels.ops.linalg.round_fp8.reference import reference

BF16 = jnp.dtype("bfloat16")


def _normal(seed: int, *shape: int, dtype: Any = BF16) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    ("rows", "columns", "programs", "config"),
    [
        pytest.param(256, 256, 1, BothWaysConfig(1, 2), marks=pytest.mark.quick),
        (256, 384, 7, BothWaysConfig(1, 3)),  # programs of two units and of one, less than their ring holds
        (384, 256, 16, BothWaysConfig(1, 1)),  # programs without a unit
        (256, 256, 3, BothWaysConfig(1, 2, 64)),
    ],
)
def test_both_ways_are_the_reference_to_the_last_bit(
    rows: int, columns: int, programs: int, config: BothWaysConfig, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, factor = _normal(0, rows, columns), jnp.full(1, 64.0 if dtype.endswith("fn") else 2.0**14)
    x = x.at[3, 7].set(1000.0)  # past the largest
    monkeypatch.setattr(both_ways, "multiprocessors", lambda kind: programs)
    with emulator.emulated(both_ways):
        made = jax.block_until_ready(round_fp8_hopper(x, factor, config=config, dtype=dtype))
    for found, wanted in zip(made, reference(x, factor, dtype=dtype), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


def test_it_lowers_for_a_gpu() -> None:
    from capibara.compile import lower_for

    shapes = (jax.ShapeDtypeStruct((256, 512), BF16), jax.ShapeDtypeStruct((1,), jnp.float32))
    with target("gpu", "NVIDIA H200"):
        lower_for(lambda *given: round_fp8_hopper(*given, config=BothWaysConfig(), dtype="float8_e5m2"), shapes, "cuda")


@pytest.mark.quick
def test_the_kernel_takes_what_is_more_than_a_launch() -> None:
    def taken(rows: int) -> list[str]:
        x, weight = jax.ShapeDtypeStruct((rows, 2048), BF16), jax.ShapeDtypeStruct((2048, 512), jnp.float32)
        with target("gpu", "NVIDIA H200"):
            found = explain(lambda x, w: fp8_products(x, [w]), x, weight).selections
        return [s.implementation for s in found if s.call.op.name == "round_fp8" and s.call.need("x").shape[0] == rows]

    assert set(taken(16384)) == {"hopper"}
    assert "hopper" not in taken(256)


@pytest.mark.quick
@pytest.mark.parametrize(("shape", "why"), [((128, 256), "128 rows"), ((256, 320), "320 columns")])
def test_what_the_kernel_refuses(shape: tuple[int, int], why: str) -> None:
    with target("gpu", "NVIDIA H200"):
        call = lookup("round_fp8").call(jax.ShapeDtypeStruct(shape, BF16), jax.ShapeDtypeStruct((1,), jnp.float32))
        assert why in str(forward.IMPLEMENTATION.refusal(call))


@pytest.mark.quick
def test_calls_without_a_meaning_are_refused() -> None:
    x = jnp.ones((4, 4))
    with pytest.raises(ValueError, match="a matrix of"):
        ROUND_FP8.call(x[0], jnp.ones(1))
    with pytest.raises(ValueError, match=r"shape \(1,\)"):
        ROUND_FP8.call(x, jnp.ones(()))
    with pytest.raises(ValueError, match="dtype of round_fp8"):
        ROUND_FP8.call(x, jnp.ones(1), dtype="int8")


@pytest.mark.parametrize("scaling", ["current", "delayed"])
@pytest.mark.parametrize("outputs", [(256,), (256, 40)])
def test_products_of_turned_operands_are_the_same(
    scaling: str, outputs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel's results made by the reference, where the kernel would take the shape."""
    from capibara.precision import Fp8Settings

    x = _normal(0, 2, 128, 256)
    weights = [_normal(1 + n, 256, columns, dtype=jnp.float32) / 16 for n, columns in enumerate(outputs)]
    history = jnp.full((1 + len(outputs), 4), 3.0) if scaling == "delayed" else None
    turned = 0

    def by_reference(x: Any, factor: Any, dtype: str) -> Any:
        nonlocal turned
        if any(length % 128 for length in x.shape):
            return None
        turned += 1
        *made, largest = reference(x, factor, dtype=dtype)
        return *made, largest[0]

    def run(history: Any) -> Any:
        def loss(x: Any, weights: Any, history: Any) -> Any:
            made = fp8_products(x, weights, Fp8Settings(scaling=scaling), history=history)
            return sum((y.astype(jnp.float32) ** 2).sum() for y in made)

        return jax.value_and_grad(loss, (0, 1))(x, weights, history)

    monkeypatch.setattr(fp8, "has_fp8_units", lambda: True)
    monkeypatch.setattr(fp8, "both_ways", lambda *given: None)
    wanted = run(history)
    monkeypatch.setattr(fp8, "both_ways", by_reference)
    found = run(history)
    assert turned == 2  # x and one gradient; 40 columns are none that the kernel takes
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # Sums over rows in another order: of 256 numbers in float32, rounded to bfloat16.
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=float(ml_dtypes.finfo(BF16).eps), atol=1e-3
        )
