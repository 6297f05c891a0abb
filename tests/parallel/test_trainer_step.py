"""The trainer's step: accumulation by weight, sums of gradients by hand, rounding by chance, and the guard."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.parallel.optimizers import OPTIMIZERS, make_optimizer, schedule_named
from capibara.parallel.trainer_step import (
    StepOptions,
    compute_dtype,
    counted_targets,
    initial_state,
    param_dtype,
    rounded_by_chance,
    step_function,
    trainer_job,
)

WIDTH, LAYERS, ROWS = 16, 3, 16


def params_of(dtype: Any = jnp.float32) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {
        "embed": jnp.asarray(draw.normal(size=(8, WIDTH)) / 4, dtype),
        "layers": {"w": jnp.asarray(draw.normal(size=(LAYERS, WIDTH, WIDTH)) / 4, dtype)},
        "norm": {"scale": jnp.ones((WIDTH,), dtype)},
    }


def batch_of(seed: int = 0, rows: int = ROWS) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    # Rows of very different counts: microbatches do not weigh the same.
    mask = (np.arange(6) < draw.integers(1, 7, (rows, 1))).astype(np.int32)
    mask[: rows // 2, 1:] = 0
    return {
        "inputs": draw.integers(0, 8, (rows, 6)).astype(np.int32),
        "targets": draw.normal(size=(rows, 6)).astype(np.float32),
        "mask": mask,
    }


def loss(params: Any, batch: Any, key: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    x = params["embed"][batch["inputs"]].astype(jnp.float32) * params["norm"]["scale"].astype(jnp.float32)
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(jnp.float32)), None), x, params["layers"]["w"])
    errors = (x.sum(-1) - batch["targets"]) ** 2 * batch["mask"]
    value = errors.sum() / jnp.maximum(batch["mask"].sum(), 1)
    return value, {"loss": value, "by_place": errors.mean(0)}


def one_step(options: StepOptions, accumulate: int = 1, mesh: Mesh | None = None, seed: int = 0) -> Any:
    optimizer = make_optimizer("sgd", 0.1)
    params = params_of()
    state = initial_state(optimizer, params, options, 1 if mesh is None else mesh.size)
    step = jax.jit(step_function(loss, optimizer, options, accumulate))
    if mesh is None:
        return step(params, state, batch_of(seed))
    placed = jax.device_put(batch_of(seed), NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        return step(params, state, placed)


def assert_trees_close(one: Any, other: Any, bound: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=bound, atol=bound), one, other)


FLOAT32 = StepOptions(precision="float32")


@pytest.mark.quick
def test_microbatches_count_by_their_targets() -> None:
    params, _, metrics = one_step(FLOAT32)
    split, _, their_metrics = one_step(FLOAT32, accumulate=4)
    assert_trees_close(params, split)
    for name in ("loss", "grad_norm"):
        assert float(metrics[name]) == pytest.approx(float(their_metrics[name]), rel=1e-5)
    # And not the mean of the microbatches' means, which is another number here.
    batch = batch_of()
    parts = [jax.tree.map(lambda x, n=n: x[n::4], batch) for n in range(4)]
    plain = np.mean([float(loss(params_of(), part, None)[0]) for part in parts])
    assert abs(plain - float(metrics["loss"])) > 1e-3


def test_microbatches_are_a_loop_of_so_many() -> None:
    text = str(jax.make_jaxpr(step_function(loss, make_optimizer("sgd", 0.1), FLOAT32, 4))(*_arguments(FLOAT32)))
    assert "length=4" in text
    text = str(jax.make_jaxpr(step_function(loss, make_optimizer("sgd", 0.1), FLOAT32, 1))(*_arguments(FLOAT32)))
    assert "length=4" not in text


def _arguments(options: StepOptions) -> tuple[Any, Any, Any]:
    params = params_of(param_dtype(options.precision))
    return params, initial_state(make_optimizer("sgd", 0.1), params, options), batch_of()


def test_targets_that_count() -> None:
    batch = batch_of()
    assert float(counted_targets(batch)) == batch["mask"].sum()
    segments = np.ones_like(batch["mask"])
    segments[:, -1] = 0
    both = {**batch, "segment_ids": segments}
    assert float(counted_targets(both)) == (batch["mask"] * segments).sum()
    assert float(counted_targets((np.zeros((5, 2)),))) == 5
    assert float(counted_targets({"image": np.zeros((3, 2)), "mask": np.ones((3, 2))})) == 3  # a loss of one's own


def test_accumulate_divides_the_rows() -> None:
    with pytest.raises(ValueError, match="accumulate divides the batch's 16 rows"):
        trainer_job(loss, params_of(), batch_of(), make_optimizer("sgd", 0.1), FLOAT32, accumulate=(3,))


# Gradients summed by hand.


@pytest.mark.quick
@pytest.mark.parametrize("communication", ["sequential", "overlapped"])
def test_sums_by_hand_are_the_compilers(communication: str) -> None:
    mesh = Mesh(jax.devices()[:8], ("data",))
    params, _, metrics = one_step(FLOAT32)
    by_hand, _, their_metrics = one_step(StepOptions("float32", communication=communication), 2, mesh)
    assert_trees_close(params, by_hand)
    assert_trees_close(metrics["by_place"] * 0 + metrics["loss"], their_metrics["by_place"] * 0 + metrics["loss"])
    assert float(their_metrics["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    assert float(their_metrics["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)


def test_buckets_wait_for_each_other_or_do_not() -> None:
    mesh = Mesh(jax.devices()[:8], ("data",))

    def text(communication: str) -> str:
        options = StepOptions("float32", communication=communication)
        params, state, batch = _arguments(options)
        big = {**params, "other": jnp.zeros((2**20,)), "another": jnp.zeros((2**23 + 1,))}  # more than a bucket

        def of_all(p: Any, b: Any, key: Any) -> Any:
            value, metrics = loss(p, b, key)
            return value + 0 * (p["other"].sum() + p["another"].sum()), metrics

        optimizer = make_optimizer("sgd", 0.1)
        state = jax.eval_shape(lambda p: initial_state(optimizer, p, options, 8), big)
        with jax.set_mesh(mesh):
            step = jax.jit(step_function(of_all, optimizer, options))
            placed = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
            return str(step.lower(big, state, placed).as_text())

    overlapped, sequential, automatic = map(text, ("overlapped", "sequential", "automatic"))
    assert overlapped.count("all_reduce") > 1
    assert sequential.count("optimization_barrier") > overlapped.count("optimization_barrier")
    assert "all_reduce" not in automatic  # the compiler will put them in


@pytest.mark.quick
def test_compressed_sums_keep_what_they_have_not_sent() -> None:
    mesh = Mesh(jax.devices()[:8], ("data",))
    options = StepOptions("float32", communication="compressed")
    exact, _, _ = one_step(FLOAT32)
    start = params_of()
    params, state, _ = one_step(options, 1, mesh)
    gradient = jax.tree.map(lambda a, b: (np.asarray(a) - np.asarray(b)) / 0.1, start, exact)
    rough = jax.tree.map(lambda a, b: (np.asarray(a) - np.asarray(b)) / 0.1, start, params)
    for right, got, unsent in zip(*map(jax.tree.leaves, (gradient, rough, state["unsent"])), strict=True):
        assert unsent.shape == (8, *right.shape)
        assert np.abs(got - right).max() > 0
        # What was not sent, over all devices, is what the sum lacks: nothing is lost.
        np.testing.assert_allclose(got + np.asarray(unsent).sum(0), right, atol=2e-5)
        # 1/127 of the largest magnitude of each device, of which eight add up; theirs are a few of the sum's.
        assert np.abs(got - right).max() <= 8 * 8 * np.abs(right).max() / 127


# Precision.


def test_types_by_name() -> None:
    assert (param_dtype("mixed"), compute_dtype("mixed")) == (jnp.float32, jnp.bfloat16)
    assert (param_dtype("bfloat16"), compute_dtype("bfloat16")) == (jnp.bfloat16, jnp.bfloat16)
    assert (param_dtype("float32"), compute_dtype("float32")) == (jnp.float32, jnp.float32)
    assert (param_dtype("fp8"), compute_dtype("fp8")) == (jnp.float32, jnp.bfloat16)
    with pytest.raises(ValueError, match="precision"):
        StepOptions("fp4")
    params = params_of(jnp.bfloat16)
    moments = initial_state(make_optimizer("adamw", 0.1), params, StepOptions("bfloat16"))["optimizer"]
    assert {leaf.dtype for leaf in jax.tree.leaves(moments) if leaf.ndim} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.quick
def test_rounding_by_chance_is_right_on_average_and_never_off_by_more_than_a_step() -> None:
    # 2**16 draws of each value: the mean of a variable between two neighbours a step apart is within 5 deviations,
    # 5 * 0.5 / 2**8 steps, of its expectation.
    values = jnp.array([1.0 + 2**-9, 1.0 + 2**-12, -3.1415927, 1e-3, 0.0, 1.0, 1e-39], jnp.float32)
    draws = 2**16
    rounded = jax.jit(lambda seed: rounded_by_chance(jnp.tile(values, (draws, 1)), jnp.bfloat16, seed))(
        jnp.array([1, 2], jnp.uint32)
    )
    assert rounded.dtype == jnp.bfloat16
    found = np.asarray(rounded.astype(jnp.float32)).astype(np.float64)
    step = np.array([2.0**-7, 2.0**-7, 2.0**-6, 2.0**-17, 0, 0, 2.0**-133])
    wanted = np.asarray(values, np.float64)
    assert (np.abs(found - wanted) <= step).all()
    assert (np.abs(found.mean(0) - wanted) <= 5 * 0.5 / np.sqrt(draws) * step).all()
    assert set(np.unique(found[:, 0])) == {1.0, 1.0 + 2**-7}
    assert (found[:, 4:6] == wanted[4:6]).all()  # what bfloat16 has stays


def test_rounding_by_chance_keeps_what_is_not_finite_and_scalars_move_too() -> None:
    seed = jnp.array([3, 4], jnp.uint32)
    odd = jnp.array([jnp.nan, jnp.inf, -jnp.inf], jnp.float32)
    found = np.asarray(rounded_by_chance(odd, jnp.bfloat16, seed).astype(jnp.float32))
    assert np.isnan(found[0])
    assert (found[1:] == [np.inf, -np.inf]).all()
    bits = np.uint32(0x7F800001).view(np.float32)  # a NaN whose only bit is one that is cut off
    assert np.isnan(np.asarray(rounded_by_chance(jnp.full((1,), bits), jnp.bfloat16, seed).astype(jnp.float32))).all()
    scalar = jnp.float32(1 + 2**-8)
    drawn = {float(rounded_by_chance(scalar, jnp.bfloat16, jnp.array([n, n], jnp.uint32))) for n in range(20)}
    assert drawn == {1.0, 1 + 2**-7}
    assert rounded_by_chance(scalar, jnp.float32, seed) == scalar


def test_rounding_by_chance_is_the_same_on_any_mesh() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32)), jnp.float32)
    seed = jnp.array([5, 6], jnp.uint32)
    alone = jax.jit(lambda x: rounded_by_chance(x, jnp.bfloat16, seed))(x)
    for spec in (PartitionSpec("a"), PartitionSpec(None, "b"), PartitionSpec("b", "a")):
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
        cut = jax.device_put(x, NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            spread = jax.jit(lambda x: rounded_by_chance(x, jnp.bfloat16, seed))(cut)
        assert (np.asarray(alone) == np.asarray(spread)).all()


def test_changes_below_half_a_step_of_bfloat16_add_up() -> None:
    """A weight of 1 has neighbours 2**-8 and 2**-7 away: to the nearest, steps of 2**-11 would leave it for ever."""
    options = StepOptions("bfloat16")
    optimizer = make_optimizer("sgd", 2.0**-11, b1=0.0)
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}

    def pull(p: Any, batch: Any, key: Any) -> Any:
        return p["w"].astype(jnp.float32).sum(), {}

    step = jax.jit(step_function(pull, optimizer, options))
    state = initial_state(optimizer, params, options)
    for _ in range(64):
        params, state, _ = step(params, state, {"x": jnp.zeros((1,))})
    mean = float(params["w"].astype(jnp.float32).mean())
    # 64 steps of 2**-11; each of 4096 weights is off by less than 2**-8 * sqrt(64) by chance.
    assert mean == pytest.approx(1 - 64 * 2.0**-11, abs=5 * 2.0**-8 * 8 / 64)
    assert mean < 1 - 32 * 2.0**-11
    assert params["w"].dtype == jnp.bfloat16


# Optimizers.


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_optimizer_learns(name: str, precision: str) -> None:
    options = StepOptions(precision, rate=lambda step: 0.01)
    rate = {"adamw": 3e-3, "lion": 1e-3, "adafactor": 3e-2, "muon": 1e-2, "sgd": 1e-2}[name]
    optimizer = make_optimizer(name, rate, clip=1.0)
    params = params_of(param_dtype(precision))
    state = jax.jit(lambda p: initial_state(optimizer, p, options))(params)
    step = jax.jit(step_function(loss, optimizer, options))
    losses = []
    for _ in range(30):
        params, state, metrics = step(params, state, batch_of())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(param_dtype(precision))}
    assert float(metrics["learning_rate"]) == pytest.approx(0.01)
    assert int(state["step"]) == 30


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_weight_decay_takes_from_matrices_alone(name: str) -> None:
    params = params_of()
    zero = jax.tree.map(jnp.zeros_like, params)
    optimizer = make_optimizer(name, 0.1, weight_decay=0.5)
    changes, _ = optimizer.update(zero, optimizer.init(params), params)
    assert float(jnp.abs(changes["norm"]["scale"]).max()) == 0
    for leaf in (changes["embed"], changes["layers"]["w"]):
        assert float(jnp.abs(leaf).max()) > 0


def test_clipping_holds_the_norm() -> None:
    params = params_of()
    gradients = jax.tree.map(lambda p: 100 * jnp.ones_like(p), params)
    free, clipped = make_optimizer("sgd", 1.0, b1=0.0), make_optimizer("sgd", 1.0, b1=0.0, clip=0.5)
    for optimizer, norm in ((free, 100 * np.sqrt(sum(p.size for p in jax.tree.leaves(params)))), (clipped, 0.5)):
        changes, _ = optimizer.update(gradients, optimizer.init(params), params)
        size = np.sqrt(sum(float((c**2).sum()) for c in jax.tree.leaves(changes)))
        assert size == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "middle", "end"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1), ("wsd", 1, 0.1)]
)
def test_schedules(name: str, middle: float, end: float) -> None:
    rate = schedule_named(name, 2.0, steps=110, warmup_steps=10, final=0.1)
    assert float(rate(0)) == pytest.approx(0.2)
    assert float(rate(9)) == pytest.approx(2.0)
    assert float(rate(60)) == pytest.approx(2 * middle)
    assert float(rate(110)) == pytest.approx(2 * end)
    assert float(rate(1000)) == pytest.approx(2 * end)


# The guard.


@pytest.mark.quick
def test_a_step_that_is_not_finite_changes_nothing_but_the_counts() -> None:
    optimizer = make_optimizer("adamw", 0.1)
    for guard in (True, False):
        options = StepOptions("float32", guard=guard)
        params = params_of()
        state = initial_state(optimizer, params, options)
        step = jax.jit(step_function(loss, optimizer, options))
        params, state, _ = step(params, state, batch_of())
        bad = batch_of(1)
        bad["targets"][0, 0] = np.nan
        after, new, metrics = step(params, state, bad)
        same = all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(after), strict=True))
        assert same == guard
        assert int(metrics["skipped_in_a_row"]) == 1
        assert int(new["step"]) == 2
        if guard:
            assert_trees_close(state["optimizer"], new["optimizer"], 0)
            params, state, metrics = step(after, new, batch_of())
            assert int(metrics["skipped_in_a_row"]) == 0
            assert int(state["skipped"]) == 1


@pytest.mark.quick
@pytest.mark.parametrize("not_finite", ["gradient", "loss"])
def test_either_of_loss_and_gradient_is_enough_to_skip(not_finite: str) -> None:
    """The square root has no slope at 0; a loss may be infinite where its slope is 1."""

    def pull(p: Any, batch: Any, key: Any) -> Any:
        x = p["w"].sum()
        return (jnp.sqrt(x) if not_finite == "gradient" else x + batch["x"].sum()), {}

    batch = {"x": jnp.full((1,), jnp.inf)}
    params = {"w": jnp.zeros((2,))}
    value, slope = jax.value_and_grad(lambda p: pull(p, batch, None)[0])(params)
    assert bool(jnp.isfinite(value)) == (not_finite == "gradient")
    assert bool(jnp.isfinite(slope["w"]).all()) == (not_finite == "loss")
    optimizer = make_optimizer("sgd", 0.1)
    after, state, metrics = jax.jit(step_function(pull, optimizer, FLOAT32))(
        params, initial_state(optimizer, params, FLOAT32), batch
    )
    assert not np.asarray(after["w"]).any()
    assert int(metrics["skipped_in_a_row"]) == int(state["skipped"]) == 1


def test_the_rate_that_is_told_is_the_one_that_was_applied() -> None:
    """A step that was skipped is none of the schedule's."""
    rate = schedule_named("linear", 1.0, steps=4)
    optimizer = make_optimizer("sgd", rate, b1=0.0)

    def pull(p: Any, batch: Any, key: Any) -> Any:
        return p["w"].sum() * batch["x"].sum(), {}

    options = StepOptions("float32", rate=rate)
    step = jax.jit(step_function(pull, optimizer, options))
    params = {"w": jnp.zeros((1,))}
    state = initial_state(optimizer, params, options)
    told, applied = [], []
    for x in (1.0, jnp.nan, 1.0):
        after, state, metrics = step(params, state, {"x": jnp.full((1,), x)})
        told.append(float(metrics["learning_rate"]))
        applied.append(float(params["w"][0] - after["w"][0]))
        params = after
    assert applied == pytest.approx([1.0, 0.0, 0.75])
    assert told == pytest.approx([1.0, 0.75, 0.75])


@pytest.mark.quick
def test_what_experts_did_is_added_up_in_the_state() -> None:
    def with_shares(params: Any, batch: Any, key: Any) -> Any:
        value, metrics = loss(params, batch, key)
        return value, {**metrics, "expert_share": jnp.array([[0.25, 0.75]]) + 0 * value}

    optimizer = make_optimizer("sgd", 0.1)
    job = trainer_job(with_shares, params_of(), batch_of(), optimizer, FLOAT32, accumulate=(2,))
    run, (_, state, _) = job.build(accumulate=2)
    assert state["expert_share"].shape == (1, 2)
    start = initial_state(optimizer, params_of(), FLOAT32, expert_share=state["expert_share"])
    step = jax.jit(run)
    params, state, _ = step(params_of(), start, batch_of())
    _, state, metrics = step(params, state, batch_of())
    np.testing.assert_allclose(state["expert_share"], [[0.5, 1.5]], rtol=1e-6)
    np.testing.assert_allclose(metrics["expert_share"], [[0.25, 0.75]], rtol=1e-6)


def test_compressed_sums_of_one_device_keep_their_state() -> None:
    """A program's state goes in as it came out."""
    options = StepOptions("float32", communication="compressed")
    params, state, batch = _arguments(options)
    _, after, _ = jax.eval_shape(step_function(loss, make_optimizer("sgd", 0.1), options), params, state, batch)
    assert jax.tree.structure(after) == jax.tree.structure(state)


# Pipelines.


def noisy_loss(params: Any, batch: Any, key: Any) -> Any:
    value, metrics = loss(params, batch, key)
    return value * (1 if key is None else jax.random.uniform(key)), metrics


@pytest.mark.quick
def test_a_loss_that_draws_is_no_pipeline_and_says_so() -> None:
    def job_of(fn: Any) -> Any:
        return trainer_job(fn, params_of(), batch_of(), make_optimizer("sgd", 0.1), FLOAT32, accumulate=(2,))

    assert job_of(loss).why_no_stages() == ""
    assert "draws at random" in job_of(noisy_loss).why_no_stages()
    with pytest.raises(ValueError, match="draws at random"):
        job_of(noisy_loss).built({"accumulate": 2}, stages=2)


@pytest.mark.quick
def test_a_pipeline_is_tried_with_the_microbatches_that_are_asked_for() -> None:
    batch = batch_of(rows=9)
    optimizer = make_optimizer("sgd", 0.1)
    assert trainer_job(loss, params_of(), batch, optimizer, FLOAT32, accumulate=(3,)).why_no_stages() == ""
    assert trainer_job(loss, params_of(), batch, optimizer, FLOAT32).why_no_stages() == ""


def test_metrics_come_through_a_pipeline() -> None:
    def with_metrics(params: Any, batch: Any, key: Any) -> Any:
        value, metrics = loss(params, batch, key)
        return value, {**metrics, "twice": 2 * value}

    optimizer = make_optimizer("sgd", 0.1)
    # Layers divide over the stages.
    params = {**params_of(), "layers": {"w": params_of()["layers"]["w"][:2]}}
    job = trainer_job(with_metrics, params, batch_of(), optimizer, FLOAT32, accumulate=(2,))
    state = initial_state(optimizer, params, FLOAT32)
    whole = jax.jit(job.build(accumulate=1)[0])(params, state, batch_of())[2]
    with jax.set_mesh(Mesh(jax.devices()[:2], ("pipeline",))):
        staged = jax.jit(job.built({"accumulate": 2}, stages=2)[0])(params, state, batch_of())[2]
    for name in ("loss", "twice", "by_place", "grad_norm"):
        np.testing.assert_allclose(staged[name], whole[name], rtol=1e-5, atol=1e-6)
