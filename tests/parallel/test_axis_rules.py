"""Logical axes: the table, the constraint with and without a mesh, and its errors."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.parallel import rules
from capibara.parallel.context import tpu_v4_optimization_context
from capibara.parallel.mesh import MeshConfig
from capibara.parallel.rules import RULES, partition_spec, with_sharding_constraint

MESH = MeshConfig((4, 8))
X = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)


def constrain(x: jax.Array) -> jax.Array:
    return with_sharding_constraint(x, ("batch", "hidden"))


def test_the_table() -> None:
    assert dict(RULES) == {
        "batch": "data",
        "hidden": "model",
        "heads": "model",
        "mlp": "model",
        "vocab": "model",
        "expert": "expert",
        "sequence": "sequence",
        "stage": "pipeline",
    }


@pytest.mark.newest
@pytest.mark.parametrize("how", ["eager", "jit", "grad", "vmap", "jit of grad"])
@pytest.mark.parametrize("setter", ["jax.set_mesh", "context"])
def test_constraint_on_a_mesh(how: str, setter: str) -> None:
    mesh = MESH.build()
    with jax.set_mesh(mesh) if setter == "jax.set_mesh" else tpu_v4_optimization_context(mesh=MESH):
        if how == "eager":
            y = constrain(jnp.asarray(X))
        elif how == "jit":
            y = jax.jit(constrain)(X)
        elif how == "vmap":
            y = jax.vmap(constrain)(jnp.asarray(X)[None])[0]
        else:
            gradient = jax.grad(lambda x: (constrain(x) ** 2).sum() / 2)
            y = (jax.jit(gradient) if how == "jit of grad" else gradient)(jnp.asarray(X))
    np.testing.assert_array_equal(y, X)
    if how != "vmap":
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)


def test_no_mesh_is_a_no_op() -> None:
    x = jnp.asarray(X)
    assert constrain(x) is x
    assert with_sharding_constraint(x, P("data", "model")) is x
    assert "sharding_constraint" not in str(jax.make_jaxpr(constrain)(x))


def test_committed_array_moves_to_the_mesh() -> None:
    mesh = MESH.build()
    x = jax.device_put(X, jax.devices()[3])
    with jax.set_mesh(mesh):
        assert constrain(x).sharding == NamedSharding(mesh, P("data", "model"))


def test_partition_spec_and_sharding_are_taken() -> None:
    mesh = MESH.build()
    with jax.set_mesh(mesh):
        assert with_sharding_constraint(X, P(None, "data")).sharding.spec == P(None, "data")
    sharding = NamedSharding(mesh, P("model"))
    assert jax.jit(lambda x: with_sharding_constraint(x, sharding))(X).sharding.spec == P("model")


def test_absent_mesh_axes_are_dropped() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    with jax.set_mesh(mesh):
        assert constrain(jnp.asarray(X)).sharding.spec == P("data", None)
        x = jnp.asarray(X)
        # Nothing of it exists here: no copy on every device is forced.
        assert with_sharding_constraint(x, ("sequence", "hidden")) is x
        assert with_sharding_constraint(x, (None, None)).sharding.is_fully_replicated


def test_dimension_that_does_not_divide_stays_whole_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rules._say_not_divided.cache_clear()
    with caplog.at_level(logging.WARNING), jax.set_mesh(MESH.build()):
        for _ in range(2):
            assert constrain(jnp.ones((6, 16))).sharding.spec == P(None, "model")
    assert caplog.text.count("'batch' stays whole: a dimension of 6") == 1


def test_a_pytree_of_arrays() -> None:
    with jax.set_mesh(MESH.build()):
        tree = with_sharding_constraint({"a": jnp.ones((8, 16)), "b": jnp.ones((4, 8, 2))}, ("batch", "hidden"))
    assert {leaf.sharding.spec for leaf in tree.values()} == {P("data", "model")}


def test_unknown_name_lists_the_known_with_or_without_a_mesh() -> None:
    for mesh in (None, MESH.build()):
        with (
            jax.set_mesh(mesh),
            pytest.raises(ValueError, match=r"logical axis 'hiden'.*mean 'hidden'.*'batch'"),
        ):
            with_sharding_constraint(X, ("batch", "hiden"))


def test_collision_is_an_error_that_names_both() -> None:
    with (
        jax.set_mesh(MESH.build()),
        pytest.raises(ValueError, match="'hidden' and 'mlp', which both go on 'model'"),
    ):
        with_sharding_constraint(X, ("hidden", "mlp"))


def test_too_many_names() -> None:
    with pytest.raises(ValueError, match=r"at most one axis name a dimension.*shape \(8, 16\)"):
        with_sharding_constraint(X, ("batch", None, "hidden"))


@pytest.mark.parametrize("axes", ["batch", None, 3])
def test_axes_must_be_a_tuple(axes: object) -> None:
    with pytest.raises(ValueError, match="Axes are a tuple"):
        with_sharding_constraint(X, axes)  # type: ignore[arg-type]


def test_other_rules_reshard_without_touching_the_call() -> None:
    with jax.set_mesh(MESH.build()):
        y = with_sharding_constraint(X, ("batch", "hidden"), rules={"batch": "model", "hidden": "data"})
    assert y.sharding.spec == P("model", "data")


def test_inside_shard_map_manual_axes_are_left_alone() -> None:
    with jax.set_mesh(MESH.build()):
        full = jax.shard_map(constrain, in_specs=P("data", "model"), out_specs=P("data", "model"))
        np.testing.assert_array_equal(jax.jit(full)(X), X)
        part = jax.shard_map(constrain, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        y = jax.jit(part)(X)
    np.testing.assert_array_equal(y, X)
    assert "model" in str(y.sharding.spec)


def test_explicit_mesh_is_resharded() -> None:
    mesh = jax.make_mesh((4, 8), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        assert constrain(jnp.asarray(X)).sharding.spec == P("data", "model")
        assert jax.jit(constrain)(jnp.asarray(X)).sharding.spec == P("data", "model")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_bare_with_mesh_is_seen() -> None:
    with MESH.build():
        assert jax.jit(constrain)(X).sharding.spec == P("data", "model")


def test_partition_spec_alone() -> None:
    axes = {"data": 4, "model": 8, "expert": 2}
    assert partition_spec(("batch", None, "hidden"), axes) == P("data", None, "model")
    assert partition_spec(("expert", "batch", "mlp"), axes, shape=(2, 3, 8)) == P("expert", None, "model")
