"""A config's every keyword is seen in the program, or in what is kept of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from capibara.compile import persistent
from capibara.compile.events import count_compilations
from capibara.compile.jit import TpuCompilationConfig, create_jitted_forward, create_tpu_optimized_jit
from capibara.compile.persistent import persistent_cache

ONES = np.ones((4, 16), np.float32)


@pytest.fixture
def cache_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """jax's cache on disk, in a folder of the test's, and off again."""
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_compilation_cache_max_size",
             "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(persistent, "_current", None)
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", True)
    made = persistent_cache(tmp_path)
    assert made.folder is not None
    yield made.folder
    if persistent._keeper is not None:
        jax.monitoring.unregister_event_listener(persistent._keeper.on_event)
        monkeypatch.setattr(persistent, "_keeper", None)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def jitted(fn: Any, **keywords: Any) -> Any:
    return create_tpu_optimized_jit(config=TpuCompilationConfig(**{"cache_compiled_functions": False, **keywords}))(fn)


def layers(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jnp.tanh(x @ w) * x
    return x.sum()


@pytest.mark.quick
def test_bfloat16_reaches_arguments_and_what_is_closed_over() -> None:
    kept = jnp.ones((16, 16))

    def function(x: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x @ kept, number

    assert [leaf.dtype for leaf in jitted(function)(ONES, jnp.arange(3))] == [jnp.float32, jnp.int32]
    rounded = jitted(function, use_bfloat16=True)
    assert rounded(ONES, jnp.arange(3))[1].dtype == jnp.int32
    assert jitted(lambda x: x, use_bfloat16=True)(ONES).dtype == jnp.bfloat16
    # The weights that are closed over are float32; their product is one of bfloat16 operands.
    text = rounded.lower(ONES, jnp.arange(3)).as_text()
    assert "lhs_precision_type = bf16, rhs_precision_type = bf16, accumulation_type = f32" in text
    assert "lhs_precision_type" not in jitted(function).lower(ONES, jnp.arange(3)).as_text()


@pytest.mark.quick
def test_memory_optimization_keeps_less_for_the_backward_pass() -> None:
    def kept_bytes(memory: bool) -> int:
        _, backward = jax.vjp(jitted(layers, memory_optimization=memory), jnp.eye(16), ONES)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(backward))

    # The three layers' values, or the arguments alone, of which they are computed again.
    assert kept_bytes(True) == 16 * 16 * 4 + ONES.nbytes < kept_bytes(False)
    options = jitted(layers, memory_optimization=True).config.options()
    assert options == {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    np.testing.assert_allclose(
        jax.jit(jax.grad(jitted(layers, memory_optimization=True)))(jnp.eye(16), ONES),
        jax.jit(jax.grad(layers))(jnp.eye(16), ONES),
        rtol=1e-5,
    )


@pytest.mark.quick
def test_memory_optimization_orders_operations_by_what_they_need() -> None:
    def branches(x: jax.Array) -> jax.Array:
        return sum(jnp.outer(x, jnp.sin(x + i)).sum(0) @ jnp.outer(x, x * i) for i in range(6))  # type: ignore[return-value]

    def temporaries(memory: bool) -> int:
        compiled = jitted(branches, memory_optimization=memory).compile([(256,)])
        return int(compiled.executable.memory_analysis().temp_size_in_bytes)

    # Each branch has a matrix of 256 KiB; they need not be there at once.
    assert temporaries(True) < 0.5 * temporaries(False)


def test_a_level_is_in_the_program_that_runs() -> None:
    sizes = {
        level: len(
            jitted(layers, optimization_level=level)
            .compile([(16, 16), (4, 16)])
            .executable.runtime_executable()
            .serialize()
        )
        for level in ("none", "basic", "balanced")
    }
    assert len(set(sizes.values())) == 3, sizes


def test_async_collectives_are_said_to_be_nothing_here(
    caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    with caplog.at_level(logging.WARNING):
        assert float(jitted(layers, enable_async_collective=True)(jnp.eye(16), ONES)) == float(
            layers(jnp.eye(16), ONES)
        )
    assert any("changes nothing on a CPU" in text for text in caplog.messages)


@pytest.mark.quick
def test_programs_are_kept_on_disk_or_not(cache_on: Path) -> None:
    def kept() -> int:
        return sum("jit_told_apart" in path.name for path in cache_on.glob("*-cache"))

    def told_apart(x: jax.Array) -> jax.Array:
        return x * 3 + 1

    jitted(told_apart, cache_compiled_functions=False)(ONES)
    jitted(told_apart, cache_compiled_functions=False).compile([(5,)])
    assert kept() == 0
    jitted(told_apart, cache_compiled_functions=True)(ONES)
    assert kept() == 1
    jitted(told_apart, cache_compiled_functions=True).compile([(5,)])
    assert kept() == 2
    with count_compilations() as counts:
        jitted(told_apart, cache_compiled_functions=True)(ONES)
    assert (counts.compiled, counts.from_disk) == (0, 1)


def test_a_damaged_entry_is_made_again_and_the_number_of_entries_is_bounded(cache_on: Path) -> None:
    def told_apart(x: jax.Array) -> jax.Array:
        return x * 5 - 1

    jitted(told_apart, cache_compiled_functions=True)(ONES)
    (entry,) = [path for path in cache_on.glob("*-cache") if "told_apart" in path.name]
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    with count_compilations() as counts, pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        jitted(told_apart, cache_compiled_functions=True)(ONES)
    assert counts.compiled == 1
    assert persistent._whole(entry)  # written anew, where jax alone would have left it
    bounded = persistent_cache(max_entries=2)
    assert bounded.folder == cache_on
    for number in range(4):
        jitted(lambda x, number=number: x - number, cache_compiled_functions=True)(ONES)
    assert bounded.entries <= 2


def test_inside_of_other_programs_it_is_a_part_of_them() -> None:
    function = jitted(lambda x: x * 2, optimization_level="none")
    assert float(jax.jit(lambda x: function(x) + function(np.float32(1)))(3.0)) == 8.0
    assert float(jax.grad(function)(3.0)) == 2.0
    assert jax.vmap(function)(jnp.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.quick
def test_static_numbers_are_constants_and_other_values_other_programs() -> None:
    seen: list[int] = []

    def power(x: jax.Array, n: int) -> jax.Array:
        seen.append(n)
        return x**n

    compiled = jitted(power).compile(input_shapes=[(3,)], static_argnums=1, static_args=[2])
    assert compiled.ready
    assert compiled(np.full(3, 2, np.float32), 2).tolist() == [4, 4, 4]
    assert compiled(np.full(3, 2, np.float32), 3).tolist() == [8, 8, 8]
    assert compiled(np.full(3, 3, np.float32), 3).tolist() == [27, 27, 27]
    assert seen == [2, 3]


def test_other_shapes_than_the_declared_are_compiled_when_they_come() -> None:
    forward = create_jitted_forward(lambda x: x + 1, [(2, 3), (4, 3)])
    assert forward.programs == 2
    with count_compilations() as counts:
        assert forward(np.ones((4, 3), np.float32)).shape == (4, 3)
        assert forward(jnp.ones((2, 3))).shape == (2, 3)
    assert "jit(<lambda>)" not in counts.names
    with count_compilations() as counts:
        assert forward(np.ones((5, 3), np.float32)).shape == (5, 3)
        assert forward(np.ones((4, 3), np.int32)).dtype == jnp.int32
    assert counts.names.count("jit(<lambda>)") == 2


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="Choices: 'none', 'basic', 'balanced', 'aggressive'"):
        TpuCompilationConfig(optimization_level="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use_bfloat16 is True or False"):
        TpuCompilationConfig(use_bfloat16="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has a shape or is static"):
        jitted(layers).compile(input_shapes=[(2, 3)])
    with pytest.raises(ValueError, match="A shape is a tuple of sizes"):
        jitted(layers).compile(input_shapes=["2x3", (1,)])
    with pytest.raises(ValueError, match="once the static arguments are known"):
        _ = jitted(layers).compile([(2, 3)], static_argnums=[0]).executable
