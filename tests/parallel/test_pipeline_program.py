"""`pipelined`: a function that scans over its layers runs as a pipeline, and is the same function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.parallel.staged_programs import ROWS, VOCAB, assert_close, init, loss, mesh_of, placed, scores, tokens

from capibara.parallel import pipelined

# A gradient sums over the rows' tokens, and an entry of the table over all of them at the most.
TERMS = ROWS * 8


@pytest.mark.newest
@pytest.mark.parametrize("axes", [{"pipeline": 2, "data": 2}, {"pipeline": 4, "data": 2}])
def test_a_decoder_of_its_own_is_the_same_in_stages(axes: dict[str, int]) -> None:
    params, batch = init(), tokens()
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(pipelined(loss, microbatches=8)))(*placed(mesh, params, batch))
    assert_close(found, jax.jit(jax.value_and_grad(loss))(params, batch), TERMS)


def test_results_with_rows_come_back_in_order_and_others_are_combined() -> None:
    def several(batch: Any, params: Any) -> dict[str, Any]:
        found = scores(params, batch)
        size = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params["layers"]))
        return {"scores": found, "turned": found.transpose(1, 0, 2), "sums": found.sum((0, 1)), "size": size}

    params, batch = init(), tokens()
    with jax.set_mesh(mesh_of(pipeline=2)):
        run = pipelined(several, microbatches=4, batch=(0,), combine="sum")
        mean = pipelined(several, microbatches=4, batch=0)
        found, averaged = jax.jit(run)(batch, params), jax.jit(mean)(batch, params)
    expected = jax.jit(several)(batch, params)
    # What is made of the layers alone is made in every microbatch, as a penalty of the parameters in a mean loss is.
    expected["size"], sums = averaged["size"], expected["sums"]
    assert_close({**found, "size": found["size"] / 4}, expected, TERMS * VOCAB)
    assert_close(averaged["sums"], sums / 4, TERMS * VOCAB)


def test_the_scan_may_be_inside_of_a_jit() -> None:
    params, batch = init(), tokens()
    inside = jax.jit(jax.jit(scores))
    with jax.set_mesh(mesh_of(pipeline=2)):
        found = jax.jit(pipelined(lambda p, b: inside(p, b) * 2.0, microbatches=2))(params, batch)
    assert_close(found, jax.jit(scores)(params, batch) * 2.0, TERMS)


def test_stages_hold_their_layers_and_the_rest_of_a_loss_is_shared() -> None:
    params, batch = init(), tokens()
    mesh = mesh_of(pipeline=4)
    with jax.set_mesh(mesh):
        text = jax.jit(pipelined(loss, microbatches=8)).lower(*placed(mesh, params, batch)).compile().as_text()
    # Two rows a microbatch of eight tokens: the scores of one microbatch on each stage, and of no more at once.
    assert f"f32[1,2,8,{VOCAB}]" in text
    assert f"f32[{ROWS},8,{VOCAB}]" not in text
    assert f"f32[4,2,8,{VOCAB}]" not in text


def _recurrent(params: Any, batch: Any) -> Any:
    start = jnp.zeros(batch["mask"].shape[:1])
    return jnp.mean(jax.lax.scan(lambda h, x: (h * 0.9 + x, None), start, batch["mask"].T)[0]) * params["embed"].sum()


def _counted(params: Any, batch: Any) -> Any:
    def step(x: Any, n: Any) -> tuple[Any, None]:
        return jnp.tanh(x + n), None

    start = jnp.asarray(params["embed"])[batch["inputs"]]
    return jnp.mean(jax.lax.scan(step, start, jnp.arange(3.0))[0])


def _normalised(params: Any, batch: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh((x - x.mean(0)) @ w["up"] @ w["down"]), None

    return jnp.mean(jax.lax.scan(layer, jnp.asarray(params["embed"])[batch["inputs"]], params["layers"])[0])


def _stacks(params: Any, batch: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, Any]:
        made = jnp.tanh(x @ w["up"] @ w["down"])
        return made, (made.mean((1, 2)), made)

    x, (means, _) = jax.lax.scan(layer, jnp.asarray(params["embed"])[batch["inputs"]], params["layers"])
    return jnp.mean(x) + jnp.mean(means[0] ** 2) + 2 * jnp.mean(means[-1])


@pytest.mark.parametrize("form", ["manual", "automatic"])
def test_what_each_layer_gives_beside_its_carry_is_there_after_the_loop(form: str) -> None:
    params, batch = init(), tokens()
    mesh = mesh_of(pipeline=2, data=2)
    with jax.set_mesh(mesh):
        run = jax.jit(jax.value_and_grad(pipelined(_stacks, microbatches=4, form=form)))
        found = run(*placed(mesh, params, batch))
    assert_close(found, jax.jit(jax.value_and_grad(_stacks))(params, batch), TERMS)


def _backwards(params: Any, batch: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ w["up"] @ w["down"]), None

    return jnp.mean(
        jax.lax.scan(layer, jnp.asarray(params["embed"])[batch["inputs"]], params["layers"], reverse=True)[0]
    )


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda p, b: jnp.mean(jnp.asarray(p["embed"])[b["inputs"]]), "a function with no such scan"),
        (_recurrent, "a scan of 8 steps along the batch"),
        (_counted, "a scan of 3 steps that takes slices of no argument"),
        (_normalised, r"rows of a batch one by one.*reduce_sum.*reduces over the rows"),
        (_backwards, "a scan of 4 steps that runs backwards"),
        (jax.grad(loss), "whose stacked outputs another scan takes, as a gradient's does"),
    ],
)
def test_a_function_that_is_none_is_refused_with_the_reason(fn: Any, said: str) -> None:
    with jax.set_mesh(mesh_of(pipeline=2)), pytest.raises(ValueError, match=said):
        pipelined(fn, microbatches=2)(init(), tokens())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"microbatches": 3}, "3 microbatches for 2 stages"),
        ({"microbatches": 6}, "16 rows. Fix: use 12 or 18 rows"),
        ({"microbatches": 2, "batch": 2}, "`batch` numbers arguments. Got 2 of 2"),
        ({"microbatches": 2, "combine": "max"}, "Unknown way to combine.*'mean', 'sum'"),
        ({"microbatches": 2, "axis": "stage"}, "Unknown mesh axis 'stage'"),
        ({"microbatches": 4, "mesh": mesh_of(pipeline=4), "layers": 6}, "6 layers for 4 stages. Fix: use 4 or 8"),
    ],
)
def test_bad_input_says_the_rule(asked: dict[str, Any], said: str) -> None:
    asked = {"mesh": mesh_of(pipeline=2), **asked}
    params = init(layers=asked.pop("layers", 4))
    with pytest.raises(ValueError, match=said):
        pipelined(loss, **asked)(params, tokens())


def test_remat_and_float32_sums_reach_the_stages() -> None:
    params, batch = init(dtype=jnp.bfloat16), tokens(dtype=jnp.bfloat16)
    mesh = mesh_of(pipeline=2)

    def text(**how: Any) -> str:
        with jax.set_mesh(mesh):
            return str(jax.make_jaxpr(jax.grad(pipelined(loss, microbatches=4, **how)))(params, batch))

    plain, again, wide = text(), text(remat=True), text(float32_sums=True)
    assert again.count("checkpoint") + again.count("remat") > plain.count("checkpoint") + plain.count("remat")
    # The layers' weights enter the map in float32, and so do their gradients leave it.
    assert "f32[4,16,32]" in wide
    assert "f32[4,16,32]" not in plain


def test_a_mesh_axis_of_one_is_the_plain_program() -> None:
    params, batch = init(), tokens()
    with jax.set_mesh(mesh_of(pipeline=1)):
        found = jax.jit(pipelined(loss, microbatches=2))(params, batch)
    np.testing.assert_allclose(found, jax.jit(loss)(params, batch), rtol=TERMS * np.finfo(np.float32).eps)
