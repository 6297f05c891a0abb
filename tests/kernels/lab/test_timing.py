"""Timing: enough calls a sample, fair turns, inputs that the cache cannot keep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.lab import timing


def _recorder(name: str, log: list[str], pause: float = 0.0) -> Callable[..., Any]:
    def fn(x: Any) -> Any:
        log.append(name)
        time.sleep(pause)
        return x

    return fn


@pytest.mark.quick
def test_candidates_take_turns() -> None:
    log: list[str] = []
    fns = {name: _recorder(name, log) for name in "ABC"}
    timing.compare(fns, jnp.ones(8), samples=4, sample_seconds=0.0, jit=False)
    # Two warm-up calls each and one to calibrate come first.
    assert log[-12:] == list("ABC") * 4


class _Clock:
    """In the place of the module `time`: it goes on where a function says that it worked, and a busy machine is none
    of its business."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def takes(self, seconds: float) -> Callable[..., Any]:
        def fn(x: Any) -> Any:
            self.now += seconds
            return x

        return fn


def test_a_sample_lasts_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    timing.launch_seconds("cpu")  # by the machine's own clock
    clock = _Clock()
    monkeypatch.setattr(timing, "time", clock)
    fns = {"short": clock.takes(0.0002), "long": clock.takes(0.02)}
    made = timing.compare(fns, jnp.ones(8), samples=3, sample_seconds=0.01, jit=False)
    for one in made.values():
        assert one.seconds * one.repeats >= 0.01
    assert 50 <= made["short"].repeats <= 100
    assert made["long"].repeats == 1
    assert made["long"].seconds == pytest.approx(0.02)


@pytest.mark.quick
def test_more_work_takes_longer() -> None:
    def chain(steps: int) -> Callable[[Any], Any]:
        return lambda x: jax.lax.fori_loop(0, steps, lambda _, y: jnp.sin(y), x)

    made = timing.compare({"short": chain(10), "long": chain(1000)}, jnp.ones(2048), samples=3)
    assert made["long"].seconds > 5 * made["short"].seconds


def test_a_slow_function_gets_fewer_samples() -> None:
    made = timing.compare(
        {"slow": _recorder("slow", [], 0.02)}, jnp.ones(8), samples=50, budget_seconds=0.05, jit=False
    )["slow"]
    assert made.samples == timing.LEAST_SAMPLES


def test_median_and_quartiles() -> None:
    made = timing._timing([5.0, 1.0, 3.0, 2.0, 4.0], repeats=7, copies=2, floor=0.1)
    assert (made.seconds, made.low, made.high, made.samples, made.repeats) == (3.0, 2.0, 4.0, 5, 7)
    assert made.spread == pytest.approx(2 / 3)
    assert not made.launch_bound
    assert timing._timing([1.0], 1, 1, floor=0.9).launch_bound


def test_small_inputs_are_copied_until_they_outgrow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.CACHE_BYTES, "cpu", 4096)
    x = jnp.arange(512, dtype=jnp.float32)  # 2 KiB of a 4 KiB cache
    sets = timing.input_sets((x, None), "cpu")
    assert len(sets) == 6  # three caches' worth
    assert len({s[0].unsafe_buffer_pointer() for s in sets}) == 6
    assert all(s[1] is None for s in sets)
    for made, _ in sets:
        np.testing.assert_array_equal(made, x)
    assert len(timing.input_sets((jnp.ones(100_000),), "cpu")) == 1
    assert len(timing.input_sets((), "cpu")) == 1


def test_the_walk_over_the_copies_goes_on_from_sample_to_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(timing.CACHE_BYTES, "cpu", 4096)
    seen: list[int] = []

    def fn(x: Any) -> Any:
        seen.append(x.unsafe_buffer_pointer())
        return x

    timing.compare({"fn": fn}, jnp.ones(512), samples=6, sample_seconds=0.0, jit=False)
    walked = seen[-6:]
    assert len(set(walked)) == 6, "every sample of one call must see another copy"


def test_functions_are_jitted_unless_told_otherwise() -> None:
    traced: list[bool] = []

    def fn(x: Any) -> Any:
        traced.append(isinstance(x, jax.core.Tracer))
        return x + 1

    timing.measure(fn, jnp.ones(8), samples=1)
    assert traced == [True]
    traced.clear()
    timing.compare({"fn": fn}, jnp.ones(8), samples=1, jit=False)
    assert traced
    assert not any(traced)


@pytest.mark.parametrize(("launch", "bound"), [(10.0, True), (1e-12, False)])
def test_a_program_no_longer_than_its_launch_is_marked(
    launch: float, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(timing._LAUNCH, "cpu", launch)
    assert timing.measure(lambda x: x + 1, jnp.ones(8), samples=3).launch_bound is bound


def test_the_launch_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_LAUNCH", {})
    first = timing.launch_seconds("cpu")
    assert 0 < first < 1
    assert timing.launch_seconds("cpu") == first


def test_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="samples is at least 1"):
        timing.measure(lambda x: x, jnp.ones(8), samples=0)


@pytest.mark.parametrize(("seconds", "text"), [(2.0, "2 s"), (0.0123, "12.3 ms"), (45.6e-6, "45.6 µs"), (7e-9, "7 ns")])
def test_format_seconds(seconds: float, text: str) -> None:
    assert timing.format_seconds(seconds) == text
