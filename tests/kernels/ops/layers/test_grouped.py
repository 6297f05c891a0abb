"""grouped_gemm and grouped_gated_gemm: what the documents promise, beyond what every op must pass."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import explain, grouped_gated_gemm, grouped_gemm, interpret, target
from capibara.kernels.lab.check import check, check_output, expected
from capibara.kernels.ops.layers import GROUPED_GATED_GEMM, GROUPED_GEMM, GROUPED_GEMM_WEIGHTS
from capibara.kernels.ops.layers.grouped import rules
from capibara.kernels.ops.layers.grouped import tiles as tiles_module
from capibara.kernels.ops.layers.grouped.cases import LOWERED
from capibara.kernels.ops.layers.grouped.tiles import aligned_tiles, row_tiles, tile_limit, with_rest
from capibara.kernels.ops.layers.grouped.tpu.forward import GroupedTile
from capibara.kernels.ops.layers.grouped.xla import LoopConfig

OPS = (GROUPED_GEMM, GROUPED_GEMM_WEIGHTS, GROUPED_GATED_GEMM)
# Every form of every implementation that runs here: (name, config).
FORMS = [
    pytest.param(("xla", LoopConfig(4)), id="loop"),
    pytest.param(("xla", LoopConfig(None)), id="ragged_dot"),
    pytest.param(("pallas_tpu", GroupedTile(16, 128, 128)), id="pallas_tpu"),
    pytest.param(("reference", None), id="reference"),
]
SIZES = ([5, 0, 9, 2], [0, 0, 16, 0], [0, 7, 0, 0], [1, 1, 1, 13], [0, 0, 0, 0])


def _normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def _ranges(sizes: Any) -> list[tuple[int, int]]:
    ends = np.cumsum(sizes)
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _naive(lhs: Any, rhs: Any, sizes: Any) -> np.ndarray:
    """Group by group in float64."""
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for weight, (start, end) in zip(np.asarray(rhs, np.float64), _ranges(sizes), strict=True):
        out[start:end] = np.asarray(lhs[start:end], np.float64) @ weight
    return out


def _naive_weights(lhs: Any, d_out: Any, sizes: Any) -> np.ndarray:
    left, right = np.asarray(lhs, np.float64), np.asarray(d_out, np.float64)
    return np.stack([left[start:end].T @ right[start:end] for start, end in _ranges(sizes)])


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_against_numpy(form: Any) -> None:
    """Products and both gradients, with rows that no group has where the sizes leave some."""
    name, config = form
    lhs, rhs, flow = _normal(16, 12), _normal(4, 12, 20, seed=1), _normal(16, 20, seed=2)
    chosen = {"padded_rows": True, "implementation": name, "config": config}

    @jax.jit
    def all_of_it(sizes: Any) -> Any:
        out, pull = jax.vjp(lambda lhs, rhs: grouped_gemm(lhs, rhs, sizes, **chosen), lhs, rhs)
        return out, grouped_gemm(lhs, rhs.mT, sizes, transpose_rhs=True, **chosen), *pull(flow)

    for sizes in SIZES:
        with interpret("hlo"):
            got = all_of_it(jnp.array(sizes))
        product = _naive(lhs, rhs, sizes)
        wanted = (product, product, _naive(flow, rhs.mT, sizes), _naive_weights(lhs, flow, sizes))
        for mine, right in zip(got, wanted, strict=True):
            # Float32 sums of up to 20 products, of numbers up to about 15.
            np.testing.assert_allclose(mine, right, atol=2e-5, err_msg=str(sizes))


@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_where_it_is(form: Any) -> None:
    """In rows that no group has, and in one group's rows: forward, backward and in the weights' gradient."""
    name, config = form
    sizes = jnp.array([5, 4, 4])
    spoilt = np.zeros((16, 1), bool)
    spoilt[5:9] = spoilt[13:] = True
    lhs = jnp.where(spoilt, jnp.nan, _normal(16, 12))
    flow = jnp.where(spoilt, jnp.nan, _normal(16, 20, seed=2))
    rhs = _normal(3, 12, 20, seed=1)
    with interpret("hlo"):
        out = GROUPED_GEMM(lhs, rhs, sizes, implementation=name, config=config)
        d_rhs = GROUPED_GEMM_WEIGHTS(lhs, flow, sizes, implementation=name, config=config)
        y, _, up = GROUPED_GATED_GEMM(
            lhs, rhs, rhs, sizes, return_products=True, implementation=name, config=config
        )  # fmt: skip
    for made in (out, y, up):
        found = np.isnan(np.asarray(made))
        assert found[5:9].all()
        assert not found[:5].any()
        assert not found[9:].any()
        np.testing.assert_array_equal(np.asarray(made)[13:], 0)
    assert [bool(jnp.isnan(weight).any()) for weight in d_rhs] == [False, True, False]


@pytest.mark.parametrize("form", [f for f in FORMS if f.id != "ragged_dot"])
def test_a_weight_of_nan_spoils_its_own_group_alone(form: Any) -> None:
    name, config = form
    sizes = jnp.array([5, 0, 7, 4])
    rhs = _normal(4, 12, 20).at[jnp.array([1, 2])].set(jnp.nan)
    with interpret("hlo"):
        out = grouped_gemm(_normal(16, 12, seed=1), rhs, sizes, implementation=name, config=config)
    np.testing.assert_array_equal(np.isnan(np.asarray(out)).any(1), [False] * 5 + [True] * 7 + [False] * 4)


@pytest.mark.quick
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
def test_activations(activation: str) -> None:
    lhs, gate, up = _normal(9, 8), _normal(2, 8, 24, seed=1), _normal(2, 8, 24, seed=2)
    sizes = np.array([4, 5])
    wanted_by = {
        "silu": jax.nn.silu,
        "gelu": lambda z: jax.nn.gelu(z, approximate=False),
        "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
        "relu": jax.nn.relu,
        "sigmoid": jax.nn.sigmoid,
    }[activation]
    g, u = (jnp.asarray(_naive(lhs, w, sizes), "float32") for w in (gate, up))
    for name in ("xla", "pallas_tpu", "reference"):
        with interpret("hlo"):
            got = grouped_gated_gemm(lhs, gate, up, sizes, activation=activation, implementation=name)
        # Float32: a sum of 8 products, the activation, and a product, of numbers up to about 50.
        np.testing.assert_allclose(got, wanted_by(g) * u, atol=1e-4)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("name", ["xla", "pallas_tpu"])
def test_cases_that_the_shared_suite_only_lowers(name: str, op: Any) -> None:
    with interpret("hlo"):
        for case in op.cases:
            if case.tags == LOWERED:
                result = check(op, case.arrays(), case.params, name)
                assert result.ok, f"{case.name}: {result.why}"


@pytest.mark.parametrize("name", ["xla", "pallas_tpu"])
def test_second_derivatives(name: str) -> None:
    lhs, gate, up = _normal(10, 8), _normal(3, 8, 12, seed=1), _normal(3, 8, 12, seed=2)
    sizes, direction = jnp.array([4, 0, 5]), _normal(10, 8, seed=3)

    def slope(implementation: str) -> Any:
        def loss(lhs: Any, gate: Any, up: Any) -> Any:
            chosen = {"padded_rows": True, "implementation": implementation}
            return (grouped_gated_gemm(lhs, gate, up, sizes, activation="gelu_tanh", **chosen) ** 2).sum()

        def along(*xs: Any) -> Any:
            return (jax.grad(loss)(*xs) * direction).sum()

        return jax.jit(jax.grad(along, argnums=(0, 1, 2)))(lhs, gate, up)

    with interpret("hlo"):
        for got, wanted in zip(slope(name), slope("reference"), strict=True):
            # Both in float32, some fifty roundings deep.
            np.testing.assert_allclose(got, wanted, atol=2e-5 * float(jnp.abs(wanted).max()))


def test_the_gradient_of_a_gated_product_keeps_its_products_in_the_operands_type() -> None:
    lhs, weight = _normal(10, 8, dtype="bfloat16"), _normal(2, 8, 12, dtype="bfloat16")
    _, pull = jax.vjp(lambda *xs: grouped_gated_gemm(*xs, jnp.array([4, 6])), lhs, weight, weight)
    kept = sorted(
        leaf.shape for leaf in jax.tree.leaves(pull) if leaf.size and jnp.issubdtype(leaf.dtype, jnp.inexact)
    )  # fmt: skip
    assert kept == [(2, 8, 12), (2, 8, 12), (10, 8), (10, 12), (10, 12)]
    assert all(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(pull))


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", ["xla", "pallas_tpu"])
@pytest.mark.parametrize("shared", ["weights", "sizes", "nothing"])
def test_vmap_with_a_rest(name: str, shared: str) -> None:
    """Every element its own sizes, some with rows that no group has, whether or not they share the weights."""
    lhs, flow = _normal(3, 12, 8), _normal(3, 12, 16, seed=1)
    sizes = jnp.array([[5, 0, 7], [2, 3, 1], [0, 0, 0]])
    rhs = _normal(3, 3, 8, 16, seed=2)
    rhs, sizes = (rhs[0] if shared == "weights" else rhs), (sizes[1] if shared == "sizes" else sizes)
    axes = (0, None if shared == "weights" else 0, None if shared == "sizes" else 0, 0)

    def one(implementation: str) -> Any:
        def both(lhs: Any, rhs: Any, sizes: Any, flow: Any) -> Any:
            out, pull = jax.vjp(lambda *xs: GROUPED_GEMM(*xs, sizes, implementation=implementation), lhs, rhs)
            return out, *pull(flow)

        return both

    with interpret("hlo"):
        got = jax.jit(jax.vmap(one(name), in_axes=axes))(lhs, rhs, sizes, flow)
    wanted = jax.jit(jax.vmap(one("reference"), in_axes=axes))(lhs, rhs, sizes, flow)
    for mine, right in zip(got, wanted, strict=True):
        # Float32 sums of up to 16 products, of numbers up to about 15.
        np.testing.assert_allclose(mine, right, atol=2e-5)


@pytest.mark.parametrize("name", ["xla", "pallas_tpu"])
def test_a_gated_product_and_its_gradient_on_a_mesh(name: str) -> None:
    """K split in the first product, whose sums must be whole before the activation; F split in both."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])
    lhs, gate, up, down = _normal(24, 32), _normal(3, 32, 16), _normal(3, 32, 16, seed=1), _normal(3, 16, 32, seed=2)
    sizes = jnp.array([9, 0, 13])

    def loss(lhs: Any, gate: Any, up: Any, down: Any, implementation: str) -> Any:
        chosen = {"implementation": implementation, "padded_rows": True}
        hidden = grouped_gated_gemm(lhs, gate, up, sizes, **chosen)
        return (grouped_gemm(hidden, down, sizes, **chosen) ** 2).sum() * 1e-4

    specs = (P(None, "data"), P(None, "data", "model"), P(None, "data", "model"), P(None, "model", None))
    placed = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((lhs, gate, up, down), specs, strict=True)
    ]  # fmt: skip
    slope = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)), static_argnums=4)
    with interpret("hlo"):
        got = slope(*placed, name)
    wanted = slope(lhs, gate, up, down, "reference")
    for mine, right in zip(got, wanted, strict=True):
        # Float32, three products deep.
        np.testing.assert_allclose(mine, right, atol=1e-5 * float(jnp.abs(right).max()))


def test_the_output_type_is_the_one_asked_for() -> None:
    lhs, rhs, sizes = _normal(6, 8, dtype="bfloat16"), _normal(2, 8, 16, dtype="bfloat16"), jnp.array([2, 4])
    for name in ("xla", "pallas_tpu"):
        with interpret("hlo"):
            plain = grouped_gemm(lhs, rhs, sizes, implementation=name)
            wide, pull = jax.vjp(
                jax.jit(lambda *xs, n=name: grouped_gemm(*xs, sizes, out_dtype=jnp.float32, implementation=n)), lhs, rhs
            )
            slopes = pull(wide)
        assert wide.dtype == jnp.float32
        assert plain.dtype == slopes[0].dtype == slopes[1].dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(wide.astype("bfloat16")), np.asarray(plain))
        assert (np.asarray(wide) != np.asarray(plain, np.float32)).any()


def test_forward_mode_by_the_reference() -> None:
    lhs, rhs, sizes = _normal(6, 4), _normal(2, 4, 5), jnp.array([2, 4])
    tangent, flow = _normal(6, 4, seed=1), _normal(6, 5, seed=2)
    _, moved = jax.jvp(lambda x: grouped_gemm(x, rhs, sizes, implementation="reference"), (lhs,), (tangent,))
    _, pull = jax.vjp(lambda x: grouped_gemm(x, rhs, sizes), lhs)
    # <J t, f> = <t, Jᵀ f>, in float32.
    np.testing.assert_allclose((moved * flow).sum(), (pull(flow)[0] * tangent).sum(), rtol=1e-4)


def _both_lists(sizes: Any, rows: int, block: int) -> Any:
    visits = (aligned_tiles(sizes, rows, block, visit_empty=empty) for empty in (False, True))
    tiles = tuple(row_tiles(sizes, rows, block, rest=rest) for rest in (False, True))
    return tiles, tuple(visits), with_rest(sizes, rows)


@pytest.mark.parametrize("block", [1, 4, 5, 32])
def test_tiles(block: int) -> None:
    """Both work lists against counting; sizes that are no sizes (traced, they cannot be refused) stay in bounds."""
    lists = jax.jit(_both_lists, static_argnums=(1, 2))
    for sizes in (*SIZES, [16, 0, 0, 0], [-3, 8, 100, 2]):
        _check_lists(sizes, 16, block, lists(jnp.array(sizes), 16, block))


def test_the_list_is_made_in_few_programs() -> None:
    """A GPU runs it as a program each: no loop, no search, no gather; sums before, and sums for each tile."""
    listed = jax.jit(lambda sizes: row_tiles(sizes, 4096, 128, rest=True))
    text = listed.lower(jax.ShapeDtypeStruct((32,), jnp.int32)).compile().as_text()
    assert not re.search(r" (while|sort|gather|reduce-window)\(", text)
    # The third is the padded sizes, which a CPU does not fuse into what reads them.
    assert 2 <= len(re.findall(r"= .* fusion\(", text)) <= 3


def test_tiles_of_very_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past a number of groups the sums before each are made another way."""
    monkeypatch.setattr(tiles_module, "MOST_SQUARED", 2)
    for sizes in (*SIZES, [-3, 8, 100, 2]):
        _check_lists(sizes, 16, 4, _both_lists(jnp.array(sizes), 16, 4))


def _check_lists(sizes: list[int], rows: int, block: int, lists: Any) -> None:
    both_tiles, both_visits, rest = lists
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), rows)
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    for tiles, spans in zip(both_tiles, (ranges, [*ranges, (ends[-1], rows)]), strict=True):
        wanted = [
            (group, start, min(start + block, last), first)
            for group, (first, last) in enumerate(spans)
            for start in range(first, last, block)
        ]
        group_of, bounds, group_start, counts = (np.asarray(x).tolist() for x in tiles)
        count = counts[0]
        assert counts == [count] * (tile_limit(len(spans), rows, block) + 1)
        assert count < len(counts)
        assert list(zip(group_of, bounds[:-1], bounds[1:], group_start, strict=False))[:count] == wanted
        assert all(0 <= group < len(spans) for group in group_of)
        assert bounds[count:] == [spans[-1][1]] * (len(bounds) - count)

    for visit_empty, visits in zip((False, True), both_visits, strict=True):
        shared = [
            (group, tile)
            for group, (first, last) in enumerate(ranges)
            for tile in (range(first // block, -(-last // block)) if last > first else ())
        ]
        made = list(zip(*(np.asarray(x).tolist() for x in visits[:2]), strict=True))
        count = int(visits.visit_count)
        assert count <= len(made)
        assert [v for v in made[:count] if ranges[v[0]][0] < ranges[v[0]][1]] == shared
        empty = [group for group, (first, last) in enumerate(ranges) if first == last]
        assert [g for g, _ in made[:count] if g in empty] == (empty if visit_empty else [])
        assert all(0 <= tile < -(-rows // block) for _, tile in made)

    assert np.asarray(rest).tolist() == [*np.diff([0, *ends]), rows - ends[-1]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, w, s: grouped_gemm(x, w, jnp.array([3, 2])), "sum to the 6 rows of lhs. Got 5"),
        (lambda x, w, s: grouped_gemm(x, w, [3, 2]), "sum to the 6 rows of lhs. Got 5"),
        (lambda x, w, s: jax.jit(lambda x: grouped_gemm(x, w, np.array([3, 2])))(x), "sum to the 6 rows of lhs"),
        (lambda x, w, s: grouped_gemm(x, w, [3, 4], padded_rows=True), "share the 6 rows of lhs"),
        (lambda x, w, s: grouped_gemm(x, w, [7, -1]), "0 rows or more. Got -1 for group 1"),
        (lambda x, w, s: grouped_gemm(x, w, [7, -1], padded_rows=True), "0 rows or more"),
        (lambda x, w, s: grouped_gemm(x, w, [1, 2, 3]), "one weight for each group size. Got 2 weights and 3 sizes"),
        (lambda x, w, s: grouped_gemm(x, w, jnp.array([3.0, 3.0])), "group_sizes are whole numbers"),
        (lambda x, w, s: grouped_gemm(x, w, jnp.array([[3], [3]])), "group_sizes with 1 axis"),
        (lambda x, w, s: grouped_gemm(x, w[:0], jnp.zeros(0, "int32"), padded_rows=True), "one group or more"),
        (lambda x, w, s: grouped_gemm(x, w, s, transpose_rhs=True), "K = 4 in lhs and 5 in rhs"),
        (lambda x, w, s: grouped_gemm(x, w[0], s), "rhs with 3 axes"),
        (lambda x, w, s: grouped_gemm(x[None], w, s), "lhs with 2 axes"),
        (lambda x, w, s: grouped_gemm(x.astype("int32"), w, s), "lhs of i32"),
        (lambda x, w, s: grouped_gemm("rows", w, s), "takes arrays. Got lhs of type str"),
        (lambda x, w, s: grouped_gemm(x, w, s, out_dtype="int8"), "out_dtype of grouped_gemm"),
        (lambda x, w, s: grouped_gemm(x, None, s), "takes arrays. Got rhs of type NoneType"),
        (lambda x, w, s: grouped_gated_gemm(x, w, w[:, :, :2], s), "both .groups, K, F."),
        (lambda x, w, s: grouped_gated_gemm(x, w, w, [3, 2]), "sum to the 6 rows of lhs"),
        (lambda x, w, s: grouped_gated_gemm(x, w, w, s, activation="tanh"), "Unknown activation"),
        (lambda x, w, s: GROUPED_GEMM_WEIGHTS(x, x[:5], s), "the same rows"),
        (lambda x, w, s: LoopConfig(0), "whole number above 0"),
        (lambda x, w, s: GroupedTile(24, 128, 128), "block_m is a positive multiple of 16"),
        (lambda x, w, s: GroupedTile(16, 100, 128), "block_n is a positive multiple of 128"),
    ],
)
def test_bad_input_is_named(call: Any, words: str) -> None:
    with pytest.raises((ValueError, KeyError), match=words):
        call(jnp.ones((6, 4)), jnp.ones((2, 4, 5)), jnp.array([3, 3]))


def test_sizes_that_jit_traces_are_not_checked() -> None:
    """As documented: the groups end at the last row, and rows past the last group are zeros."""
    lhs, rhs = _normal(6, 4), _normal(2, 4, 5)
    product = jax.jit(grouped_gemm)
    np.testing.assert_array_equal(product(lhs, rhs, jnp.array([3, 2]))[5], 0)
    np.testing.assert_array_equal(product(lhs, rhs, jnp.array([2, 9])), product(lhs, rhs, jnp.array([2, 4])))


def test_no_rows() -> None:
    """Nothing in, nothing out, and zero gradients; the kernels refuse it, saying so."""
    lhs, rhs, sizes = jnp.zeros((0, 8)), _normal(2, 8, 16), jnp.zeros(2, "int32")
    out, pull = jax.vjp(lambda *xs: grouped_gemm(*xs, sizes), lhs, rhs)
    d_lhs, d_rhs = pull(out)
    assert (out.shape, d_lhs.shape) == ((0, 16), (0, 8))
    np.testing.assert_array_equal(d_rhs, jnp.zeros_like(rhs))
    with interpret("hlo"), pytest.raises(ValueError, match="an operand is empty"):
        grouped_gemm(lhs, rhs, sizes, implementation="pallas_tpu")


def _struct(*shape: int, dtype: Any = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_what_is_chosen_and_what_is_refused() -> None:
    lhs, rhs, sizes = _struct(512, 256), _struct(4, 256, 128), _struct(4, dtype="int32")
    chosen = GroupedTile(64, 128, 256)
    with target("tpu", "TPU v4"):
        made = explain(lambda *xs: grouped_gemm(*xs, implementation="pallas_tpu", config=chosen), lhs, rhs, sizes)
        assert made.selections[0].config == chosen
        default = explain(grouped_gemm, lhs, rhs, sizes).selections[0]
        assert (default.implementation, default.config) == ("xla", LoopConfig(None))  # XLA's own, until ours is timed
        refusal = GROUPED_GEMM.implementations["pallas_tpu"].refusal
        assert "one type" in str(refusal(GROUPED_GEMM.call(_struct(512, 256, dtype="float32"), rhs, sizes)))
        half = [_struct(*x.shape, dtype="float16") for x in (lhs, rhs)]
        assert "not float16" in str(refusal(GROUPED_GEMM.call(*half, sizes)))
    assert explain(grouped_gemm, lhs, rhs, sizes).selections[0].config == LoopConfig(64)  # half of an even group


@pytest.mark.quick
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_xla_has_its_own_program_on_a_tpu_and_a_loop_on_a_gpu(op: Any) -> None:
    case = op.case("hopper-back")
    for platform, made in (("tpu", "ragged_dot"), ("gpu", "stablehlo.while")):
        with target(platform):
            fn = jax.jit(lambda *xs: op(*xs, implementation="xla", **case.params))
            exported = jax.export.export(fn, platforms=[{"gpu": "cuda"}.get(platform, platform)])(*case.args())
        assert made in exported.mlir_module(), platform


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_peer_computes_the_same(op: Any) -> None:
    case = op.case("empty-ends")
    peer = op.peers["ragged_dot"](case)
    result = check_output(peer(*case.arrays()), expected(op, case.arrays(), case.params))
    assert result.ok, result.why


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_tiles_for_the_real_cases_keep_both_cores_of_a_v4_busy(op: Any) -> None:
    """The parallel axes have two tiles or more; and a tile of rows is no longer than what it is for."""
    with target("tpu", "TPU v4"):
        for case in op.cases:
            if "tune" in case.tags:
                call = op.call(*case.args(), **case.params)
                best, n = op.implementations["pallas_tpu"].candidates(call)[0], rules.sizes(call)
                parallel = -(-n.columns // best.block_n)
                if op is GROUPED_GEMM_WEIGHTS:
                    parallel *= -(-n.inner // best.block_k)
                assert parallel >= 2, (case.name, best)
                assert best.block_m <= 2 * max(n.rows / n.groups, 64), (case.name, best)


@pytest.mark.parametrize(("rows", "inner"), [(0, 4), (6, 0)])
def test_vmap_of_empty_products(rows: int, inner: int) -> None:
    lhs, sizes = jnp.zeros((3, rows, inner)), jnp.full((3, 2), rows // 2)
    shared, own = jnp.zeros((2, inner, 5)), jnp.zeros((3, 2, inner, 5))
    assert jax.vmap(grouped_gemm, (0, None, 0))(lhs, shared, sizes).shape == (3, rows, 5)
    grads = jax.vmap(jax.grad(lambda *xs: grouped_gemm(*xs).sum(), (0, 1)))(lhs, own, sizes)
    assert [x.shape for x in grads] == [lhs.shape, own.shape]


def test_an_output_type_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"out_dtype is a type, or the name of one.*Got 'bf16'"):
        grouped_gemm(jnp.ones((2, 4)), jnp.ones((1, 4, 3)), jnp.array([2]), out_dtype="bf16")
