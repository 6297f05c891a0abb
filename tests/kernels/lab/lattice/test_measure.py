"""A row of the lattice: every program held against the reference, timed in turns, and the ratios that follow."""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Case, Cost, Implementation
from capibara.kernels.lab.lattice import measure
from capibara.kernels.lab.lattice.workloads import Workload


def _reference(x: Any) -> Any:
    return jnp.sin(x) * 2


def _slow(x: Any) -> Any:
    for _ in range(12):
        x = x + 0 * jnp.linalg.cholesky(jnp.eye(48) * (1 + jnp.abs(x[0])))[0, 0]
    return jnp.sin(x) * 2


def _raises(x: Any) -> Any:
    raise NotImplementedError("there is no such kernel")


def _workload(grad: bool = False, **given: Any) -> Workload:
    op = Op(
        "doubled_sine", family="test", reference=_reference, operands=("x",),
        cost=lambda call: Cost(vector_flops=1e4, bytes=1e4), tolerance=lambda call: 1e-5,
    )  # fmt: skip
    op.implement(Implementation("xla", _reference))
    op.implement(Implementation("slow", _slow))
    case = Case("small", ((1000,),), "float32")
    made = Workload(
        "sines", "llama-3-8b", "1000", op, case, grad, lambda x, form=None: op(x, implementation=form), ("xla", "slow"),
        {"plain": _reference, "other": lambda x: x * 2, "broken": _raises},
    )  # fmt: skip
    return dataclasses.replace(made, **given)


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    with ThreadPoolExecutor(2) as pool:
        return measure.prepare(_workload(), pool).time()


def test_a_row_has_each_program_and_says_which_are_right(row: dict[str, Any]) -> None:
    assert row["right"] == {"dispatch": True, "slow": True, "plain": True, "other": False}
    assert set(row["microseconds"]) == {"dispatch", "slow", "plain", "other"}
    assert row["same_as_dispatch"] == ["xla"]
    assert "there is no such kernel" in row["notes"]["broken"]
    assert row["ours"] == ["dispatch", "slow"]
    assert row["calls_a_program"] == measure.CALLS
    assert (row["clock"], row["host_microseconds"]) == ("host", {})  # a CPU's profile has no device
    (decision,) = row["decisions"]
    assert (decision["op"], decision["implementation"]) == ("doubled_sine", "xla")
    assert decision["operands"] == row["operands"] == ["f32[1000]"]


def test_ratios_are_of_what_is_right(row: dict[str, Any]) -> None:
    """The better of the two runs; a peer that computes something else does not count."""
    runs = zip(*(row["microseconds"][name] for name in ("dispatch", "plain")), strict=True)
    assert row["against_best_peer"] == pytest.approx(max(peer / ours for ours, peer in runs))
    assert row["against_own_best"] == pytest.approx(1.0)


def test_a_choice_that_is_behind_is_timed_twice() -> None:
    def chosen(x: Any, form: str | None = None) -> Any:
        return _reference(x) if form == "xla" else _slow(x)

    with ThreadPoolExecutor(2) as pool:
        made = measure.prepare(_workload(ours=chosen, forms=("xla",), peers={}), pool).time()
    assert len(made["microseconds"]["dispatch"]) == 2
    assert made["against_own_best"] < 0.97
    assert made["against_best_peer"] is None


def test_with_gradients_the_cotangents_are_the_references() -> None:
    def wrong_gradient(x: Any) -> Any:
        return _reference(x) + jax.lax.stop_gradient(x) - x

    with ThreadPoolExecutor(2) as pool:
        made = measure.prepare(_workload(grad=True, peers={"off": wrong_gradient}, forms=()), pool)
    assert made.programs["dispatch"].right
    assert not made.programs["off"].right


def test_programs_are_several_calls_on_arrays_of_their_own() -> None:
    sets = [(np.float32(1),), (np.float32(2),)]
    assert [float(x) for x in measure.repeated(lambda x: x + 1)(*sets)] == [2.0, 3.0]
    large = _workload(case=Case("large", ((1 << 29,),), "float32"))
    assert measure._calls(_workload()) == measure.CALLS
    assert measure._calls(large) == 1


def test_long_programs_have_the_devices_clock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host saw stays in the row beside it."""

    def on_device(running: Any, calls: int, again: bool = False) -> str:
        for program in running:
            program.taken[-1:] = [*(program.taken[-1:] if again else []), [7.0]]
        return "device"

    def on_host(running: Any, calls: int) -> None:
        for program in running:
            program.taken.append([50_000.0])

    monkeypatch.setattr(measure, "_timed", on_host)
    monkeypatch.setattr(measure, "_timed_on_device", on_device)
    with ThreadPoolExecutor(2) as pool:
        made = measure.prepare(_workload(forms=()), pool).time()
    assert made["clock"] == "device"
    assert set(made["host_microseconds"].values()) == {50_000.0}
    assert made["microseconds"]["dispatch"] == [7.0]


def test_a_row_of_which_nothing_runs_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU too, whose profile then has no program to tell apart."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.profiler, "trace", lambda folder: contextlib.nullcontext())
    monkeypatch.setattr(measure, "_kernels", lambda folder: [])
    assert measure._timed_on_device([], calls=1) is None


def test_a_profile_is_parted_where_nothing_ran() -> None:
    """A kernel that outlasts the ones after it leaves no pause behind these; what ran beside it counts once."""
    spans = [measure.Span(*each) for each in ((0.0, 0.5), (0.1, 0.2), (0.4, 0.45), (0.53, 0.6))]
    parts = measure.parted(spans, 2)
    assert parts == [spans[:3], spans[3:]]
    assert [measure.busy(part) for part in parts] == pytest.approx([0.5, 0.07])
    assert measure.parted(spans, 3) is None


def test_a_row_tells_the_longest_kernels_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two calls a program, each of which ran eight."""
    milliseconds = {f"kernel {number}": number + 1 for number in range(8)}

    def kernels(folder: str) -> list[measure.Span]:
        spans, now = [], 0.0
        for _ in range(measure.ROUNDS):
            now += measure.PAUSE_SECONDS
            for name, took in (*milliseconds.items(), *milliseconds.items()):
                spans.append(measure.Span(now, now + 1e-3 * took, name))
                now += 1e-3 * took
        return spans

    program = measure.Program("ours", True, run=lambda: None, wait=lambda out: None, taken=[[40_000.0]])
    monkeypatch.setattr(measure.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(measure.jax.profiler, "trace", lambda folder: contextlib.nullcontext())
    monkeypatch.setattr(measure, "_kernels", kernels)
    assert measure._timed_on_device([program], calls=2) == "device"
    assert program.microseconds(0) == pytest.approx(36_000)
    assert program.kernels == {f"kernel {number}": 1000.0 * (number + 1) for number in range(7, 1, -1)}


def test_programs_take_turns_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip that has rested is faster: what begins a profile is none of the programs' time."""
    spans: list[measure.Span] = []
    now = [0.0]

    def program(name: str, seconds: float) -> measure.Program:
        def run() -> None:
            took = seconds * (0.5 if now[0] < 0.028 else 1.0)
            spans.append(measure.Span(now[0], now[0] + took, name))
            now[0] += took

        return measure.Program(name, True, run=run, wait=lambda out: None, taken=[[1e6 * seconds]])

    def trace(folder: str) -> contextlib.AbstractContextManager[None]:
        spans.clear()
        now[0] = 0.0
        return contextlib.nullcontext()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    programs = [program("ours", 0.02), program("peer", 0.03), program("slow", 0.05)]
    monkeypatch.setattr(measure.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(measure.jax.profiler, "trace", trace)
    monkeypatch.setattr(measure.time, "sleep", sleep)
    monkeypatch.setattr(measure, "_kernels", lambda folder: spans)
    assert measure._timed_on_device(programs, calls=1) == "device"
    assert [p.microseconds(0) for p in programs] == pytest.approx([20_000, 30_000, 50_000])
    assert len(programs[0].taken[0]) == measure.ROUNDS
    assert [p.kernels for p in programs] == [{"ours": 20_000}, {"peer": 30_000}, {"slow": 50_000}]
    measure._timed_on_device(programs, calls=1, again=True)
    assert [len(p.taken) for p in programs] == [2, 2, 2]
    monkeypatch.setattr(measure, "_kernels", lambda folder: spans[:3])
    assert measure._timed_on_device(programs, calls=1) is None
