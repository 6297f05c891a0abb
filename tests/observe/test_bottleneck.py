"""Each of the eight is planted and found, and its suggestion, followed, removes it; a clean program has none."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import hardware
from capibara.observe import bottleneck
from capibara.observe.bottleneck import analyze_performance_bottlenecks
from capibara.observe.profiler import profile, result

STEPS = 8
SQUARE = jnp.ones((256, 256), jnp.bfloat16)
LONG = jnp.ones((1 << 19,))


@pytest.fixture(autouse=True)
def a_host_of_known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds an operation hangs on what the host reaches, which is timed; a busy one reaches any part of it."""
    rates = tuple((name, 1e11) for name in ("float32", "float64", "bfloat16"))
    known = dataclasses.replace(hardware.host(), flops_by_dtype=rates, vector_flops=2.5e10, hbm_bandwidth=2e10)
    monkeypatch.setattr(hardware.chips, "host", lambda: known)  # where a device's kind finds it


@jax.jit
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def steps(x: Any, w: jax.Array, after: Callable[[jax.Array], object] = lambda y: None) -> Callable[[], jax.Array]:
    def run() -> jax.Array:
        for _ in range(STEPS):
            y = product(x, w)
            after(y)
        return y

    return run


def clean() -> Callable[[], jax.Array]:
    return steps(SQUARE, SQUARE)


def float32() -> Callable[[], jax.Array]:
    return steps(SQUARE.astype(jnp.float32), SQUARE.astype(jnp.float32))


def padding() -> Callable[[], jax.Array]:
    return steps(jnp.ones((264, 200), jnp.bfloat16), jnp.ones((200, 200), jnp.bfloat16))


def input_bound() -> Callable[[], jax.Array]:
    return steps(SQUARE, SQUARE, lambda y: (y.block_until_ready(), time.sleep(0.05)))


def batches_ahead() -> Callable[[], jax.Array]:
    time.sleep(0.05)  # as long, before the loop
    return steps(SQUARE, SQUARE)


def fetching() -> Callable[[], jax.Array]:
    return steps(SQUARE, SQUARE, np.asarray)


def host_batches() -> Callable[[], jax.Array]:
    return steps(np.ones((256, 256), jnp.bfloat16), SQUARE)


def among_small_operations() -> Callable[[], jax.Array]:
    """A loop whose single operations, of other shapes each time, are more runs than its steps."""

    def run() -> jax.Array:
        jnp.ones((3, 3)) + 1, jnp.zeros((3, 3)) + 1  # outside of the loop
        for number in range(STEPS):
            y = product(np.ones((256, 256), jnp.bfloat16), SQUARE)
            jnp.ones((3, 3)) + number, jnp.ones((3, 3)) * number
        return y

    return run


def calling_back() -> Callable[[], jax.Array]:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda corner: None, x[0, 0])
        return product(x, SQUARE)

    return lambda: [step(SQUARE) for _ in range(STEPS)][-1]


def memory_bound() -> Callable[[], jax.Array]:
    pieces = [jax.jit(lambda x, n=n: jnp.where(x > n, x * 1.01, x + n)) for n in range(2)]

    def run() -> jax.Array:
        x = LONG
        for n in range(24):
            x = pieces[n % 2](x)
        return x

    return run


def fused() -> Callable[[], jax.Array]:
    @jax.jit
    def whole(x: jax.Array) -> jax.Array:
        for n in range(24):
            x = jnp.where(x > n % 2, x * 1.01, x + n % 2)
        return x

    return lambda: whole(LONG)


def launch_bound() -> Callable[[], jax.Array]:
    increment = jax.jit(lambda x: x + 1)

    def run() -> jax.Array:
        x = jnp.ones((8,))
        for _ in range(200):
            x = increment(x)
        return x

    return run


def one_program() -> Callable[[], jax.Array]:
    whole = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, c: c + 1, x))
    return lambda: whole(jnp.ones((8,)))


def communicating() -> Callable[[], jax.Array]:
    return summed(jax.P("d", None))


def sharded_along_the_other_axis() -> Callable[[], jax.Array]:
    return summed(jax.P(None, "d"))


def summed(spec: jax.P) -> Callable[[], jax.Array]:
    """Over rows: exchanged where the devices have some of the rows each, local where they have some of the columns."""
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.jit(lambda x: x.reshape(4, 64, -1).sum(0))
    x = jax.device_put(jnp.ones((4 * 64, 4096)), jax.NamedSharding(mesh, spec))
    return lambda: [function(x) for _ in range(3)][-1]


def recompiling() -> Callable[[], jax.Array]:
    return lambda: [jax.jit(lambda x, n=n: x @ x * n)(SQUARE) for n in range(4)][-1]


def jitted_once() -> Callable[[], jax.Array]:
    function = jax.jit(lambda x, n: x @ x * n)
    return lambda: [function(SQUARE, jnp.bfloat16(n)) for n in range(4)][-1]


PLANTED = [
    (float32, "float32", clean),
    (padding, "padding", clean),
    (input_bound, "input", batches_ahead),
    (fetching, "host_transfer", clean),
    (host_batches, "host_transfer", clean),
    (among_small_operations, "host_transfer", clean),
    (calling_back, "host_transfer", clean),
    (memory_bound, "memory", fused),
    (launch_bound, "launch", one_program),
    (communicating, "communication", sharded_along_the_other_axis),
    (recompiling, "recompilation", jitted_once),
]


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize(("planted", "kind", "repaired"), PLANTED, ids=[one[0].__name__ for one in PLANTED])
def test_what_is_planted_is_found_and_the_suggestion_removes_it(planted: Any, kind: str, repaired: Any) -> None:
    report = analyze_performance_bottlenecks(planted())
    found = {one.kind: one for one in report.bottlenecks}
    assert kind in found, report
    assert report.has_bottlenecks
    assert found[kind].description
    assert found[kind].suggestion
    assert any(isinstance(value, int | float) and value > 0 for value in found[kind].evidence.values())
    assert kind not in {one.kind for one in analyze_performance_bottlenecks(repaired()).bottlenecks}


@pytest.mark.quick
def test_the_host_is_judged_by_the_speed_that_these_tests_give_it() -> None:
    with profile("known", "tracing") as recording:
        clean()()
    assert recording.profile is not None
    assert recording.profile.memory_bandwidth == 2e10
    assert recording.profile.peak_flops["bfloat16"] == 1e11


@pytest.mark.quick
def test_a_clean_program_has_none() -> None:
    report = analyze_performance_bottlenecks(clean())
    assert not report.has_bottlenecks, report
    assert not report.note


@pytest.mark.quick
def test_without_an_argument_it_is_the_last_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    with profile("last", "tracing"):
        float32()()
    assert "float32" in {one.kind for one in analyze_performance_bottlenecks().bottlenecks}
    monkeypatch.setattr(result, "_last", [])
    nothing = analyze_performance_bottlenecks()
    assert not nothing.has_bottlenecks
    assert "Nothing has been profiled" in nothing.note


def test_a_profile_by_counting_judges_what_it_can_and_says_what_not() -> None:
    with profile("counted") as recording:
        float32()()
    report = analyze_performance_bottlenecks(recording.profile)
    assert "float32" in {one.kind for one in report.bottlenecks}
    assert "trace" in report.note


def test_nothing_ran() -> None:
    with profile("empty", "tracing") as recording:
        pass
    assert "No compiled program" in analyze_performance_bottlenecks(recording.profile).note


def test_what_is_neither_a_profile_nor_a_function() -> None:
    with pytest.raises(ValueError, match="function without arguments"):
        analyze_performance_bottlenecks("train.py")  # type: ignore[arg-type]


def test_the_worst_comes_first() -> None:
    with profile("several", "tracing") as recording:
        float32()(), padding()()
    assert recording.profile is not None
    more = dataclasses.replace(
        recording.profile, compilations={"f at train.py:1": 9}, compile_seconds=1.0, wall_seconds=2.0,
        platform="gpu", peak_flops={**recording.profile.peak_flops, "bfloat16": 16e11},
    )  # fmt: skip
    shares = [one.evidence["share"] for one in bottleneck.analyze_performance_bottlenecks(more).bottlenecks]
    assert len(shares) >= 2
    assert shares == sorted(shares, reverse=True)


def test_tiles_that_a_cpu_has_not_come_last_there() -> None:
    with profile(mode="tracing") as recording:
        padding()()
    assert recording.profile is not None
    more = dataclasses.replace(
        recording.profile, compilations={"f at train.py:1": 9}, compile_seconds=0.6, wall_seconds=2.0
    )
    here = analyze_performance_bottlenecks(more).bottlenecks
    assert [one.kind for one in here][-1] == "padding"
    assert here[-1].suggestion.startswith("A cpu has no such tiles; for a TPU or a GPU: Make")
    (there,) = [
        one
        for one in analyze_performance_bottlenecks(dataclasses.replace(more, platform="tpu")).bottlenecks
        if one.kind == "padding"
    ]
    assert there.suggestion.startswith("Make the dimensions")


def test_where_bfloat16_is_no_faster_it_is_said_and_comes_last() -> None:
    with profile(mode="tracing") as recording:
        for number in range(3):
            jax.jit(lambda x, n=number: x @ x * n)(SQUARE.astype(jnp.float32))
    found = recording.profile
    assert found is not None
    report = analyze_performance_bottlenecks(found)
    last = report.bottlenecks[-1]
    assert last.kind == "float32"
    assert last.suggestion.startswith("A cpu multiplies bfloat16 no faster; for a TPU or a GPU: Compute")
    assert len(report.bottlenecks) > 1
    fast = dataclasses.replace(found, peak_flops={**found.peak_flops, "bfloat16": 16e11})
    kinds = {one.kind: one for one in analyze_performance_bottlenecks(fast).bottlenecks}
    assert kinds["float32"].suggestion.startswith("Compute products in bfloat16")
