"""The step that `capibara train PRESET` would compile on an H200, lowered here: packed data, one device."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from capibara.kernels import target
from capibara.kernels.core.dispatch import recording
from capibara.parallel import run as layouts_run
from capibara.train.config import load_run
from capibara.train.run import train


class _Lowered(Exception):
    """The step's text, before a compiler that is not here is asked."""


def _check(preset: str, layers: int, kernels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def lower(program: Any) -> None:
        with layouts_run.surroundings(program.layout, program.mesh):
            raise _Lowered(program._step.trace(*program.arguments).lower(lowering_platforms=("cuda",)).as_text())

    monkeypatch.setattr(layouts_run, "lower_program", lower)
    # Fewer layers than the preset's; tokens of one row, since that changes no kernel.
    # A remat that is named leaves nothing to search for: which one it is changes no kernel either.
    changes = [
        f"model.layers={layers}",
        "train.batch_size=1",
        "train.unroll=-1",
        "train.remat=none",
        "train.accumulate=1",
    ]
    with target("gpu", device_kind="NVIDIA H200"), recording() as decisions, pytest.raises(_Lowered) as lowered:
        train(load_run(preset, changes, environment={}), devices=jax.devices()[:1])
    assert "mosaic_gpu" in str(lowered.value)
    ours = {decision.call.op.name for decision in decisions if decision.implementation == "hopper"}
    assert kernels <= ours


def test_the_step_of_small_lowers_with_our_attention_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _check("small", 1, {"attention"}, monkeypatch)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("preset", "layers", "kernels"),
    [
        ("gpu", 1, {"attention"}),
        ("moe", 1, {"attention", "route", "grouped_gated_gemm"}),
        ("hybrid", 4, {"attention", "ssd", "route", "grouped_gated_gemm"}),
    ],
)
def test_a_presets_step_lowers_with_our_kernels_in_it(
    preset: str, layers: int, kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _check(preset, layers, kernels, monkeypatch)
