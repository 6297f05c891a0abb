"""The documented compilation calls change what is compiled, keyword by keyword."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.jax.tpu_v4.optimizations import (
    TpuCompilationConfig,
    TpuWarmupManager,
    create_jitted_forward,
    create_tpu_optimized_jit,
)


@pytest.mark.quick
def test_the_documented_compile_binds_parameters_at_the_first_call() -> None:
    config = TpuCompilationConfig(
        optimization_level="aggressive",
        use_bfloat16=True,
        enable_async_collective=True,
        memory_optimization=True,
        cache_compiled_functions=True,
    )

    @create_tpu_optimized_jit(config=config)
    def optimized_forward(params: Any, inputs: Any) -> Any:
        return inputs @ params

    compiled = optimized_forward.compile(input_shapes=[(4, 8)], static_argnums=[0])
    assert not compiled.ready
    eye = np.eye(8, dtype=np.float32)
    assert compiled(eye, np.ones((4, 8), np.float32)).dtype == jnp.bfloat16
    assert compiled.ready
    # Another value of the same shapes runs in the same program, and is not mistaken for the first.
    assert float(compiled(2 * eye, np.ones((4, 8), np.float32))[0, 0]) == 2.0


@pytest.mark.quick
def test_the_forward_of_a_model_has_its_weights_as_operands() -> None:
    class Model:
        def __init__(self) -> None:
            self.params = jnp.ones((64, 64))

        def apply(self, params: Any, inputs: Any) -> Any:
            return inputs @ params

        def forward(self, inputs: Any) -> Any:
            return self.apply(self.params, inputs)

    model = Model()
    forward = create_jitted_forward(
        model_fn=model.forward,
        input_shapes=[(2, 64)],
        optimization_level="aggressive",
        use_bfloat16=True,
        enable_async_collective=True,
    )
    assert forward.executable.memory_analysis().argument_size_in_bytes >= 64 * 64 * 4
    assert float(forward(np.ones((2, 64), np.float32))[0, 0]) == 64.0
    model.params = 2 * model.params
    assert float(forward(np.ones((2, 64), np.float32))[0, 0]) == 128.0


def test_the_warm_up_is_told_its_batches() -> None:
    manager = TpuWarmupManager(compilation_cache_size_gb=2.0, warmup_steps=10, progressive_warmup=True)
    shapes = [(8, 4, 6), (16, 4, 6), (32, 4, 6)]
    done = manager.warmup_model(model=jax.jit(jnp.tanh), input_shapes=shapes, batch_sizes=[8, 16, 32])
    assert [row.shape for row in done.shapes] == shapes
