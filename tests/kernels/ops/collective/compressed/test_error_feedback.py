"""Error feedback: nothing is lost for good, the state is plain arrays, and training ends where exact training does."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from capibara.kernels.ops.collective.compressed import compressed_all_reduce, feedback_state, redistribute

EXAMPLE = runpy.run_path(str(Path(__file__).parents[5] / "examples" / "parallel" / "compressed_gradients.py"))
BOTH = ("data", "chip")


@functools.lru_cache
def _step(outer: int, inner: int = 1, **how: Any) -> Any:
    devices = jax.devices("cpu")[: outer * inner]
    mesh = jax.make_mesh((outer, inner), BOTH, axis_types=(AxisType.Auto,) * 2, devices=devices)
    axes: Any = BOTH
    if inner > 1:
        axes, how = "data", {**how, "inner_axis_name": "chip"}

    def local(tree: Any, state: Any) -> Any:
        return compressed_all_reduce(jax.tree.map(lambda x: x[0], tree), axes, state=state, **how)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(BOTH), P(BOTH)), out_specs=(P(), P(BOTH))))


@pytest.mark.quick
@pytest.mark.parametrize(("outer", "inner"), [(8, 1), (2, 4)])
def test_what_was_not_sent_is_kept_and_sent_with_the_next(outer: int, inner: int) -> None:
    """After any number of steps: all that was delivered and all that is kept add up to all that was given."""
    step = _step(outer, inner, block_size=32, bucket_bytes=256)
    shapes = {"w": (5, 13), "b": (3,)}
    state = feedback_state({name: np.zeros(shape) for name, shape in shapes.items()}, 8)
    given = {name: np.zeros(shape) for name, shape in shapes.items()}
    delivered = {name: np.zeros(shape) for name, shape in shapes.items()}
    largest = dict.fromkeys(shapes, 0.0)
    generator = np.random.default_rng(0)
    for _ in range(6):
        tree = {name: generator.standard_normal((8, *shape)).astype(np.float32) for name, shape in shapes.items()}
        out, state = step(tree, state)
        for name, x in tree.items():
            given[name] += x.astype(np.float64).sum(0)
            delivered[name] += np.asarray(out[name], np.float64)
            largest[name] = max(largest[name], np.abs(x).max())
    for name in shapes:
        kept = np.asarray(state[name], np.float64).sum(0)
        assert np.abs(kept).max() > 0
        # Float32 sums of 8 numbers, and of what is kept, at each of 6 steps, each up to 8 of the largest magnitude.
        rounding = 6 * 10 * 2.0**-24 * 8 * largest[name]
        assert np.abs(delivered[name] + kept - given[name]).max() <= rounding
        # What is kept does not pile up: each device's own half step, and half a step of the sum.
        assert np.abs(kept).max() <= 1.1 * 8 * largest[name] / 127


def test_a_small_gradient_beside_a_large_one_arrives_only_with_feedback() -> None:
    x = np.zeros((8, 40), np.float32)
    x[:, 0] = [100.0, -100.0] * 4  # cancels in the sum, and makes a step of 0.8
    x[:, 1:] = 0.1
    step, state = _step(8), feedback_state(x[0], 8)
    delivered = np.zeros(40)
    for _ in range(20):
        out, state = step(x, state)
        delivered += np.asarray(out, np.float64)
    # 20 · 8 · 0.1 = 16 each, less what is still kept: half a step on each of 8 devices, and half a step of the sum.
    assert np.abs(delivered[1:] - 16.0).max() <= 9 * 0.5 * 100 / 127 * 1.01
    alone, none = step(x, None)
    assert none is None
    assert not np.asarray(alone)[1:].any()


def test_a_number_that_is_not_finite_does_not_stay_in_the_state() -> None:
    x = np.ones((8, 40), np.float32)
    x[3, 7] = np.nan
    step = _step(8)
    out, state = step(x, feedback_state(x[0], 8))
    assert np.isnan(np.asarray(out)[7])
    assert np.isfinite(np.asarray(state)).all()
    out, _ = step(np.ones((8, 40), np.float32), state)
    np.testing.assert_allclose(out, 8.0, rtol=2 / 127)


def test_a_state_survives_another_number_of_devices() -> None:
    x = np.random.default_rng(1).standard_normal((8, 40)).astype(np.float32)
    _, state = _step(8)(x, feedback_state(x[0], 8))
    fewer = redistribute(np.asarray(state), 4)  # as a checkpoint gives it back
    assert fewer.shape == (4, 40)
    np.testing.assert_allclose(fewer.sum(0), np.asarray(state).sum(0), rtol=0, atol=16 * 2.0**-24)
    nothing = np.zeros((4, 40), np.float32)
    out, _ = _step(4)(nothing, fewer)  # it takes the new mesh's state, and sends what was kept
    assert np.abs(np.asarray(out)).max() > 0


def test_bad_states_say_what_to_do() -> None:
    x = np.ones((8, 4), np.float32)
    with pytest.raises(ValueError, match="tree like the gradients"):
        _step(8)({"a": x}, feedback_state({"b": x[0]}, 8))
    with pytest.raises(ValueError, match=r"float32 of shape \(1, 4\)"):
        _step(8)(x, feedback_state(x[0], 16))
    with pytest.raises(ValueError, match=r"float32 of shape \(1, 4\)\. Got 0\.5"):
        jax.vmap(lambda x: compressed_all_reduce(x, "data", state=0.5), axis_name="data")(x)
    with pytest.raises(ValueError, match="devices is a positive whole number"):
        feedback_state(x[0], 0)
    with pytest.raises(ValueError, match="leading axis of one row a device"):
        redistribute({"w": 3.0}, 2)


def test_training_on_32_devices_ends_within_one_percent_of_exact_training() -> None:
    """The example, which the examples' own test runs on 8 devices, by both kinds of rounding."""
    rows = EXAMPLE["losses"](32, ("exact", "int8 nearest, feedback"), steps=25)
    assert rows[0]["loss"] < 1.8  # log 10 = 2.3 is what nothing learned gives
    assert abs(rows[1]["of_exact"] - 1) < 0.01
    assert rows[1]["loss"] != rows[0]["loss"]  # it was compressed


def test_what_is_kept_behind_an_inner_axis_lies_where_it_belongs() -> None:
    """Delivered and kept add up to the gradients, place by place, though each device rounds only its inner part."""
    kind = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=kind, devices=jax.devices("cpu")[:4])
    rows = jax.sharding.PartitionSpec(("dcn", "ici"))
    given = jax.random.normal(jax.random.key(0), (4, 1200))

    def one(own: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        return compressed_all_reduce(own[0], "dcn", inner_axis_name="ici", state=kept)

    specs = (jax.sharding.PartitionSpec(), rows)
    sent, kept = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=rows, out_specs=specs))(given, jnp.zeros((4, 1200)))
    assert float(jnp.abs(kept).max()) > 0
    # A handful of float32 roundings of sums of four numbers of size at most 5.
    assert jnp.abs(sent + kept.sum(0) - given.sum(0)).max() < 8 * 20 * float(jnp.finfo(jnp.float32).eps)
