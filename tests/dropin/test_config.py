"""`capibara.jax.config`: jax's, and two options more."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import jax
import pytest

from capibara.jax import config
from capibara.mesh.context import active

FLAGS = ("jax_check_tracer_leaks", "jax_debug_nans", "jax_log_compiles")


def flags() -> list[bool]:
    return [getattr(jax.config, name) for name in FLAGS]


@pytest.fixture(autouse=True)
def everything_is_put_back() -> Iterator[None]:
    before = flags()
    yield
    config.update("jax_debug_mode", False)
    config.update("enable_tpu_optimizations", False)
    assert flags() == before
    assert not active()


@pytest.mark.quick
def test_it_behaves_as_jax_config() -> None:
    assert config.jax_enable_x64 is jax.config.jax_enable_x64 is False
    assert isinstance(config, type(jax.config))
    assert set(jax.config.values) < set(config.values)
    assert set(dir(jax.config)) <= set(dir(config))
    assert config.read("jax_dump_ir_to") == jax.config.read("jax_dump_ir_to")
    try:
        config.update("jax_enable_x64", True)
        assert jax.config.jax_enable_x64
        assert config.jax_enable_x64
    finally:
        jax.config.update("jax_enable_x64", False)
    with jax.enable_x64(True):
        assert config.jax_enable_x64


def test_unknown_option_says_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"Unrecognized config option: jax_enable_x65. Nearest: jax_enable_x64"):
        config.update("jax_enable_x65", True)
    with pytest.raises(AttributeError, match="Nearest: enable_tpu_optimizations"):
        config.update("enable_tpu_optimisations", True)
    with pytest.raises(AttributeError):
        _ = config.no_such_option


@pytest.mark.quick
def test_optimizations_are_process_wide_and_reversible() -> None:
    answers: list[bool] = []

    def ask_a_thread() -> bool:
        thread = threading.Thread(target=lambda: answers.append(active()))
        thread.start()
        thread.join(10)
        return answers[-1]

    assert not config.enable_tpu_optimizations
    config.update("enable_tpu_optimizations", True)
    assert config.enable_tpu_optimizations
    assert config.values["enable_tpu_optimizations"] is config.read("enable_tpu_optimizations") is True
    assert active()
    assert ask_a_thread()
    assert jax.config.jax_default_matmul_precision == "bfloat16"
    config.update("enable_tpu_optimizations", False)
    assert not ask_a_thread()
    assert jax.config.jax_default_matmul_precision is None


def test_debug_mode_puts_back_what_was_set() -> None:
    try:
        jax.config.update("jax_debug_nans", True)
        config.update("jax_debug_mode", True)
        assert config.jax_debug_mode
        assert flags() == [True, True, True]
        config.update("jax_check_tracer_leaks", True)
        config.update("jax_debug_mode", False)
        assert not config.jax_debug_mode
        assert flags() == [False, True, False]
    finally:
        jax.config.update("jax_debug_nans", False)


@pytest.mark.filterwarnings("ignore")
def test_debug_mode_finds_a_nan() -> None:
    config.update("jax_debug_mode", True)
    with pytest.raises(FloatingPointError):
        jax.jit(jax.numpy.log)(-1.0).block_until_ready()


@pytest.mark.parametrize("name", ["enable_tpu_optimizations", "jax_debug_mode"])
def test_values_must_be_bool(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is True or False"):
        config.update(name, "yes")


def test_setting_attributes() -> None:
    config.enable_tpu_optimizations = True
    assert active()
    config.jax_test_attribute = 1
    assert jax.config.jax_test_attribute == 1
    del jax.config.jax_test_attribute
