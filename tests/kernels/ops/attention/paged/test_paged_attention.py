"""paged_attention: its specification against plain loops, every implementation on hostile batches, and its keywords."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels import explain, interpret, target
from capibara.kernels.lab.check import check
from capibara.kernels.ops.attention.paged import PAGED_ATTENTION, paged_attention
from capibara.kernels.ops.attention.paged.rules import Sizes
from capibara.kernels.ops.attention.paged.tpu import forward as tpu
from capibara.kernels.ops.attention.paged.xla import GroupConfig, default_config

SMALL = 100_000  # numbers of a pool
OWN_CASES = [
    case
    for case in PAGED_ATTENTION.cases
    if not case.tags & {"bench", "test", "shard"} and math.prod(case.shapes[1]) <= SMALL
]


def loops(
    query: Any,
    keys: Any,
    values: Any,
    table: Any,
    contexts: Any,
    starts: Any,
    window: int | None,
    softcap: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The op's documentation as loops over sequences, tokens and heads, in float64."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    tokens, heads, depth = query.shape
    page_size, kv_heads = keys.shape[1:3]
    out, lse = np.zeros(query.shape), np.full((tokens, heads), -np.inf)
    for sequence, context in enumerate(np.asarray(contexts).tolist()):
        first, end = (sequence, sequence + 1) if starts is None else np.asarray(starts)[sequence : sequence + 2]
        for token in range(first, end):
            position = context - (end - token)
            seen = [i for i in range(position + 1) if window is None or i > position - window]
            for head in range(heads if seen else 0):
                at = [(table[sequence, i // page_size], i % page_size, head // (heads // kv_heads)) for i in seen]
                scores = np.array([query[token, head] @ keys[place] for place in at]) / depth**0.5
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                lse[token, head] = np.log(weights.sum()) + scores.max()
                shares = weights / weights.sum()
                out[token, head] = sum(w * values[place] for w, place in zip(shares, at, strict=True))
    return out, lse


def small(ragged: bool = False, **changed: Any) -> dict[str, Any]:
    """Three sequences of 9, 4 and 0 keys in pages of 4; ragged: 3, 1 and 0 tokens, and two of padding."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    made = {
        "query": normal(6 if ragged else 3, 4, 32),
        "key_pages": normal(5, 4, 2, 32),
        "value_pages": normal(5, 4, 2, 32),
        "page_table": jnp.array([[4, 0, 2], [1, 77, -5], [99, 99, 99]], jnp.int32),
        "context_lengths": jnp.array([9, 4, 0], jnp.int32),
    }
    if ragged:
        made["query_starts"] = jnp.array([0, 3, 4, 4], jnp.int32)
    return made | changed


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 0.7)])
@pytest.mark.parametrize("name", ["reference", "xla"])
def test_against_plain_loops(name: str, ragged: bool, window: int | None, softcap: float | None) -> None:
    given = small(ragged)
    wanted = loops(*given.values(), *([] if ragged else [None]), window, softcap)
    got = paged_attention(**given, window=window, softcap=softcap, return_lse=True, implementation=name)
    # float32 against float64: sums of 32 products and of 9 terms, some 30 roundings of 6e-8 on numbers of order 1.
    for mine, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, right, rtol=2e-6, atol=2e-6)


@pytest.mark.spread(6)
@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("case", OWN_CASES, ids=lambda case: case.name)
def test_hostile_batches_gathered_at_once(case: Any) -> None:
    """As a GPU takes them: without a loop, all tiles together or some after others."""
    for tiles in (2, 1000):
        result = check(PAGED_ATTENTION, case.arrays(), case.params, "xla", GroupConfig(4, tiles=tiles, whole=True))
        assert result.ok, result.why


@pytest.mark.spread(10)
@pytest.mark.parametrize("case", OWN_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["xla", "pallas_tpu"])
def test_hostile_batches(name: str, case: Any) -> None:
    """Against the reference in float64, with NaN wherever no key is and nonsense in the unused table."""
    with interpret():
        reason = PAGED_ATTENTION.implementations[name].refusal(PAGED_ATTENTION.call(*case.args(), **case.params))
        if reason is not None:
            pytest.skip(f"it refuses: {reason}")
        result = check(PAGED_ATTENTION, case.arrays(), case.params, name)
    assert result.ok, result.why


@pytest.mark.quick
def test_keys_that_nobody_sees_change_no_bit() -> None:
    """Unused pages, the rest of the last page, unused entries, and with a window the pages before it."""
    given = small()
    first = paged_attention(**given, window=4, implementation="xla")
    pools = {name: given[name].at[3].set(jnp.nan).at[4].set(jnp.nan).at[2, 1:].set(jnp.nan) for name in
             ("key_pages", "value_pages")}  # fmt: skip
    table = given["page_table"].at[0, 0].set(1000).at[2].set(-7)
    second = paged_attention(**given | pools | {"page_table": table}, window=4, implementation="xla")
    np.testing.assert_array_equal(first, second)
    assert np.isnan(paged_attention(**given | pools, implementation="xla")).any(), "without a window page 4 is in use"


@pytest.mark.quick
@pytest.mark.parametrize("ragged", [False, True])
def test_key_splits_change_the_work_and_not_the_result(ragged: bool) -> None:
    given = small(ragged)
    config = GroupConfig(tokens=2, keys=4, tiles=8)  # a page a step
    run = lambda splits: paged_attention(**given, key_splits=splits, implementation="xla", config=config)  # noqa: E731
    traced = {splits: str(jax.make_jaxpr(lambda s=splits: run(s))()) for splits in (1, 3)}
    tiles = 4 if ragged else 3
    rows = 2 if ragged else 1
    assert f"f32[{tiles},3,2,2,{rows},32]" in traced[3], "three parts are summed on their own"
    assert f"f32[{tiles},1,2,2,{rows},32]" in traced[1]
    # Each is right to some 30 roundings of float32.
    np.testing.assert_allclose(run(1), run(3), rtol=2e-6, atol=2e-6)


@pytest.mark.quick
def test_a_gpu_takes_all_tiles_in_few_steps() -> None:
    def cut(name: str, kind: str = "NVIDIA H200", **params: Any) -> tuple[int, bool]:
        """Steps that a full context takes, and whether all tiles take them together."""
        args = PAGED_ATTENTION.case(name).args()
        with target("gpu", kind):
            config = default_config(PAGED_ATTENTION.call(*args, **params))
        splits = params.get("key_splits", config.splits)
        (sequences, columns), page_size = args[3].shape, args[1].shape[1]
        return -(-columns * page_size // (config.keys * splits)), config.tiles >= sequences

    assert cut("grouped") == (1, True)
    assert cut("grouped", key_splits=2) == (1, True)
    assert cut("wide-24x3k") == (4, True)
    assert cut("decode-64x8k") == (4, True)
    assert cut("decode-64x8k", "NVIDIA A100-SXM4-40GB") == (4, True)
    assert cut("decode-64x8k", "an unknown GPU") == (4, False), "550 MB of a quarter of the keys and their scores"


@pytest.mark.quick
def test_scale_and_lse() -> None:
    given = small()
    plain = paged_attention(**given)
    assert not np.allclose(plain, paged_attention(**given, scale=0.5))
    out, lse = paged_attention(**given, return_lse=True)
    np.testing.assert_array_equal(out, plain)
    assert lse.shape == (3, 4)
    assert np.isneginf(lse[2]).all()
    assert not out[2].any(), "a context of 0 gives zeros"


def test_padding_tokens_give_zeros() -> None:
    out, lse = paged_attention(**small(ragged=True), return_lse=True)
    assert not out[4:].any()
    assert np.isneginf(lse[4:]).all()


BROKEN = [
    ({"page_table": jnp.array([[4, 0, 5], [1, 0, 0], [0, 0, 0]], jnp.int32)}, "page 5 for sequence 0"),
    ({"page_table": jnp.array([[4, -1, 2], [1, 0, 0], [0, 0, 0]], jnp.int32)}, "page -1 for sequence 0"),
    ({"context_lengths": jnp.array([13, 4, 0], jnp.int32)}, "13 for sequence 0"),
    ({"context_lengths": jnp.array([2, 4, 0], jnp.int32)}, "2 for sequence 0, which has 3 tokens"),
    ({"query_starts": jnp.array([0, 3, 2, 4], jnp.int32)}, "does not fall"),
    ({"query_starts": jnp.array([0, 3, 4, 7], jnp.int32)}, "within the 6 tokens"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("broken", "text"), BROKEN, ids=lambda x: x if isinstance(x, str) else "")
def test_debug_raises_at_once_and_under_jit(broken: dict[str, Any], text: str) -> None:
    given = small(ragged=True) | broken
    with pytest.raises(ValueError, match=text):
        paged_attention(**given, debug=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(jax.jit(lambda **xs: paged_attention(**xs, debug=True))(**given))
    jax.block_until_ready(paged_attention(**given))  # without debug nothing is read on the host, nor out of bounds


def test_debug_passes_what_is_right() -> None:
    for ragged in (False, True):
        given = small(ragged)
        wanted = paged_attention(**given, window=4)
        # With a window the pages before it may be gone.
        gone = given["page_table"].at[0, 0].set(1000) if not ragged else given["page_table"]
        given["page_table"] = gone
        np.testing.assert_array_equal(wanted, paged_attention(**given, window=4, debug=True))
        np.testing.assert_array_equal(wanted, jax.jit(lambda xs: paged_attention(**xs, window=4, debug=True))(given))


BAD = [
    ({"query": jnp.ones((4, 4, 32))}, "Without query_starts there is one token a sequence"),
    ({"query": jnp.ones((3, 3, 32))}, "multiple of the cache's heads"),
    ({"query": jnp.ones((3, 4, 16))}, "the query's head_dim"),
    ({"query": jnp.ones((3, 4, 32), jnp.bfloat16)}, "one floating-point type"),
    (
        {"key_pages": jnp.ones((5, 4)), "value_pages": jnp.ones((5, 4))},
        "or \\[pages, page_size, kv_heads \\* head_dim\\]",
    ),
    ({"key_pages": jnp.ones((5, 4, 80)), "value_pages": jnp.ones((5, 4, 80))}, "the query's head_dim"),
    ({"page_table": jnp.ones((3,), jnp.int32)}, "page_table is \\[sequences, max_pages\\]"),
    ({"context_lengths": jnp.ones((3,), jnp.float32)}, "context_lengths is int32"),
    ({"context_lengths": jnp.ones((2,), jnp.int32)}, "one context length a row"),
    ({"query_starts": jnp.ones((3,), jnp.int32)}, "one number more than there are sequences"),
    ({"window": 0}, "window is a whole number"),
    ({"key_splits": 0}, "key_splits is a whole number"),
    ({"softcap": 0.0}, "softcap is above zero"),
    ({"scale": float("nan")}, "scale is a finite number"),
]


@pytest.mark.parametrize(("bad", "text"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input_says_the_rule(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        paged_attention(**small() | bad)


@pytest.mark.parametrize(("name", "side_by_side"), [("xla", False), ("xla", True), ("pallas_tpu", False)])
def test_heads_of_a_ragged_batch_are_split_over_a_mesh(name: str, side_by_side: bool) -> None:
    """Query heads with their key heads; nothing is gathered."""
    case = PAGED_ATTENTION.case("ragged")
    arrays = case.arrays()
    if side_by_side:
        pools = [x.reshape(*x.shape[:2], -1) for x in arrays[1:3]]
        arrays = (arrays[0], *pools, *arrays[3:])
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    specs = [P(None, "model"), P(None, None, "model"), P(None, None, "model"), P(), P(), P()]
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    with interpret("hlo"):
        # A page of 8 keys and one head is what the kernel's tiles of 8 rows need.
        fn = jax.jit(lambda *xs: PAGED_ATTENTION(*xs, implementation=name, **case.params))
        out, lse = fn(*placed)
        text = fn.lower(*placed).compile().as_text()
    wanted = PAGED_ATTENTION(*arrays, implementation="reference", **case.params)
    np.testing.assert_allclose(out, wanted[0], rtol=1e-5, atol=1e-5)  # sums of 64 products in float32, twice
    np.testing.assert_allclose(lse, wanted[1], rtol=1e-5, atol=1e-5)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 3)
    assert "all-gather" not in text


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_heads_side_by_side_are_the_same_cache(kv: int) -> None:
    """A pool of three axes gives the bits of the same pool of four, one key head for all or for each included."""
    pools = {name: small()[name][:, :, :1].repeat(kv, 2) for name in ("key_pages", "value_pages")}
    flat = {name: x.reshape(5, 4, kv * 32) for name, x in pools.items()}
    np.testing.assert_array_equal(paged_attention(**small() | pools), paged_attention(**small() | flat))


def sizes_with(**changed: int) -> Sizes:
    given = {"heads": 32, "depth": 64, "page_size": 64, "kv_heads": 8} | changed
    return Sizes(tokens=64, pages=4096, sequences=64, max_pages=64, **given)


@pytest.mark.parametrize(
    ("n", "side_by_side", "form"),
    [
        (sizes_with(depth=128), False, "rows"),
        (sizes_with(depth=128), True, "lanes"),
        (sizes_with(), True, "lanes"),
        (sizes_with(), False, "lanes"),  # copied, and not padded
        (sizes_with(page_size=128), False, "turned"),
        (sizes_with(page_size=128), True, "lanes"),
        (sizes_with(depth=96), True, "lanes"),
        (sizes_with(kv_heads=1), True, "rows"),  # half of a row of lanes
        (sizes_with(page_size=8), True, "rows"),  # half of a packed tile of bfloat16
    ],
)
def test_a_page_is_read_as_it_lies(n: Sizes, side_by_side: bool, form: str) -> None:
    """What the TPU compiler was seen to lay out without a copy."""
    assert tpu.form_of(n, jnp.bfloat16, side_by_side) == form
    pool = (n.pages, n.page_size, n.kv_heads * n.depth) if side_by_side else (n.pages, n.page_size, n.kv_heads, n.depth)
    shapes = [(n.tokens, n.heads, n.depth), pool, pool, (64, 64), (64,)]
    args = [jax.ShapeDtypeStruct(s, "bfloat16" if i < 3 else "int32") for i, s in enumerate(shapes)]
    with target("tpu", "TPU v4"):
        made = tpu.candidates(PAGED_ATTENTION.call(*args))
    assert {config.form for config in made} == {form}


def test_the_form_is_how_the_pools_enter_the_kernel() -> None:
    """Each form's values are checked on the cases that take it; here, that the config's is the one taken."""
    case = PAGED_ATTENTION.case("keys-minor")
    pages = case.shapes[1][0]
    for form, page in {"rows": (256, 64), "lanes": (128, 128), "turned": (128, 128)}.items():
        config = tpu.PagesConfig(pages=2, chunk=1, form=form)
        fn = lambda *xs, c=config: tpu.tpu_forward(*xs, config=c, **{**PAGED_ATTENTION.params, **case.params})  # noqa: E731
        traced = jax.make_jaxpr(fn)(*(x for x in case.args() if x is not None))
        (call,) = [e for e in traced.eqns if e.primitive.name == "pallas_call"]
        assert [v.aval.shape for v in call.invars[-2:]] == [(pages, *page)] * 2
        assert ("transpose" in {e.primitive.name for e in traced.eqns}) == (form == "turned")


def test_a_form_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="form"):
        tpu.PagesConfig(form="columns")
    pool = jnp.ones((5, 4, 2, 64))
    given = small(query=jnp.ones((3, 4, 64)), key_pages=pool, value_pages=pool)
    with interpret(), pytest.raises(ValueError, match="a page's keys are a multiple of 128 here, not 4"):
        paged_attention(**given, implementation="pallas_tpu", config=tpu.PagesConfig(form="turned"))


def test_dispatch_names_its_choice() -> None:
    case = PAGED_ATTENTION.case("decode-64x8k")
    made = explain(PAGED_ATTENTION, *(x for x in case.args() if x is not None))
    assert made.implementation == "xla"
    assert "it is for gpu" in str(made)


@pytest.mark.parametrize(("ragged", "depth"), [(False, 128), (True, 128), (True, 96), (False, 256)])
def test_the_hopper_kernel_lowers_inside_shard_map(ragged: bool, depth: int) -> None:
    """Heads over a mesh, in a checked shard_map: the kernel's loops count from zero, not from what it reads."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec
    shapes = [(4, 8, depth), (16, 64, 4, depth), (16, 64, 4, depth), (2 if ragged else 4, 4), (2 if ragged else 4,)]
    types = ["bfloat16"] * 3 + ["int32"] * 2
    specs = [spec(None, "model"), spec(None, None, "model"), spec(None, None, "model"), spec(), spec()]
    if ragged:
        shapes, types, specs = [*shapes, (3,)], [*types, "int32"], [*specs, spec()]
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]

    def local(*arrays: jax.Array) -> jax.Array:
        return PAGED_ATTENTION(*arrays, implementation="hopper")

    with target("gpu", "NVIDIA H200"):
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=spec(None, "model"))
        assert "mosaic_gpu" in jax.export.export(jax.jit(mapped), platforms=["cuda"])(*args).mlir_module()
