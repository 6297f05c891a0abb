"""What an argument is, by what the program does with it: whatever its type, its name and its place in the call."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.program.role_programs import (
    RAW_KEY,
    TYPED_KEY,
    Case,
    decode,
    diffusion,
    f32,
    graph,
    i32,
    images,
    ppo,
    seq2seq,
)

import capibara
from capibara.parallel.job import leaf_roles, program_job
from capibara.parallel.training_step import training_job
from capibara.program.argument_roles import argument_roles

CASES = {
    "ppo with a raw key": ppo(RAW_KEY),
    "ppo with a typed key": ppo(TYPED_KEY),
    "images": images(),
    "seq2seq": seq2seq(),
    "diffusion": diffusion(),
    "graph": graph(),
    "decode": decode(),
}


@pytest.mark.quick(cases="all")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_roles_in_every_order_of_the_arguments(case: Case) -> None:
    fn, args, roles = case
    count = len(args)
    for order in (tuple(range(count)), tuple(reversed(range(count))), (*range(1, count), 0)):
        back = [order.index(number) for number in range(count)]

        def turned(*given: Any, back: list[int] = back) -> Any:
            return fn(*(given[place] for place in back))

        found = argument_roles(turned, tuple(args[number] for number in order))
        assert found.roles == tuple(roles[number] for number in order), found.note()


@pytest.mark.parametrize(
    ("name", "count", "unit", "rows"),
    [
        ("ppo with a raw key", 2048, "examples", 2048),
        ("images", 64, "examples", 64),
        # Both are looked up, and the target picks from scores besides.
        ("seq2seq", 16 * 40 + 16 * 24, "tokens", 16),
        ("diffusion", 64, "examples", 64),
        ("graph", 512, "examples", 512),
        ("decode", 8, "examples", 8),
    ],
)
def test_tokens_are_what_is_looked_up_in_weights(name: str, count: int, unit: str, rows: int) -> None:
    fn, args, _ = CASES[name]
    job = program_job(fn, args)
    assert (job.tokens, job.unit, job.rows) == (count, unit, rows), job.notes
    assert any("overrides it" in note for note in job.notes), "what to write where this is wrong"
    given = program_job(fn, args, tokens=7)
    assert (given.tokens, given.unit) == (7, "tokens")


def test_what_is_assumed_is_said_and_what_is_known_is_not() -> None:
    fn, args, _ = CASES["graph"]
    found = argument_roles(fn, args)
    assert [found.names[number] for number in found.assumed] == ["senders", "receivers", "labels"]
    assert "assumed of senders, receivers, labels" in found.note()
    assert "`roles` of plan() or of what shapes() returns overrides" in found.note()
    fn, args, _ = CASES["ppo with a raw key"]
    assert argument_roles(fn, args).assumed == ()


def test_positions_beside_tokens_are_not_more_tokens() -> None:
    def loss(p: Any, batch: Any) -> jax.Array:
        x = p["embed"][batch["ids"]] + p["place"][batch["positions"]] + jax.nn.one_hot(batch["kinds"], 2) @ p["kinds"]
        return jnp.mean(jnp.tanh(x @ p["w"]) ** 2)

    params = {"embed": f32(64, 16), "place": f32(32, 16), "kinds": f32(2, 16), "w": f32(16, 16)}
    job = training_job(loss, params, {"ids": i32(8, 32), "positions": i32(8, 32), "kinds": i32(8, 32)})
    assert (job.tokens, job.unit, job.lengths) == (8 * 32, "tokens", (32,))
    # The same array, and a product with it in place of a lookup.
    only = training_job(
        lambda p, b: jnp.mean(jnp.tanh(jax.nn.one_hot(b, 64) @ p["embed"]) ** 2), params, i32(8, 32), optimizer="sgd"
    )
    assert (only.tokens, only.unit) == (8 * 32, "tokens")


def test_pictures_of_whole_numbers_are_no_tokens() -> None:
    pixels = jax.ShapeDtypeStruct((32, 8, 8), jnp.uint8)

    def loss(w: jax.Array, batch: Any) -> jax.Array:
        scores = (batch["x"].reshape(-1, 64) / 255.0) @ w
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), batch["y"][:, None], 1).mean()

    job = training_job(loss, f32(64, 10), {"x": pixels, "y": i32(32)})
    assert (job.tokens, job.unit) == (32, "examples")
    assert job.smaller["half the batch"]().unit == "examples"


@pytest.mark.parametrize("key", [RAW_KEY, TYPED_KEY], ids=["raw", "typed"])
def test_a_key_among_the_data_is_not_cut(key: Any) -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            keep = jax.random.bernoulli(batch["key"], 0.9, batch["x"].shape)
            return jnp.mean(jnp.tanh(jnp.tanh(batch["x"] * keep @ w) @ w) ** 2)

        return params - 0.1 * jax.grad(loss)(params)

    args = (f32(16, 16), {"key": key, "x": f32(64, 16)})
    job = program_job(step, args)
    assert job.roles == ("params", "batch")
    assert leaf_roles(job, args) == ("params", "other", "batch")
    plan = capibara.plan.plan(job, on="v4-8", top=1)
    assert plan.fits
    assert dict(plan.best.layout.mesh.axes)["data"] == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("key", [RAW_KEY, TYPED_KEY], ids=["raw", "typed"])
def test_a_key_in_the_batch_of_a_loss_is_named(key: Any) -> None:
    with pytest.raises(ValueError, match=r"a random key has none.*\['key'\].*functools.partial"):
        training_job(lambda p, b: jnp.mean(b["x"] @ p), f32(16, 16), {"x": f32(8, 16), "key": key})


def test_frozen_weights_are_weights_and_gradients_alone_train_too() -> None:
    def step(base: jax.Array, adapter: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(jnp.tanh(x @ base + x @ p["down"] @ p["up"]) @ base) ** 2)

        return jax.value_and_grad(loss)(adapter)

    found = argument_roles(step, (f32(32, 32), {"down": f32(32, 4), "up": f32(4, 32)}, f32(64, 32)))
    assert found.roles == ("params", "params", "batch")


def test_rows_that_do_not_come_first_are_not_cut_and_that_is_said() -> None:
    def recurrent(p: Any, xs: jax.Array, h: jax.Array) -> Any:
        def cell(h: jax.Array, x: jax.Array) -> Any:
            h = jnp.tanh(h @ p["u"] + x @ p["w"])
            return h, h @ p["out"]

        return jax.lax.scan(cell, h, xs)

    weights = {"u": f32(32, 32), "w": f32(8, 32), "out": f32(32, 4)}
    found = argument_roles(recurrent, (weights, f32(100, 16, 8), f32(16, 32)))
    assert found.roles == ("params", "other", "batch")
    assert found.assumed == (1,)
    assert "not as its first dimension" in found.note()


def test_one_tree_of_everything_a_step_carries() -> None:
    def step(state: Any, batch: Any) -> Any:
        key, own = jax.random.split(state["key"])

        def loss(p: Any) -> jax.Array:
            x = p["embed"][batch["ids"]]
            x = jnp.tanh(x * jax.random.bernoulli(own, 0.9, x.shape) @ p["w"])
            scores = jax.nn.log_softmax(x @ p["embed"].T)
            return -jnp.take_along_axis(scores, batch["labels"][..., None], -1).mean()

        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], jax.grad(loss)(state["p"]))
        new = jax.tree.map(lambda p, m: p - 0.1 * m, state["p"], moments)
        return {"p": new, "moments": moments, "key": key, "step": state["step"] + 1}

    weights = {"embed": f32(512, 64), "w": f32(64, 64)}
    state = {"p": weights, "moments": weights, "key": RAW_KEY, "step": i32()}
    job = program_job(jax.jit(step), (state, {"ids": i32(16, 128), "labels": i32(16, 128)}))
    assert job.roles == ("params", "batch")
    assert (job.tokens, job.unit, job.lengths) == (16 * 128, "tokens", (128,)), "labels are not more tokens"


def test_an_update_with_a_key_is_planned() -> None:
    fn, args, _ = CASES["ppo with a raw key"]
    plan = capibara.plan.plan(fn, args, on="v4-8", top=1)
    assert plan.fits, plan.refused
    lines = str(plan).splitlines()
    assert lines[1] == (
        "Job: batch 2048; the program's own optimizer; weights float32, moments float32, activations float32"
    )
    assert "examples/s" in lines[3]
    assert "tokens" not in lines[3]
    document = plan.as_dict()
    assert list(document)[:2] == ["name", "job"]
    assert document["job"]["roles"] == ["other", "batch", "params", "state"]
    assert document["job"]["batch"] == 2048
    assert (document["unit"], document["examples"], document["tokens"]) == ("examples", 2048, None)
    assert document["examples_per_second"] > 0
    assert "usd_per_billion_examples" in document["bills"][0]
    assert set(itertools.chain(*(one.keys() for one in document["bills"]))).isdisjoint({"usd_per_billion_tokens"})
