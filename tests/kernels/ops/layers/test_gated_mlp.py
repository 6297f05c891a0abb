"""gated_mlp: what it computes with its kernels and without, its gradients, what it refuses, and who is taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype as typechecker
from jaxtyping import jaxtyped
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import gated_mlp, target
from capibara.kernels.core.dispatch import recording
from capibara.kernels.ops.layers.activation import tanh_formulas
from capibara.kernels.ops.layers.gated_mlp import api
from capibara.kernels.ops.layers.gated_mlp.api import GATED_PRODUCTS, GATED_PRODUCTS_GRAD, has_kernels
from capibara.kernels.ops.layers.gated_mlp.hopper import backward, forward, turns
from capibara.kernels.ops.layers.gated_mlp.hopper.turns import TurnsConfig
from capibara.kernels.ops.layers.gated_mlp.pairs import paired, unpaired
from capibara.kernels.ops.layers.gated_mlp.reference import reference, reference_grad
from capibara.kernels.ops.layers.grouped.hopper import forward as walked
from capibara.kernels.pallas.hopper import SMEM_BYTES, smem_bytes

BF16 = jnp.dtype("bfloat16")
checked = jaxtyped(typechecker=typechecker)(gated_mlp)


def _normal(seed: int, *shape: int, dtype: Any = BF16) -> Any:
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(numbers / shape[0] ** 0.5).astype(dtype)


def _weights(depth: int, columns: int, dtype: Any = BF16) -> tuple[Any, Any, Any]:
    return _normal(1, depth, columns, dtype=dtype), _normal(2, depth, columns, dtype=dtype), _normal(
        3, columns, depth, dtype=dtype
    )  # fmt: skip


@contextlib.contextmanager
def emulated(programs: int) -> Iterator[None]:
    modules = (forward, backward, turns, walked, tanh_formulas)
    with emulator.emulated(*modules), pytest.MonkeyPatch.context() as patched:
        for module in (forward, backward):
            patched.setattr(module, "multiprocessors", lambda kind: programs)
        yield


def _within(found: Any, wanted: Any, units: float, length: int) -> None:
    """So many roundings of bfloat16 of the largest number, and sqrt(length) of the float32 sums."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= (units * 2.0**-9 + 8 * 2.0**-24 * length**0.5) * np.abs(wanted).max()


def _plain(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


@pytest.mark.quick
def test_elsewhere_it_is_three_products_and_an_activation() -> None:
    x, weights = _normal(0, 2, 3, 8, dtype=jnp.float32), _weights(8, 24, jnp.float32)
    np.testing.assert_allclose(checked(x, *weights), _plain(x, *weights), rtol=1e-5, atol=1e-6)
    found = jax.grad(lambda *a: gated_mlp(*a).sum(), (0, 1, 2, 3))(x, *weights)
    wanted = jax.grad(lambda *a: _plain(*a).sum(), (0, 1, 2, 3))(x, *weights)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.quick
def test_pairs_come_apart_again() -> None:
    gate, up = _normal(0, 3, 192), _normal(1, 3, 192)
    for one, other in zip(unpaired(paired(gate, up)), (gate, up), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "programs", "config"),
    [
        pytest.param(128, 128, 128, 1, TurnsConfig(), marks=pytest.mark.quick),  # two tiles: one for each warpgroup
        (200, 192, 320, 2, TurnsConfig(stages=2, slots=2, band=1)),  # a ring that comes round inside of a tile
        (
            264,
            320,
            192,
            3,
            TurnsConfig(stages=4, slots=3, band=2),
        ),  # five steps in four stages
        (16, 128, 128, 5, TurnsConfig(stages=6)),  # programs without a tile, warpgroups without one
    ],
)
@pytest.mark.parametrize("keep", [True, False])
def test_products_by_the_kernel(
    rows: int, depth: int, columns: int, programs: int, config: TurnsConfig, keep: bool
) -> None:
    x, pairs = _normal(5, rows, depth) * rows**0.5, _normal(6, depth, 2 * columns)
    with emulated(programs):
        made = jax.block_until_ready(forward.products_hopper(x, pairs, config=config, kind="silu", keep=keep))
    wanted = reference(x.astype(jnp.float32), pairs.astype(jnp.float32), kind="silu", keep=True)
    for found, exact in zip(made if keep else [made], wanted, strict=False):
        assert found.dtype == BF16
        _within(found, exact, 2, depth)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "identity"])
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "programs", "config"),
    [
        pytest.param(128, 128, 256, 1, TurnsConfig(), marks=pytest.mark.quick),
        (200, 192, 320, 2, TurnsConfig(stages=2, slots=2, band=1)),
        (264, 320, 192, 3, TurnsConfig(stages=3, slots=4, band=2)),
    ],
)
def test_gradients_by_the_kernel(
    rows: int, depth: int, columns: int, programs: int, config: TurnsConfig, kind: str
) -> None:
    d_out, down, products = _normal(5, rows, depth), _normal(6, columns, depth), _normal(7, rows, 2 * columns) * 8
    with emulated(programs):
        made = backward.products_grad_hopper(d_out, down, products, config=config, kind=kind)
        made = jax.block_until_ready(made)
    wide = [a.astype(jnp.float32) for a in (d_out, down, products)]
    _within(made, reference_grad(*wide, kind=kind), 2, depth)


def test_the_whole_by_kernels_and_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = _normal(0, 4, 40, 128) * 2, _weights(128, 256, jnp.float32)
    monkeypatch.setattr(api, "has_kernels", lambda *given, kind: True)
    with emulated(2), recording() as ran, target("gpu", "NVIDIA H200"):
        y = gated_mlp(x, *weights)
        grads = jax.grad(lambda *a: gated_mlp(*a).astype(jnp.float32).sum(), (0, 1, 2, 3))(x, *weights)
    assert [s.call.op.name for s in ran].count("gated_products_grad") == 1
    wide = [a.astype(jnp.float32) for a in (x, *weights)]
    _within(y, _plain(*wide), 4, 256)
    wanted = jax.grad(lambda *a: _plain(*a).sum(), (0, 1, 2, 3))(*wide)
    for found, given, exact in zip(grads, (x, *weights), wanted, strict=True):
        assert found.dtype == given.dtype
        _within(found, exact, 6, 256)  # of d_out, of both products, of their gradients, of the sum


def test_rings_fit_the_shared_memory() -> None:
    for candidates, columns, transposed in ((forward.candidates, 64, False), (backward.candidates, 128, True)):
        for config in candidates(None):  # type: ignore[operator]
            staged = 2 * config.slots * 64 * columns * 2
            assert smem_bytes(turns.ring(config, BF16, transpose_b=transposed)) + staged <= SMEM_BYTES


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype", "why"),
    [
        (4100, 128, 128, "bfloat16", "4100 rows"),
        (4096, 96, 128, "bfloat16", "sum over 96"),
        (4096, 128, 64, "bfloat16", "64 columns"),
        (4096, 128, 128, "float16", "bfloat16 alone"),
    ],
)
def test_what_the_kernels_refuse(rows: int, depth: int, columns: int, dtype: str, why: str) -> None:
    shape = jax.ShapeDtypeStruct
    with target("gpu", "NVIDIA H200"):
        call = GATED_PRODUCTS.call(shape((rows, depth), dtype), shape((depth, 2 * columns), dtype))
        assert why in str(forward.IMPLEMENTATION.refusal(call))
        weights = [shape(s, "float32") for s in ((depth, columns), (depth, columns), (columns, depth))]
        assert not has_kernels(shape((rows, depth), dtype), *weights, kind="silu")


@pytest.mark.quick
def test_arrays_that_do_not_belong_together_are_refused() -> None:
    x, (gate, up, down) = jnp.ones((2, 8)), _weights(8, 24, jnp.float32)
    with pytest.raises(ValueError, match=r"gate and up \[K, columns\]"):
        gated_mlp(x, gate[:, :8], up, down)
    with pytest.raises(ValueError, match="24 columns of up"):
        gated_mlp(x, gate, up, down.T)
    with pytest.raises(ValueError, match="multiple of 64"):
        GATED_PRODUCTS.call(x, jnp.ones((8, 48)))
    with pytest.raises(ValueError, match="rows, 2·columns"):
        GATED_PRODUCTS_GRAD.call(x, jnp.ones((64, 8)), jnp.ones((2, 64)))
    with pytest.raises(ValueError, match="kind"):
        GATED_PRODUCTS.call(x, jnp.ones((8, 128)), kind="silo")


@pytest.mark.quick
def test_kernels_are_for_many_rows_and_for_weights_that_are_cast() -> None:
    def taken(rows: int, dtype: str = "float32", kind: str = "NVIDIA H200") -> bool:
        weights = [jax.ShapeDtypeStruct(s, dtype) for s in ((2048, 8192), (2048, 8192), (8192, 2048))]
        with target("gpu", kind):
            return has_kernels(jax.ShapeDtypeStruct((rows, 2048), BF16), *weights, kind="silu")

    assert taken(16384)
    assert not taken(2048)
    assert not taken(16384, "bfloat16")
    assert not taken(16384, kind="NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_both_kernels_are_lowered_for_a_gpu(kind: str) -> None:
    from capibara.compile import lower_for

    x = jax.ShapeDtypeStruct((4096, 256), BF16)
    weights = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 192), (256, 192), (192, 256))]
    with target("gpu", "NVIDIA H200"):
        lower_for(
            jax.grad(lambda *a: gated_mlp(*a, kind=kind).astype(jnp.float32).sum(), (0, 1)), (x, *weights), "cuda"
        )
