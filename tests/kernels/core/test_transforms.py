"""What meshes ask of a kernel: over which axes its results vary, and how it is split where nothing is placed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import nearest_code, rms_norm, target
from capibara.kernels.ops.linalg import gemm

OPS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "gemm": (gemm, (256, 256), (256, 128)),
    "rms_norm": (rms_norm, (256, 1024), (1024,)),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", OPS)
def test_a_hopper_gradient_inside_shard_map_keeps_its_axes(name: str) -> None:
    """plgpu.kernel forgets the axes of its out_type, and JAX refuses a gradient that varies over fewer."""
    op, split, whole = OPS[name]
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x: Any, weight: Any) -> Any:
        return op(x, weight, implementation="hopper").astype(jnp.float32).sum()[None]

    local = jax.shard_map(loss, mesh=mesh, in_specs=(jax.P("x"), jax.P()), out_specs=jax.P("x"))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (split, whole)]
    with target("gpu", "NVIDIA H200"):
        gradient = jax.jit(jax.grad(lambda *args: local(*args).sum(), argnums=(0, 1)))
        text = jax.export.export(gradient, platforms=["cuda"])(*shapes).mlir_module()
    assert "mosaic_gpu" in text
    assert "all_reduce" in text, "the replicated operand's gradient is summed over the axis"


def test_operands_that_are_not_on_the_mesh_in_force() -> None:
    """XLA then hands the op's mesh rule layouts without names, of which nothing is split."""
    x, codes = jnp.arange(8.0).reshape(4, 2), jnp.eye(2)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        indices = jax.jit(lambda x: nearest_code(x, codes))(x)
    np.testing.assert_array_equal(indices, nearest_code(x, codes))
