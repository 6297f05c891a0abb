"""The decoder as a whole: its parameters, that loops and packing and caches change nothing, its work, its gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.models.models import MODELS, VOCAB, ids_of, params_of

from capibara.kernels.core.dispatch import recording
from capibara.models import decoder
from capibara.models.config import ModularModelConfig
from capibara.models.preset import load_preset, preset_names
from capibara.parallel.remat import OFFLOAD, checkpoint_scans
from capibara.program.jaxprs import scan_parts
from capibara.program.markers import recording_axes

# Float32 through a few layers of width 16, whose values are about 1.
CLOSE = {"atol": 2e-5, "rtol": 2e-5}
FLOAT32 = {"dtype": jnp.float32}


def _hidden(model: ModularModelConfig, params: Any, ids: jax.Array, **more: Any) -> jax.Array:
    return jax.jit(functools.partial(_states, model, **more))(params, ids)


def _states(model: ModularModelConfig, params: Any, ids: jax.Array, **more: Any) -> jax.Array:
    return decoder.hidden_states(model, params, ids, **{**FLOAT32, **more})[0]


@pytest.mark.quick
def test_parameters_are_those_of_the_tree() -> None:
    presets = {name: load_preset(name).model for name in preset_names()}
    for name, model in {**MODELS, **presets}.items():
        shapes = decoder.param_shapes(model)
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == model.parameters, name
        axes = decoder.axes(model)
        named = jax.tree.leaves(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
        for leaf, names in zip(jax.tree.leaves(shapes), named, strict=True):
            assert len(leaf.shape) == len(names), name
        assert all(names[0] == "stage" for names in jax.tree.leaves(axes["layers"], is_leaf=_is_axes)), name
        assert (model.active_parameters < model.parameters) == any("moe" in part for part in model.period), name


def _is_axes(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def test_weights_keep_the_type_that_they_need() -> None:
    shapes = decoder.param_shapes(MODELS["hybrid"], jnp.bfloat16)
    wide = {
        jax.tree_util.keystr(path).split("'")[-2]
        for path, leaf in jax.tree.flatten_with_path(shapes)[0]
        if leaf.dtype == jnp.float32
    }
    assert wide == {"router", "step_bias", "decay", "skip"}
    params = jax.jit(lambda key: decoder.init(MODELS["hybrid"], key, jnp.bfloat16))(jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.dtype, params) == jax.tree.map(lambda leaf: leaf.dtype, shapes)


def test_a_start_hangs_on_the_key_and_on_nothing_beside_the_weight() -> None:
    model = MODELS["dense"]
    init = jax.jit(functools.partial(decoder.init, model))
    first, again, other = (init(jax.random.key(seed)) for seed in (0, 0, 1))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), first, again)))
    assert not (first["embed"] == other["embed"]).any()
    # Another block beside it changes no weight.
    wider = model.with_overrides(blocks={"mlp": {"bias": True}})
    with_bias = jax.jit(functools.partial(decoder.init, wider))(jax.random.key(0))
    assert (with_bias["layers"][0]["mlp"]["up"] == first["layers"][0]["mlp"]["up"]).all()
    # Weights of layers and of blocks are drawn apart.
    up = first["layers"][0]["mlp"]["up"]
    assert not (up[0] == up[1]).any()
    assert not (up == first["layers"][1]["mlp"]["up"]).any()


def test_the_residual_starts_at_about_one_and_stays_there() -> None:
    for name in ("dev", "hybrid"):
        model = load_preset(name).model
        small = model.with_overrides(vocab=512) if name == "dev" else MODELS["hybrid"]
        params = jax.jit(functools.partial(decoder.init, small))(jax.random.key(0))
        x = np.asarray(params["embed"])
        assert np.std(x) == pytest.approx(1.0, rel=0.1)
        states = jax.jit(functools.partial(_states, small))(params, ids_of(2, 16))
        assert np.isfinite(states).all()
        deviation = float(np.std(decoder.logits(small, params, states)))
        assert 0.5 < deviation < 2, "logits of a fresh model are about 1"


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_loop_written_out_is_the_same(name: str) -> None:
    model = MODELS[name]
    params, ids = params_of(model), ids_of(2, 10)
    batch = {"inputs": ids, "targets": ids_of(2, 10, seed=1)}

    def results(unroll: int | bool) -> Any:
        return jax.jit(
            jax.value_and_grad(functools.partial(decoder.loss, model, unroll=unroll, **FLOAT32), has_aux=True)
        )(params, batch)

    (value, metrics), gradients = results(1)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    touched = [np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients)]
    assert all(touched), "every weight has a gradient"
    for unroll in (2, True) if name == "dense" else (True,):
        (other, other_metrics), other_gradients = results(unroll)
        np.testing.assert_allclose(value, other, rtol=1e-6)
        jax.tree.map(functools.partial(np.testing.assert_allclose, **CLOSE), metrics, other_metrics)
        jax.tree.map(functools.partial(np.testing.assert_allclose, **CLOSE), gradients, other_gradients)
    loops = [
        jax.jit(functools.partial(_states, model, unroll=unroll)).lower(params, ids).as_text().count("stablehlo.while")
        for unroll in (1, True)
    ]
    # A scan over time is a loop too, in every repeat of the layer.
    assert loops[0] > 0
    assert loops[1] <= model.repeats * (loops[0] - 1)


def test_metrics_have_a_row_a_layer_in_the_layers_order() -> None:
    blocks = {"a": {"kind": "vq", "codes": 4}, "b": {"kind": "vq", "codes": 4}}
    model = ModularModelConfig(hidden=8, layers=6, vocab=VOCAB, pattern="a : a : b", blocks=blocks)
    params, ids = params_of(model), ids_of(2, 8)
    # The second layer of each pass has one code that is everybody's nearest.
    codebook = params["layers"][1]["a"]["codebook"]
    params["layers"][1]["a"]["codebook"] = (codebook * 100).at[:, 0].set(0.0)
    _, _, metrics = jax.jit(functools.partial(decoder.hidden_states, model, **FLOAT32))(params, ids)
    perplexity = np.asarray(metrics["vq_perplexity"])
    assert perplexity.shape == (6,)
    assert set(np.flatnonzero(np.isclose(perplexity, 1.0))) == {1, 4}


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ["dense", "hybrid", "codes", "twice"])
def test_packed_rows_are_those_apart(name: str) -> None:
    model = MODELS[name]
    params = params_of(model)
    first, second = ids_of(1, 5), ids_of(1, 7, seed=1)
    packed = jnp.concatenate([first, second, ids_of(1, 2, seed=2)], axis=1)
    segments = jnp.asarray([[1] * 5 + [2] * 7 + [0] * 2])
    positions = jnp.asarray([[*range(5), *range(7), 0, 1]])
    together = jax.jit(functools.partial(_states, model))(params, packed, segment_ids=segments, positions=positions)
    np.testing.assert_allclose(together[:, :5], _hidden(model, params, first), **CLOSE)
    np.testing.assert_allclose(together[:, 5:12], _hidden(model, params, second), **CLOSE)
    apart = _hidden(model, params, packed)
    assert np.abs(np.asarray(together - apart))[:, 5:12].max() > 1e-2, "without segments the second sees the first"


@pytest.mark.spread(2)
@pytest.mark.quick
@pytest.mark.parametrize("name", MODELS)
def test_decoding_from_a_cache_is_the_forward_pass(name: str) -> None:
    """Prompts of several lengths beside each other, then a token at a time, then a few at once."""
    model = MODELS[name]
    params, ids = params_of(model), ids_of(3, 14)
    whole = np.asarray(_hidden(model, params, ids))
    step = jax.jit(functools.partial(decoder.decode, model, **FLOAT32))
    prompts = np.array([6, 1, 4])
    padded = jnp.where(np.arange(6) < prompts[:, None], ids[:, :6], 7)
    cache = decoder.new_cache(model, 3, 14, jnp.float32)
    x, cache = step(params, padded, cache, jnp.zeros(3, jnp.int32), jnp.asarray(prompts))
    for row, length in enumerate(prompts):
        np.testing.assert_allclose(x[row, :length], whole[row, :length], **CLOSE)
    start = prompts.copy()
    for _ in range(4):
        token = jnp.take_along_axis(ids, jnp.asarray(start)[:, None], axis=1)
        x, cache = step(params, token, cache, jnp.asarray(start), jnp.ones(3, jnp.int32))
        np.testing.assert_allclose(x[:, 0], whole[np.arange(3), start], **CLOSE)
        start += 1
    # Some more at once; the first row has four left, and its padding would not fit into the cache.
    more = np.array([3, 5, 0])
    chunk = np.stack(
        [
            np.resize(np.asarray(ids)[row, at : at + n] if n else 7, 5)
            for row, (at, n) in enumerate(zip(start, more, strict=True))
        ]
    )
    x, cache = step(params, jnp.asarray(chunk), cache, jnp.asarray(start), jnp.asarray(more))
    for row, n in enumerate(more):
        np.testing.assert_allclose(x[row, :n], whole[row, start[row] : start[row] + n], **CLOSE)
    start += more
    token = jnp.take_along_axis(ids, jnp.asarray(start)[:, None], axis=1)
    x, cache = step(params, token, cache, jnp.asarray(start), jnp.ones(3, jnp.int32))
    np.testing.assert_allclose(x[:, 0], whole[np.arange(3), start], **CLOSE)


def test_a_cache_keeps_its_own_type() -> None:
    model = MODELS["hybrid"]
    params, ids = params_of(model), ids_of(2, 4)
    cache = decoder.new_cache(model, 2, 8, jnp.bfloat16)
    run = jax.jit(functools.partial(decoder.decode, model, **FLOAT32))
    x, after = run(params, ids, cache, jnp.zeros(2, jnp.int32), jnp.full(2, 4))
    assert x.dtype == jnp.float32
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), cache
    )


def test_embeddings_are_taken_in_place_of_ids() -> None:
    for name in ("dense", "twice"):
        model = MODELS[name]
        params, ids = params_of(model), ids_of(2, 6)
        embedded = params["embed"][ids] * model.embed_scale
        np.testing.assert_allclose(_hidden(model, params, embedded), _hidden(model, params, ids), **CLOSE)
    for inputs, said in (
        (jnp.ones((2, 6, 5)), r"Embeddings are \[batch, length, 16\]\. Got \[2, 6, 5\]"),
        (jnp.ones((2, 16)), r"Embeddings are \[batch, length, 16\]"),
        (jnp.ones(6, jnp.int32), r"Token ids are \[batch, length\]\. Got \[6\].*ids\[None\]"),
    ):
        with pytest.raises(ValueError, match=said):
            decoder.hidden_states(model, params, inputs)


def test_a_tied_table_is_the_heads_too() -> None:
    model = MODELS["twice"]
    assert "head" not in decoder.weights(model)
    params, ids = params_of(model), ids_of(2, 6)
    untied = dataclasses.replace(model, tied=False)
    other = {**params, "head": params["embed"].T}

    def scores(model: ModularModelConfig, params: Any) -> jax.Array:
        return decoder.logits(model, params, _states(model, params, ids))

    got = jax.jit(functools.partial(scores, model))(params)
    np.testing.assert_allclose(got, jax.jit(functools.partial(scores, untied))(other), **CLOSE)
    assert np.abs(got).max() < model.softcap
    assert untied.parameters == model.parameters + VOCAB * model.hidden


@pytest.mark.parametrize(
    ("key", "value"), [("norm", "rms"), ("norm_eps", 0.5), ("embed_scale", 2.0), ("softcap", 1.0), ("softcap", None)]
)
def test_every_key_of_the_model_changes_its_loss(key: str, value: Any) -> None:
    model = MODELS["twice"]
    changed = dataclasses.replace(model, **{key: value})
    params = params_of(model)
    batch = {"inputs": ids_of(2, 8), "targets": ids_of(2, 8, seed=1)}
    values = [float(jax.jit(decoder.make_loss(one, **FLOAT32))(params, batch)) for one in (model, changed)]
    assert abs(values[0] - values[1]) > 1e-3


def test_the_form_of_attention_is_the_one_that_is_asked_for() -> None:
    model = MODELS["dense"]
    params, ids = params_of(model), ids_of(1, 8)
    texts = {
        name: str(
            jax.make_jaxpr(functools.partial(_states, dataclasses.replace(model, attention_implementation=name)))(
                params, ids
            )
        )
        for name in ("reference", "xla")
    }
    assert texts["reference"] != texts["xla"]
    with pytest.raises(ValueError, match="flash"):
        _states(dataclasses.replace(model, attention_implementation="flash"), params, ids)


@pytest.mark.parametrize(("placing", "alone"), [(contextlib.nullcontext, 1), (recording_axes, 2)])
def test_what_a_block_adds_goes_into_the_next_norm_and_its_gradient(placing: Any, alone: int) -> None:
    """The head's norm is alone, and the pattern's first one where a planner looks on."""
    model = MODELS["dense"]  # four blocks a pass over its pattern
    params, ids = params_of(model), ids_of(1, 8)
    with placing(), recording() as found:
        jax.make_jaxpr(jax.grad(lambda params: _states(model, params, ids).sum()))(params)
    calls = [one.call for one in found if one.call.need(one.call.op.operands[0]).shape == (1, 8, model.hidden)]
    backward = [call["d_sum"] is not None for call in calls if call.op.name == "norm_grad"]
    assert sorted(backward) == [False] * alone + [True] * (5 - alone)
    assert any(call.op.name == "norm" and call["residual"] is not None for call in calls)


def test_the_loss_is_the_mean_over_targets_that_count() -> None:
    model = MODELS["dense"]
    params = params_of(model)
    inputs, targets = ids_of(2, 8), ids_of(2, 8, seed=1)
    scores = decoder.logits(model, params, _hidden(model, params, inputs))
    nats = -np.take_along_axis(np.asarray(jax.nn.log_softmax(scores)), np.asarray(targets)[..., None], axis=-1)[..., 0]
    squares = np.asarray(jax.nn.logsumexp(scores, axis=-1)) ** 2

    @functools.partial(jax.jit, static_argnames="z_loss")
    def loss(batch: Any, z_loss: float = 0.0) -> Any:
        return decoder.loss(model, params, batch, z_loss=z_loss, **FLOAT32)

    batch = {"inputs": inputs, "targets": targets}
    assert float(loss(batch)[0]) == pytest.approx(nats.mean(), rel=1e-5)
    mask = np.arange(16).reshape(2, 8) % 3 > 0
    assert float(loss({**batch, "mask": jnp.asarray(mask)})[0]) == pytest.approx(nats[mask].mean(), rel=1e-5)
    segments = jnp.asarray([[1] * 8, [1] * 3 + [0] * 5])
    kept = np.asarray(segments) != 0
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    packed = {**batch, "segment_ids": segments, "positions": positions}
    assert float(loss(packed)[0]) == pytest.approx(nats[kept].mean(), rel=1e-5)
    value, metrics = loss(batch, z_loss=0.5)
    assert float(value) == pytest.approx(nats.mean() + 0.5 * squares.mean(), rel=1e-5)
    assert set(metrics) == {"loss"}


def test_the_blocks_own_losses_are_added_and_not_in_the_metric() -> None:
    model = MODELS["hybrid"]
    params = params_of(model)
    batch = {"inputs": ids_of(2, 8), "targets": ids_of(2, 8, seed=1)}
    value, metrics = jax.jit(functools.partial(decoder.loss, model, **FLOAT32))(params, batch)
    without = model.with_overrides(blocks={"moe": {"balance_loss": 0.0, "z_loss": 0.0}})
    plain, _ = jax.jit(functools.partial(decoder.loss, without, **FLOAT32))(params, batch)
    assert float(plain) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert float(value) > float(plain) + 1e-3
    assert metrics["expert_share"].shape == (2, 4), "two layers of the six have experts"
    np.testing.assert_allclose(metrics["expert_share"].sum(axis=1), 1.0, rtol=1e-6)


def test_noise_differs_from_layer_to_layer() -> None:
    moe = {"kind": "moe", "experts": 4, "top_k": 1, "ffn": 8, "jitter": 0.9}
    model = ModularModelConfig(hidden=8, layers=4, vocab=VOCAB, pattern="2 moe", blocks={"moe": moe})
    params = params_of(model)
    # All layers alike: without noise of their own they would choose alike.
    same = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), params["layers"][0])
    same["moe"]["down"] = jnp.zeros_like(same["moe"]["down"])
    params["layers"] = [same, same]

    def shares(key: jax.Array | None) -> np.ndarray:
        run = jax.jit(functools.partial(decoder.hidden_states, model, **FLOAT32))
        return np.asarray(run(params, ids_of(4, 32), key=key)[2]["expert_share"])

    quiet, noisy = shares(None), shares(jax.random.key(0))
    assert (quiet == quiet[0]).all()
    assert len({tuple(row) for row in noisy}) == 4


@pytest.mark.quick
@pytest.mark.parametrize(
    ("unroll", "policy", "arrays"),
    [(True, "none", 2), (1, "none", 1), (2, "none", 1), (True, "dots", 1), (True, "full", 1), (True, OFFLOAD, 1)],
)
def test_a_layers_last_sum_is_left_where_nothing_is_computed_again(unroll: Any, policy: str, arrays: int) -> None:
    """What a loop carries, or what is computed again begins with, is one array and not both terms of a sum."""
    model = MODELS["dense"]
    states = checkpoint_scans(functools.partial(_states, model, unroll=unroll), policy)
    program = jax.make_jaxpr(states)(params_of(model), ids_of(2, 10))
    (loop,) = [e for e in program.eqns if e.primitive.name == "scan"]
    _, carried = scan_parts(loop.params)
    assert carried == arrays


@pytest.mark.parametrize("training", [False, True])
def test_work_is_what_xla_counts(training: bool) -> None:
    """For a dense decoder in its plain form, whose table of scores is whole: the causal half is added here."""
    length, heads = 64, 4
    model = ModularModelConfig(
        hidden=64, layers=2, vocab=256, attention_implementation="reference",
        blocks={"attention": {"heads": heads, "kv_heads": 2}, "mlp": {"ffn": 128}},
    )  # fmt: skip

    def loss(params: Any, batch: Any) -> jax.Array:
        x = decoder.hidden_states(model, params, batch["inputs"], unroll=True, **FLOAT32)[0]
        return jnp.mean(decoder.logits(model, params, x))

    shapes = decoder.param_shapes(model), decoder.batch_shapes(1, length)
    fn = jax.value_and_grad(loss) if training else loss
    counted: Any = jax.jit(fn).lower(*shapes).compile().cost_analysis()
    upper_half = (3 if training else 1) * model.layers * 4 * model.hidden * (length / 2)
    said = model.flops_per_token(length, training=training) + upper_half
    # XLA also counts norms, softmax and activations: some tens of operations a number.
    assert said * length == pytest.approx(counted["flops"], rel=0.08)
    assert said * length < counted["flops"]


def test_work_of_experts_is_that_of_the_chosen_ones() -> None:
    from capibara.program import trace

    blocks = {"moe": {"experts": 8, "top_k": 2, "ffn": 64, "shared_ffn": 32}}
    model = ModularModelConfig(hidden=64, layers=2, vocab=64, pattern="moe", blocks=blocks)
    args = decoder.param_shapes(model), decoder.batch_shapes(2, 32)
    norms = 3 * model.hidden  # no products
    said = model.flops_per_token(32, training=False) - 2 * norms
    assert trace(decoder.make_loss(model), args, device_kind="TPU v4").flops == said * 64
