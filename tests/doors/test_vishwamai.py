"""vishwamai.kernels.tpu: its pieces together, as the document puts them."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import capibara.jax.numpy as cnp
from capibara.kernels import explain, registry, target
from capibara.kernels.core.dispatch import recording
from capibara.mesh.context import active, current
from vishwamai.kernels import tpu
from vishwamai.kernels.tpu import (
    PrecisionConfig,
    benchmark_kernel,
    gemm,
    register_tpu_op,
    tile_layout,
    tpu_kernel,
    untile_layout,
    validate_sharding,
)

RNG = np.random.default_rng(0)
A = jnp.asarray(RNG.normal(size=(128, 256)), jnp.float32)
B = jnp.asarray(RNG.normal(size=(256, 128)), jnp.float32)
EXACT = np.asarray(A, np.float64) @ np.asarray(B, np.float64)
# Two operands rounded to bfloat16, 2**-9 each; the sums and the result are float32.
ROUNDED = 2 * 2**-9
FLOAT32 = 4 * 256**0.5 * 2**-24


def error(got: Any) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - EXACT) / np.linalg.norm(EXACT))


@tpu_kernel(precision=PrecisionConfig.HIGH)
def efficient_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """One product in blocks."""
    return gemm(a, b, block_size=128, use_bfloat16=True)


@pytest.mark.quick
def test_a_decorated_product() -> None:
    with jax.named_scope("optimization_block"):
        got = efficient_matmul(A, B)
    assert got.dtype == jnp.float32
    assert 2**-12 < error(got) < ROUNDED
    assert efficient_matmul.__doc__ == "One product in blocks."
    text = efficient_matmul.lower(A, B).as_text(debug_info=True)
    assert "efficient_matmul" in text
    with target("tpu", "TPU v4"):
        (chosen,) = explain(efficient_matmul, A, B).selections
    assert chosen.implementation == "pallas_tpu"


def test_a_kernel_inside_another_program() -> None:
    outer = jax.jit(lambda a, b: efficient_matmul(a, b) * 2)
    assert error(outer(A, B) / 2) < ROUNDED

    async def serve() -> Any:
        return efficient_matmul(A, B)

    assert error(asyncio.run(serve())) < ROUNDED
    assert not active()


@pytest.mark.quick
def test_the_keywords_of_gemm() -> None:
    assert error(gemm(A, B, use_bfloat16=False)) < FLOAT32 < error(gemm(A, B, use_bfloat16=True))
    programs = {str(jax.make_jaxpr(lambda a, b, s=s: gemm(a, b, block_size=s))(A, B)) for s in (128, 256)}
    assert len(programs) == 2
    with pytest.raises(ValueError, match="positive multiple of 128"):
        gemm(A, B, block_size=64)


@pytest.mark.quick
def test_inside_a_kernel_the_context_is_on() -> None:
    seen: list[Any] = []

    @tpu_kernel
    def layer(a: jax.Array, b: jax.Array) -> jax.Array:
        seen.append((active(), current().precision))  # type: ignore[union-attr]
        return cnp.matmul(a, b)

    with recording() as found:
        got = layer(A, B)
    assert seen == [(True, "bfloat16")]
    assert [s.call.op.name for s in found] == ["gemm"]
    # A CPU multiplies float32 in full whatever is asked.
    assert error(got) < FLOAT32
    assert not active()
    with recording() as outside:
        cnp.matmul(A, B)
    assert not outside


@pytest.mark.quick
def test_a_users_op_over_the_library() -> None:
    @register_tpu_op
    def gated(inputs: jax.Array, gate: jax.Array) -> jax.Array:
        """A custom operation."""
        return inputs * jax.nn.sigmoid(gate)

    try:
        assert "gated" in registry()

        @tpu_kernel
        def block(x: jax.Array, w: jax.Array) -> jax.Array:
            return gated(gemm(x, w), x @ w)

        names = [s.call.op.name for s in explain(block, A, B).selections]
        assert names[-1] == "gated"
        assert "gemm" in names
        assert jax.grad(lambda x: block(x, B).sum())(A).shape == A.shape
    finally:
        gated.unregister()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shape", "names", "spec"),
    [
        ((4, 8), ("data", "model"), PartitionSpec("data", "model")),
        ((4, 4, 2), ("data", "model", "expert"), PartitionSpec(("data", "expert"), "model")),
    ],
)
def test_a_sharded_product_on_meshes_of_32(shape: Any, names: Any, spec: PartitionSpec) -> None:
    mesh = Mesh(np.asarray(jax.devices()[:32]).reshape(shape), names)
    rows = NamedSharding(mesh, PartitionSpec(spec[0], None))
    columns = NamedSharding(mesh, PartitionSpec(None, spec[1]))
    a, b = jax.device_put(np.asarray(A), rows), jax.device_put(np.asarray(B), columns)
    validate_sharding(a, mesh, PartitionSpec(spec[0], None))
    got = validate_sharding(efficient_matmul(a, b), mesh, spec)
    assert error(got) < ROUNDED
    with pytest.raises(ValueError, match=r"expected: .*\n.*actual: "):
        validate_sharding(got, mesh, PartitionSpec(None, spec[1]))


def test_tiles_inside_a_kernel() -> None:
    image = jnp.asarray(RNG.normal(size=(1, 130, 250, 2)), jnp.float32)

    @tpu_kernel
    def brighten(x: jax.Array) -> jax.Array:
        return untile_layout(tile_layout(x) + 1, x.shape)

    np.testing.assert_array_equal(brighten(image), image + 1)


def test_a_benchmark_is_a_median_of_waited_for_calls() -> None:
    timing = benchmark_kernel(efficient_matmul, A, B, samples=5)
    assert timing.samples >= 3
    assert 0 < timing.low <= timing.seconds <= timing.high


@pytest.mark.quick
def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'group_norm'; it has PrecisionConfig"):
        _ = tpu.group_norm
    with pytest.raises(ImportError):
        from vishwamai.kernels.tpu import group_norm  # noqa: F401
    assert {"precision", "use_efficient_attention"} <= set(inspect.signature(tpu_kernel).parameters)
    assert list(inspect.signature(gemm).parameters) == ["a", "b", "block_size", "use_bfloat16"]
