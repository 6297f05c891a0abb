"""attention against float64 numpy: every feature alone and with the others, and what must never leak."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.ops.attention import naive

from capibara.kernels import explain, interpret, target
from capibara.kernels.core.spec import Case
from capibara.kernels.lab.check import check
from capibara.kernels.ops.attention import api
from capibara.kernels.ops.attention.api import ATTENTION
from capibara.kernels.ops.attention.chunks import ChunkConfig
from capibara.kernels.pallas import prng

attention = functools.partial(api.attention, layout="bhtd")

FORMS = ("reference", "xla")


def _seeded(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _close(got: Any, wanted: Any, what: str, tolerance: float = 2e-5) -> None:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted)
    same = (got == wanted) | np.isclose(got, wanted, rtol=0, atol=tolerance * max(1.0, _largest(wanted)))
    assert same.all(), f"{what}: {np.abs(got - wanted)[~same].max()}"


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _dropped(seed: Any, b: int, h: int, t: int, s: int, rate: float) -> np.ndarray:
    rows = np.arange(b * h * t, dtype=np.uint32).reshape(b, h, t, 1)
    return np.asarray(prng.keep_mask(seed, rows, np.arange(s, dtype=np.uint32), rate))


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    """Any combination of features on a tiny shape."""
    b, kv, groups = draw(st.sampled_from([(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1)]))
    t, s = draw(st.sampled_from([(1, 1), (1, 9), (7, 7), (13, 5), (6, 17)]))
    h = kv * groups
    one_of = lambda n: draw(st.sampled_from([1, n]))  # noqa: E731
    call: dict[str, Any] = {"b": b, "h": h, "kv": kv, "t": t, "s": s}
    call["causal"] = draw(st.booleans())
    call["q_offset"] = draw(st.sampled_from([0, 0, s - t, -3]))
    call["window"] = draw(st.sampled_from([None, None, (2, 0), (1, 3), (None, 1), (4, None)]))
    call["bias"] = (one_of(b), one_of(h), one_of(t), s) if draw(st.booleans()) else None
    call["mask"] = (one_of(b), one_of(h), one_of(t), s) if draw(st.booleans()) else None
    call["segments"] = draw(st.booleans())
    call["blocks"] = (one_of(b), one_of(h)) if draw(st.booleans()) else None
    call["softcap"] = draw(st.sampled_from([None, 1.0]))
    call["scale"] = draw(st.sampled_from([None, 0.7]))
    call["dropout_rate"] = draw(st.sampled_from([0.0, 0.0, 0.4]))
    call["seed"] = draw(st.integers(0, 1000))
    return call


def _check(call: dict[str, Any], form: str, config: Any) -> None:
    b, h, kv, t, s = (call[name] for name in ("b", "h", "kv", "t", "s"))
    depth = 4
    rng = np.random.default_rng(call["seed"])
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    q, k, v = draw(b, h, t, depth), draw(b, kv, s, depth), draw(b, kv, s, depth)
    bias = None if call["bias"] is None else draw(*call["bias"])
    mask = None if call["mask"] is None else rng.random(call["mask"]) < 0.7
    q_segments = rng.integers(0, 2, (b, t)).astype(np.int32) if call["segments"] else None
    kv_segments = rng.integers(0, 2, (b, s)).astype(np.int32) if call["segments"] else None
    size, block_mask = None, None
    if call["blocks"] is not None:
        size = (3, 4)
        block_mask = rng.random((*call["blocks"], -(-t // 3), -(-s // 4))) < 0.6
    rate = call["dropout_rate"]
    seed = rng.integers(0, 2**32, 2).astype(np.uint32) if rate else None
    ok = naive.visible(
        (b, h, t, s), causal=call["causal"], q_offset=call["q_offset"], window=call["window"], mask=mask,
        q_segments=q_segments, kv_segments=kv_segments, block_mask=block_mask, block_size=size,
    )  # fmt: skip
    d_out, d_lse = draw(b, h, t, depth), draw(b, h, t)
    keep = _dropped(seed, b, h, t, s, rate) if rate else None
    wanted = naive.attention(
        q, k, v, ok, bias=bias, scale=call["scale"], softcap=call["softcap"], keep=keep, rate=rate,
        d_out=d_out, d_lse=d_lse,
    )  # fmt: skip
    # Keys that no query sees, and queries that see no key, hold NaN: it must reach nothing.
    seen = ok.any(2).reshape(b, kv, h // kv, s).any(2)
    k, v = (np.where(seen[..., None], x, np.nan) for x in (k, v))
    q = np.where(ok.any(3)[..., None], q, np.nan)

    params = {n: call[n] for n in ("causal", "q_offset", "window", "scale", "softcap", "dropout_rate")}

    @jax.jit
    def both(q: Any, k: Any, v: Any, bias: Any) -> Any:
        def forward(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return ATTENTION(
                q, k, v, bias, mask, q_segments, kv_segments, block_mask, seed,
                implementation=form, config=config, block_size=size, return_lse=True, **params,
            )  # fmt: skip

        made, pull = jax.vjp(forward, q, k, v, bias)
        return made, pull((jnp.asarray(d_out), jnp.asarray(d_lse)))

    (out, lse), (dq, dk, dv, dbias) = both(q, k, v, bias)
    _close(out, wanted["out"], "out")
    _close(lse, wanted["lse"], "lse")
    for name, got in (("dq", dq), ("dk", dk), ("dv", dv)):
        _close(got, wanted[name], name)
    if bias is not None:
        full = wanted["dbias"]
        shared = tuple(a for a in range(3) if bias.shape[a] == 1 and full.shape[a] != 1)
        _close(dbias, full.sum(shared, keepdims=True), "dbias")


@given(calls())
@settings(max_examples=5, deadline=None, derandomize=True)
def test_any_combination_in_chunks(call: dict[str, Any]) -> None:
    """Chunks of 4 queries and 5 keys: several of each, none dividing the lengths, unaligned with the blocks."""
    _check(call, "xla", ChunkConfig(4, 5))


EVERYTHING = {
    "b": 2, "h": 4, "kv": 2, "t": 13, "s": 11, "causal": True, "q_offset": -2, "window": (6, 0), "bias": (1, 4, 13, 11),
    "mask": (2, 1, 1, 11), "segments": True, "blocks": (1, 4), "softcap": 2.0, "scale": 0.7, "dropout_rate": 0.3,
    "seed": 5,
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_everything_at_once(form: str) -> None:
    _check(EVERYTHING, form, ChunkConfig(4, 5) if form == "xla" else None)


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient(form: str) -> None:
    q, k, v = _seeded(0, 1, 2, 6, 4), _seeded(1, 1, 2, 5, 4), _seeded(2, 1, 2, 5, 4)
    mask = np.ones((1, 1, 6, 5), bool)
    mask[..., 2, :] = False

    def loss(q: Any, k: Any, v: Any) -> Any:
        out, lse = attention(q, k, v, mask=mask, return_lse=True, implementation=form)
        return (out**2).sum() + jnp.where(jnp.isneginf(lse), 0, lse).sum(), (out, lse)

    gradients, (out, lse) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    assert not np.asarray(out)[:, :, 2].any()
    assert np.isneginf(np.asarray(lse)[:, :, 2]).all()
    assert not np.asarray(gradients[0])[:, :, 2].any()
    assert all(np.isfinite(np.asarray(g)).all() for g in gradients)


@pytest.mark.parametrize("form", FORMS)
def test_a_bias_of_minus_infinity_is_a_mask(form: str) -> None:
    q, k, v = (_seeded(i, 1, 1, 5, 4) for i in range(3))
    mask = np.tri(5, dtype=bool)[None, None] & (np.arange(5)[:, None] != 3)
    run = functools.partial(attention, implementation=form)
    by_bias = jax.grad(lambda q, k, v, b: run(q, k, v, bias=b).sum(), (0, 1, 2, 3))
    got = by_bias(q, k, v, jnp.where(mask, 0.0, -jnp.inf))
    wanted = jax.grad(lambda q, k, v: run(q, k, v, mask=mask).sum(), (0, 1, 2))(q, k, v)
    for x, y in zip(got, wanted, strict=False):
        np.testing.assert_allclose(x, y, atol=1e-6)
    assert np.isfinite(np.asarray(got[3])).all()


@pytest.mark.quick
@pytest.mark.parametrize("empty", ["queries", "keys", "batch"])
def test_nothing_to_attend_to(empty: str) -> None:
    b, t, s = int(empty != "batch"), 3 * (empty != "queries"), 4 * (empty != "keys")
    q, k = jnp.ones((b, 2, t, 8)), jnp.ones((b, 2, s, 8))
    out, lse = attention(q, k, k, return_lse=True)
    assert out.shape == (b, 2, t, 8)
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()
    assert jax.grad(lambda k: attention(q, k, k).sum())(k).shape == k.shape


def test_the_second_derivative() -> None:
    q, k, v = (_seeded(i, 1, 2, 4, 4) for i in range(3))

    def twice(form: str) -> Any:
        def slope(q: Any) -> Any:
            return (jax.grad(lambda x: (attention(x, k, v, causal=True, implementation=form) ** 2).sum())(q) ** 2).sum()

        return jax.jit(jax.grad(slope))(q)

    np.testing.assert_allclose(twice("xla"), twice("reference"), rtol=1e-4, atol=1e-5)


def test_dropout_is_the_same_whatever_the_chunks() -> None:
    q, k, v = (_seeded(i, 2, 2, 10, 4) for i in range(3))
    seed = np.array([3, 4], np.uint32)
    made = [
        ATTENTION(q, k, v, *(None,) * 5, seed, dropout_rate=0.5, implementation="xla", config=config)
        for config in (ChunkConfig(3, 4), ChunkConfig(10, 10))
    ]
    np.testing.assert_allclose(*made, atol=1e-6)
    by_key = [attention(q, k, v, dropout_rate=0.5, dropout_key=jax.random.key(n)) for n in (0, 0, 1)]
    np.testing.assert_array_equal(by_key[0], by_key[1])
    assert not np.allclose(by_key[0], by_key[2])


def test_dropout_under_vmap_is_each_element_alone() -> None:
    q, k, v = (_seeded(i, 3, 1, 2, 6, 4) for i in range(3))
    keys = jax.random.split(jax.random.key(0), 3)
    run = functools.partial(attention, dropout_rate=0.5)
    got = jax.vmap(lambda q, k, v, r: run(q, k, v, dropout_key=r))(q, k, v, keys)
    for element in range(3):
        alone = run(q[element], k[element], v[element], dropout_key=keys[element])
        np.testing.assert_allclose(got[element], alone, atol=1e-6)


@pytest.mark.quick
def test_layouts_agree() -> None:
    q, k, v = _seeded(0, 2, 4, 7, 8), _seeded(1, 2, 2, 9, 8), _seeded(2, 2, 2, 9, 8)
    out, lse = attention(q, k, v, causal=True, query_offset=2, return_lse=True)
    turned = (x.swapaxes(1, 2) for x in (q, k, v))
    other, other_lse = attention(*turned, layout="bthd", causal=True, query_offset=2, return_lse=True)
    np.testing.assert_allclose(other, out.swapaxes(1, 2), atol=1e-6)
    np.testing.assert_allclose(other_lse, lse, atol=1e-6)


def test_window_as_a_number_counts_the_querys_own_key() -> None:
    q, k, v = (_seeded(i, 1, 1, 9, 4) for i in range(3))
    by_number = attention(q, k, v, causal=True, window=3)
    i, j = np.arange(9)[:, None], np.arange(9)[None, :]
    np.testing.assert_allclose(by_number, attention(q, k, v, mask=(j <= i) & (j > i - 3)), atol=1e-6)
    np.testing.assert_allclose(by_number, attention(q, k, v, causal=True, window=(2, None)), atol=1e-6)


def test_bfloat16_and_float64_keep_their_types() -> None:
    q = jnp.asarray(_seeded(0, 1, 2, 6, 8), jnp.bfloat16)
    out, lse = attention(q, q, q, causal=True, return_lse=True)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    with jax.enable_x64(True):
        wide = jnp.asarray(_seeded(0, 1, 2, 6, 8), jnp.float64)
        exact = attention(wide, wide, wide, causal=True)
        ok = naive.visible((1, 2, 6, 6), causal=True)
        assert exact.dtype == jnp.float64
        np.testing.assert_allclose(exact, naive.attention(wide, wide, wide, ok)["out"], atol=1e-14)


@pytest.mark.quick
def test_memory_is_linear_at_8k_forward_and_backward() -> None:
    """The compiler's count of temporaries at 8,192 keys: under a tenth of the naive form's."""
    shape = jax.ShapeDtypeStruct((1, 2, 8192, 32), jnp.float32)

    def both(form: str) -> Any:
        def run(q: Any, k: Any, v: Any) -> Any:
            out, pull = jax.vjp(lambda *x: attention(*x, causal=True, implementation=form), q, k, v)
            return out, pull(out)

        return run

    for make in (lambda form: functools.partial(attention, causal=True, implementation=form), both):
        used = {}
        for form in FORMS:
            compiled = jax.jit(make(form)).lower(shape, shape, shape).compile()
            used[form] = compiled.memory_analysis().temp_size_in_bytes
        assert used["xla"] < used["reference"] / 10, used


@pytest.mark.parametrize("case", [c for c in ATTENTION.cases if not c.tags & {"test", "bench"}], ids=lambda c: c.name)
def test_the_cases_that_the_shared_suite_only_lowers(case: Case) -> None:
    result = check(ATTENTION, case.arrays(), case.params, "xla")
    assert result.ok, result.why


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_nan_that_a_query_sees_is_not_hidden(implementation: str) -> None:
    q, k, v = (jnp.ones((1, 1, 6, 32)) for _ in range(3))
    out, lse = attention(q, k.at[0, 0, 3].set(jnp.nan), v, causal=True, return_lse=True, implementation=implementation)
    assert np.isfinite(out[0, 0, :3]).all()
    assert np.isnan(out[0, 0, 3:]).all()
    assert np.isnan(lse[0, 0, 3:]).all()


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas_tpu"])
def test_nan_in_padding_reaches_no_gradient(implementation: str) -> None:
    """Queries that see nothing and keys that nobody sees, all of them NaN: padding may hold anything."""
    ids = jnp.where(jnp.arange(40) < 30, 0, -1)[None]
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 2, 40, 32)).at[:, :, 30:].set(jnp.nan) for i in range(3))

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = attention(q, k, v, segment_ids=ids, key_segment_ids=ids - (ids < 0), implementation=implementation)
        return (out[:, :, :30] ** 2).sum()

    with interpret("hlo"):
        grads = jax.grad(loss, (0, 1, 2))(q, k, v)
    for grad in grads:
        assert np.isfinite(grad[:, :, :30]).all()
        assert (grad[:, :, 30:] == 0).all()


@pytest.mark.parametrize("asked", [False, True])
def test_cudnn_is_asked_for_the_log_sum_exp_where_it_is_wanted(asked: bool) -> None:
    q = jax.ShapeDtypeStruct((1, 2, 256, 64), "bfloat16")

    def attended(q: Any) -> Any:
        return attention(q, q, q, causal=True, return_lse=asked, implementation="cudnn")

    with target("gpu", "NVIDIA H200"):
        text = str(jax.make_jaxpr(attended)(q))
        made = jax.tree.leaves(jax.eval_shape(attended, q))
    assert f"is_training={asked}" in text
    assert [x.shape for x in made] == [q.shape, *([q.shape[:-1]] if asked else [])]


@pytest.mark.parametrize(
    ("shape", "keys", "chip", "refused"),
    [
        ((1, 1, 1, 32), 1, "NVIDIA H200", "one query over one key"),
        ((1, 1, 1, 32), 2, "NVIDIA H200", None),
        ((1, 1, 2, 32), 1, "NVIDIA H200", None),
        ((1, 1, 64, 256), 64, "NVIDIA H200", None),
        ((1, 1, 64, 256), 64, "NVIDIA B200", "head_dim up to 128"),
    ],
)
def test_what_cudnn_has_no_backward_pass_of(shape: tuple[int, ...], keys: int, chip: str, refused: str | None) -> None:
    """It says so before it runs, and another takes the backward pass of its own forward."""
    q, k = (jax.ShapeDtypeStruct((*shape[:2], length, shape[3]), "bfloat16") for length in (shape[2], keys))

    def slope(q: Any, k: Any, v: Any) -> Any:
        total = lambda q: ATTENTION(q, k, v, implementation="cudnn").astype("float32").sum()  # noqa: E731
        return jax.grad(total)(q)

    with target("gpu", chip):
        *forward, backward = explain(slope, q, k, k).selections
    assert {one.implementation for one in forward} == {"cudnn"}
    assert (backward.implementation == "cudnn") == (refused is None)
    (verdict,) = (one for one in backward.verdicts if one.implementation == "cudnn")
    assert refused is None or refused in verdict.reason
