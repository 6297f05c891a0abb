"""Rotary embeddings against float64, at small positions and at 100,000."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.ops.attention import naive

from capibara.kernels import explain, target
from capibara.kernels.ops.attention import api
from capibara.kernels.ops.attention.chunks import ChunkConfig
from capibara.kernels.ops.attention.rope import Rope, rope_tables, rotate_both
from capibara.kernels.ops.attention.rope import rope as public_rope
from capibara.kernels.ops.attention.rope_scaling import frequencies
from capibara.surface.flash import flash_attention

attention = functools.partial(api.attention, layout="bhtd")
rope = functools.partial(public_rope, layout="bhtd")

SCALINGS: dict[str, Any] = {
    "none": None,
    "linear": {"type": "linear", "factor": 4.0},
    "ntk": {"type": "ntk", "factor": 4.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_length": 2048},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
}


def _exact(x: Any, positions: np.ndarray, style: str, scaling: Any = None, base: float = 10000.0) -> np.ndarray:
    """[B, H, T, D] turned as complex numbers in float64."""
    x = np.asarray(x, np.float64)
    turn, temperature = frequencies(x.shape[-1], base, scaling)
    turned = np.exp(1j * positions[..., None] * turn) * temperature
    turned = turned[:, None] if turned.ndim == 3 else turned
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:] if style == "half" else x[..., ::2] + 1j * x[..., 1::2]
    made = pairs * turned
    if style == "half":
        return np.concatenate([made.real, made.imag], -1)
    return np.stack([made.real, made.imag], -1).reshape(x.shape)


def _x(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("name", SCALINGS)
def test_values(style: str, name: str) -> None:
    x = _x(1, 2, 40, 64)
    got = rope(x, style=style, scaling=SCALINGS[name])
    np.testing.assert_allclose(got, _exact(x, np.arange(40), style, SCALINGS[name]), atol=2e-6)


@pytest.mark.quick
@pytest.mark.parametrize("how", ["traced", "tables"])
def test_position_100000_is_as_exact_as_position_1(how: str) -> None:
    positions = np.array([[0, 1, 255, 256, 65535, 65536, 99_999, 100_000]])
    x = _x(1, 2, 8, 128)
    by_table: dict[str, Any] = {"tables": rope_tables(100_001, 128, base=500_000.0)}
    asked = by_table if how == "tables" else {"base": 500_000.0}
    got = jax.jit(lambda x, p: rope(x, p, **asked))(x, positions)
    np.testing.assert_allclose(got, _exact(x, positions, "half", base=500_000.0), atol=3e-6)
    # In bfloat16 the one error is the rounding of the result.
    small = x.astype(jnp.bfloat16)
    exact = _exact(small, positions, "half", base=500_000.0)
    error = np.abs(np.asarray(rope(small, positions, **asked), np.float64) - exact)
    assert (error <= 2.0**-8 * np.abs(exact) + 1e-5).all()


def test_layouts_positions_and_batches_agree() -> None:
    x = _x(2, 3, 5, 8)
    positions = np.array([[0, 1, 2, 0, 1], [7, 8, 9, 10, 11]])
    got = rope(x, positions)
    np.testing.assert_allclose(got, _exact(x, positions, "half"), atol=2e-6)
    other = rope(x.swapaxes(1, 2), positions, layout="bthd")
    np.testing.assert_allclose(other.swapaxes(1, 2), got, atol=1e-6)
    np.testing.assert_allclose(rope(x, np.arange(5)), rope(x), atol=1e-6)


def test_scores_depend_on_distance_alone() -> None:
    q, k = _x(1, 1, 1, 32), _x(1, 1, 1, 32) + 1
    dots = [float((rope(q, [100 + s]) * rope(k, [90 + s])).sum()) for s in (0, 1000, 50_000)]
    np.testing.assert_allclose(dots, dots[0], rtol=1e-5)


def test_the_gradient_turns_back() -> None:
    x, flow = _x(1, 1, 6, 8), _x(1, 1, 6, 8) + 1
    (got,) = jax.vjp(lambda x: rope(x, style="interleaved"), x)[1](flow)
    np.testing.assert_allclose(got, _exact(flow, -np.arange(6), "interleaved"), atol=2e-6)


@pytest.mark.quick
@pytest.mark.parametrize("rotary_dim", [8, 6])
def test_halves_on_a_gpu(rotary_dim: int) -> None:
    """There the two halves are joined, in the gradient as well, which XLA's GPU compiler makes one pass of."""
    x, flow = _x(2, 3, 6, 8).astype("bfloat16"), (_x(2, 3, 6, 8) + 1).astype("bfloat16")

    def both(x: jax.Array, flow: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x: rope(x, rotary_dim=rotary_dim), x)
        return y, pull(flow)[0]

    wanted = both(x, flow)
    with target("gpu", "NVIDIA H200"):
        got = both(x, flow)
        program = str(jax.make_jaxpr(both)(x, flow))
        _, pull = jax.vjp(jax.jit(lambda x: rope(x, rotary_dim=rotary_dim)), x)
    for ours, other in zip(got, wanted, strict=True):
        # The same products and sums, which a compiler may round together: one unit of bfloat16 at the most.
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(other, np.float32), rtol=2.0**-7, atol=1e-6)
    assert program.count("concatenate[") == 2
    assert " pad[" not in program
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull))
    assert kept <= sum(table.nbytes for table in rope_tables(6, rotary_dim)), "the angles, as large as they are"


def test_scaling_leaves_fast_pairs_and_slows_slow_ones() -> None:
    plain, _ = frequencies(128)
    for name in ("ntk", "yarn", "llama3"):
        scaled, temperature = frequencies(128, scaling=SCALINGS[name])
        factor = SCALINGS[name]["factor"]
        np.testing.assert_allclose(scaled[0], plain[0])
        np.testing.assert_allclose(scaled[-1], plain[-1] / factor)
        assert (np.diff(scaled) < 0).all()
        assert temperature == pytest.approx(0.1 * math.log(4.0) + 1 if name == "yarn" else 1.0)


def test_tables_are_made_once() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    assert rope_tables(64, 32, scaling=scaling) is rope_tables(64, 32, scaling=dict(scaling))
    assert rope_tables(64, 32).cos.dtype == np.float32


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: rope(x, style="quarter"), "interleaved"),
        (lambda x: rope(x, layout="tbhd"), "bthd"),
        (lambda x: rope(x[0]), "four axes"),
        (lambda x: rope(x, np.arange(4)), "positions"),
        (lambda x: rope(x[..., :7]), "even"),
        (lambda x: rope(x, tables=rope_tables(4, 8)), "tables"),
        (lambda x: rope(x, scaling={"type": "cubic"}), "linear"),
        (lambda x: rope(x, scaling={"type": "yarn", "factor": 2.0}), "original_length"),
        (lambda x: rope(x, scaling={"type": "linear", "factor": 2.0, "beta": 1}), "beta"),
        (lambda x: rope(x, scaling={"type": "linear", "factor": 0.5}), "1 or more"),
        (lambda x: rope_tables(0, 8), "1 position"),
        (lambda x: rope(x, base=1.0), "base"),
    ],
)
def test_bad_input(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(_x(1, 2, 5, 8))


def test_part_of_a_head() -> None:
    x = _x(1, 2, 5, 12)
    for style in ("half", "interleaved"):
        got = rope(x, style=style, rotary_dim=8)
        np.testing.assert_allclose(got[..., :8], _exact(x[..., :8], np.arange(5), style), atol=2e-6)
        np.testing.assert_array_equal(got[..., 8:], x[..., 8:])


def test_positions_either_side_of_zero() -> None:
    x = _x(1, 1, 4, 8)
    positions = np.array([-70_000, -1, 0, 300])
    np.testing.assert_allclose(rope(x, positions), _exact(x, positions, "half"), atol=3e-6)


def test_a_position_that_has_no_angle() -> None:
    x, tables = _x(1, 1, 2, 8), rope_tables(4, 8)
    with pytest.raises(ValueError, match=r"positions 0 to 3.*from 0 to 4.*rope_tables\(5"):
        rope(x, np.array([0, 4]), tables=tables)
    with pytest.raises(ValueError, match="16777216"):
        rope(x, np.array([0, 1 << 24]))
    # On a device the values are not known, so the result shows it.
    for positions in ([0, 4], [0, -1]):
        made = rope(x, jnp.array(positions), tables=tables)
        assert np.isfinite(made[:, :, 0]).all()
        assert np.isnan(made[:, :, 1]).all()
    assert np.isnan(rope(x, jnp.array([0, 1 << 24]))[:, :, 1]).all()


def _attended(
    q: Any, k: Any, v: Any, q_positions: Any, k_positions: Any, rotary: int, style: str, base: float, **seen: Any
) -> tuple[Any, Any]:
    """Attention on turned queries and keys in float64: its output, and a function from cotangent to gradients."""

    def turned(x: Any, positions: Any) -> np.ndarray:
        x = np.asarray(x, np.float64)
        part = _exact(x[..., :rotary], np.asarray(positions), style, base=base)
        return np.concatenate([part, x[..., rotary:]], -1)

    q_turned, k_turned = turned(q, q_positions), turned(k, k_positions)
    ok = naive.visible((*q.shape[:3], k.shape[2]), **seen)

    def gradients(flow: Any) -> tuple[np.ndarray, ...]:
        made = naive.attention(q_turned, k_turned, v, ok, d_out=flow)
        # The gradient of a rotation is the rotation back.
        return turned(made["dq"], -np.asarray(q_positions)), turned(made["dk"], -np.asarray(k_positions)), made["dv"]

    return naive.attention(q_turned, k_turned, v, ok)["out"], gradients


def _packed() -> np.ndarray:
    return np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]])


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    # A chunk of queries at the end of a longer context: rotation and causality agree on where it is.
    "offset": {"t": 3, "s": 9, "causal": True, "query_offset": 6},
    "before zero": {"query_offset": -2},
    "interleaved": {"style": "interleaved", "causal": True},
    "part of a head": {"rotary_dim": 4},
    "scaled base": {"base": 500.0},
    "segments": {"segment_ids": _packed()},
    "segments that start over": {
        "segment_ids": _packed(),
        "query_positions": np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]]),
        "key_positions": np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]]),
    },
    "positions that are given": {"query_positions": [40, 3, 3, 0, 1, 2, 9], "key_positions": jnp.arange(7) * 2},
}


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize(
    ("name", "layout"), [*((name, "bhtd") for name in FORMS), ("offset", "bthd"), ("segments that start over", "bthd")]
)
def test_attention_turns_queries_and_keys(name: str, layout: str) -> None:
    form = {"t": 7, "s": 7, "style": "half", "rotary_dim": None, "base": 10000.0, **FORMS[name]}
    t, s = form["t"], form["s"]
    q, k, v, flow = _x(2, 4, t, 8), _x(2, 2, s, 8) + 1, _x(2, 2, s, 8) * 2, _x(2, 4, t, 8) - 1
    given = {n: form.get(n) for n in ("style", "rotary_dim", "base", "query_positions", "key_positions")}
    seen = {n: form[n] for n in ("causal", "query_offset", "segment_ids") if n in form}

    def fn(q: Any, k: Any, v: Any) -> Any:
        swap = (lambda x: x.swapaxes(1, 2)) if layout == "bthd" else (lambda x: x)
        return swap(attention(swap(q), swap(k), swap(v), layout=layout, rope=Rope(**given), **seen))

    offset, ids = form.get("query_offset", 0), form.get("segment_ids")
    q_positions = offset + np.arange(t) if form.get("query_positions") is None else form["query_positions"]
    k_positions = np.arange(s) if form.get("key_positions") is None else form["key_positions"]
    wanted, gradients = _attended(
        q, k, v, q_positions, k_positions, form["rotary_dim"] or 8, form["style"], form["base"],
        causal=form.get("causal", False), q_offset=offset, q_segments=ids, kv_segments=ids,
    )  # fmt: skip
    made, pull = jax.vjp(jax.jit(fn), q, k, v)
    # Scores are a dozen at the most, from sums of 8 products: some 50 roundings of 6e-8 in an exponent, on values of 6.
    np.testing.assert_allclose(made, wanted, atol=3e-5)
    for got, exact in zip(pull(flow), gradients(np.asarray(flow)), strict=True):
        np.testing.assert_allclose(got, exact, atol=3e-5 * max(1.0, np.abs(exact).max()))


@pytest.mark.quick
@pytest.mark.parametrize("tables", [False, True])
def test_attention_at_position_100000(tables: bool) -> None:
    q, k, v = _x(1, 2, 4, 64), _x(1, 1, 6, 64) + 0.5, _x(1, 1, 6, 64)
    keys = 100_000 + np.arange(6)
    given: dict[str, Any] = {"tables": rope_tables(100_006, 64)} if tables else {}

    def made(dtype: Any) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        small = [x.astype(dtype) for x in (q, k, v)]
        got = attention(*small, causal=True, query_offset=100_000, rope=Rope(key_positions=keys, **given))
        exact, _ = _attended(
            *small, 100_000 + np.arange(4), keys, 64, "half", 10000.0, causal=True, q_offset=100_000
        )  # fmt: skip
        return np.asarray(got, np.float64), exact, [np.asarray(x, np.float64) for x in small]

    # An angle made in float32 would be off by 100,000 · 2^-24 = 0.006 here, and scores of about 10 by 0.06.
    got, exact, _ = made(jnp.float32)
    np.testing.assert_allclose(got, exact, atol=2e-5)
    # In bfloat16 a turned number is rounded by 2^-8 of itself at most, so a score by 2 · 2^-8 · |q| · |k| / 8. That
    # moves a mean of values by twice as much times the largest; probabilities and result are rounded once more.
    got, exact, (q_used, k_used, v_used) = made(jnp.bfloat16)
    longest = np.linalg.norm(q_used, axis=-1).max() * np.linalg.norm(k_used, axis=-1).max() / 8
    assert np.abs(got - exact).max() <= 2.0**-8 * (2 * 2 * longest + 2) * np.abs(v_used).max()


def test_what_the_backward_pass_keeps() -> None:
    q, k, v = _x(1, 4, 64, 16), _x(1, 2, 64, 16), _x(1, 2, 64, 16)

    def kept(rope: Rope | None) -> int:
        _, pull = jax.vjp(jax.jit(lambda q, k, v: attention(q, k, v, rope=rope)), q, k, v)
        return sum(x.nbytes for x in jax.tree.leaves(pull))

    angles = sum(table.nbytes for table in rope_tables(64, 16)) + 8  # and the two signs of a pair
    assert kept(Rope()) - kept(None) <= 2 * angles, "the angles of queries and keys, and no second copy of either"


@pytest.mark.quick
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_the_rotation_is_fused_with_what_came_before(style: str) -> None:
    shape = jax.ShapeDtypeStruct((1, 4, 256, 64), jnp.bfloat16)

    @jax.jit
    def fn(q: Any, k: Any) -> Any:
        return rotate_both(jnp.tanh(q), k * 2, Rope(style=style), "bhtd", 0)

    compiled = fn.lower(shape, shape).compile()
    entry = compiled.as_text().split("ENTRY")[1]
    assert entry.count(" fusion(") == 2, "one pass over the queries and one over the keys"
    assert compiled.memory_analysis().temp_size_in_bytes == 0, "nothing is stored but the turned copies"


def test_rope_is_a_tree() -> None:
    q = _x(2, 2, 5, 8)
    scaling = {"type": "linear", "factor": 2.0}
    wanted = attention(q, q, q, rope=Rope(scaling=scaling))
    jitted = jax.jit(lambda q, rope: attention(q, q, q, rope=rope))
    for given in (
        Rope(scaling=scaling),
        Rope(tables=rope_tables(5, 8, scaling=scaling)),
        Rope(scaling=scaling, query_positions=list(range(5)), key_positions=jnp.arange(5)),
    ):
        np.testing.assert_allclose(jitted(q, given), wanted, atol=1e-5)
    assert jitted._cache_size() == 3

    def loss(q: Any, given: Rope) -> Any:
        return flash_attention(q, q, q, precision="float32", rope=given).sum()

    moved = Rope(query_positions=jnp.arange(5) + 3)
    np.testing.assert_allclose(
        jax.grad(loss)(q, moved), jax.grad(lambda q: attention(q, q, q, rope=moved).sum())(q), atol=1e-5
    )
    alone = jax.vmap(lambda q, p: attention(q[None], q[None], q[None], rope=Rope(query_positions=p))[0])
    positions = np.array([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])
    together = attention(q, q, q, rope=Rope(query_positions=positions))
    np.testing.assert_allclose(alone(q, jnp.asarray(positions)), together, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: attention(x, x, x, rope=rope_tables(5, 8)), "is a Rope.*RopeTables.*tables="),
        (lambda x: attention(x, x, x, rope=Rope(tables=rope_tables(4, 8))), r"0 to 4.*0 to 3.*rope_tables\(5, 8\)"),
        (
            lambda x: attention(x, x, x, query_offset=3, rope=Rope(tables=rope_tables(7, 8))),
            r"3 to 7.*rope_tables\(8, 8\)",
        ),
        (lambda x: attention(x, x, x, query_offset=-1, rope=Rope(tables=rope_tables(9, 8))), "-1 to 3.*positions"),
        (
            lambda x: attention(x, x, x, rope=Rope(tables=rope_tables(5, 8), key_positions=np.arange(1, 6))),
            "key_positions from 1 to 5",
        ),
        (lambda x: attention(x, x, x, rope=Rope(query_positions=np.arange(4))), r"\[5\] or \[1, 5\]"),
        (lambda x: attention(x, x, x, rope=Rope(query_positions=np.arange(5.0))), "integers.*f64|integers.*f32"),
        (lambda x: attention(x[..., :7], x[..., :7], x[..., :7], rope=Rope()), "even.*Got 7.*rotary_dim"),
        (
            lambda x: attention(x[..., :7], x[..., :7], x[..., :7], rope=Rope(tables=rope_tables(5, 6))),
            "even.*Got 7.*rotary_dim",
        ),
        (lambda x: attention(x, x, x, rope=Rope(rotary_dim=10)), "at most head_dim.*10 of 8"),
        (lambda x: attention(x, x, x, rope=Rope(tables=rope_tables(5, 6))), r"\[5 or more, 4\].*f32\[5,3\]"),
        (
            lambda x: attention(x, x, x, rope=Rope(tables=jax.tree.map(jnp.bfloat16, rope_tables(5, 8)))),
            "float32.*bf16",
        ),
        (lambda x: Rope(style="quarter"), "interleaved"),
        (lambda x: Rope(scaling={"type": "linear"}), "factor"),
        (lambda x: Rope(base=5.0, tables=rope_tables(5, 8)), "tables with base=5.0"),
    ],
)
def test_bad_rope_in_attention(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(_x(1, 2, 5, 8))


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("transform", ["grad", "jit of grad", "vmap of grad"])
def test_a_config_reaches_the_forward_pass_of_a_gradient(transform: str, named: bool) -> None:
    x, config = _x(1, 2, 16, 8), ChunkConfig(4, 8)
    asked: dict[str, Any] = {"implementation": "xla"} if named else {}
    step = jax.grad(lambda x: attention(x, x, x, causal=True, rope=Rope(), config=config, **asked).sum())
    if transform == "jit of grad":
        step = jax.jit(step)
    elif transform == "vmap of grad":
        step, x = jax.vmap(step), x[None]
    found = explain(step, x).selections
    forward = [s for s in found if s.call.op.name == "attention"]
    assert {s.config for s in forward} == {config}
    assert any("config" in s.why for s in forward), "the pass that keeps the log-sum-exp is one of them"
    backward = [s for s in found if s.call.op.name == "attention_grad"]
    assert backward
    assert config not in {s.config for s in backward}, "the backward pass chooses for itself"
