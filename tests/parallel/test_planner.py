"""`optimize_sharding_strategy`: by parameters alone and by a loss; what fits, what differs, what is said."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from capibara.jax.tpu_v4.optimizations import optimize_sharding_strategy
from capibara.parallel.by_parameters import ProductsModel, parameter_job
from capibara.parallel.plans import DoesNotFit


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


def _decoder(d: int = 768, layers: int = 12, vocab: int = 32000) -> Any:
    blocks = {"q": (d, d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d), "norm": (d,)}
    return {
        "embed": _shape(vocab, d),
        "blocks": {name: _shape(layers, *shape) for name, shape in blocks.items()},
        "norm": _shape(d),
    }


@pytest.mark.newest
def test_as_the_documents_call_it() -> None:
    params = _decoder()
    plan = optimize_sharding_strategy(
        model_params=params, input_shape=(32, 512, 768), mesh_shape=(4, 8), memory_limit_gb=32.0
    )
    assert jax.tree.structure(plan.specs) == jax.tree.structure(params)
    blocks = plan.specs["blocks"]
    # A column cut, then a row cut; a stack of vectors stays whole.
    assert "model" in tuple(blocks["up"])[2]
    assert "model" in tuple(blocks["down"])[1]
    assert blocks["norm"] == PartitionSpec()
    assert plan.input_spec == PartitionSpec("data")
    whole = sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(params))
    # Parameters, gradients and two moments, cut 32 ways at the most and not at all at the least.
    assert whole * 4 / 32 < plan.bytes_per_chip < whole * 4 + 4 * 2**30
    assert plan.step_seconds > 0
    assert set(plan.why) == {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    text = plan.explain()
    assert "predicted" in text
    assert "['blocks']['up']: " in text


def test_square_matrices_take_turns() -> None:
    job = parameter_job(_decoder(), (32, 512, 768), 2, True)
    leaves = {leaf.name: leaf for leaf in ProductsModel(job, None, 1.0).anatomy().leaves if leaf.role == "params"}
    first, second = leaves["['blocks']['out']"], leaves["['blocks']['q']"]
    assert first.groups[2] == second.groups[1]
    assert first.groups[1] == second.groups[2]


def test_the_targets_choose_differently() -> None:
    # Enough tokens that gathers hide behind products: for time they are free, for the worst case they are not.
    plans = {
        target: optimize_sharding_strategy(_decoder(), (64, 2048, 768), (4, 8), optimization_target=target)
        for target in ("throughput", "latency", "memory")
    }
    assert len({str(plan.specs) for plan in plans.values()}) == 3
    assert plans["memory"].bytes_per_chip < plans["latency"].bytes_per_chip
    assert plans["throughput"].step_seconds <= plans["latency"].step_seconds


def test_training_is_dearer_than_a_forward_pass() -> None:
    adamw, sgd, forward = (
        optimize_sharding_strategy(
            _decoder(), (32, 512, 768), (4, 8), optimizer=optimizer, optimization_target="memory"
        )
        for optimizer in ("adamw", "sgd", None)
    )
    assert adamw.bytes_per_chip > sgd.bytes_per_chip > forward.bytes_per_chip
    assert forward.step_seconds < sgd.step_seconds


def test_a_limit_shards_more_and_then_names_what_would_fit() -> None:
    params = _decoder(2048, 24)
    roomy = optimize_sharding_strategy(params, (32, 512, 2048), (4, 8), optimization_target="latency")
    tight = optimize_sharding_strategy(
        params, (32, 512, 2048), (4, 8), 0.7 * roomy.bytes_per_chip / 2**30, optimization_target="latency"
    )
    assert tight.bytes_per_chip <= 0.7 * roomy.bytes_per_chip
    with pytest.raises(DoesNotFit, match=r"needs .* GiB a chip.*Fix: .*chips.*predicted"):
        optimize_sharding_strategy(params, (32, 512, 2048), (2, 2), 4.0)


def test_a_third_axis_takes_a_part_of_the_batch() -> None:
    plan = optimize_sharding_strategy(_decoder(), (32, 512, 768), (2, 4, 4))
    assert plan.mesh.axis_names == ("data", "model", "expert")
    assert plan.input_spec == PartitionSpec(("data", "expert"))


def test_a_batch_that_does_not_divide_is_named_with_one_that_does() -> None:
    with pytest.raises(DoesNotFit, match=r"33 rows of the batch do not divide over 4 chips \(32 or 36 would\)"):
        optimize_sharding_strategy(_decoder(), (33, 512, 768), (4, 8))


@pytest.mark.newest
def test_with_a_loss_the_whole_step_is_planned() -> None:
    def loss(params: Any, ids: jax.Array) -> jax.Array:
        x = params["embed"][ids]
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, params["layers"])
        scores = x @ params["embed"].T
        return jnp.mean(jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(scores, ids[..., None], -1)[..., 0])

    params = {"embed": _shape(512, 64), "layers": {"up": _shape(2, 64, 256), "down": _shape(2, 256, 64)}}
    plan = optimize_sharding_strategy(params, (16, 32), (2, 4), 1.0, loss=loss)
    assert jax.tree.structure(plan.specs) == jax.tree.structure(params)
    assert set(plan.choices) == {"remat", "accumulate"}
    assert plan.bytes_per_chip > 0
    assert plan.mesh.axes == {"data": 2, "model": 4}
    # The batch can be named where it is not one array of tokens.
    same = optimize_sharding_strategy(
        params, (16, 32), (2, 4), 1.0, loss=lambda p, b: loss(p, b["ids"]),
        batch={"ids": jax.ShapeDtypeStruct((16, 32), "int32")},
    )  # fmt: skip
    assert str(same.specs) == str(plan.specs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_shape": (0, 3)}, "input_shape is whole numbers"),
        ({"memory_limit_gb": -1}, "memory_limit_gb is a positive number"),
        ({"mesh_shape": (4, 0)}, "A mesh shape is"),
        ({"optimization_target": "speed"}, "Choices: 'throughput', 'latency', 'memory'"),
        ({"model_params": {"w": 3}}, "int in model_params"),
        ({"batch": {}}, "batch is what a loss takes"),
        ({"optimizer": "adam"}, "Did you mean 'adamw'"),
        ({"loss": lambda p, b: 0.0, "optimizer": None}, "planned as a training step"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    keywords = {"model_params": _decoder(), "input_shape": (32, 512, 768), "mesh_shape": (4, 8), **changes}
    with pytest.raises(ValueError, match=message):
        optimize_sharding_strategy(**keywords)
