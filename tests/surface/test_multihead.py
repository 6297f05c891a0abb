"""Multi-head attention: against numpy, its gradient, its layout of heads on a mesh, and its keys."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from capibara.kernels import explain
from capibara.surface import multihead
from capibara.surface.draws import Draws
from capibara.surface.multihead import init_multihead_attention, multihead_attention, pack_qkv

WIDTH, HEADS, KV_HEADS = 32, 4, 2
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, WIDTH)), jnp.float32)
# Two products of 32 and 24 columns and an attention of 8 and 7, in float32: sqrt of the lengths, four for bad luck.
LIMIT = 4 * (32**0.5 + 8**0.5 + 7**0.5 + 32**0.5) * 2**-24


def error(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def separate(seed: int, use_bias: bool) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed).normal
    narrow = WIDTH // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"q": (WIDTH, WIDTH), "k": (WIDTH, narrow), "v": (WIDTH, narrow)}
    made = {name: draw(size=shape) / WIDTH**0.5 for name, shape in (shapes | {"out": (WIDTH, WIDTH)}).items()}
    if use_bias:
        made |= {f"{name}_bias": draw(size=shape[-1]) for name, shape in (shapes | {"out": (WIDTH, WIDTH)}).items()}
    return made


def by_hand(w: dict[str, np.ndarray], x: Any, causal: bool) -> np.ndarray:
    x = np.asarray(x, np.float64)

    def project(name: str, heads: int) -> np.ndarray:
        y = x @ w[name] + w.get(f"{name}_bias", 0)
        return y.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)

    q, k, v = project("q", HEADS), project("k", KV_HEADS), project("v", KV_HEADS)
    k, v = (np.repeat(a, HEADS // KV_HEADS, 1) for a in (k, v))
    scores = q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5
    if causal:
        scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (p / p.sum(-1, keepdims=True)) @ v
    return mixed.swapaxes(1, 2).reshape(x.shape) @ w["out"] + w.get("out_bias", 0)


def packed(w: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    w32 = {name: jnp.asarray(x, jnp.float32) for name, x in w.items()}
    made = {"qkv": pack_qkv(w32["q"], w32["k"], w32["v"], HEADS, KV_HEADS), "out": w32["out"]}
    if "q_bias" in w32:
        biases = pack_qkv(w32["q_bias"], w32["k_bias"], w32["v_bias"], HEADS, KV_HEADS)
        made |= {"qkv_bias": biases, "out_bias": w32["out_bias"]}
    return made


@pytest.mark.quick
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_against_separate_projections_in_numpy(use_bias: bool, causal: bool) -> None:
    w = separate(1, use_bias)
    got = multihead_attention(
        packed(w), X, HEADS, num_kv_heads=KV_HEADS, use_bias=use_bias, causal=causal, precision="float32"
    )
    assert error(got, by_hand(w, X, causal)) < LIMIT


@pytest.mark.quick
def test_it_is_two_products_with_their_bias_and_one_attention() -> None:
    params = init_multihead_attention(jax.random.key(0), WIDTH, HEADS)
    found = explain(lambda p, x: multihead_attention(p, x, HEADS), params, X).selections
    assert [s.call.op.name for s in found] == ["gemm", "attention", "gemm"]
    assert [s.call["bias"].shape for s in found if s.call.op.name == "gemm"] == [(3 * WIDTH,), (WIDTH,)]


def test_gradients_match_differences() -> None:
    params = init_multihead_attention(jax.random.key(0), WIDTH, HEADS, num_kv_heads=KV_HEADS)
    options: dict[str, Any] = {"num_kv_heads": KV_HEADS, "causal": True}

    def loss(params: Any, x: Any) -> Any:
        return (multihead_attention(params, x, HEADS, precision="float32", **options) ** 2).sum()

    made = jax.grad(loss, (0, 1))(params, X)
    step = jax.tree.map(lambda a: jnp.asarray(np.random.default_rng(a.size).normal(size=a.shape), a.dtype), made)
    along = sum(float((a * b).sum()) for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(step), strict=True))
    h = 1e-3

    def moved(by: float) -> float:
        return float(loss(*jax.tree.map(lambda a, b: a + by * b, (params, X), step)))

    # A central difference errs by h squared times a third derivative, and by float32's rounding of the loss over h.
    assert abs((moved(h) - moved(-h)) / (2 * h) - along) < 1e-2 * abs(along)


def test_a_mesh_splits_whole_heads_and_moves_nothing_but_the_output() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = init_multihead_attention(jax.random.key(0), WIDTH, HEADS, num_kv_heads=KV_HEADS)
    specs = {"qkv": (None, "model"), "qkv_bias": ("model",), "out": ("model", None), "out_bias": ()}
    placed = {n: jax.device_put(p, NamedSharding(mesh, PartitionSpec(*specs[n]))) for n, p in params.items()}
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    fn = jax.jit(lambda p, x: multihead_attention(p, x, HEADS, num_kv_heads=KV_HEADS, causal=True))
    text = fn.lower(placed, x).compile().as_text()
    assert text.count(" all-reduce(") == 1
    assert not any(moved in text for moved in ("all-gather", "all-to-all", "collective-permute"))
    assert error(fn(placed, x), multihead_attention(params, X, HEADS, num_kv_heads=KV_HEADS, causal=True)) < LIMIT


@pytest.mark.quick
def test_dropout_is_a_choice_and_a_key() -> None:
    params = init_multihead_attention(jax.random.key(0), WIDTH, HEADS)
    plain = multihead_attention(params, X, HEADS)
    one, two = (multihead_attention(params, X, HEADS, dropout_rate=0.5, rng=jax.random.key(i)) for i in (1, 2))
    again = multihead_attention(params, X, HEADS, dropout_rate=0.5, rng=jax.random.key(1))
    np.testing.assert_array_equal(one, again)
    assert error(one, plain) > 0.05
    assert error(one, two) > 0.05
    with pytest.raises(ValueError, match="Dropout draws from a key"):
        multihead_attention(params, X, HEADS, dropout_rate=0.5)


def test_a_window_and_segments_pass_through() -> None:
    params = init_multihead_attention(jax.random.key(0), WIDTH, HEADS, use_bias=False)
    plain = multihead_attention(params, X, HEADS, use_bias=False)
    ids = jnp.asarray([[0] * 3 + [1] * 4] * 2)
    apart = multihead_attention(params, X, HEADS, use_bias=False, segment_ids=ids)
    first = multihead_attention(params, X[:, :3], HEADS, use_bias=False)
    assert error(apart[:, :3], first) < LIMIT
    assert error(multihead_attention(params, X, HEADS, use_bias=False, window=2), plain) > 0.05


@pytest.mark.quick
def test_mistakes_are_named() -> None:
    params = init_multihead_attention(jax.random.key(0), WIDTH, HEADS)
    for call, said in (
        (lambda: multihead_attention(params, X, 5), "num_heads divides the width"),
        (lambda: multihead_attention(params, X, HEADS, num_kv_heads=3), "multiple of num_kv_heads"),
        (lambda: multihead_attention(params, X, 0), "num_heads is a positive whole number"),
        (lambda: multihead_attention(params, X[0], HEADS), r"x is \[batch, length, width\]"),
        (lambda: multihead_attention(params, X, HEADS, use_bias=False), "With use_bias=False there are no biases"),
        (lambda: multihead_attention(params, X, HEADS, num_kv_heads=2), r"'qkv' is \[32, 64\]"),
        (lambda: multihead_attention({"qkv": params["qkv"]}, X, HEADS), "no 'out'"),
        (lambda: multihead_attention({**params, "bias": X}, X, HEADS), "Unknown parameter of multi-head"),
        (lambda: multihead_attention(3, X, HEADS), "params is a mapping"),  # type: ignore[arg-type]
        (lambda: multihead_attention(params, X, HEADS, layout="bthd"), "layout is not an argument"),
        (lambda: pack_qkv(X[0], X[0], X[0, :, :3], 4), "The value's projection has 4 heads of 8"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


@pytest.mark.quick
def test_keys_one_after_another() -> None:
    one, same, other = Draws(3), Draws(3), Draws(4)
    first, second = one.next(), one.next()
    bits = lambda key: tuple(np.asarray(jax.random.key_data(key)))  # noqa: E731
    assert bits(first) == bits(same.next())
    assert len({bits(k) for k in (first, second, one.fixed(), other.next())}) == 4
    assert bits(one.fixed()) == bits(same.fixed())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(lambda x: x * jax.random.normal(one.next()))(1.0)  # eager: a new key every time
    with pytest.warns(UserWarning, match="the same elements at every run"):
        jax.jit(lambda x: x * jax.random.normal(one.next()))(1.0)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="seed is a whole number"):
            Draws(wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("nothing_said_yet")
def test_made_parameters_are_said_once() -> None:
    draws = Draws()

    def call() -> Any:
        options: dict[str, Any] = {"use_bias": True, "dropout_rate": 0.1, "params": None, "rng": None}
        return multihead.self_attention(draws, X, HEADS, training=False, **options)

    with pytest.warns(UserWarning, match="made random ones.*init_multihead_attention"):
        first = call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(first, call())
