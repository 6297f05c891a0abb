"""Published models as data: numbers that fit together, and a quarter that nothing is made on."""

from __future__ import annotations

import pytest

from capibara.kernels.lab.lattice.models import held_back, models
from capibara.kernels.lab.lattice.workloads import FAMILIES


@pytest.mark.quick
def test_numbers_fit_together() -> None:
    assert len(models()) >= 40
    for name, model in models().items():
        assert (model.heads is None) == (model.kv_heads is None) == (model.head_dim is None), name
        if model.heads:
            assert model.kv_heads
            assert model.heads % model.kv_heads == 0, name
        if model.experts:
            assert model.expert_ffn, name
            assert 1 <= model.top_k <= model.experts, name
        assert (model.codes is None) == (model.code_width is None) == (model.code_rows is None), name


@pytest.mark.quick
def test_a_quarter_is_held_back_and_families_have_both_sides() -> None:
    apart = [name for name in models() if held_back(name)]
    assert 0.2 <= len(apart) / len(models()) <= 0.3
    alone = []
    for family, made in FAMILIES.items():
        sides = {held_back(name) for name, model in models().items() if made.has(model)}
        assert False in sides, family
        if True not in sides:
            alone.append(family)
    assert alone == ["linear recurrence"]  # one published model has it


@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "gpt-oss-20b", "mamba2-2-7b"])
def test_what_tuned_tables_were_made_on_is_not_held_back(name: str) -> None:
    assert not held_back(name)
