"""Which operation became slower. Times are made up here: benchmarks/profile_gate.py plants real ones."""

from __future__ import annotations

import dataclasses
import random

import pytest

from capibara.observe.profiler import Profile
from capibara.observe.profiler.compare import compare, repeated
from capibara.observe.profiler.result import OpRow

OPS = ("first", "second", "third", "fourth", "fifth")


def once(milliseconds: dict[str, float], *, runs: int = 30, suffix: str = "") -> Profile:
    """A profile of one run of the program, with an instruction a scope."""
    ops = tuple(
        OpRow(
            program="jit_step", op=f"dot.{number}{suffix}", kind="product", source=f"jit(step)/{scope}/dot_general",
            count=2 * runs, flops=1.0, matrix_flops=1.0, bytes=1.0, dtype="float32", bound="compute",
            least_seconds=1e-6, runs=runs, seconds=2 * runs * taken * 1e-3, best_seconds=taken * 1e-3,
            median_seconds=taken * 1e-3,
        )
        for number, (scope, taken) in enumerate(milliseconds.items())
    )  # fmt: skip
    return Profile(
        name="steps", mode="tracing", wall_seconds=1.0, seconds=1.0, compile_seconds=0.0, platform="cpu",
        device_kind="cpu", chips=1, peak_flops={"bfloat16": 1e12}, memory_bandwidth=1e10, launch_seconds=1e-6,
        programs=(), ops=ops, compilations={}, host_arguments=0, peak_memory_bytes=0.0, memory_source="",
    )  # fmt: skip


def taken(
    factors: dict[str, float] | None = None, *, busy: float = 1.0, noise: float = 0.0, repeats: int = 8, seed: int = 0,
    ops: tuple[str, ...] = OPS, runs: int = 30,
) -> Profile:  # fmt: skip
    """A program over repeats: each operation takes a millisecond, times its factor, times what the machine does."""
    draws = random.Random(seed)
    return repeated(
        [
            once({op: (factors or {}).get(op, 1.0) * busy * (1 + noise * draws.random()) for op in ops}, runs=runs)
            for _ in range(repeats)
        ]
    )


@pytest.mark.quick
def test_the_slow_one_is_named() -> None:
    (change,) = compare(taken(), taken({"second": 1.5})).slower
    assert "second" in change.op
    assert change.slower_by == pytest.approx(0.5)
    assert change.before == pytest.approx(2e-3)  # of a run of the program, which runs it twice


@pytest.mark.quick
def test_equal_runs_are_quiet_and_a_slow_one_is_found_in_noise() -> None:
    for seed in range(20):
        base = taken(noise=0.3, seed=seed)
        assert not compare(base, taken(noise=0.3, seed=100 + seed)).slower
        (found,) = compare(base, taken({"second": 1.5}, noise=0.3, seed=100 + seed)).slower
        assert "second" in found.op


@pytest.mark.quick
def test_a_machine_that_is_busier_as_a_whole_makes_nothing_slower() -> None:
    found = compare(taken(), taken(busy=2.0))
    assert not found.slower
    assert found.pace == pytest.approx(2.0)
    for busy in (0.8, 3.0):  # nor does it hide one
        (change,) = compare(taken(), taken({"second": 1.5}, busy=busy)).slower
        assert change.slower_by == pytest.approx(0.5)
    # One that runs on one core does not become faster when others leave the rest of them.
    assert not compare(taken(), taken({"second": 1.5}, busy=0.66)).slower


def test_a_device_of_ones_own_is_not_busier() -> None:
    base, after = taken(), taken(busy=1.5)
    alone = [dataclasses.replace(one, platform="gpu") for one in (base, after)]
    assert len(compare(*alone).slower) == len(OPS)


def test_of_two_operations_none_stands_out() -> None:
    """Which of them became slower, or the machine: both are held against the base as they are."""
    two = OPS[:2]
    found = compare(taken(ops=two), taken(ops=two, busy=1.5))
    assert (len(found.slower), found.pace) == (2, 1.0)


def test_repeats_that_are_far_apart_ask_for_more() -> None:
    def spread(second: list[float]) -> Profile:
        return repeated([once({op: value if op == "second" else 1.0 for op in OPS}) for value in second])

    steady, after = [1.0] * 6, [1.4, 1.4, 1.4, 1.4, 1.4, 1.4]
    assert compare(spread(steady), spread(after)).slower
    # The median is the same, and the base had repeats that were as slow.
    assert not compare(spread([1.0, 1.0, 1.0, 1.0, 1.6, 1.6]), spread([0.9, 0.9, 1.4, 1.4, 1.4, 1.6])).slower


def test_the_tolerance_decides() -> None:
    base, after = taken(), taken({"second": 1.2})
    assert not compare(base, after).slower
    assert len(compare(base, after, tolerance=0.1).slower) == 1
    assert len(compare(*(dataclasses.replace(one, platform="gpu") for one in (base, after))).slower) == 1
    with pytest.raises(ValueError, match="fraction"):
        compare(base, after, tolerance=-1)


def test_instructions_may_be_renamed_and_operations_may_be_new() -> None:
    renamed = repeated([once({**dict.fromkeys(OPS, 1.0), "second": 2.0, "sixth": 9.0}, suffix="9")] * 8)
    found = compare(taken(), renamed)
    assert ["second" in one.op for one in found.slower] == [True]
    assert found.new == ("jit(step)/sixth/dot_general",)


def test_small_operations_are_left_out() -> None:
    found = compare(taken({"second": 1e-3}), taken({"second": 2e-3}))
    assert (found.slower, found.judged) == ((), len(OPS) - 1)


def test_profiles_that_cannot_be_compared() -> None:
    base = taken()
    for before, after, said in [
        (base, dataclasses.replace(base, mode="counting"), "which a trace has"),
        (dataclasses.replace(base, device_kind="NVIDIA H200"), base, "one kind of device"),
        (taken(repeats=2), taken(repeats=2), "repeats or more"),
        (dataclasses.replace(base, repeats=0), base, "repeats or more"),
        (base, taken(repeats=7), "taken alike"),
        # A gate that compares nothing is open.
        (base, taken(ops=("other",)), "none that is in both"),
        (taken(runs=4), taken({"second": 2.0}, runs=4), "none that is in both"),
    ]:
        with pytest.raises(ValueError, match=said):
            compare(before, after)
