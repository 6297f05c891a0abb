"""Memory by the documented door, as the documents write it."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.quick
def test_the_manager_and_the_optimizer() -> None:
    import capibara.jax as jax
    import capibara.jax.numpy as jnp
    from capibara.jax import get_optimization_status
    from capibara.jax.tpu_v4.optimizations import HBMOptimizer, TpuMemoryManager

    memory_manager = TpuMemoryManager(
        memory_limit_gb=32.0,
        cleanup_threshold=0.85,
        prefetch_enabled=True,
        compression_enabled=True,
    )
    hbm_optimizer = HBMOptimizer(access_pattern="sequential", cache_policy="lru", bandwidth_limit_gbps=900)

    @jax.jit
    def forward(batch: jax.Array) -> jax.Array:
        return jnp.tanh(batch).sum()

    large_batch = jnp.ones((64, 128))
    with memory_manager.managed_context():
        result = forward(large_batch)
        status = get_optimization_status()
    assert status["memory_optimized"] is True
    assert float(result) == pytest.approx(64 * 128 * np.tanh(1), rel=1e-5)
    plan = hbm_optimizer.plan({"a": (8, 128), "b": (8, 128)}, ["a", "b"])
    assert plan.seconds == pytest.approx(2 * 4096 / 900e9)
    assert plan.prefetch_distance == 1


@pytest.mark.quick
def test_the_monitor_and_the_cache() -> None:
    import capibara.jax.numpy as jnp
    from capibara.jax.tpu_v4.optimizations import TpuMemoryMonitor, create_optimized_cache

    memory_monitor = TpuMemoryMonitor(memory_limit_gb=32.0, cleanup_threshold=0.85)
    cache = create_optimized_cache(
        cache_size_gb=4.0,
        use_hbm=True,  # in the devices' memory
        prefetch_enabled=True,
    )
    cache["keys"] = jnp.ones((256, 1024))
    assert "keys" in cache
    assert memory_monitor.usage() >= 1 / 1024
    assert memory_monitor.peak() >= memory_monitor.usage()
    cache.prefetch(["keys"])
    assert cache["keys"].shape == (256, 1024)
    assert cache.stats()["device_bytes"] == 2**20
    del cache["keys"]
    assert "keys" not in cache
    cache.close()
