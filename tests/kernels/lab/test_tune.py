"""Tuning a function: every different call of it is measured once, remembered, and taken from then on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.kernels import explain, lookup, target, tune
from capibara.kernels.core import tables
from capibara.kernels.core.op import Op, register, unregister
from capibara.kernels.core.spec import Case, Implementation
from capibara.kernels.lab.tune import case_of


def _slow(x: Any, times: int = 1) -> Any:
    return 2.0 * times * x + 1e-30 * jax.lax.fori_loop(0, 400, lambda _, y: jnp.sin(y), x)


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    monkeypatch.setenv("CAPIBARA_CACHE_DIR", str(tmp_path / "cache"))
    tables.forget()
    made = Op(
        "doubling", family="test", reference=lambda x, *, times=1: 2.0 * times * x, operands=("x",), params={"times": 1}
    )
    made.implement(Implementation("slow", lambda x, *, times: _slow(x, times)))
    made.implement(Implementation("fast", lambda x, *, times: 2.0 * times * x))
    register(made)
    yield made
    unregister("doubling")
    tables.forget()


X = jax.ShapeDtypeStruct((20000,), "float32")


def test_every_call_of_a_function_is_measured_and_remembered(op: Op) -> None:
    def model(x: Any, power: int) -> Any:
        return op(op(x)) + op(x[:9000], times=power).sum() + op(x, implementation="slow")

    steps: list[str] = []
    found = tune(model, X, power=3, on_progress=lambda step: steps.append(step.text))
    assert list(found.calls.values()) == [3, 1]
    assert [report.best.implementation for report in found.reports if report.best] == ["fast", "fast"]
    assert all((found.gain(report) or 0) > 1.2 for report in found.reports)
    assert "times as fast as slow" in str(found)
    assert found.as_dict()["calls"] == {"doubling(f32[20000])": 3, "doubling(f32[9000] times=3)": 1}
    assert any("timing the best" in text for text in steps)
    taken = [s.implementation for s in explain(model, X, power=3).selections]
    assert taken == ["fast", "fast", "fast", "slow"]
    assert set(tune(model, X, power=3).skipped.values()) == {
        "the user's table has it; again=True measures it once more"
    }
    assert len(tune(model, X, power=3, again=True).reports) == 2


def test_gradients_have_calls_of_their_own(op: Op) -> None:
    assert list(tune(jax.grad(lambda x: op(x).sum()), X, save=False).calls) == ["doubling(f32[20000])"]
    with target("gpu", "NVIDIA H200"):
        q = jax.ShapeDtypeStruct((1, 4, 640, 64), "bfloat16")
        lse = jax.ShapeDtypeStruct((1, 4, 640), "float32")
        call = lookup("attention_grad").call(q, q, q, *[None] * 6, q, lse, q, None, causal=True)
    case = case_of(call)
    assert case is not None
    assert case.shapes[0] == (1, 4, 640, 64)
    out, sums = case.arrays()[9:11]
    assert out is not None
    assert sums is not None
    assert bool(jnp.isfinite(sums).all())
    assert float(jnp.abs(out.astype(jnp.float32)).max()) < 8  # a forward pass's own, not numbers drawn beside it


def test_save_and_max_configs(op: Op, tmp_path: Path) -> None:
    assert tune("doubling", X, save=False).reports[0].path is None
    assert not (tmp_path / "cache").exists()
    (report,) = tune(op, X, save=tmp_path / "there", max_configs=1).reports
    assert report.path is not None
    assert json.loads(report.path.read_text())["entries"][0]["implementation"] == "fast"
    assert report.path.is_relative_to(tmp_path / "there")


def test_what_is_not_measured_says_why(op: Op) -> None:
    asked = tune(lambda x: op(x, implementation="slow"), X)
    assert list(asked.skipped.values()) == ["it runs on slow because it was asked for by name"]
    assert "not measured" in str(asked)
    sizes = jax.ShapeDtypeStruct((4,), "int32")
    with target("gpu", "NVIDIA H200"):
        x, w = jax.ShapeDtypeStruct((100, 64), "bfloat16"), jax.ShapeDtypeStruct((4, 64, 64), "bfloat16")
        call = lookup("grouped_gemm").call(x, w, sizes)
    assert case_of(call) is None
    assert str(tune(lambda x: x + 1, X)) == "no capibara op is called"


def test_operands_are_drawn_as_a_like_case_draws_them(op: Op) -> None:
    op.cases = (Case("ones", ((8,),), "float32", {"times": 2}, draw={0: lambda generator, shape: jnp.ones(shape)}),)
    alike = case_of(op.call(X, times=2))
    assert alike is not None
    assert alike.shapes == ((20000,),)
    assert float(alike.arrays()[0].sum()) == 20000.0  # type: ignore[union-attr]
    assert case_of(op.call(X, times=3)) is None
