"""The mesh that code is traced for: jax's own, and that of a plan, which needs no devices."""

from __future__ import annotations

import jax
import pytest

from capibara.mesh import MeshConfig
from capibara.mesh.traced_for import mesh_in_force, traced_for


@pytest.mark.quick
def test_the_mesh_of_a_plan_is_there_without_devices_and_asking_is_noted() -> None:
    assert mesh_in_force().empty
    with traced_for({"data": 512, "model": 4}) as planned:
        assert not planned.asked
        assert dict(mesh_in_force().shape) == {"data": 512, "model": 4}
        assert planned.asked
    with traced_for(None) as planned:
        assert mesh_in_force().empty
        assert planned.asked
    assert mesh_in_force().empty


def test_a_mesh_that_is_set_is_the_one_in_force() -> None:
    mesh = MeshConfig((2,), ("data",)).build(jax.devices()[:2])
    with traced_for({"data": 4}) as planned, jax.set_mesh(mesh):
        assert dict(mesh_in_force().shape) == {"data": 2}
        assert not planned.asked


def test_the_rules_that_are_gone_by_are_those_that_were_named() -> None:
    with traced_for({"data": 4}) as planned:
        mesh_in_force(("batch",))
        mesh_in_force(("batch", "mlp"))
        assert planned.places == {"batch", "mlp"}
        mesh_in_force()
        mesh_in_force(("batch",))
        assert planned.places is None, "one who does not say may go by any"
