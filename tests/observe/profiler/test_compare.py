"""Which operation became slower. Times are made up here: tests/cli/test_profile.py plants a real one."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import pytest

from capibara.observe.profiler import Profile, profile
from capibara.observe.profiler.compare import Change, slower, steadier


@pytest.fixture(scope="module")
def base() -> Profile:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("first"):
            x = x @ x
        with jax.named_scope("second"):
            return x @ x

    x = jnp.ones((64, 64))
    step(x)
    with profile(mode="tracing") as recording:
        for _ in range(5):
            step(x)
    assert recording.profile is not None
    return timed(recording.profile, {})


def timed(found: Profile, factors: dict[str, float], noise: float = 0.0, seed: int = 0) -> Profile:
    draws = random.Random(seed)
    ops = []
    for op in found.ops:
        factor = next((factor for word, factor in factors.items() if word in op.source), 1.0)
        seconds = 1e-3 * factor * (1 + draws.uniform(0, noise))
        ops.append(dataclasses.replace(op, best_seconds=seconds, median_seconds=seconds, seconds=seconds * op.count))
    return dataclasses.replace(found, ops=tuple(ops))


@pytest.mark.quick
def test_the_slow_one_is_named(base: Profile) -> None:
    (change,) = slower(base, timed(base, {"second": 1.5}))
    assert "second" in change.op
    assert change.slower_by == pytest.approx(0.5)


@pytest.mark.quick
def test_equal_runs_are_quiet(base: Profile) -> None:
    for seed in range(20):
        assert not slower(base, timed(base, {}, noise=0.2, seed=seed))


def test_the_tolerance_decides(base: Profile) -> None:
    again = timed(base, {"second": 1.2})
    assert not slower(base, again)
    assert len(slower(base, again, tolerance=0.1)) == 1
    gpu = dataclasses.replace(base, platform="gpu")
    assert len(slower(gpu, dataclasses.replace(again, platform="gpu"))) == 1
    with pytest.raises(ValueError, match="fraction"):
        slower(base, again, tolerance=-1)


def test_instructions_may_be_renamed(base: Profile) -> None:
    renamed = dataclasses.replace(
        timed(base, {"second": 2.0}),
        ops=tuple(dataclasses.replace(op, op=f"{op.op}.99") for op in timed(base, {"second": 2.0}).ops),
    )
    assert len(slower(base, renamed)) == 1


def test_small_operations_are_left_out(base: Profile) -> None:
    tiny = timed(base, {"second": 1e-3})
    assert not slower(tiny, timed(base, {"second": 2e-3}))


def test_what_ran_a_few_times_is_left_out(base: Profile) -> None:
    once = [
        dataclasses.replace(
            timed(base, factors), ops=tuple(dataclasses.replace(op, runs=4) for op in timed(base, factors).ops)
        )
        for factors in ({}, {"second": 2.0})
    ]
    assert not slower(*once)


def test_only_what_is_slow_every_time_is_said() -> None:
    once = [Change("p", "a", 1.0, 2.0), Change("p", "b", 1.0, 3.0)]
    assert steadier(once, [Change("p", "b", 1.0, 2.5)]) == [Change("p", "b", 1.0, 2.5)]


def test_profiles_that_cannot_be_compared(base: Profile) -> None:
    with pytest.raises(ValueError, match="which a trace has"):
        slower(base, dataclasses.replace(base, mode="counting"))
    with pytest.raises(ValueError, match="one kind of device"):
        slower(dataclasses.replace(base, device_kind="NVIDIA H200"), base)
