"""VQbitLayer as documented: what it returns, how its codebook learns, jit, meshes, bad input, and real data."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import target
from capibara.kernels.core.dispatch import recording
from capibara.vq.vqbit import VQbitState
from capibara.vq.vqbit.vqbit_layer import VQbitLayer

METRICS = {
    "perplexity", "usage", "commitment_loss", "codebook_loss", "loss", "dead_codes", "revived", "invalid_rows",
}  # fmt: skip


def _nearest(x: Any, codes: Any) -> np.ndarray:
    x, codes = np.asarray(x, np.float64), np.asarray(codes, np.float64)
    return ((x[:, None] - codes[None]) ** 2).sum(-1).argmin(1)


def _error(x: Any, codes: Any) -> float:
    """The mean squared distance of a row to its nearest code."""
    return float(np.square(np.asarray(x) - np.asarray(codes)[_nearest(x, codes)]).sum(-1).mean())


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


X = np.random.default_rng(0).standard_normal((3, 10, 4), np.float32)


@pytest.fixture(scope="module")
def trained() -> tuple[VQbitLayer, Any]:
    """A layer after its first batch, X, and what that call gave: compiled once for the tests that need no other."""
    layer = VQbitLayer(codebook_size=8, embedding_dim=4, use_jax_native=True, use_tpu_optimizations=False)
    return layer, layer(X)


def test_as_documented(trained: Any) -> None:
    layer, (quantized, indices, metrics) = trained
    x = jnp.asarray(X)
    assert quantized.shape == x.shape
    assert indices.shape == (3, 10)
    assert set(metrics) == METRICS
    assert 1 <= float(metrics["perplexity"]) <= 8
    quantized, indices, metrics = layer(x, training=False)
    np.testing.assert_array_equal(quantized, layer.codebook[indices])
    error = float(jnp.square(x - quantized).mean())
    np.testing.assert_allclose(metrics["commitment_loss"], error, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], 0.25 * error, rtol=1e-5)


def test_the_gradient_goes_straight_through_and_pulls_to_the_code() -> None:
    layer = VQbitLayer(6, 4, commitment=0.5)
    x, weights = _normal(1, 20, 4).at[3, 0].set(jnp.nan), _normal(2, 20, 4)
    state = layer.init(codebook=_normal(13, 6, 4))

    def loss(x: jax.Array, codebook: jax.Array) -> jax.Array:
        (quantized, _, metrics), _ = layer.apply(state._replace(codebook=codebook), x, training=False)
        return (quantized * weights).sum() + metrics["loss"]

    dx, dcodes = jax.jit(jax.grad(loss, (0, 1)))(x, state.codebook)
    codes = np.asarray(state.codebook)[_nearest(x, state.codebook)]
    pull = 0.5 * 2 * (x - codes) / (19 * 4)  # a row that is no number is in no loss
    np.testing.assert_allclose(dx, weights + jnp.where(jnp.isnan(x[:, :1]), 0, pull), rtol=1e-5, atol=1e-6)
    assert not dcodes.any(), "moving averages, not gradients, move this codebook"


def test_moving_averages_by_hand() -> None:
    """The last code has no row, and stays where it is: `revive_after` is None."""
    layer = VQbitLayer(3, 1, decay=0.75, revive_after=None)
    state = layer.init(codebook=jnp.array([[0.0], [10.0], [100.0]]))
    (_, _, metrics), new = layer.apply(state, jnp.array([[1.0], [3.0], [11.0], [jnp.nan]]))
    np.testing.assert_allclose(new.counts, [0.75 + 0.25 * 2, 0.75 + 0.25 * 1, 0.75])
    np.testing.assert_allclose(new.sums[:, 0], [0.25 * 4, 7.5 + 0.25 * 11, 75])
    # Smoothing adds 1e-5 to counts near 1.
    np.testing.assert_allclose(new.codebook[:, 0], [1 / 1.25, 10.25 / 1.0, 100], rtol=2e-5)
    assert (int(metrics["dead_codes"]), int(metrics["revived"])) == (1, 0)
    unchanged = layer.apply(state, jnp.full((4, 1), jnp.nan))[1]
    np.testing.assert_allclose(unchanged.codebook, state.codebook, rtol=2e-5)


def test_decay_none_learns_by_gradient() -> None:
    layer = VQbitLayer(4, 2, decay=None, kmeans_start=False, revive_after=None)
    x = _normal(3, 64, 2)
    state = layer.init()

    @jax.jit
    def step(state: VQbitState) -> tuple[VQbitState, jax.Array]:
        def loss(codebook: jax.Array) -> Any:
            (_, _, metrics), new = layer.apply(state._replace(codebook=codebook), x)
            return metrics["loss"], (metrics, new)

        slope, (metrics, new) = jax.grad(loss, has_aux=True)(state.codebook)
        return new._replace(codebook=new.codebook - slope), metrics["codebook_loss"]

    losses = []
    for _ in range(30):
        state, error = step(state)
        losses.append(float(error))
    assert losses[-1] < 0.8 * losses[0]


def test_kmeans_start_or_random_codes() -> None:
    """From `init`, or at the first step of a compiled program, which afterwards does what an eager step does."""
    x = jnp.concatenate([_normal(4, 8, 4) * 0.1 + 5 * i for i in range(4)])[:30]
    layer = VQbitLayer(8, 4, revive_after=1)
    drawn = layer.init()
    random = _error(x, drawn.codebook)
    assert _error(x, layer.init(x=x).codebook) < 0.1 * random
    without = VQbitLayer(8, 4, kmeans_start=False).init(x=x)
    np.testing.assert_array_equal(without.codebook, drawn.codebook)
    assert bool(without.started)
    step = jax.jit(layer.apply)
    (_, _, metrics), state = step(drawn, x)
    assert (bool(drawn.started), bool(state.started)) == (False, True)
    assert metrics["commitment_loss"] < 0.1 * random / 4  # of one number, not of the four of a row
    for one, other in zip(jax.tree.leaves(step(state, x)), jax.tree.leaves(layer.apply(state, x)), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # fused sums round otherwise


def test_dead_codes_come_back_as_rows() -> None:
    x = _normal(5, 16, 3)
    far = jnp.concatenate([x[:2], jnp.full((3, 3), 100.0)])
    layer = VQbitLayer(5, 3, revive_after=2)
    state = layer.init(codebook=far)
    (_, _, first), state = layer.apply(state, x)
    assert (int(first["dead_codes"]), int(first["revived"])) == (0, 0)
    (_, _, second), state = layer.apply(state, x)
    assert (int(second["dead_codes"]), int(second["revived"])) == (3, 3)
    for code in np.asarray(state.codebook[2:]):
        assert (np.abs(np.asarray(x) - code).max(1) == 0).any()
    (_, _, third), _ = layer.apply(state, x)
    assert third["usage"] > second["usage"]


def test_rows_that_are_no_numbers(trained: Any) -> None:
    layer, _ = trained
    x = jnp.asarray(X).at[1, 4, 0].set(jnp.nan).at[2, 5, 1].set(jnp.inf)
    state = layer.init(x=x)
    assert jnp.isfinite(state.codebook).all()
    (quantized, indices, metrics), new = layer.apply(state, x)
    assert int(metrics["invalid_rows"]) == 2
    assert indices[1, 4] == indices[2, 5] == -1
    assert jnp.isnan(quantized[1, 4]).all()
    assert jnp.isnan(quantized[2, 5]).all()
    assert jnp.isfinite(new.codebook).all()
    assert all(jnp.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("rows", [0, 6])
def test_a_first_batch_without_a_valid_row_starts_nothing(rows: int) -> None:
    """The drawn codes stay, finite and different, and the next batch starts the codebook."""
    layer = VQbitLayer(4, 2)
    nothing = jnp.full((rows, 2), jnp.nan)
    _, indices, metrics = layer(nothing)
    assert indices.tolist() == [-1] * rows
    assert int(metrics["invalid_rows"]) == rows
    assert not bool(layer.state.started)
    np.testing.assert_allclose(layer.codebook, layer.init().codebook, rtol=2e-5)  # smoothed
    (_, _, _), compiled = jax.jit(layer.apply)(layer.init(), nothing)
    assert not bool(compiled.started)
    x = _normal(14, 8, 2) + 50
    layer(x)
    assert bool(layer.state.started)
    assert float(layer.codebook.min()) > 40


def test_inside_jit_the_object_is_a_constant_and_says_so(trained: Any) -> None:
    layer = VQbitLayer(8, 4)
    x = jnp.asarray(X)
    before = layer.state = trained[0].state
    with pytest.warns(UserWarning, match="does not update"):
        jax.grad(lambda x: layer(x)[0].sum())(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside = jax.jit(lambda x: layer(x)[0])(x)  # said once
    assert layer.state is before
    np.testing.assert_array_equal(inside, trained[0](x, training=False)[0])


TRANSFORMED: dict[str, Callable[[VQbitLayer], Any]] = {
    "jit": lambda layer: jax.jit(lambda x: layer(x))(X),
    "jit of the layer": lambda layer: jax.jit(layer)(X),
    "jit on an array that it closes over": lambda layer: jax.jit(lambda: layer(X))(),
    "grad": lambda layer: jax.grad(lambda x: layer(x)[2]["loss"])(X),
    "jit of grad": lambda layer: jax.jit(jax.grad(lambda x: layer(x)[0].sum()))(X),
    "vmap": lambda layer: jax.vmap(layer)(X),
    "shard_map": lambda layer: jax.shard_map(
        lambda x: layer(x)[:2], mesh=_two_devices(), in_specs=P(None, "data"), out_specs=P(None, "data")
    )(X),
}


def _two_devices() -> Mesh:
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


@pytest.mark.spread(3)
@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:.*VQbitLayer")
@pytest.mark.parametrize("how", TRANSFORMED)
def test_a_fresh_layer_is_first_called_inside(how: str, trained: Any) -> None:
    """Its state is numbers of the seed, the same however it was called, and training goes on from it outside."""
    layer = VQbitLayer(8, 4)
    with jax.checking_leaks():
        made = TRANSFORMED[how](layer)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((made, layer.state)))
    np.testing.assert_array_equal(layer.codebook, trained[0].init().codebook)
    if isinstance(made, tuple):
        np.testing.assert_allclose(made[0], layer.codebook[made[1]], rtol=1e-6)
    if how == "jit":
        assert not bool(layer.state.started)
        random = _error(X.reshape(-1, 4), layer.codebook)
        layer(X)
        assert bool(layer.state.started)
        assert _error(X.reshape(-1, 4), layer.codebook) < 0.5 * random, "k-means has started the codes"


def test_what_a_first_call_inside_says() -> None:
    layer = VQbitLayer(8, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        jax.eval_shape(layer, X)
        jax.eval_shape(layer, X)
    texts = [str(one.message) for one in said if "VQbitLayer" in str(one.message)]
    assert len(texts) == 2, "each once"
    assert "random ones of its seed" in texts[0]
    assert "layer.init(x=batch)" in texts[0]
    assert "layer.apply(state, x, training=True)" in texts[1]


@pytest.mark.filterwarnings("ignore:.*VQbitLayer")
def test_a_training_loop_inside_jit() -> None:
    """The encoder's weights by gradient, the codes by their averages: one compiled step, from an empty state."""
    layer = VQbitLayer(4, 2, decay=0.8)
    x = _normal(5, 64, 4)
    weights, state = _normal(6, 4, 2), layer.init()

    @jax.jit
    def step(weights: jax.Array, state: VQbitState) -> Any:
        def loss(weights: jax.Array) -> Any:
            (_, _, metrics), new = layer.apply(state, x @ weights)
            return metrics["loss"], new

        (value, new), slope = jax.value_and_grad(loss, has_aux=True)(weights)
        return weights - 0.1 * slope, new, value

    losses = []
    for _ in range(10):
        weights, state, value = step(weights, state)
        losses.append(float(value))
    assert bool(state.started)
    assert losses[-1] < losses[0]
    layer.state = state
    np.testing.assert_array_equal(jax.jit(layer)(x @ weights)[1], layer(x @ weights, training=False)[1])


def test_use_jax_native_is_dispatch_and_false_is_xla() -> None:
    x = _normal(9, 16, 4)
    for native, why in ((True, "it comes first for"), (False, "asked for by name")):
        layer = VQbitLayer(3, 4, use_jax_native=native)
        state = layer.init(codebook=x[:3])
        with recording() as found:
            jax.eval_shape(lambda state, layer=layer: layer.apply(state, x, training=False), state)
        assert why in found[0].why


def test_use_tpu_optimizations(caplog: pytest.LogCaptureFixture) -> None:
    """On a TPU the search is in bfloat16; elsewhere nothing changes, and that is said once."""
    x = _normal(10, 16, 4)
    layer = VQbitLayer(3, 4, use_tpu_optimizations=True)
    state = layer.init(codebook=x[:3])
    with caplog.at_level(logging.WARNING, "capibara.vq"):
        for _ in range(2):
            made = layer.apply(state, x)[0]
    assert caplog.text.count("changes nothing on cpu") == 1
    np.testing.assert_array_equal(made[1], _nearest(x, state.codebook))
    with target("tpu"), recording() as found:
        jax.eval_shape(layer.apply, state, x)
    assert {np.dtype(operand.dtype).name for operand in found[-1].call.args if operand is not None} == {"bfloat16"}
    with target("tpu"):  # what it computes, by plain XLA operations on this machine
        plain = VQbitLayer(3, 4, use_jax_native=False, use_tpu_optimizations=True)
        (_, indices, _), new = plain.apply(state, x)
    np.testing.assert_array_equal(indices, made[1])
    np.testing.assert_allclose(new.codebook, layer.apply(state, x)[1].codebook, rtol=1e-5, atol=1e-6)


def test_codebook_split_over_a_mesh() -> None:
    """A training step with the codes over four devices and the rows over two is the step of one device."""
    mesh = jax.make_mesh((2, 4), ("data", "codes"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    split = VQbitLayer(16, 8, mesh=mesh, codebook_axis_name="codes", revive_after=1, kmeans_start=False)
    whole = VQbitLayer(16, 8, revive_after=1, kmeans_start=False)
    x = _normal(11, 64, 8).at[3, 0].set(jnp.nan)
    codebook = _normal(12, 16, 8)
    state = split.init(codebook=codebook)
    assert state.codebook.sharding.is_equivalent_to(NamedSharding(mesh, P("codes", None)), 2)
    assert split.specs().sums == P("codes", None)
    rows = jax.device_put(x, NamedSharding(mesh, P("data", None)))
    step = jax.jit(split.apply, out_shardings=(None, split.shardings()))
    (quantized, indices, metrics), new = step(state, rows)
    (right, right_indices, right_metrics), right_new = whole.apply(whole.init(codebook=codebook), x)
    np.testing.assert_array_equal(indices, right_indices)
    np.testing.assert_allclose(quantized, right, rtol=1e-6)
    np.testing.assert_allclose(new.codebook, right_new.codebook, rtol=1e-5, atol=1e-6)
    assert new.codebook.sharding.is_equivalent_to(NamedSharding(mesh, P("codes", None)), 2)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, right_metrics[name], rtol=1e-5)


def _windows() -> np.ndarray:
    """Real data: source text of the standard library, 8 bytes at a time, each byte from -1 to 1."""
    text = Path(str(argparse.__file__)).read_bytes()
    length = 2048 * 8
    assert len(text) > length
    return np.frombuffer(text[:length], np.uint8).reshape(-1, 8).astype(np.float32) / 64 - 1


def _lloyd(x: np.ndarray, codes: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        at = _nearest(x, codes)
        codes = np.stack([x[at == k].mean(0) if (at == k).any() else codes[k] for k in range(len(codes))])
    return codes


def test_training_on_real_text() -> None:
    """Batches of source text, from random codes: far better than random rows of it, and near k-means of all of it."""
    x = _windows()
    rng = np.random.default_rng(0)
    rows = x[rng.choice(len(x), 32, replace=False)]
    layer = VQbitLayer(32, 8, decay=0.9, kmeans_start=False, revive_after=5)
    step = jax.jit(layer.apply)
    state = layer.init()
    untrained = _error(x, state.codebook)
    for _ in range(8):
        for batch in np.split(x[rng.permutation(len(x))], 8):
            (_, _, metrics), state = step(state, batch)
    error = _error(x, state.codebook)
    by_kmeans = _error(x, _lloyd(x, rows, 25))
    assert error < untrained / 5
    assert error < _error(x, rows) / 1.3
    assert error < 1.15 * by_kmeans
    assert float(metrics["perplexity"]) > 32 / 2
    started = VQbitLayer(32, 8).init(x=x)
    assert _error(x, started.codebook) < 1.15 * by_kmeans, "k-means start, over the whole data"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"codebook_size": 0}, "codebook_size is a whole number, 1 or more"),
        ({"embedding_dim": 2.5}, "embedding_dim is a whole number"),
        ({"decay": 1.0}, "decay is from 0 to below 1"),
        ({"decay": "x"}, "decay is from 0 to below 1.*Got 'x'"),
        ({"commitment": -1}, "commitment is a finite weight"),
        ({"commitment": "x"}, "commitment is a finite weight"),
        ({"revive_after": 0}, "revive_after"),
        ({"seed": -1}, "seed"),
        ({"codebook_axis_name": "codes"}, "mesh=None"),
    ],
)
def test_bad_layers(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        VQbitLayer(**{"codebook_size": 4, "embedding_dim": 2, **change})


def test_bad_meshes() -> None:
    mesh = jax.make_mesh((4,), ("codes",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="Did you mean 'codes'"):
        VQbitLayer(8, 2, mesh=mesh, codebook_axis_name="code")
    with pytest.raises(ValueError, match="6 codes over 4 devices"):
        VQbitLayer(6, 2, mesh=mesh, codebook_axis_name="codes")
    with pytest.raises(ValueError, match="pass mesh="):
        VQbitLayer(6, 2).shardings()


def test_bad_calls() -> None:
    layer = VQbitLayer(4, 2)
    with pytest.raises(ValueError, match="embedding_dim = 2"):
        layer(jnp.ones((3, 5)))
    with pytest.raises(ValueError, match="astype"):
        layer(jnp.ones((3, 2), jnp.int32))
    with pytest.raises(ValueError, match=r"layer.state = layer.init\(\)"):
        _ = layer.codebook
    with pytest.raises(ValueError, match=r"\(4, 2\)"):
        layer.init(codebook=jnp.ones((4, 3)))
    with pytest.raises(ValueError, match="1 codes with NaN"):
        layer.init(codebook=jnp.ones((4, 2)).at[1, 1].set(jnp.nan))
    with pytest.raises(ValueError, match="1 codes with NaN"):
        layer.state = layer.init()._replace(codebook=jnp.ones((4, 2)).at[0, 0].set(jnp.inf))


def test_seeds_and_keys() -> None:
    one, same, other = (VQbitLayer(4, 2, seed=seed).init().codebook for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not jnp.array_equal(one, other)
    assert not jnp.array_equal(one, VQbitLayer(4, 2, seed=1).init(jax.random.key(9)).codebook)
