"""The documented names of capibara.jax, used as a program written to the documents uses them."""

from __future__ import annotations

import jax as real_jax
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.quick
def test_a_program_for_plain_jax_runs_with_the_import_changed() -> None:
    import capibara.jax as jax
    import capibara.jax.nn as nn
    import capibara.jax.numpy as jnp
    from capibara.jax import random

    @jax.jit
    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(nn.relu(jnp.dot(x, weights)) ** 2)

    key = random.PRNGKey(7)
    x, weights = random.normal(key, (16, 8)), jnp.ones((8, 4))
    value, gradient = jax.value_and_grad(loss)(weights, x)
    expected = np.maximum(np.asarray(x) @ np.ones((8, 4)), 0)
    np.testing.assert_allclose(value, (expected**2).sum(), rtol=1e-4)
    np.testing.assert_allclose(gradient, 2 * np.asarray(x).T @ expected, rtol=1e-4, atol=1e-4)


def test_the_backend_says_what_it_is() -> None:
    import capibara.jax as jax

    assert jax.__name__ == "capibara.jax"
    assert hasattr(jax, "tpu_v4_optimizations")
    assert jax.__version__ == real_jax.__version__


def test_meshes_and_context_from_core() -> None:
    import capibara.jax as jax
    import capibara.jax.numpy as jnp
    from capibara.jax._src.core import (
        TPUv4MeshConfigurations,
        create_tpu_mesh_config,
        tpu_v4_optimization_context,
        with_sharding_constraint,
    )

    presets = TPUv4MeshConfigurations()
    assert presets.CULTURAL_ANALYSIS.shape == (4, 8)
    assert presets.QUANTUM_CLASSICAL.shape == (8, 4)
    assert presets.SPIKING_NEURAL.shape == (16, 2)
    config = create_tpu_mesh_config(mesh_shape=(4, 8), optimization_target="inference", memory_limit_gb=32.0)

    def gram(x: jax.Array) -> jax.Array:
        placed = with_sharding_constraint(x, ("batch", "hidden"))
        return jnp.sum(placed * placed)

    x = jnp.random.normal(jax.random.PRNGKey(0), (64, 128))
    plain = jax.jit(gram)(x)
    with tpu_v4_optimization_context(mesh=config):
        np.testing.assert_allclose(jax.jit(gram)(x), plain, rtol=1e-5)


def test_detection_status_and_diagnosis() -> None:
    import capibara.jax as jax
    from capibara.jax import diagnostics

    info = jax.get_backend_info()
    for key in ("name", "tpu_optimized", "custom_kernels", "memory_limit_gb"):
        assert key in info
    for key in ("flash_attention", "parallel_scan", "vq_kernels"):
        assert isinstance(info["capabilities"][key], bool)
    try:
        if not jax.get_optimization_status()["tpu_optimized"]:
            jax.config.update("enable_tpu_optimizations", True)
        assert jax.get_optimization_status()["tpu_optimized"]
    finally:
        jax.config.update("enable_tpu_optimizations", False)
    assert diagnostics.check_installation().jax_native_available


def test_debug_options() -> None:
    import capibara.jax as jax

    try:
        jax.config.update("jax_debug_mode", True)
        jax.config.update("jax_check_tracer_leaks", True)
        jax.config.update("jax_log_compiles", True)
        assert jax.jit(lambda x: x * x)(3) == 9
    finally:
        jax.config.update("jax_debug_mode", False)
    assert not jax.config.jax_log_compiles


def test_old_spellings_of_the_other_documents() -> None:
    import capibara.jax as jax
    from capibara.jax.experimental import mesh_utils
    from capibara.jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(mesh_utils.create_device_mesh((4, 8)), axis_names=("data", "model"))
    with jax.set_mesh(mesh):
        spec = PartitionSpec("data", "model")
        policy = jax.pjit(in_axis_resources=spec, out_axis_resources=spec)
        assert policy(lambda x: x + 1)(np.zeros((8, 8))).sharding.spec == spec
    assert jax.device_memory_allocated() is None or jax.device_memory_peak() >= 0


def test_checkpoint_as_a_module() -> None:
    from capibara.jax.checkpoint import checkpoint
    from capibara.jax.experimental.checkpoint import checkpoint as again

    assert checkpoint is again is real_jax.checkpoint
    assert real_jax.grad(checkpoint(lambda x: x**3))(2.0) == 12.0
