"""A row of the lattice: every program held against the reference, timed in turns, and the ratios that follow."""

from __future__ import annotations

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
