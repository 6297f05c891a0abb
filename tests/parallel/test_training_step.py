"""A training step around any loss: accumulation is the same step, knobs are checked, state has the type asked for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.parallel.job import leaf_roles, program_job
from capibara.parallel.training_step import training_job, training_step


def _loss(params: Any, batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["layers"])
    return jnp.mean((x @ params["out"] - batch["y"]) ** 2)


def _no_scan(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["out"] - batch["y"]) ** 2)


def _arrays(dtype: str = "float32") -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    params = {
        "layers": 0.3 * jax.random.normal(next(keys), (3, 5, 5), dtype),
        "out": 0.3 * jax.random.normal(next(keys), (5, 2), dtype),
    }
    return params, {"x": jax.random.normal(next(keys), (8, 5)), "y": jax.random.normal(next(keys), (8, 2))}


@pytest.mark.quick
@pytest.mark.parametrize(("remat", "accumulate"), [("none", 4), ("full", 1), ("dots", 2)])
def test_knobs_do_not_change_the_step(remat: str, accumulate: int) -> None:
    params, batch = _arrays()
    job = training_job(_loss, params, batch)
    plain, shapes = job.build()
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[1])
    other, _ = job.build(remat=remat, accumulate=accumulate)
    first, second = jax.jit(plain)(params, state, batch), jax.jit(other)(params, state, batch)
    # AdamW divides by the root of the squared gradient, which magnifies its rounding where it is near zero.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-6), first, second)
    assert any(bool(jnp.any(a != b)) for a, b in zip(*map(jax.tree.leaves, (first[0], params)), strict=True))


def test_it_learns() -> None:
    params, batch = _arrays()
    job = training_job(_loss, params, batch, optimizer="sgd")
    step = jax.jit(job.build(accumulate=2)[0])
    losses = []
    for _ in range(20):
        params, state, value = step(params, (), batch)
        losses.append(float(value))
    assert state == ()
    assert losses[-1] < losses[0]


def test_mixed_decides_the_type_of_moments_and_sums() -> None:
    params, batch = _arrays("bfloat16")
    types = {}
    for mixed in (True, False):
        _, (_, state, _) = training_job(_loss, params, batch, mixed=mixed).build()
        types[mixed] = state["mean"]["out"].dtype
        step = training_step(_loss, "sgd", accumulate=2, mixed=mixed)
        # The sums are carried by the loop over microbatches.
        text = str(jax.make_jaxpr(step)(params, (), batch))
        assert ("f32[3,5,5]" in text) == mixed
    assert types == {True: jnp.float32, False: jnp.bfloat16}


def test_an_optimizer_like_optax() -> None:
    class Momentum:
        def init(self, params: Any) -> Any:
            return jax.tree.map(jnp.zeros_like, params)

        def update(self, gradients: Any, state: Any, params: Any) -> Any:
            state = jax.tree.map(lambda s, g: 0.9 * s + g, state, gradients)
            return jax.tree.map(lambda s: -0.1 * s, state), state

    params, batch = _arrays()
    step, (shapes, state, _) = training_job(_loss, params, batch, optimizer=Momentum()).build()
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    moved, _, _ = step(params, Momentum().init(params), batch)
    gradient = jax.grad(_loss)(params, batch)["out"]
    np.testing.assert_allclose(moved["out"], params["out"] - 0.1 * gradient, rtol=1e-6)


def test_what_a_job_says() -> None:
    params, batch = _arrays()
    job = training_job(_loss, params, batch, knobs={"accumulate": (2,)})
    assert job.knobs["remat"] == ("none", "dots", "full")
    assert job.knobs["accumulate"] == (2,)
    assert job.beyond["accumulate"] == (1, 4, 8)
    assert job.tokens == 8
    assert job.smaller["half the batch"]().tokens == 4
    _, args = job.build(**job.defaults())
    assert leaf_roles(job, args).count("state") == 5
    flat = training_job(_no_scan, params, batch)
    assert flat.knobs["remat"] == ("none",)
    assert "no scan" in flat.notes[0]


def test_what_the_loss_says_to_half_a_sequence_is_kept() -> None:
    params, inputs = {"w": jnp.ones((6, 4))}, {"x": jnp.ones((8, 6))}

    def cut(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(batch["x"] @ params["w"][: batch["x"].shape[1]])

    def strict(params: Any, batch: Any) -> jax.Array:
        if batch["x"].shape[1] != 6:
            raise KeyError("six features\nare needed")
        return jnp.mean(batch["x"] @ params["w"])

    assert "half the sequence" in training_job(cut, params, inputs).smaller
    assert training_job(cut, params, inputs).not_smaller == {}
    job = training_job(strict, params, inputs)
    assert set(job.smaller) == {"half the batch"}
    assert job.not_smaller == {"half the sequence": r"KeyError: 'six features\nare needed'"}


def test_a_program_and_its_roles() -> None:
    w, ids = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((2, 16), "int32")
    job = program_job(lambda w, ids: w[ids], (w, ids))
    assert job.roles == ("params", "batch")
    assert "roles of the arguments, by what the program does with them" in job.notes[0]
    assert job.tokens == 32
    assert program_job(lambda w, ids: w[ids], (w, ids), roles=("other", "batch"), donate=(1,)).donate == (1,)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"optimizer": "adamx"}, "Did you mean 'adamw'"),
        ({"optimizer": 3}, "init\\(params\\)"),
        ({"knobs": {"remta": ("full",)}}, "Did you mean 'remat'"),
        ({"knobs": {"remat": ("all",)}}, "remat policy"),
        ({"knobs": {"remat": ()}}, "one or more values"),
        ({"knobs": {"accumulate": (3,)}}, "use one of 1, 2, 4, 8"),
        ({"loss": lambda p, b: (_loss(p, b), 1)}, r"A loss gives one real number.*loss\(...\)\[0\]"),
        ({"loss": lambda p, b: b["y"].mean(1)}, r"A loss gives one real number.*loss\(...\).mean\(\)"),
        ({"loss": 5}, "A loss is a function"),
        ({"params": {"layers": np.ones((3, 5, 5)), "out": np.ones((5, 2), "int32")}}, r"int32 at \['out'\]"),
    ],
)
def test_bad_input_is_named(keywords: dict[str, Any], message: str) -> None:
    params, batch = _arrays()
    with pytest.raises(ValueError, match=message):
        training_job(**{"loss": _loss, "params": params, "batch": batch, **keywords})


def test_bad_batches_and_programs_are_named() -> None:
    params, batch = _arrays()
    with pytest.raises(ValueError, match="same number of rows"):
        training_job(_loss, params, {**batch, "y": batch["y"][:4]})
    with pytest.raises(ValueError, match="one role an argument"):
        program_job(_loss, (params, batch), roles=("params",))
    with pytest.raises(ValueError, match="Did you mean 'params'"):
        program_job(_loss, (params, batch), roles=("param", "batch"))
    with pytest.raises(ValueError, match="int in argument 1"):
        program_job(_loss, (params, 3))
    with pytest.raises(ValueError, match="donate holds positions"):
        program_job(_loss, (params, batch), donate=(2,))


@pytest.mark.parametrize("accumulate", [0, -1, 2.0, True, "2", 3])
def test_a_step_checks_how_many_microbatches_it_has(accumulate: Any) -> None:
    params, batch = _arrays()
    with pytest.raises(ValueError, match="accumulate"):
        training_step(_loss, "sgd", accumulate=accumulate)(params, (), batch)


def test_a_step_in_stages_is_the_same_step() -> None:
    random = np.random.default_rng(3)
    params = {"layers": random.normal(size=(4, 8, 8)).astype("float32") / 4, "out": np.ones((8, 2), "float32")}
    batch = {"x": random.normal(size=(8, 8)).astype("float32"), "y": random.normal(size=(8, 2)).astype("float32")}
    job = training_job(_loss, params, batch, optimizer="sgd")
    assert job.why_no_stages() == ""
    step, shapes = job.built({"remat": "full", "accumulate": 4}, stages=2)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[1])
    plain, _ = job.built({"remat": "none", "accumulate": 1})
    expected = jax.jit(plain)(params, state, batch)
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("pipeline",))):
        found = jax.jit(step)(params, state, batch)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Sums of eight rows in another order.
        np.testing.assert_allclose(one, other, rtol=0, atol=8 * 8 * np.finfo(np.float32).eps)
