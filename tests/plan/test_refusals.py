"""A compiler that needs more than the model says: what it refuses is told with its bytes and not offered again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import capibara
from capibara.cost.result import Estimate
from capibara.mesh.layout import Layout
from capibara.plan.compiled import Compiled
from capibara.plan.search.evaluation import PaperModel

GiB = 2**30


def _tables(w: jax.Array, x: jax.Array) -> jax.Array:
    """Two tables of scores and their product: 64 GiB of a chip each for a row of 2^17, and small arguments."""
    s = jnp.einsum("btd,dc,buc->btu", x, w, x)
    return jnp.sum(jax.nn.softmax(s, -1) @ jax.nn.softmax(s, -2), axis=(1, 2))


def _plan(length: int, **keywords: Any) -> Any:
    weights, rows = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, 128), (4, length, 128)))
    return capibara.plan.plan(_tables, (weights, rows), on="v4-8", roles=("params", "batch"), level="tpu", **keywords)


@pytest.fixture
def _a_low_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model as it is, of a tenth of what it says: however good it becomes, the compiler needs more."""
    own = PaperModel.estimate

    def estimate(self: PaperModel, layout: Layout) -> Estimate:
        found = own(self, layout)
        return replace(found, memory=replace(found.memory, temporaries=found.memory.temporaries / 10, margin=0.08))

    monkeypatch.setattr(PaperModel, "estimate", estimate)


@pytest.mark.usefixtures("_a_low_model")
def test_every_layout_that_was_tried_is_refused_and_none_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Layout] = []

    def compiler(job: Any, layout: Layout, where: Any) -> Compiled:
        asked.append(layout)
        return Compiled("tpu", "by hand", temporaries=48 * GiB, error="Used 48.00G of 30.75G hbm", error_kind="hbm_oom")

    monkeypatch.setattr("capibara.plan.evidence.compile_layout", compiler)
    monkeypatch.setattr("capibara.plan.evidence.chip_compiler", lambda level: SimpleNamespace(available=True))
    plan = _plan(2**17, mesh="data=4")
    assert not plan.fits
    assert [one.layout for one in plan.refused_by_compiler] == asked
    assert len(asked) == len({layout.name for layout in asked}), "each is asked about once"
    assert plan.best.bytes == 48 * GiB
    text = str(plan)
    assert "DOES NOT FIT: the TPU compiler refused" in text
    assert "48.00 GiB a chip of 30.75 GiB usable" in text
    assert "--level tpu" not in text
    # On another mesh the model has layouts that fit with ease. It is known by now to be low by that much.
    low = max(48 * GiB / one.estimate.memory.total for one in plan.refused_by_compiler)
    for change in plan.changes:
        assert change.bytes_at_worst == pytest.approx(low * change.bytes)
        assert change.bytes_at_worst <= 30.75 * GiB
    assert plan.as_dict()["refused_by_compiler"][0]["compiled"]["error"] == "Used 48.00G of 30.75G hbm"


@pytest.mark.usefixtures("_a_low_model")
def test_the_next_best_is_compiled_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(job: Any, layout: Layout, where: Any) -> Compiled:
        if layout.mesh.axes.get("data") == 4:
            return Compiled("tpu", "by hand", temporaries=48 * GiB, error="Used 48.00G", error_kind="hbm_oom")
        return Compiled("tpu", "by hand", 1.0 * GiB, 0.0, 23.0 * GiB, 0.0, peak=24.0 * GiB)

    monkeypatch.setattr("capibara.plan.evidence.compile_layout", compiler)
    monkeypatch.setattr("capibara.plan.evidence.chip_compiler", lambda level: SimpleNamespace(available=True))
    plan = _plan(2**17)
    assert plan.fits
    assert plan.level == "tpu"
    assert plan.best.bytes == 24 * GiB
    assert plan.refused_by_compiler
    out = [one.layout for one in plan.refused_by_compiler]
    assert all(one.layout not in out for one in plan.candidates)
    assert "temporaries 23.00 GiB" in str(plan), "the compiler's, and not the model's"
    assert any("times the predicted bytes of what it refused" in note for note in plan.notes)


@pytest.mark.tpu_compiler
@pytest.mark.usefixtures("_a_low_model")
def test_the_tpu_compiler_refuses_what_the_model_took() -> None:
    plan = _plan(2**17, mesh="data=4")
    assert not plan.fits
    first = plan.refused_by_compiler[0]
    assert first.compiled.error_kind == "hbm_oom"
    # One table is 64 GiB, or 32 in bfloat16, whatever else the compiler keeps.
    assert first.by_compiler > 32 * GiB > 30.75 * GiB > first.estimate.memory.total
    assert f"{first.by_compiler / GiB:.2f} GiB a chip of 30.75 GiB usable" in str(plan)
    assert plan.best.bytes == min(one.bytes for one in plan.refused_by_compiler)

    small = _plan(8192, mesh="data=4")
    assert small.fits
    made = small.best.compiled
    assert small.best.bytes == made.peak
    assert f"temporaries {made.temporaries / GiB:.2f} GiB" in str(small)
