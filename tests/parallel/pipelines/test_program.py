"""`pipelined`: a function that scans over its layers runs as a pipeline, and is the same function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.parallel.pipelines.staged_programs import (
    ROWS,
    VOCAB,
    assert_close,
    init,
    loss,
    mesh_of,
    placed,
    scores,
    tokens,
)

from capibara.parallel import pipelined

# A gradient sums over the rows' tokens, and an entry of the table over all of them at the most.
TERMS = ROWS * 8


@pytest.mark.quick
@pytest.mark.parametrize("axes", [{"pipeline": 2, "data": 2}, {"pipeline": 4, "data": 2}])
def test_a_program_of_its_own_is_the_same_in_stages(axes: dict[str, int]) -> None:
    params, batch = init(), tokens()
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(pipelined(loss, microbatches=8)))(*placed(mesh, params, batch))
    assert_close(found, jax.jit(jax.value_and_grad(loss))(params, batch), TERMS)


def _several(batch: Any, params: Any) -> dict[str, Any]:
    found = scores(params, batch)
    size = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params["layers"]))
    right = jnp.sum(jnp.argmax(found, -1) == batch["targets"])
    return {
        "scores": found,
        "turned": found.transpose(1, 0, 2),
        "sums": found.sum((0, 1)),
        "size": size,
        "right": right,
        "largest": jnp.max(found),
    }


def test_results_with_rows_come_back_in_order_and_others_are_those_of_all_rows() -> None:
    params, batch = init(), tokens()
    expected = jax.jit(_several)(batch, params)
    with jax.set_mesh(mesh_of(pipeline=2)):
        found = jax.jit(pipelined(_several, microbatches=4, batch=(0,)))(batch, params)
        summed = jax.jit(pipelined(_several, microbatches=4, batch=0, combine="sum"))(batch, params)
        averaged = jax.jit(pipelined(_several, microbatches=4, batch=0, combine="mean"))(batch, params)
    assert_close(found, expected, TERMS * VOCAB)
    assert found["right"].dtype == expected["right"].dtype
    assert found["right"] == expected["right"]
    # By hand: what is made of the layers alone is made in every microbatch.
    assert_close([summed["sums"], summed["size"] / 4], [expected["sums"], expected["size"]], TERMS * VOCAB)
    assert_close([averaged["sums"] * 4, averaged["size"]], [expected["sums"], expected["size"]], TERMS * VOCAB)


def _token_losses(params: Any, batch: Any) -> Any:
    found = scores(params, batch)
    return jax.nn.logsumexp(found, -1) - jnp.take_along_axis(found, batch["targets"][..., None], axis=-1)[..., 0]


def _masked_mean(params: Any, batch: Any) -> Any:
    return jnp.sum(_token_losses(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def _divided_first(params: Any, batch: Any) -> Any:
    return jnp.sum(_token_losses(params, batch) * batch["mask"] / jnp.sum(batch["mask"]))


def _perplexity_and_penalty(params: Any, batch: Any) -> Any:
    return jnp.exp(jnp.mean(_token_losses(params, batch))) + jnp.sum(params["unembed"] ** 2)


def _of_rows_alone(params: Any, batch: Any) -> Any:
    losses = _token_losses(params, batch)
    return jnp.sum(losses / losses.shape[0])


def _statistics_before(params: Any, batch: Any) -> Any:
    start = jnp.asarray(params["embed"])[batch["inputs"]]
    start = start - start.mean(0)

    def layer(carry: Any, w: Any) -> tuple[Any, None]:
        x, number = carry
        return (x + jnp.tanh(x @ w["up"]) @ w["down"] / (1 + number), number + 1), None

    x, number = jax.lax.scan(layer, (start, 0), params["layers"])[0]
    # The table is read again, and so is what was made before the layers, of all rows.
    return jnp.mean((x * start @ params["embed"].T) ** 2) * number


@pytest.mark.parametrize(
    "fn", [_masked_mean, _divided_first, _perplexity_and_penalty, _of_rows_alone, _statistics_before]
)
def test_numbers_of_all_rows_are_exact_where_microbatches_weigh_differently(fn: Any) -> None:
    params, batch = init(), tokens()
    # Every fourth row, one microbatch of four, has nearly all of its tokens masked.
    batch["mask"] = batch["mask"] * np.where(np.arange(ROWS) % 4 == 0, 1e-3, 1.0).astype(np.float32)[:, None]
    mesh = mesh_of(pipeline=2, data=2)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(pipelined(fn, microbatches=4)))(*placed(mesh, params, batch))
    assert_close(found, jax.jit(jax.value_and_grad(fn))(params, batch), TERMS)


def _with_layer(change: Any, after: Any = jnp.mean) -> Any:
    def fn(params: Any, batch: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return x + jnp.tanh(change(x) @ w["up"]) @ w["down"], None

        return after(jax.lax.scan(layer, jnp.asarray(params["embed"])[batch["inputs"]], params["layers"])[0])

    return fn


def _same(x: Any) -> Any:
    return x


def _dropped(x: Any) -> Any:
    return x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)


def _numbered(x: Any) -> Any:
    return x * jnp.arange(x.shape[0], dtype=jnp.float32)[:, None, None]


def _contrast(x: Any) -> Any:
    return jnp.mean(jax.nn.log_softmax(x[:, 0] @ x[:, 0].T))


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (_with_layer(lambda x: jnp.cumsum(x, 0)), "cumsum .*in the loop over layers, in which rows meet"),
        (_with_layer(lambda x: jnp.sort(x, 0)), "sort .*in the loop over layers, in which rows meet"),
        (_with_layer(lambda x: x[::-1]), "rev .*in the loop over layers, in which rows meet"),
        (_with_layer(lambda x: x + x[:1]), "slice .*in the loop over layers, in which rows meet"),
        (_with_layer(_dropped), "random numbers for each row .*in the loop over layers"),
        (_with_layer(_numbered), "a row's number in the batch .*in the loop over layers"),
        (_with_layer(lambda x: x / x.shape[0]), "the number 16.0 for all rows and 8.0 for a microbatch"),
        (_with_layer(_same, lambda x: jnp.mean(_numbered(x))), "a row's number in the batch .*after its layers"),
        (_with_layer(_same, lambda x: jnp.mean(_dropped(x))), "random numbers for each row .*after its layers"),
        (_with_layer(_same, lambda x: jnp.var(x)), "brings back to the rows what was made of all"),
        (_with_layer(_same, lambda x: jnp.prod(x)), "reduce_prod, in which rows meet.*combine="),
        (_with_layer(_same, lambda x: jnp.mean(jnp.roll(x, 1, 0) * x)), "after the loop over layers, which mixes rows"),
        (_with_layer(_same, _contrast), r"one dimension of what is made of it. Got \(16, 16\)"),
        (_with_layer(_same, lambda x: x.sum() if x.shape[0] > 8 else x.mean()), "the same to a microbatch as to all"),
    ],
)
def test_what_needs_other_rows_is_refused_and_not_wrong(fn: Any, said: str) -> None:
    with jax.set_mesh(mesh_of(pipeline=2)), pytest.raises(ValueError, match=said):
        jax.eval_shape(pipelined(fn, microbatches=2), init(), tokens())


def test_how_microbatches_become_one_can_be_said_by_hand() -> None:
    params, batch = init(), tokens()
    fn = _with_layer(_same, jnp.var)
    with jax.set_mesh(mesh_of(pipeline=2)):
        found = jax.jit(pipelined(fn, microbatches=4, combine="mean"))(params, batch)
    # Rows of one chip go to different microbatches: every fourth.
    parts = [fn(params, jax.tree.map(lambda leaf, n=n: leaf[n::4], batch)) for n in range(4)]
    assert_close(found, np.mean(parts), TERMS)


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
        (_normalised, r"rows of a batch one by one.*reduce_sum.*in the loop over layers, in which rows meet"),
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
        ({"microbatches": 2, "axis_name": "stage"}, "Unknown mesh axis 'stage'"),
        ({"microbatches": 4, "mesh": mesh_of(pipeline=4), "layers": 6}, "6 layers for 4 stages. Fix: use 4 or 8"),
    ],
)
def test_bad_input_says_the_rule(asked: dict[str, Any], said: str) -> None:
    asked = {"mesh": mesh_of(pipeline=2), **asked}
    params = init(layers=asked.pop("layers", 4))
    with pytest.raises(ValueError, match=said):
        pipelined(loss, **asked)(params, tokens())


@pytest.mark.parametrize(("extra", "said"), [(np.arange(8), r"\(16, 8\), \(8,\)"), (1.0, r"\(16, 8\), \(\)")])
def test_every_array_of_a_batch_has_its_rows(extra: Any, said: str) -> None:
    with jax.set_mesh(mesh_of(pipeline=2)), pytest.raises(ValueError, match=f"same number of rows.*{said}"):
        pipelined(loss, microbatches=2)(init(), {**tokens(), "positions": extra})


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
