"""A new chip is one row of the table and its prices: lookups, slices, op costs and plans follow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from capibara.cost.ops import op_seconds
from capibara.hardware import chips
from capibara.hardware.facts import Chip, GiB, SliceFamily
from capibara.hardware.topology import slice_by_name, slice_names
from capibara.kernels.core.context import Target
from capibara.kernels.core.dispatch import select
from capibara.kernels.core.op import lookup, registry
from capibara.plan import plan

V4, H200 = chips.chip("v4"), chips.chip("h200")
TPU = dataclasses.replace(
    V4,
    name="tpu_v9",
    device_kinds=("TPU v9",),
    aliases=("v9",),
    flops_by_dtype=(("bfloat16", 2.75e15), ("float32", 0.4e15)),
    vector_flops=4.3e13,
    hbm_bytes=64 * GiB,
    usable_hbm_bytes=None,
    hbm_bandwidth=12e12,
    slices=SliceFamily(
        "v9", libtpu_prefix="v9", per_chip=1, small=((2, 2), (2, 4), (4, 4)), max_chips=16, wrap_length=4
    ),
    source=("invented",),
)
GPU = dataclasses.replace(
    H200,
    name="h900",
    device_kinds=("NVIDIA H900",),
    aliases=(),
    flops_by_dtype=tuple((dtype, 2 * rate) for dtype, rate in H200.flops_by_dtype),
    hbm_bandwidth=2 * H200.hbm_bandwidth,
    source=("invented",),
)
PRICES = """
[[price]]
chip = "{name}"
region = "nowhere"
provider = "invented"
on_demand = 7.0
date = "2026-11-16"
source = "invented"
"""


@pytest.fixture(params=[TPU, GPU], ids=lambda row: row.name)
def row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Chip:
    monkeypatch.setattr(chips, "CHIPS", (*chips.CHIPS, request.param))
    made: Chip = request.param
    return made


def _step(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ w.T


@pytest.mark.quick(cases="all")
def test_a_plan_on_it(row: Chip, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES.format(name=row.name))
    args = (jax.ShapeDtypeStruct((4096, 8192), "bfloat16"), jax.ShapeDtypeStruct((8192, 4096), "bfloat16"))
    on, like = ("v9-8", "v5e-8") if row is TPU else ("h900x8", "h200x8")
    made = plan(_step, args, on=on, roles=("params", "batch"), pricing=prices, calibrated=False)
    assert made.best is not None
    assert made.where.chip is row
    assert made.where.chips == 8
    # It has ten times a v4's rates, or twice an H200's.
    other = plan(_step, args, on=like, roles=("params", "batch"), calibrated=False)
    assert other.best is not None
    assert 0 < made.best.estimate.seconds < other.best.estimate.seconds
    assert f"not measured on {row.name}" in " ".join(made.best.estimate.notes)
    assert [bill.price.usd for bill in made.bills if bill.price.kind == "on_demand"] == [7.0]


def test_lookups_and_slices(row: Chip) -> None:
    for word in (row.name, row.device_kinds[0], *row.aliases):
        assert chips.chip(word) is row
    assert chips.chip_for(row.device_kinds[0]) is row
    if row is TPU:
        assert list(slice_names("v9")) == ["v9-4", "v9-8", "v9-16"]
        assert slice_by_name("v9-16").wrap == (True, True)
        assert slice_by_name("v9:2x4").chip is TPU


def test_ops_have_times_and_kernels_on_it(row: Chip) -> None:
    base = V4 if row is TPU else H200
    for name, op in registry().items():
        for case in op.cases[:1]:
            assert (
                0
                < op_seconds(name, *case.args(), chip=row, **case.params)
                < 1.01 * op_seconds(name, *case.args(), chip=base, **case.params)
            ), name
    # The architecture says which kernels are for it.
    x = jax.ShapeDtypeStruct((8, 1024, 1024), "bfloat16")
    chosen = [
        select(lookup("linear_recurrence").call(x, x, target=Target(which.platform, which.device_kinds[0])))
        for which in (row, base)
    ]
    assert chosen[0].implementation == chosen[1].implementation
