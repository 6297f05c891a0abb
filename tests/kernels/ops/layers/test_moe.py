"""A mixture of experts on one device: dispatch, combine and the layer, against every expert on every token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels import Routing, init_moe, moe_layer, route, target
from capibara.kernels.ops.layers import combine, dispatch, dispatch_to_buffers
from capibara.kernels.ops.layers.moe import arrange
from capibara.kernels.ops.layers.moe.arrange import by_group

WIDTH, HIDDEN, EXPERTS = 16, 24, 8


def _normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def _params(seed: int = 0) -> dict[str, Any]:
    return init_moe(jax.random.key(seed), WIDTH, HIDDEN, EXPERTS)


def _dense(params: Any, x: Any, top_k: int, activation: Any = jax.nn.silu, **options: Any) -> Any:
    """Every expert on every token; the routing's weights pick."""
    routing = route(x @ params["router"], top_k=top_k, bias=params.get("bias"), implementation="reference", **options)
    hidden = activation(jnp.einsum("td,edf->tef", x, params["gate"])) * jnp.einsum("td,edf->tef", x, params["up"])
    made = jnp.einsum("tef,efd->ted", hidden, params["down"])
    mixing = (jax.nn.one_hot(routing.indices, params["router"].shape[1]) * routing.weights[..., None]).sum(1)
    return (made * mixing[..., None]).sum(1)


def _close(got: Any, wanted: Any) -> None:
    """Float32 products of some 24 numbers, twice or thrice in a row: tens of roundings of the largest."""
    for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, right, atol=5e-6 * float(jnp.abs(right).max()))


def test_rows_are_sorted_by_expert_and_then_by_token() -> None:
    indices = jnp.asarray(np.random.default_rng(0).permuted(np.tile(np.arange(5), (40, 1)), axis=1)[:, :3], jnp.int32)
    x = jnp.arange(40.0)[:, None]
    rows, sizes, permutation = dispatch(x, Routing(jnp.ones((40, 3)), indices), 7)
    experts, tokens = np.repeat(np.arange(5), np.bincount(np.ravel(indices), minlength=5)), np.asarray(rows[:, 0])
    np.testing.assert_array_equal(sizes, np.bincount(np.ravel(indices), minlength=7))
    for expert in range(5):
        chosen = np.flatnonzero((np.asarray(indices) == expert).any(1))
        np.testing.assert_array_equal(tokens[experts == expert], chosen)
    np.testing.assert_array_equal(np.asarray(permutation.slot).ravel()[np.asarray(permutation.source)], np.arange(120))


def test_both_ways_of_sorting_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many groups and choices for one integer are sorted by a stable sort of two arrays; so is a priority."""
    groups = jnp.asarray(np.random.default_rng(1).integers(0, 4, (32, 1)), jnp.int32)  # 3 is past the groups
    packed = by_group(groups, 3)
    assert int(packed.group_sizes.sum()) == int((groups < 3).sum())
    by_weight = by_group(groups, 3, priority=jnp.zeros((32, 1)))
    monkeypatch.setattr(arrange, "PACKED_BELOW", 0)
    for other in (by_weight, by_group(groups, 3)):
        for mine, right in zip(jax.tree.leaves(other), jax.tree.leaves(packed), strict=True):
            np.testing.assert_array_equal(mine, right)


def test_a_gpu_compares_instead_of_searching() -> None:
    """Each round of a search is programs of its own there; what is found is the same."""
    groups = jnp.asarray(np.random.default_rng(0).integers(0, 5, (40, 2)), jnp.int32)
    made, texts = [], []
    for platform in ("cpu", "gpu"):
        with target(platform):
            fn = jax.jit(lambda g: by_group(g, 4))
            made.append(fn(groups))
            texts.append(fn.lower(groups).as_text())
    assert ["stablehlo.while" in text for text in texts] == [True, False]
    jax.tree.map(np.testing.assert_array_equal, *made)


@pytest.mark.quick
def test_combine_undoes_dispatch_and_nothing_scatters_rows() -> None:
    x, logits = _normal(24, 6), _normal(24, 5, seed=1)
    routing = route(logits, top_k=3)

    def back(x: Any, weights: Any) -> Any:
        mixed = routing._replace(weights=weights)
        rows, _, permutation = dispatch(x, mixed, 5)
        return combine(jnp.sin(rows), mixed, permutation)

    def plain(x: Any, weights: Any) -> Any:
        return jnp.sin(x) * weights.sum(-1, keepdims=True)

    _close(jax.jit(back)(x, routing.weights), jax.jit(plain)(x, routing.weights))
    flow = _normal(24, 6, seed=2)
    slopes = [
        jax.jit(jax.grad(lambda x, w, f=f: (f(x, w) * flow).sum(), argnums=(0, 1)))
        for f in (back, plain)
    ]  # fmt: skip
    _close(slopes[0](x, routing.weights), slopes[1](x, routing.weights))
    text = slopes[0].lower(x, routing.weights).as_text()
    scattered = [line for line in text.splitlines() if "scatter" in line and "xf32" in line]
    assert not scattered, "rows move by gathers; only the permutation's integers are scattered"


def test_combine_adds_in_float32() -> None:
    """256 + 1 is 256 in bfloat16; 256 + 1 + 1 + ... is not, in float32."""
    routing = Routing(jnp.ones((1, 5)), jnp.arange(5)[None])
    _, _, permutation = dispatch(jnp.ones((1, 1), "bfloat16"), routing, 5)
    rows = jnp.array([[256.0], [1], [1], [1], [1]], "bfloat16")
    assert float(combine(rows, routing, permutation)[0, 0]) == 260.0


@pytest.mark.parametrize("keep", ["order", "weight"])
def test_buffers_keep_the_first_or_the_heaviest(keep: str) -> None:
    weights, experts = _normal(30, 1) ** 2, jnp.asarray(np.random.default_rng(2).integers(0, 3, (30, 1)), jnp.int32)
    routing = Routing(weights, experts)
    x = jnp.arange(1.0, 31.0)[:, None]
    made = dispatch_to_buffers(x, routing, 4, capacity_factor=0.8, keep=keep)  # 0.8 · 30 / 4 = 6
    assert made.rows.shape == (4, 6, 1)
    kept: set[int] = set()
    for expert in range(4):
        tokens = np.flatnonzero(np.asarray(experts[:, 0]) == expert)
        if keep == "weight":
            tokens = tokens[np.argsort(-np.asarray(weights[tokens, 0]), kind="stable")]
        wanted = np.zeros(6)
        wanted[: min(6, len(tokens))] = tokens[:6] + 1
        np.testing.assert_array_equal(made.rows[expert, :, 0], wanted)
        assert int(made.group_sizes[expert]) == min(6, len(tokens))
        kept |= set(tokens[:6].tolist())
    assert int(made.dropped) == 30 - len(kept) > 0
    back = combine(made.rows, routing, made.permutation)
    mask = np.isin(np.arange(30), list(kept))
    np.testing.assert_allclose(back[:, 0], np.where(mask, x[:, 0] * weights[:, 0], 0), rtol=1e-6)
    # A dropped token has no gradient.
    slope = jax.grad(lambda x: dispatch_to_buffers(x, routing, 4, capacity_factor=0.8, keep=keep).rows.sum())(x)
    np.testing.assert_array_equal(slope[:, 0], mask)


OPTIONS: list[dict[str, Any]] = [{"gate": "sigmoid", "scale": 2.5}, {"normalize": False, "activation": "gelu"}]


@pytest.mark.quick
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_layer_against_every_expert_on_every_token(options: dict[str, Any]) -> None:
    params, x, flow = _params(), _normal(20, WIDTH), _normal(20, WIDTH, seed=1)
    if options.get("gate") == "sigmoid":
        params["bias"] = 0.3 * _normal(EXPERTS, seed=2)
    naive = {k: v for k, v in options.items() if k != "activation"}
    erf = {"activation": lambda x: jax.nn.gelu(x, approximate=False)} if "activation" in options else {}

    def layer(params: Any, x: Any) -> Any:
        y, _ = moe_layer(params, x, top_k=2, **options)
        return (y * flow).sum(), y

    def dense(params: Any, x: Any) -> Any:
        y = _dense(params, x, 2, **erf, **naive)
        return (y * flow).sum(), y

    (got, y), (wanted, right) = (jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True))(params, x) for f in (layer, dense))
    _close(y, right)
    _close(got, wanted)


def _layer(params: Any, x: Any, **options: Any) -> Any:
    return jax.jit(lambda params, x: moe_layer(params, x, **options))(params, x)


def test_metrics_room_for_all_and_room_for_some() -> None:
    params, x = _params(), _normal(4, 6, WIDTH)
    free, metrics = _layer(params, x, top_k=2)
    roomy, also = _layer(params, x, top_k=2, capacity_factor=float(EXPERTS))
    _close(roomy, free)
    assert int(metrics.dropped) == int(also.dropped) == 0
    assert int(metrics.counts.sum()) == 48
    np.testing.assert_array_equal(metrics.counts, also.counts)
    logits = x.reshape(-1, WIDTH) @ params["router"]
    np.testing.assert_allclose(metrics.z_loss, (jax.nn.logsumexp(logits, -1) ** 2).mean(), rtol=1e-5)
    assert 0.9 < float(metrics.load_balancing_loss) < EXPERTS
    results = {keep: _layer(params, x, top_k=2, capacity_factor=0.5, keep=keep) for keep in ("order", "weight")}
    # Both drop what is past an expert's room, half of an even share of 48 choices: three.
    for _, tight in results.values():
        assert int(tight.dropped) == int(jnp.maximum(metrics.counts - 3, 0).sum()) > 0
    assert not np.allclose(results["order"][0], results["weight"][0])


def test_jitter_moves_the_choice() -> None:
    params, x = _params(), _normal(64, WIDTH)
    slight, strong = (_layer(params, x, top_k=1, jitter=jitter, key=jax.random.key(0)) for jitter in (1e-7, 0.9))
    _close(slight[1].z_loss, _layer(params, x, top_k=1)[1].z_loss)
    assert not np.allclose(strong[0], slight[0])


def test_bfloat16_and_vmap() -> None:
    params, x = _params(), _normal(2, 12, WIDTH)
    exact = _layer(params, x, top_k=2)[0]
    half = _layer(params, x.astype("bfloat16"), top_k=2)[0]
    assert half.dtype == jnp.bfloat16
    # The router sees x rounded, as do the experts; choices may differ for a token or two, the rest is a few roundings.
    off = jnp.abs(half.astype("float32") - exact).max(-1) > 0.05 * jnp.abs(exact).max()
    assert int(off.sum()) <= 2
    mapped = jax.jit(jax.vmap(lambda x: moe_layer(params, x, top_k=2)[0]))(x)
    _close(mapped, exact)


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 1.25}, {"capacity_factor": 1.25, "keep": "weight"}])
def test_no_tokens(options: dict[str, Any]) -> None:
    params, x = _params(), jnp.zeros((2, 0, WIDTH))

    def loss(params: Any, x: Any) -> Any:
        y, metrics = moe_layer(params, x, top_k=2, **options)
        return y.sum() + metrics.load_balancing_loss + metrics.z_loss, (y, metrics)

    slopes, (y, metrics) = jax.grad(loss, has_aux=True)(params, x)
    assert y.shape == (2, 0, WIDTH)
    assert [float(x) for x in (metrics.load_balancing_loss, metrics.z_loss, metrics.dropped)] == [0, 0, 0]
    assert metrics.counts.tolist() == [0] * EXPERTS
    assert not any(slope.any() for slope in slopes.values())


def test_parameters_may_be_lists_of_numbers() -> None:
    params, x = _params(), _normal(3, WIDTH)
    lists = {name: np.asarray(given).tolist() for name, given in params.items()}
    np.testing.assert_array_equal(moe_layer(lists, x, top_k=2)[0], moe_layer(params, x, top_k=2)[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": EXPERTS + 1}, "from 1 to the number of experts"),
        ({"top_k": 0}, "from 1 to the number of experts"),
        ({"capacity_factor": 0.0}, "capacity factor is a finite number above 0"),
        ({"capacity_factor": -1.0}, "capacity factor is a finite number above 0"),
        ({"capacity_factor": 1.0, "keep": "best"}, "Unknown rule of what to keep"),
        ({"keep": "weight"}, "keep is for a capacity factor"),
        ({"activation": "swish"}, "Unknown activation of grouped_gated_gemm 'swish'.*'silu'"),
        ({"jitter": 0.1}, "The jitter and its key come together"),
        ({"key": jax.random.key(0)}, "The jitter and its key come together"),
        ({"jitter": 1.5, "key": jax.random.key(0)}, "from 0 to below 1"),
    ],
)
def test_bad_options_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        moe_layer(_params(), _normal(4, WIDTH), **{"top_k": 2, **change})


def test_bad_arrays_are_named() -> None:
    params, x = _params(), _normal(4, WIDTH)

    def fails(words: str, params: Any, x: Any) -> None:
        with pytest.raises(ValueError, match=words):
            moe_layer(params, x, top_k=2)

    fails("no 'down'", {k: v for k, v in params.items() if k != "down"}, x)
    fails("Unknown parameter", params | {"norm": x}, x)
    fails("down is", params | {"down": params["up"]}, x)
    fails("router is", params | {"router": x[0]}, x)
    fails(r"x is a float array \[..., 16\]", params, x[:, :8])
    fails(r"x is a float array", params, x.astype("int32"))
    fails(r"x is a float array \[..., 16\]", params, [1.0, 2.0])
    fails("moe_layer takes arrays", params, "tokens")
    fails("a mapping of router, gate, up, down to arrays. Got a list", list(params.values()), x)
    fails(r"takes arrays. Got params\['up'\] of type str", params | {"up": "weights"}, x)
    fails(r"one number an expert, \(8,\)", params | {"bias": jnp.ones(4)}, x)
    routing = route(_normal(4, 8), top_k=2)
    with pytest.raises(ValueError, match="flatten the leading axes"):
        dispatch(x[None], routing, 8)
    with pytest.raises(ValueError, match="at least one expert"):
        dispatch(x, routing, 0)
    with pytest.raises(ValueError, match="num_experts is a whole number"):
        dispatch(x, routing, "eight")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dispatch takes arrays"):
        dispatch("rows", routing, 8)  # type: ignore[arg-type]
    rows, _, permutation = dispatch(x, routing, 8)
    with pytest.raises(ValueError, match="The permutation is of the dispatch"):
        combine(rows[:3], routing, permutation)
    with pytest.raises(ValueError, match="hidden is 1 or more"):
        init_moe(jax.random.key(0), 4, 0, 2)
    with pytest.raises(ValueError, match=r"width is 1 or more, a whole number\. Got 8\.5"):
        init_moe(jax.random.key(0), 8.5, 4, 2)  # type: ignore[arg-type]
