"""Operands that lie on a mesh of one device, as a trainer places them: from JAX 0.11 on their types name that mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from capibara.kernels import attention, paged_attention, target
from capibara.mesh import MeshConfig


def _placed(*shape: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    mesh = MeshConfig((1, 1), ("data", "model")).build(jax.devices()[:1])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


@pytest.mark.quick
def test_documents_of_a_row_are_kept_apart_by_the_kernel() -> None:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        y = attention(q, k, v, causal=True, segment_ids=segments, implementation="hopper")
        return y.astype(jnp.float32).sum()

    q, k = _placed(2, 512, 6, 64), _placed(2, 512, 2, 64)
    with target("gpu", device_kind="NVIDIA H200"):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, _placed(2, 512, dtype=jnp.int32))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_pages_are_read_by_the_kernel() -> None:
    def run(*operands: jax.Array) -> jax.Array:
        return paged_attention(*operands, implementation="hopper")

    pool = _placed(32, 64, 2, 128)
    operands = _placed(4, 8, 128), pool, pool, _placed(4, 8, dtype=jnp.int32), _placed(4, dtype=jnp.int32)
    with target("gpu", device_kind="NVIDIA H200"):
        traced = jax.jit(run).trace(*operands)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
