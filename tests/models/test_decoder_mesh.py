"""The decoder on a mesh of 8: values and gradients of one device, whatever lies where."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.models.models import MODELS, VOCAB, ids_of, params_of

from capibara.mesh import MeshConfig, shard_params
from capibara.models import decoder
from capibara.models.config import ModularModelConfig
from capibara.parallel import pipelined

MOE = ModularModelConfig(
    hidden=16,
    layers=4,
    vocab=VOCAB,
    pattern="attention+moe : attention+mlp",
    blocks={
        "attention": {"heads": 4, "kv_heads": 2},
        "mlp": {"ffn": 32},
        "moe": {"experts": 8, "top_k": 2, "ffn": 16, "shared_ffn": 16, "shared_gate": True},
    },
)


def _results(model: ModularModelConfig, params: Any, batch: Any) -> Any:
    run = jax.value_and_grad(functools.partial(decoder.loss, model, dtype=jnp.float32), has_aux=True)
    return jax.jit(run)(params, batch)


@functools.cache
def _alone(name: str) -> Any:
    model = MOE if name == "moe" else MODELS[name]
    params = params_of(model)
    batch = {"inputs": ids_of(4, 8), "targets": ids_of(4, 8, seed=1)}
    return model, params, batch, _results(model, params, batch)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("hybrid", {"data": 2, "model": 2, "expert": 2}),
        ("moe", {"data": 4, "model": 2}),
        ("moe", {"data": 2, "expert": 4}),
        ("dense", {"data": 2, "sequence": 2, "model": 2}),
    ],
)
def test_a_mesh_gives_what_one_device_gives(name: str, axes: dict[str, int]) -> None:
    model, params, batch, ((value, metrics), gradients) = _alone(name)
    mesh = MeshConfig(tuple(axes.values()), tuple(axes)).build(jax.devices()[:8])
    placed = shard_params(params, decoder.axes(model), mesh)
    rows = jax.device_put(batch, NamedSharding(mesh, P("data")))
    if "expert" in axes:
        moe = next(layer["moe"] for layer in placed["layers"] if "moe" in layer)
        assert "expert" in str(moe["up"].sharding.spec)
        assert moe["up"].addressable_shards[0].data.shape[1] == moe["up"].shape[1] // axes["expert"]
    with jax.set_mesh(mesh):
        (other, other_metrics), other_gradients = _results(model, placed, rows)
    assert float(other) == pytest.approx(float(value), rel=1e-5)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-4)
    jax.tree.map(close, other_metrics, metrics)
    jax.tree.map(close, other_gradients, gradients)


def test_stages_of_a_pipeline_give_what_one_device_gives() -> None:
    model = MODELS["dense"]
    params = params_of(model)
    batch = {"inputs": ids_of(4, 8), "targets": ids_of(4, 8, seed=1)}
    loss = decoder.make_loss(model, dtype=jnp.float32)
    value, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
    mesh = MeshConfig((2, 2), ("pipeline", "data")).build(jax.devices()[:4])
    placed = shard_params(params, decoder.axes(model), mesh)
    assert placed["layers"][0]["mlp"]["up"].sharding.spec[0] == "pipeline"
    rows = jax.device_put(batch, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        other, other_gradients = jax.jit(jax.value_and_grad(pipelined(loss, microbatches=2)))(placed, rows)
    assert float(other) == pytest.approx(float(value), rel=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-4), other_gradients, gradients)


def test_tokens_travel_to_their_experts() -> None:
    """With an expert axis, by an exchange of tokens; without one there is none to make."""

    def text(axes: dict[str, int]) -> str:
        mesh = MeshConfig(tuple(axes.values()), tuple(axes)).build(jax.devices()[:8])
        shapes = shard_params(decoder.param_shapes(MOE), decoder.axes(MOE), mesh)
        batch = decoder.batch_shapes(4, 8)
        with jax.set_mesh(mesh):
            return jax.jit(decoder.make_loss(MOE)).lower(shapes, batch).as_text()

    assert "all_to_all" in text({"data": 2, "expert": 4})
    assert "all_to_all" not in text({"data": 4, "model": 2})


def test_experts_that_do_not_divide_stay_whole() -> None:
    """Of 8 experts over 3 devices there is no equal share: computed without an exchange, and the same."""
    model, params, batch, ((value, _), _) = _alone("moe")
    mesh = MeshConfig((1, 3), ("data", "expert")).build(jax.devices()[:3])
    placed = shard_params(params, decoder.axes(model), mesh)
    with jax.set_mesh(mesh):
        (other, _), _ = _results(model, placed, batch)
    assert float(other) == pytest.approx(float(value), rel=1e-5)


def test_a_mesh_of_explicit_axes_is_refused_with_the_one_to_build() -> None:
    model = MODELS["dense"]
    shapes, batch = decoder.param_shapes(model), decoder.batch_shapes(4, 8)
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"data, model of type Explicit\. Fix: .*MeshConfig"):
        jax.eval_shape(decoder.make_loss(model), shapes, batch)
