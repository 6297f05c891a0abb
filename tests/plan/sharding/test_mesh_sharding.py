"""`create_mesh_sharding`: the mesh over the devices asked for, and a model's arrays put on it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from capibara.jax.tpu_v4.optimizations import create_mesh_sharding, optimize_sharding_strategy
from capibara.plan.search.search import TARGETS
from capibara.plan.sharding.mesh_sharding import WORDS


def _params(width: int = 64) -> dict[str, Any]:
    up = jnp.arange(width * 4 * width, dtype=jnp.float32).reshape(width, 4 * width)
    return {"up": up, "down": up.T, "bias": jnp.ones(width)}


@pytest.mark.quick
def test_as_the_documents_call_it() -> None:
    sharding = create_mesh_sharding(mesh_shape=(4, 8), device_ids=list(range(32)), optimization_target="throughput")
    assert dict(sharding.mesh.shape) == {"data": 4, "model": 8}
    params = _params()
    strategy = optimize_sharding_strategy(params, (32, 512, 64), (4, 8), 32.0)
    placed = sharding.shard_model(params, strategy=strategy)
    for name, array in placed.items():
        np.testing.assert_array_equal(array, params[name])
        assert array.sharding.spec == strategy.specs[name]
        assert array.sharding.mesh == sharding.mesh


def test_devices_come_in_the_order_of_their_ids() -> None:
    ids = [7, 3, 5, 1, 0, 2, 4, 6]
    mesh = create_mesh_sharding((2, 4), ids).mesh
    assert [device.id for device in mesh.devices.flat] == ids
    assert create_mesh_sharding((4, 8)).mesh.devices.size == 32


def test_every_word_is_a_layout_of_its_own() -> None:
    sharding = create_mesh_sharding((4, 8))
    specs = {word: sharding.specs(_params(), word) for word in WORDS}
    assert set(map(str, specs["data"].values())) == {str(PartitionSpec())}
    assert specs["tensor"]["up"] == PartitionSpec(None, "model")
    assert specs["tensor"]["down"] == PartitionSpec("model")
    assert specs["fully_sharded"]["up"] == PartitionSpec(None, ("data", "model"))
    assert specs["fully_sharded"]["bias"] == PartitionSpec()
    shards = {word: sharding.shard_model(_params(), word)["up"].addressable_shards[0].data.size for word in WORDS}
    assert shards["data"] == 32 * shards["fully_sharded"] == 8 * shards["tensor"]


def test_the_mesh_target_is_used_when_there_is_no_strategy() -> None:
    # In the wide one products take longer than the gathers behind them, in the narrow one they do not.
    both = [jax.eval_shape(lambda width=width: _params(width)) for width in (64, 8192)]
    specs = {target: [str(create_mesh_sharding((4, 8), None, target).specs(one)) for one in both] for target in TARGETS}
    assert len(set(map(str, specs.values()))) == 3, specs
    for target in TARGETS:
        assert specs[target] == [str(create_mesh_sharding((4, 8)).specs(one, target)) for one in both]


def test_objects_with_params_come_back_as_what_they_were() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        params: Any
        name: str = "kept"

    class Plain:
        def __init__(self, params: Any) -> None:
            self.params = params

    sharding = create_mesh_sharding((4, 8))
    for kind in (Frozen, Plain):
        model = kind(_params())
        placed = sharding.shard_model(model, "tensor")
        assert type(placed) is kind
        assert placed.params["up"].sharding.spec == PartitionSpec(None, "model")
        assert len(model.params["up"].sharding.device_set) == 1
    assert sharding.shard_model(Frozen(_params()), "data").name == "kept"


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="Choices: 'throughput', 'latency', 'memory'"):
        create_mesh_sharding((4, 8), None, "inference")
    with pytest.raises(ValueError, match=r"takes the ids of 32 attached devices. Got 4 ids"):
        create_mesh_sharding((4, 8), [0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"\[99\] are not attached"):
        create_mesh_sharding((1, 2), [0, 99])
    with pytest.raises(ValueError, match="device_ids are whole numbers"):
        create_mesh_sharding((1, 2), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="each device once"):
        create_mesh_sharding((1, 2), [0, 0])
    sharding = create_mesh_sharding((4, 8))
    with pytest.raises(ValueError, match="'fully_sharded'"):
        sharding.shard_model(_params(), "zero")
    strategy = optimize_sharding_strategy(_params(), (32, 512, 64), (4, 8))
    with pytest.raises(ValueError, match="structure it was made for"):
        sharding.shard_model({"other": jnp.ones((4, 4))}, strategy)
    with pytest.raises(ValueError, match="mesh it was made for"):
        create_mesh_sharding((8, 4)).shard_model(_params(), strategy)


def test_fully_sharded_cuts_over_as_many_devices_as_divide() -> None:
    specs = create_mesh_sharding((4, 8)).specs({"both": np.ones((48, 20)), "one": np.ones((7, 12))}, "fully_sharded")
    assert specs == {"both": PartitionSpec("model", "data"), "one": PartitionSpec(None, "data")}


def test_numbers_nothing_and_empty_models_are_placed() -> None:
    sharding = create_mesh_sharding((4, 8))
    for word in WORDS:
        assert sharding.shard_model({}, word) == {}
        placed = sharding.shard_model({"step": 3, "none": None}, word)
        assert (int(placed["step"]), placed["none"]) == (3, None)
        assert len(placed["step"].sharding.device_set) == 32


def test_what_cannot_be_done_to_a_model_is_said() -> None:
    class ReadOnly:
        @property
        def params(self) -> Any:
            return {"w": np.ones((4, 4))}

    with pytest.raises(ValueError, match="ReadOnly, whose params cannot"):
        create_mesh_sharding((4, 8)).shard_model(ReadOnly(), "data")
    with pytest.raises(ValueError, match="cuts over a model axis"):
        create_mesh_sharding((32,)).shard_model(_params(), "tensor")
