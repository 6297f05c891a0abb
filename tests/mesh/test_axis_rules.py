"""Logical axes: the table, the constraint with and without a mesh, and its errors."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.mesh.context import tpu_v4_optimization_context
from capibara.mesh.mesh import MeshConfig
from capibara.mesh.rules import (
    RECORDER,
    RULES,
    logical_sharding,
    partition_spec,
    shard_params,
    with_sharding_constraint,
)

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


@pytest.mark.quick
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


def test_a_rule_of_none_asks_for_a_whole_copy() -> None:
    mesh = MESH.build()
    x = jax.device_put(X, NamedSharding(mesh, P("data", "model")))
    with jax.set_mesh(mesh):
        assert with_sharding_constraint(x, ("batch", None), rules={"batch": None}).sharding.is_fully_replicated
        # An absent axis among them: nothing is forced.
        mixed = with_sharding_constraint(x, ("batch", "rows"), rules={"batch": None, "rows": "pipeline"})
    assert mixed is x


@pytest.mark.usefixtures("nothing_said_yet")
def test_dimension_that_does_not_divide_stays_whole_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


@pytest.mark.quick
def test_a_rule_of_several_mesh_axes() -> None:
    axes = {"data": 4, "model": 8, "expert": 2}
    rules = {"batch": ("data", "pipeline", "expert"), "hidden": ("model",), "rows": None}
    assert partition_spec(("batch", "hidden", "rows"), axes, rules=rules) == P(("data", "expert"), "model", None)
    # As many of the first as divide: 8 over data and expert, 4 over data alone, 6 over neither.
    sizes = {dimension: partition_spec(("batch",), axes, (dimension,), rules) for dimension in (8, 4, 6)}
    assert sizes == {8: P(("data", "expert")), 4: P("data"), 6: P(None)}
    with pytest.raises(ValueError, match="'batch' and 'expert', which both go on 'expert'"):
        partition_spec(("batch", "expert"), axes, rules={**rules, "expert": "expert"})


def test_a_constraint_over_several_mesh_axes() -> None:
    with jax.set_mesh(MESH.build()):
        y = with_sharding_constraint(jnp.ones((32, 3)), ("batch",), rules={"batch": ("data", "model")})
    assert y.sharding.spec == P(("data", "model"))
    assert y.addressable_shards[0].data.shape == (1, 3)


@pytest.mark.usefixtures("nothing_said_yet")
def test_the_axis_that_does_not_divide_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            partition_spec(("batch",), {"data": 4, "model": 8}, (4,), {"batch": ("data", "model")})
    assert caplog.text.count("'batch' is not split over 'model': a dimension of 4") == 1


@pytest.mark.quick
def test_logical_sharding() -> None:
    mesh = MESH.build()
    assert logical_sharding(mesh, ("batch", None, "mlp")) == NamedSharding(mesh, P("data", None, "model"))
    assert logical_sharding(MESH, ("batch", "mlp"), (6, 16)).spec == P(None, "model")
    assert logical_sharding(mesh, None).is_fully_replicated
    assert logical_sharding(mesh, ("rows",), rules={"rows": "model"}).spec == P("model")
    with pytest.raises(ValueError, match="at most one axis name a dimension"):
        logical_sharding(mesh, ("batch", "mlp"), (8,))
    with pytest.raises(ValueError, match=r"mesh is a jax Mesh or a MeshConfig. Got tuple"):
        logical_sharding((4, 8), ("batch",))  # type: ignore[arg-type]


@pytest.mark.quick
def test_a_model_is_laid_out_by_its_names() -> None:
    mesh = MESH.build()
    params = {"table": np.ones((64, 16), np.float32), "blocks": [{"up": np.ones((16, 32)), "bias": np.ones(32)}, 1.0]}
    names = {"table": ("vocab", None), "blocks": [{"up": (None, "mlp"), "bias": None}, ()]}
    placed = shard_params(params, names, mesh)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, placed)
    assert specs == {"table": P("model", None), "blocks": [{"up": P(None, "model"), "bias": P()}, P()]}
    np.testing.assert_array_equal(placed["table"], params["table"])
    other = shard_params(params, names, MESH, rules={"vocab": "data", "mlp": None})
    assert other["table"].sharding.spec == P("data", None)
    assert other["blocks"][0]["up"].sharding.is_fully_replicated


def test_a_model_that_does_not_exist_yet_is_laid_out_too() -> None:
    shapes = jax.eval_shape(lambda: {"up": jnp.ones((16, 32), jnp.bfloat16)})
    placed = shard_params(shapes, {"up": (None, "mlp")}, MESH)
    assert (placed["up"].shape, placed["up"].dtype) == ((16, 32), jnp.bfloat16)
    assert placed["up"].sharding.spec == P(None, "model")


def test_names_of_another_structure_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a tuple of names for each leaf.*the tree's own structure"):
        shard_params({"a": X, "b": X}, {"a": ("batch",)}, MESH)


def test_a_recorder_is_given_the_names_instead() -> None:
    seen = []
    token = RECORDER.set(lambda leaf, names: seen.append(names) or leaf + 1)
    try:
        y = with_sharding_constraint(X, ("batch", None))
        with pytest.raises(ValueError, match="logical axis 'bach'"):
            with_sharding_constraint(X, ("bach", None))
    finally:
        RECORDER.reset(token)
    assert seen == [("batch", None)]
    np.testing.assert_array_equal(y, X + 1)
