"""Drawn calls for the TPU compiler: the same draws as the bench's, dispatched for the chip that is named."""

from __future__ import annotations

import itertools

import jax
import pytest

from capibara.compile import lattice
from capibara.hardware import chip
from capibara.kernels.lab.lattice.workloads import draw

KIND = "TPU v4"


@pytest.mark.quick
def test_a_draw_is_the_benchs_own() -> None:
    workload = next(itertools.islice(draw(3, ["norm", "activation"]), 1, None))
    fn, args = lattice.workload_program(3, ["norm", "activation"], 1, KIND)
    leaves = jax.tree.leaves(args)
    wanted = [x for x in workload.case.args() if x is not None]
    # With a gradient the cotangents come first.
    assert [x.shape for x in leaves][-len(wanted) :] == [x.shape for x in wanted]
    assert jax.tree.leaves(jax.eval_shape(fn, *args))


def test_dispatch_decides_for_the_chip_and_by_predictions() -> None:
    """Outside of a TPU, and outside of an optimisation context, it would take XLA's programs."""
    stream = lattice._workloads(0, ["norm"], chip("v4"))
    gradient = next(workload for workload in stream if workload.grad)
    decisions = lattice._decisions(gradient, chip("v4"))
    assert decisions == (("norm", "pallas_tpu"), ("norm_grad", "pallas_tpu"))
    assert lattice._seconds(gradient, chip("v4")) > gradient.cost.bytes / chip("v4").hbm_bandwidth


def test_rows_say_what_came_of_each_draw() -> None:
    told = []
    rows = lattice.compile_lattice(
        "v4-8", rows=1, families=["router"], workers=1, on_result=lambda done, total, report: told.append((done, total))
    )
    assert told == [(1, 1)]
    (row,) = rows
    assert row.ok
    assert row.as_dict()["decisions"] == [{"op": "route", "implementation": "pallas_tpu"}]
    assert row.report.name == row.name
