"""Draws of the lattice: the same for a seed, other for another, every family soon, one in four of a held-back model."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import pytest

from capibara.errors import UnknownNameError
from capibara.kernels.core.context import target
from capibara.kernels.lab.lattice.workloads import FAMILIES, MOST_BYTES, MOST_FLOPS, draw

A_ROUND = sum(family.turns for family in FAMILIES.values())


def _said(count: int, seed: int = 0, **given: object) -> list[str]:
    return [str(workload) for workload in itertools.islice(draw(seed, **given), count)]  # type: ignore[arg-type]


@pytest.mark.quick
def test_a_seed_draws_the_same_and_another_other_shapes() -> None:
    first = _said(A_ROUND)
    assert first == _said(A_ROUND)
    assert len(set(first) & set(_said(A_ROUND, seed=1))) <= A_ROUND // 4


@pytest.mark.quick
def test_a_round_has_every_family_and_two_have_held_back_models() -> None:
    drawn = list(itertools.islice(draw(3), 2 * A_ROUND))
    assert {workload.family for workload in drawn[:A_ROUND]} == set(FAMILIES)
    apart = {workload.family for workload in drawn if workload.held_back}
    assert set(FAMILIES) - apart == {"linear recurrence"}
    assert {workload.held_back for workload in drawn} == {False, True}


def test_families_are_those_that_are_named() -> None:
    assert {text.partition(":")[0] for text in _said(6, families=["norm", "fft"])} == {"norm", "fft"}
    with pytest.raises(UnknownNameError, match="Did you mean 'norm'"):
        next(draw(families=["norms"]))


def test_what_a_family_draws_does_not_hang_on_the_others() -> None:
    among = [text for text in _said(3 * A_ROUND) if text.startswith("norm:")]
    assert _said(len(among), families=["norm"]) == among


@pytest.mark.parametrize("seed", range(3))
def test_calls_are_what_an_accelerator_does_in_milliseconds(seed: int) -> None:
    for workload in itertools.islice(draw(seed), 4 * A_ROUND):
        cost = workload.cost
        bound = 10 if workload.family == "cross-entropy" else 1.5  # which is bounded by its logits
        assert (3 if workload.grad else 1) * cost.flops <= bound * MOST_FLOPS, str(workload)
        assert cost.bytes <= 1.5 * MOST_BYTES, str(workload)
        for shape in workload.case.args():
            assert shape is None or 0 not in shape.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_small_ones_are_of_the_same_parts(family: str) -> None:
    small = next(draw(0, [family], shrink=64))
    assert small.family == family
    assert small.cost.flops <= 3e9
    assert small.what != next(draw(0, [family])).what


def test_forms_are_those_that_take_the_call_there() -> None:
    with target("gpu", "NVIDIA H200"):
        there = next(draw(0, ["attention"]))
    assert set(there.forms) >= {"hopper", "cudnn"}
    assert next(draw(0, ["attention"], shrink=64)).forms == ("xla",)


def test_groups_are_checked_in_part() -> None:
    grouped = next(draw(0, ["grouped gemm"], shrink=64))
    arrays: tuple[Any, ...] = grouped.case.arrays()
    assert grouped.op.excerpt is not None
    part = grouped.op.excerpt(grouped.op, arrays)
    assert part is not None
    assert part.arrays[-1].shape[0] < arrays[-1].shape[0]
    assert int(part.arrays[-1].sum()) == part.arrays[0].shape[0]
    assert jax.tree.leaves(part.outputs([arrays[0]]))[0].shape == part.arrays[0].shape
