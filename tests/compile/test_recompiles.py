"""A function that is compiled again says which argument changed, or which line."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.compile.recompiles import Change, RecompileDetector, watch_recompiles


@pytest.mark.quick
def test_the_argument_and_what_changed_in_it() -> None:
    detector = RecompileDetector()

    @detector.watch
    @jax.jit
    def step(params: dict[str, list[jax.Array]], x: jax.Array) -> jax.Array:
        return params["w"][0] * x

    def changes() -> tuple[Change, ...]:
        return detector.recompilations[-1].changes

    three, four = np.ones(3, np.float32), np.ones(4, np.float32)
    step({"w": [three]}, three)
    step({"w": [three]}, three)
    assert not detector.recompilations
    step({"w": [four]}, np.float32(1))
    assert changes() == (Change("params['w'][0]", "shape", "(3,)", "(4,)"), Change("x", "shape", "(3,)", "()"))
    step({"w": [four]}, np.int32(1))
    assert changes() == (Change("x", "dtype", "float32", "int32"),)
    step({"w": [four]}, 1.0)
    assert changes() == (Change("x", "weak type", "False", "True"),)
    step({"w": [four], "v": [three]}, np.float32(1))
    assert changes() == (Change("params['v'][0]", "structure", "absent", "float32(3,)"),)
    assert detector.counts["step"] == 5
    assert "params['v'][0]: structure absent -> float32(3,)" in detector.report()


def test_static_values_and_shardings() -> None:
    detector = RecompileDetector()
    power = detector.watch(jax.jit(lambda x, n: x**n, static_argnums=1))
    x = jnp.arange(8.0)
    power(x, 2)
    power(x, 3)
    assert detector.recompilations[-1].changes == (Change("n", "static value", "2", "3"),)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    power(jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))), 3)
    (change,) = detector.recompilations[-1].changes
    assert (change.path, change.what) == ("x", "sharding")
    assert "'data'" in change.now


@pytest.mark.quick
def test_the_line_of_the_jaxpr_where_no_argument_changed() -> None:
    detector = RecompileDetector()
    x = np.ones(5, np.float32)
    for factor in (2.0, 3.0, 3.0):
        detector.watch(_made(factor))(x)
    first, second = detector.recompilations
    assert "the jaxpr did" in first.reason
    assert "2.0" in first.reason
    assert "3.0" in first.reason
    assert "sin" not in first.reason  # that line is as it was
    assert "the same program was made again" in second.reason


def _made(factor: float) -> jax.stages.Wrapped:
    return jax.jit(lambda x: jnp.sin(x) * factor)


@pytest.mark.quick
def test_functions_that_nobody_watches_are_explained_by_jax(caplog: pytest.LogCaptureFixture) -> None:
    def unwatched_step(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return params["w"] + x

    function = jax.jit(unwatched_step)
    ones = {length: np.ones(length, np.float32) for length in (3, 4)}
    function({"w": ones[3]}, ones[3])  # before the context
    with caplog.at_level(logging.WARNING), RecompileDetector() as detector:
        function({"w": ones[3]}, ones[3])
        assert not detector.counts
        function({"w": ones[4]}, ones[4])
        for _ in range(2):
            jax.jit(lambda x: x - 9)(ones[3])
    again, anew = detector.recompilations
    assert again.function == "unwatched_step"
    assert "params['w'], now f32[4] and before f32[3]" in again.reason
    assert "made anew each time" in anew.reason
    assert detector.counts["unwatched_step"] == 1
    assert not caplog.messages  # jax's explanations are read, not logged
    assert not jax.config.jax_explain_cache_misses


def test_one_inside_of_another_sees_what_it_sees() -> None:
    def counted(x: jax.Array) -> jax.Array:
        return x * 11

    with RecompileDetector() as outer:
        with RecompileDetector() as inner:
            function = jax.jit(counted)
            for length in (3, 4):
                function(np.ones(length, np.float32))
        function(np.ones(5, np.float32))
    assert (outer.counts["counted"], inner.counts["counted"]) == (3, 2)
    assert [again.reason for again in inner.recompilations] == ["at x, now f32[4] and before f32[3]"]
    assert len(outer.recompilations) == 2
    assert not jax.config.jax_explain_cache_misses


def test_the_decorator_tells_each_reason_once(caplog: pytest.LogCaptureFixture, nothing_said_yet: None) -> None:
    @watch_recompiles
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    with caplog.at_level(logging.WARNING):
        for length in (3, 4, 3, 4):
            double(np.ones(length))
    assert len(caplog.messages) == 1
    assert "x: shape (3,) -> (4,)" in caplog.messages[0]
    assert len(double.detector.recompilations) == 1  # type: ignore[attr-defined]
