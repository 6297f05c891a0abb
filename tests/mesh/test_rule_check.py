"""A table of rules held against a mesh."""

from __future__ import annotations

from typing import Any

import pytest

from capibara.mesh.mesh import MeshConfig
from capibara.mesh.rule_check import RuleCheck, check_rules
from capibara.mesh.rules import RULES

MESH = MeshConfig((4, 8))


@pytest.mark.quick
def test_the_default_table_on_the_default_mesh() -> None:
    found = check_rules(RULES, MESH)
    assert set(found.exclusive) == {
        ("hidden", "heads", "model"),
        ("hidden", "mlp", "model"),
        ("hidden", "vocab", "model"),
        ("heads", "mlp", "model"),
        ("heads", "vocab", "model"),
        ("mlp", "vocab", "model"),
    }
    assert found.absent == (("expert", "expert"), ("sequence", "sequence"), ("stage", "pipeline"))
    assert found.unused == ()
    assert "'heads' and 'mlp' cannot be in one array: both go on 'model'" in str(found)
    assert "'stage' is not split over 'pipeline': the mesh has no such axis" in str(found)


def test_tuples_share_an_axis_too() -> None:
    found = check_rules({"batch": ("data", "expert"), "expert": "expert"}, {"data": 4, "expert": 2})
    assert found == RuleCheck((("batch", "expert", "expert"),), (), ())


def test_pairs_on_an_axis_that_is_absent_do_not_exclude_each_other() -> None:
    assert check_rules({"heads": "model", "mlp": "model"}, {"data": 4}).exclusive == ()


def test_an_axis_that_nothing_uses() -> None:
    found = check_rules({"batch": "data", "vocab": None}, {"data": 4, "model": 8, "stage": 1})
    assert found.unused == ("model",)
    assert str(found) == "no rule uses the mesh axis 'model'"
    assert str(check_rules({"batch": "data"}, {"data": 4})).startswith("every rule finds its mesh axis")


def test_a_misspelt_axis_is_dropped_or_by_strict_refused() -> None:
    rules = {"batch": "data", "mlp": ("modle",)}
    assert check_rules(rules, MESH).absent == (("mlp", "modle"),)
    with pytest.raises(ValueError, match=r"in the rule for 'mlp': 'modle'.*Did you mean 'model'"):
        check_rules(rules, MESH, strict=True)
    assert check_rules({"batch": "data"}, MESH, strict=True).absent == ()


@pytest.mark.parametrize("mesh", [MESH, MESH.axes])
def test_meshes_of_every_kind(mesh: Any) -> None:
    assert check_rules({"batch": "data"}, mesh).unused == ("model",)
    assert check_rules({"batch": "data"}, MESH.build()).unused == ("model",)
    with pytest.raises(ValueError, match="A mesh is a jax Mesh"):
        check_rules(RULES, (4, 8))
