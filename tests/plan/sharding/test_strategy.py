"""`optimize_sharding_strategy`: by parameters alone and by a loss; what fits, what differs, what is said."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from capibara.hardware.topology import slice_by_name
from capibara.jax.tpu_v4.optimizations import optimize_sharding_strategy
from capibara.mesh.layout import Layout
from capibara.mesh.mesh import MeshConfig
from capibara.mesh.training_mesh import training_mesh_config
from capibara.plan.search.plans import DoesNotFit, bytes_in_words
from capibara.plan.sharding.by_parameters import ProductsModel, parameter_job


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


def _decoder(d: int = 768, layers: int = 12, vocab: int = 32000) -> Any:
    blocks = {"q": (d, d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d), "norm": (d,)}
    return {
        "embed": _shape(vocab, d),
        "blocks": {name: _shape(layers, *shape) for name, shape in blocks.items()},
        "norm": _shape(d),
    }


@pytest.mark.quick
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


@pytest.mark.quick
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
        ({"model_params": {"w": "3"}}, "str in model_params"),
        ({"batch": {}}, "batch is what a loss takes"),
        ({"optimizer": "adam"}, "Did you mean 'adamw'"),
        ({"loss": lambda p, b: 0.0, "optimizer": None}, "planned as a training step"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    keywords = {"model_params": _decoder(), "input_shape": (32, 512, 768), "mesh_shape": (4, 8), **changes}
    with pytest.raises(ValueError, match=message):
        optimize_sharding_strategy(**keywords)


@pytest.mark.parametrize(
    ("params", "mesh"),
    [({"w": _shape(509, 1021)}, (4, 8)), ({"w": _shape(512, 2048)}, (7, 3)), ({}, (4, 8)), ({"s": _shape()}, (4, 8))],
)
def test_what_no_axis_divides_stays_whole_and_is_said(params: Any, mesh: tuple[int, int]) -> None:
    plan = optimize_sharding_strategy(params, (28, 16, 8), mesh)
    assert all(spec == PartitionSpec() for spec in jax.tree.leaves(plan.specs))
    assert "replicated" in plan.name
    assert plan.input_spec == PartitionSpec("data")
    if "w" in params:
        assert "no dimension of it divides" in plan.why["['w']"]


def test_a_gradient_lies_with_its_own_moment_whatever_the_others_are_called() -> None:
    def planned(name: str) -> float:
        # The small one does not divide and comes first: its moments are whole.
        params = {"a": {name: _shape(7, 11)}, "w": _shape(512, 512)}
        return optimize_sharding_strategy(params, (32, 128, 512), (32, 1)).bytes_per_chip

    assert planned("w") == planned("other")


def test_a_sequence_axis_takes_a_part_of_the_tokens_and_of_no_features() -> None:
    params = {"up": _shape(512, 2048), "down": _shape(2048, 512)}
    split = optimize_sharding_strategy(params, (32, 128, 512), training_mesh_config(32, 8, 2, 1, 1, 2))
    wider = optimize_sharding_strategy(params, (32, 128, 512), training_mesh_config(32, 16, 2))
    assert split.input_spec == PartitionSpec("data", "sequence")
    # As many tokens a chip, and moments in as many parts.
    assert split.bytes_per_chip == wider.bytes_per_chip
    features = optimize_sharding_strategy(params, (32, 512), training_mesh_config(32, 8, 2, 1, 1, 2))
    assert features.input_spec == PartitionSpec("data")


def test_a_mesh_config_brings_its_limit_and_what_it_is_meant_for() -> None:
    params = _decoder(2048, 24)

    def planned(**mesh: Any) -> Any:
        return optimize_sharding_strategy(params, (32, 512, 2048), MeshConfig((4, 8), **mesh))

    roomy = planned(target="inference")
    assert (roomy.target, planned().target) == ("latency", "throughput")
    assert planned(memory_limit_gb=32.0).bytes_per_chip == planned().bytes_per_chip
    limit = 0.7 * roomy.bytes_per_chip
    assert planned(target="inference", memory_limit_gb=limit / 2**30).bytes_per_chip <= limit


def test_numpy_numbers_and_plain_ones_are_taken() -> None:
    params = {"w": _shape(64, 64), "scale": 2.0, "steps": 3, "key": jax.random.key(0), "none": None}
    plan = optimize_sharding_strategy(params, tuple(np.array([32, 16, 64])), (4, 8), np.float32(3.0))  # type: ignore[arg-type]
    assert plan.specs["scale"] == plan.specs["steps"] == plan.specs["key"] == PartitionSpec()
    assert plan.specs["none"] is None


def test_bytes_in_words_never_read_zero() -> None:
    assert bytes_in_words(2**31, 2**30) == "2.0 of 1.0 GiB"
    assert bytes_in_words(2**20) == "1.0 MiB"
    assert bytes_in_words(7.0) == "7.0 bytes"


def test_the_rules_by_hand() -> None:
    params = {"down": _shape(2048, 512), "up": _shape(512, 2048)}
    specs = (PartitionSpec("model"), PartitionSpec(None, "model"), PartitionSpec("data"))
    layout = Layout(MeshConfig((4, 8)), specs, rules={})

    def estimated(train: bool) -> Any:
        return ProductsModel(parameter_job(params, (32, 128, 512), 0, train), slice_by_name("v4-64"), 2.0**30).estimate(
            layout
        )

    step, forward = estimated(True), estimated(False)
    tokens, weights = 32 * 128 / 4, 2048 * 512 / 8
    # Parameters in float32 and the input; gradients, what each product was given, and the widest output, cut by 8.
    assert forward.memory.arguments == 2 * 4 * weights + 4 * tokens * 512
    given, output = 2 * tokens * (2048 / 8 + 512), 2 * tokens * 512
    assert step.memory.temporaries == 2 * 4 * weights + given + output
    assert forward.memory.temporaries == output
    assert (forward.flops, step.flops) == (4 * tokens * weights, 12 * tokens * weights)
    assert step.compute_seconds == pytest.approx(3 * forward.compute_seconds)
    # One sum over the model axis after the rows' product; the columns' comes in the backward pass and is as wide.
    assert step.exposed_seconds == pytest.approx(2 * forward.exposed_seconds)
    assert forward.exposed_seconds > 0


def test_where_the_moments_lie_is_said() -> None:
    params = {"a": {"w": _shape(512, 2048)}, "w": _shape(2048, 512)}
    plan = optimize_sharding_strategy(params, (32, 128, 512), (4, 8))
    assert "optimizer sharded" in plan.name
    assert plan.specs["w"] == PartitionSpec("model")
    assert plan.moment_specs["w"] == PartitionSpec("model", "data")
    assert plan.moment_specs["a"]["w"] == PartitionSpec("data", "model")
    assert optimize_sharding_strategy(params, (32, 128, 512), (4, 8), optimizer="sgd").moment_specs is None

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch @ params["a"]["w"] @ params["w"]) ** 2)

    def stepped(optimizer: str) -> Any:
        rows = _shape(32, 512)
        return optimize_sharding_strategy(
            params, (32, 512), (4, 8), loss=loss, batch=rows, optimizer=optimizer, optimization_target="memory"
        )

    # For least memory moments are in as many parts as there are chips, and so are the parameters.
    step = stepped("adamw")
    assert step.moment_specs == step.specs
    assert len(step.moment_specs["w"]) == 2
    assert stepped("sgd").moment_specs is None


def test_a_loss_of_other_batches_is_told_what_it_was_given() -> None:
    with pytest.raises(TypeError) as raised:
        optimize_sharding_strategy(_decoder(), (32, 512), (4, 8), loss=lambda params, batch: batch["tokens"].sum())
    told = "The loss was given int32 tokens of input_shape (32, 512); pass batch= where it takes others."
    assert told in raised.value.__notes__  # beside jax's own
