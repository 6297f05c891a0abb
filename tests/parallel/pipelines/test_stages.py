"""`pipeline`: the same values and gradients as a scan, in the ticks that the schedule says."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.parallel.pipelines.staged_programs import assert_close, mesh_of

from capibara.mesh import with_sharding_constraint
from capibara.parallel import Schedule, pipeline

LAYERS, WIDE, ROWS = 8, 8, 16


def _layer(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w)


def _given(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(0)
    weights = random.normal(size=(LAYERS, WIDE, WIDE)) / 4
    return jnp.asarray(weights, dtype), jnp.asarray(random.normal(size=(ROWS, WIDE)), dtype)


def _plain(layer: Any, weights: Any, x: Any) -> Any:
    return jax.lax.scan(lambda one, w: (layer(one, w), None), x, weights)[0]


def _loss(run: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda w, x: jnp.sum(run(w, x).astype(jnp.float32) ** 2), argnums=(0, 1)))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("axes", "rounds", "remat"), [({"pipeline": 2, "data": 2}, 1, False), ({"pipeline": 4, "data": 2}, 2, True)]
)
def test_values_and_gradients_are_the_scans(axes: dict[str, int], rounds: int, remat: bool) -> None:
    weights, x = _given()
    mesh = mesh_of(**axes)
    held = weights if rounds == 1 else weights.reshape(rounds, LAYERS // rounds, WIDE, WIDE)
    spec = P("pipeline") if rounds == 1 else P(None, "pipeline")
    held, rows = jax.device_put(held, NamedSharding(mesh, spec)), jax.device_put(x, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        run = _loss(lambda w, x: pipeline(_layer, w, x, microbatches=8, rounds=rounds, remat=remat))
        found = run(held, rows)
    expected = _loss(lambda w, x: _plain(_layer, w, x))(weights, x)
    # A gradient sums over rows and columns, once a layer.
    assert_close(found, expected, terms=ROWS * WIDE)
    assert found[1][0].sharding.spec == spec, "a stage's gradients stay on it"


def test_every_stage_does_every_microbatch_once_and_waits_for_the_others() -> None:
    for stages, microbatches, rounds in ((4, 8, 1), (2, 6, 3), (4, 4, 2)):
        schedule = Schedule(stages, microbatches, rounds)
        done = Counter()
        for stage in range(stages):
            own = [t for t in range(schedule.ticks) if 0 <= t - stage < microbatches * rounds]
            assert schedule.ticks - len(own) == stages - 1, "the share of waiting, counted"
            assert schedule.bubble == (schedule.ticks - len(own)) / schedule.ticks
            done.update((stage, *map(int, schedule.at(stage, tick))) for tick in own)
        assert len(done) == stages * microbatches * rounds
        assert set(done.values()) == {1}
        # A microbatch is with the next stage one tick later, and after the last it comes round.
        for tick in range(schedule.ticks - stages):
            for stage in range(stages - 1):
                if 0 <= tick - stage < microbatches * rounds:
                    now, then = schedule.at(stage, tick), schedule.at(stage + 1, tick + 1)
                    assert tuple(map(int, now)) == tuple(map(int, then))
    assert Schedule(4, 8).bubble == (4 - 1) / (8 + 4 - 1)


def test_the_program_has_as_many_ticks_and_sends_a_microbatch_at_each() -> None:
    weights, x = _given()
    mesh = mesh_of(pipeline=4, data=2)
    with jax.set_mesh(mesh):
        made = jax.jit(lambda w, x: pipeline(_layer, w, x, microbatches=8))
        shaped = (
            jax.ShapeDtypeStruct(weights.shape, weights.dtype, sharding=NamedSharding(mesh, P("pipeline"))),
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data"))),
        )
        lengths = re.findall(r"length=(\d+)", str(jax.make_jaxpr(made)(weights, x)))
        text = made.lower(*shaped).compile().as_text()
    assert sorted(map(int, lengths)) == [LAYERS // 4, Schedule(4, 8).ticks]
    # What is sent at a tick is one chip's rows of one microbatch: 16 rows by 8 microbatches by 2 of data.
    assert re.search(rf"f32\[{ROWS // 8 // 2},{WIDE}\]\S* collective-permute", text), "data stays split inside"


def test_rows_that_only_fill_the_pipeline_do_not_spoil_the_gradients() -> None:
    def divides(x: Any, w: Any) -> Any:  # on rows of zeros it would be nan, and so would its gradient times zero
        return (x @ w) / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))

    weights, x = _given()
    with jax.set_mesh(mesh_of(pipeline=4)):
        found = _loss(lambda w, x: pipeline(divides, w, x, microbatches=4))(weights, x)
    assert_close(found, _loss(lambda w, x: _plain(divides, w, x))(weights, x), terms=4 * ROWS * WIDE)


@pytest.mark.quick
def test_layers_that_look_up_are_left_to_the_partitioner() -> None:
    def looks_up(x: Any, w: Any) -> Any:
        # Along the width, which the model axis splits: inside of the manual form this stops XLA, and the process.
        scores = with_sharding_constraint(x @ w, (None, "mlp"))
        return x + jnp.tanh(jnp.take_along_axis(scores, jnp.argmax(scores, -1, keepdims=True), axis=-1))

    weights, x = _given()
    mesh = mesh_of(pipeline=2, data=2, model=2)
    with jax.set_mesh(mesh):
        held = jax.device_put(weights, NamedSharding(mesh, P("pipeline")))
        run = _loss(lambda w, x: pipeline(looks_up, w, x, microbatches=4, remat=True))
        assert "shard_map" not in str(jax.make_jaxpr(run)(held, x))
        found = run(held, x)
    assert_close(found, _loss(lambda w, x: _plain(looks_up, w, x))(weights, x), terms=ROWS * WIDE)


@pytest.mark.parametrize("rounds", [1, 2])
def test_both_forms_are_the_same(rounds: int) -> None:
    weights, x = _given(jnp.bfloat16)
    held = weights if rounds == 1 else weights.reshape(rounds, -1, WIDE, WIDE)

    def run(form: str) -> tuple[str, Any]:
        made = jax.jit(lambda w, x: pipeline(_layer, w, x, microbatches=4, rounds=rounds, form=form, float32_sums=True))
        with jax.set_mesh(mesh_of(pipeline=2, data=2)):
            return str(jax.make_jaxpr(made)(held, x)), made(held, x)

    (manual, one), (automatic, other) = run("manual"), run("automatic")
    assert "shard_map" in manual
    assert "shard_map" not in automatic
    assert "f32[" in automatic, "the weights' sums are float32 in both"
    np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_float32_sums_add_up_gradients_of_narrow_parameters_better() -> None:
    weights, x = _given(jnp.bfloat16)

    def gradient(**how: Any) -> np.ndarray:
        with jax.set_mesh(mesh_of(pipeline=2)):
            run = _loss(lambda w, x: pipeline(_layer, w, x, microbatches=ROWS, **how))
            return np.asarray(run(weights, x)[1][0], np.float64)

    exact = np.asarray(_loss(lambda w, x: _plain(_layer, w, x))(weights.astype("float32"), x.astype("float32"))[1][0])
    errors = [np.abs(gradient(**how) - exact).mean() for how in ({"float32_sums": True}, {})]
    assert errors[0] < errors[1]


def test_remat_keeps_only_what_enters_a_stage() -> None:
    def wide(x: Any, w: Any) -> Any:
        return x + jnp.tanh(jnp.repeat(x @ w, 32, -1)).reshape(*x.shape, 32).sum(-1)

    weights, x = _given()
    mesh = mesh_of(pipeline=2)

    def temporaries(remat: bool) -> int:
        with jax.set_mesh(mesh):
            run = _loss(lambda w, x: pipeline(wide, w, x, microbatches=8, remat=remat))
            return run.lower(weights, x).compile().memory_analysis().temp_size_in_bytes

    kept = temporaries(False) - temporaries(True)
    # Every tick keeps tanh's [2, 8 * 32] of each of its four layers but for the one that is looked at.
    assert kept > (Schedule(2, 8).ticks - 2) * 4 * 2 * WIDE * 32 * 4 / 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"axis_name": "stage"}, r"Unknown mesh axis 'stage'.*'pipeline'"),
        ({"weights": (6, WIDE, WIDE)}, r"6 layers for 4 stages. Fix: use 4 or 8 layers"),
        ({"weights": (2, 4, WIDE, WIDE), "rounds": 4}, r"\[4 rounds, layers of a round, ...\]"),
        ({"microbatches": 6}, r"6 microbatches for 4 stages. Fix: use 4 or 8"),
        ({"microbatches": 12}, r"16 rows. Fix: use 12 or 24 rows, or microbatches that divide 16"),
        ({"microbatches": 0}, r"microbatches is a whole number from 1 up"),
        ({"rounds": 0}, r"rounds is a whole number from 1 up"),
        ({"layer": lambda x, w: (x @ w).astype(jnp.bfloat16)}, r"A layer gives what it takes.*bfloat16\[2, 8\]"),
        ({"layer": lambda x, w: (x @ w)[:, :4]}, r"float32\[2, 4\] from float32\[2, 8\]"),
        ({"form": "by hand"}, r"Unknown form of a pipeline 'by hand'.*'manual', 'automatic'"),
        (
            {"mesh": jax.make_mesh((4,), ("pipeline",), (AxisType.Explicit,))},
            "is of type Auto.*'pipeline' of type Explicit",
        ),
        ({"mesh": None}, r"A pipeline runs on a mesh. Got none"),
    ],
)
def test_what_cannot_be_a_pipeline_says_why(change: dict[str, Any], said: str) -> None:
    _, x = _given()
    asked = {"layer": _layer, "weights": (LAYERS, WIDE, WIDE), "microbatches": 8, "mesh": mesh_of(pipeline=4), **change}
    layer, weights = asked.pop("layer"), jnp.ones(asked.pop("weights"))
    with pytest.raises(ValueError, match=said):
        pipeline(layer, weights, x, **asked)
