"""The TPU attention kernels by emulation against a plain float64 form, their tables of live blocks, and lowering."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compile import lower_for
from capibara.kernels import interpret, target
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.attention.reference import reference, reference_grad
from capibara.kernels.ops.attention.tpu import backward as tpu_backward
from capibara.kernels.ops.attention.tpu import blocks as tpu_blocks
from capibara.kernels.ops.attention.tpu import forward as tpu_forward
from capibara.kernels.ops.attention.tpu.backward import FlashGradConfig
from capibara.kernels.ops.attention.tpu.blocks import DEAD, PARTIAL, WHOLE, FlashConfig
from capibara.kernels.pallas import prng, vmem

OPTIONAL = ("bias", "mask", "q_segments", "kv_segments", "block_mask", "dropout_seed")
PARAMS: dict[str, Any] = {
    "causal": False, "q_offset": 0, "window": None, "scale": None, "softcap": None, "dropout_rate": 0.0,
    "block_size": None,
}  # fmt: skip
FORWARD = Op(
    "attention", family="attention", reference=reference, operands=("q", "k", "v", *OPTIONAL),
    params={**PARAMS, "return_lse": False},
)  # fmt: skip
BACKWARD = Op(
    "attention_grad", family="attention", reference=reference_grad, params=PARAMS,
    operands=("q", "k", "v", *OPTIONAL, "out", "lse", "d_out", "d_lse"),
)  # fmt: skip


@dataclasses.dataclass
class Case:
    """A call: sizes, features, the extra operands, keys that are NaN because no query may see them, and queries that
    are because they may see no key.
    """

    heads: tuple[int, int] = (2, 2)
    lengths: tuple[int, int] = (200, 200)
    depth: int = 64
    dtype: str = "float32"
    config: tuple[int, int, int, int] = (128, 128, 128, 128)
    fused: bool = True
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    nan_keys: slice = dataclasses.field(default_factory=lambda: slice(0, 0))
    nan_queries: slice = dataclasses.field(default_factory=lambda: slice(0, 0))
    batch: int = 1
    length_minor: bool = False

    def arrays(self) -> tuple[Any, ...]:
        """q, k, v, d_out, d_lse; the keys that nothing sees are NaN, and the queries that see nothing."""
        rng = np.random.default_rng(0)
        (rows, columns), (heads, kv_heads) = self.lengths, self.heads
        of_queries, of_keys = (self.batch, heads, rows, self.depth), (self.batch, kv_heads, columns, self.depth)
        q, k, v, do = (
            jnp.asarray(rng.standard_normal(shape), self.dtype) for shape in (of_queries, of_keys, of_keys, of_queries)
        )
        k, v = (x.at[:, :, self.nan_keys].set(jnp.nan) for x in (k, v))
        q, do = (x.at[:, :, self.nan_queries].set(jnp.nan) for x in (q, do))
        return q, k, v, do, jnp.asarray(rng.standard_normal((self.batch, heads, rows)), "float32")


def draw(seed: int, *shape: int, p: float | None = None) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(np.float32) if p is None else rng.random(shape) < p


SEGMENTS = np.array([[0] * 40 + [1] * 70 + [3] * 90], np.int32)
CASES = {
    "causal-gqa-offset-tails": Case(
        (4, 2), (200, 300), 128, params={"causal": True, "q_offset": 60}, nan_keys=slice(260, None)
    ),
    "chunks-in-a-block": Case(
        (1, 1), (512, 384), 128, config=(256, 384, 128, 128), params={"causal": True, "q_offset": -100},
        nan_queries=slice(0, 100),
    ),
    "window-odd-depth": Case(
        (1, 1), (300, 190), 40, fused=False, params={"window": (30, 20)}, nan_queries=slice(220, None)
    ),
    "bfloat16-softcap-scale": Case(
        lengths=(130, 250), dtype="bfloat16", length_minor=True, params={"softcap": 3.0, "scale": 0.3}
    ),
    "segments": Case(
        length_minor=True,
        extra={"q_segments": SEGMENTS, "kv_segments": np.where(SEGMENTS == 1, 7, SEGMENTS)}, nan_keys=slice(40, 110),
        nan_queries=slice(40, 110),
    ),
    "mask-by-pair-causal": Case(
        (2, 1), depth=96, length_minor=True, params={"causal": True}, extra={"mask": draw(1, 1, 2, 200, 200, p=0.5)}
    ),
    "mask-by-key-bias": Case(
        extra={"mask": (np.arange(200) < 150)[None, None, None], "bias": draw(2, 1, 2, 200, 200)},
        nan_keys=slice(150, None),
    ),
    "bias-summed-over-batch-and-queries": Case(
        (2, 1), (200, 140), batch=2, fused=False, length_minor=True, params={"causal": True, "softcap": 5.0},
        extra={"bias": draw(3, 1, 2, 1, 140)},
    ),
    "block-mask-by-head": Case(
        (2, 1), (300, 300), 32, length_minor=True, params={"block_size": (128, 128)},
        extra={"block_mask": draw(7, 1, 2, 3, 3, p=0.5)},
    ),
    # Keys from 128 on are live, and the first 192 queries come before them; 64 of those share a block with others.
    "block-mask-and-position": Case(
        (1, 1), (256, 256), params={"causal": True, "q_offset": -64, "block_size": (256, 128)},
        extra={"block_mask": np.array([[[[False, True]]]])}, nan_queries=slice(0, 192),
    ),
    "dropout": Case(
        (2, 1), (130, 200), batch=2, params={"dropout_rate": 0.3},
        extra={"dropout_seed": np.array([3, 4], np.uint32)},
    ),
    "one-query": Case((4, 1), (1, 77), 64, length_minor=True, params={"causal": True, "q_offset": 76}),
}  # fmt: skip


def allowed_pairs(case: Case) -> np.ndarray:
    (rows, columns), p, extra = case.lengths, {**PARAMS, **case.params}, case.extra
    i, j = np.arange(rows)[:, None] + p["q_offset"], np.arange(columns)[None]
    allowed = np.ones((case.batch, case.heads[0], rows, columns), bool)
    left, right = p["window"] or (None, None)
    if p["causal"]:
        allowed &= j <= i
    allowed &= True if left is None else j >= i - left
    allowed &= True if right is None else j <= i + right
    if "mask" in extra:
        allowed &= extra["mask"]
    if "q_segments" in extra:
        allowed &= (extra["q_segments"][:, :, None] == extra["kv_segments"][:, None])[:, None]
    if "block_mask" in extra:
        wide = extra["block_mask"].repeat(p["block_size"][0], 2).repeat(p["block_size"][1], 3)
        allowed &= wide[:, :, :rows, :columns]
    return allowed


def plain(case: Case) -> dict[str, np.ndarray]:
    """Everything in float64 by the textbook, pair by pair."""
    p = {**PARAMS, **case.params}
    q, k, v, do, d_lse = (np.nan_to_num(np.asarray(x.astype(jnp.float32)).astype(np.float64)) for x in case.arrays())
    groups = case.heads[0] // case.heads[1]
    k, v = k.repeat(groups, 1), v.repeat(groups, 1)
    scale = case.depth**-0.5 if p["scale"] is None else p["scale"]
    s = q @ k.swapaxes(2, 3) * scale + case.extra.get("bias", 0.0)
    slope = 1.0
    if p["softcap"]:
        t = np.tanh(s / p["softcap"])
        s, slope = p["softcap"] * t, 1 - t * t
    allowed = allowed_pairs(case)
    weights = np.where(allowed, np.exp(s), 0.0)
    total = weights.sum(-1, keepdims=True)
    prob = weights / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        lse = np.log(total)[..., 0]
    keep = np.ones_like(prob)
    if p["dropout_rate"]:
        flat = np.arange(np.prod(q.shape[:3]), dtype=np.uint32).reshape(*q.shape[:3], 1)
        kept = prng.keep_mask(case.extra["dropout_seed"], flat, np.arange(k.shape[2], dtype=np.uint32), 0.3)
        keep = np.asarray(kept) / (1 - p["dropout_rate"])
    out = (prob * keep) @ v
    dp = (do @ v.swapaxes(2, 3)) * keep
    delta = (out * do).sum(-1) - np.where(np.isneginf(lse), 0, d_lse)
    ds = prob * (dp - delta[..., None]) * slope
    summed = lambda x: x.reshape(case.batch, case.heads[1], groups, *x.shape[2:]).sum(2)  # noqa: E731
    dk, dv = summed(ds.swapaxes(2, 3) @ q * scale), summed((prob * keep).swapaxes(2, 3) @ do)
    bias = case.extra.get("bias", np.zeros((1, 1, 1, 1)))
    lacking = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
    dbias = ds.sum(lacking, keepdims=True)
    return {"out": out, "lse": lse, "dq": ds @ k * scale, "dk": dk, "dv": dv, "dbias": dbias}


def emulated(case: Case, mode: str = "hlo") -> dict[str, np.ndarray]:
    params = {**PARAMS, **case.params}
    extra = [None if case.extra.get(n) is None else jnp.asarray(case.extra[n]) for n in OPTIONAL]

    def both(q: Any, k: Any, v: Any, do: Any, d_lse: Any, *extra: Any) -> dict[str, Any]:
        config = FlashConfig(*case.config, length_minor=case.length_minor)
        out, lse = tpu_forward.tpu_forward(q, k, v, *extra, config=config, return_lse=True, **params)
        found = {"out": out, "lse": lse}
        grad_config = FlashGradConfig(*case.config, fused=case.fused, length_minor=case.length_minor)
        flow = jnp.where(jnp.isneginf(lse), 0.0, d_lse)
        grads = tpu_backward.tpu_backward(q, k, v, *extra, out, lse, do, flow, config=grad_config, **params)
        found |= {n: x for n, x in zip(("dq", "dk", "dv", "dbias"), grads, strict=True) if x is not None}
        return found

    with interpret(mode, detect_races=mode == "machine"), jax.default_matmul_precision("highest"):
        found = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(*case.arrays(), *extra)
    return {name: np.asarray(x.astype(jnp.float32)) for name, x in found.items()}


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], dtype: str) -> None:
    for name, got in found.items():
        expected = wanted[name]
        dead = np.isneginf(expected)
        np.testing.assert_array_equal(np.isneginf(got), dead, err_msg=name)
        error = np.abs(np.where(dead, 0, got) - np.where(dead, 0, expected)).max()
        # bfloat16: probabilities, outputs and score gradients are each rounded once, half a unit in 2^8.
        limit = 2e-5 if dtype == "float32" or name == "lse" else 2.0**-6
        assert error <= limit * max(np.abs(expected[~dead]).max(initial=0.0), 1.0), (name, error)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    assert_close(emulated(CASES[name]), plain(CASES[name]), CASES[name].dtype)


@pytest.mark.parametrize(("fused", "length_minor"), [(True, True), (False, False)])
def test_memory_that_starts_as_nan_and_no_races(fused: bool, length_minor: bool) -> None:
    """Reads past the operands see NaN here, so tails are cleared; every access is ordered."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    # The keys are summed over two heads, and both lengths end inside a block.
    case = Case(
        (2, 1), (200, 140), 64, fused=fused, length_minor=length_minor, params={"causal": True, "q_offset": -30}
    )
    assert_close(emulated(case, "machine"), plain(case), case.dtype)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


def shapes(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def calls(
    b: int, h: int, kv: int, t: int, d: int, s: int = 0, *, extra: Any = None, **params: Any
) -> tuple[Call, Call]:
    """The forward and the backward call of these sizes, for a v4."""
    q, k = shapes(b, h, t, d), shapes(b, kv, s or t, d)
    optional = [(extra or {}).get(n) for n in OPTIONAL]
    with target("tpu", "TPU v4"):
        forward = FORWARD.call(q, k, k, *optional, return_lse=True, **params)
        saved = (q, shapes(b, h, t, dtype=jnp.float32), q, None)
        return forward, BACKWARD.call(q, k, k, *optional, *saved, **params)


# Beside the workloads that tests/kernels/test_every_op.py lowers.
ODD = {
    "odd": ((1, 2, 2, 100, 40, 77), {"softcap": 5.0}),
    "segments": (
        (2, 2, 1, 1000, 64),
        {"extra": {"q_segments": shapes(2, 1000, dtype=jnp.int32), "kv_segments": shapes(2, 1000, dtype=jnp.int32)}},
    ),
    "mask": ((2, 2, 1, 1000, 64), {"extra": {"mask": shapes(2, 1, 1000, 1000, dtype=jnp.bool_)}}),
    "mask-by-key": ((2, 2, 1, 1000, 64), {"extra": {"mask": shapes(2, 1, 1, 1000, dtype=jnp.bool_)}}),
    "blocks": (
        (2, 2, 1, 1000, 64),
        {"extra": {"block_mask": shapes(1, 2, 2, 2, dtype=jnp.bool_)}, "block_size": (512, 512)},
    ),
    "bias": ((2, 2, 1, 1000, 64), {"extra": {"bias": shapes(1, 2, 1000, 1000)}}),
    "bias-row": ((2, 2, 1, 1000, 64), {"extra": {"bias": shapes(2, 1, 1, 1000)}}),
    "dropout": ((2, 2, 1, 1000, 64), {"extra": {"dropout_seed": shapes(2, dtype=jnp.uint32)}, "dropout_rate": 0.1}),
}


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("name", ODD)
def test_lowers_for_tpu(name: str) -> None:
    sizes, params = ODD[name]
    for call, made in zip(calls(*sizes, **params), (tpu_forward, tpu_backward), strict=True):
        assert made.refuses(call) is None  # type: ignore[attr-defined]
        implementation = made.IMPLEMENTATION  # type: ignore[attr-defined]
        for config in (implementation.default_config(call), implementation.candidates(call)[-1]):

            def fn(*present: Any, call: Call = call, config: Any = config, impl: Any = implementation) -> Any:
                given = iter(present)
                full = [None if x is None else next(given) for x in call.args]
                return jax.tree.leaves(impl.fn(*full, config=config, **call.params))

            result = lower_for(fn, [x for x in call.args if x is not None], "tpu")
            assert result.ok, result.error
            assert "tpu_custom_call" in result.custom_calls


@pytest.mark.parametrize(
    ("t", "s", "params", "blocks", "most"),
    [
        # causal: q block i sees key blocks up to the diagonal: 1 + 2 + 3 + 4 of 16, the diagonal ones masked
        (4096, 4096, {"causal": True}, (1024, 1024), (10, 4, 4)),
        (4096, 4096, {}, (1024, 1024), (16, 0, 4)),
        # a window of 1024 back: two or three blocks of 512 for each of 64, whatever the length
        (32768, 32768, {"causal": True, "window": (1023, 0)}, (512, 512), (189, 126, 3)),
        (1024, 1000, {}, (512, 512), (4, 2, 2)),
        (128, 4096, {"causal": True, "q_offset": 128}, (128, 128), (2, 1, 2)),
    ],
)  # fmt: skip
def test_work_is_proportional_to_the_live_blocks(
    t: int, s: int, params: dict[str, Any], blocks: tuple[int, int], most: tuple[int, int, int]
) -> None:
    rules = tpu_blocks.rules_of(shapes(1, 1, t, 128), shapes(1, 1, s, 128), {**PARAMS, **params})
    kinds = tpu_blocks.block_kinds(rules, *blocks)
    live, partial, steps = most
    assert (int((kinds != DEAD).sum()), int((kinds == PARTIAL).sum())) == (live, partial)
    assert tpu_blocks.most_live(kinds) == steps
    for by_key in (False, True):
        walked = tpu_blocks.Blocks(rules, blocks, by_key=by_key)
        lines = walked.banded_table(np).reshape(walked.outer, walked.steps)
        for row, line in zip(kinds.T if by_key else kinds, lines, strict=True):
            alive = np.flatnonzero(row)
            np.testing.assert_array_equal(line[: len(alive)], alive * 4 + row[alive])
            # Past the end one block is named again, so no copy starts, and its kind says to do nothing.
            np.testing.assert_array_equal(line[len(alive) :] & 3, DEAD)
            assert len(set(line[max(len(alive) - 1, 0) :] >> 2)) <= 1


def test_block_kinds_against_every_pair() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        t, s, offset = (int(x) for x in rng.integers((1, 1, -60), (90, 90, 60)))
        sides = [None if rng.random() < 0.5 else int(rng.integers(1, 40)) for _ in range(2)]
        params = {**PARAMS, "causal": bool(rng.random() < 0.5), "q_offset": offset, "window": tuple(sides)}
        bq, bk = (int(x) for x in rng.integers(1, 40, 2))
        rules = tpu_blocks.rules_of(shapes(1, 1, t, 8), shapes(1, 1, s, 8), params)
        kinds = tpu_blocks.block_kinds(rules, bq, bk, ragged_rows=True)
        pairs = np.zeros((kinds.shape[0] * bq, kinds.shape[1] * bk), bool)
        pairs[:t, :s] = allowed_pairs(Case((1, 1), (t, s), params=params))[0, 0]
        blocks = pairs.reshape(kinds.shape[0], bq, kinds.shape[1], bk)
        some, every = blocks.any((1, 3)), blocks.all((1, 3))
        np.testing.assert_array_equal(kinds == WHOLE, every)
        for by_key in (False, True):
            walked = tpu_blocks.Blocks(rules, (bq, bk), by_key=by_key, ragged_rows=True)
            lines = walked.banded_table(np).reshape(walked.outer, walked.steps)
            for row, line in zip(kinds.T if by_key else kinds, lines, strict=True):
                alive = np.flatnonzero(row)
                np.testing.assert_array_equal(line[line & 3 != DEAD], alive * 4 + row[alive])
        # Positions alone may keep a block whose few pairs are outside; they never lose one.
        assert not (some & (kinds == DEAD)).any()


def test_segments_and_block_masks_make_dead_blocks() -> None:
    rules = tpu_blocks.rules_of(shapes(1, 1, 512, 64), shapes(1, 1, 512, 64), PARAMS)
    walked = tpu_blocks.Blocks(rules, (128, 128))
    segments = jnp.asarray(np.repeat([[0, 1, 1, 2]], 128, axis=1).reshape(1, -1))
    table = jax.jit(lambda a, b: walked.table(None, None, a, b)[0])(segments, segments.at[0, 300].set(2))
    one, two, three = 4 * np.array([1, 2, 3])
    np.testing.assert_array_equal(
        table.reshape(4, 4),
        [
            [WHOLE, 0, 0, 0],
            [one + WHOLE, two + PARTIAL, two, two],
            [one + WHOLE, two + PARTIAL, two, two],
            [two + PARTIAL, three + WHOLE, three, three],
        ],
    )
    alive = jnp.asarray([[[[True, False], [False, True]], [[True, True], [False, False]]]])
    table = jax.jit(lambda a: walked.table(a, (256, 256), None, None)[0])(alive).reshape(2, 4, 4)
    np.testing.assert_array_equal(table[0, 0], [WHOLE, one + WHOLE, one, one])
    np.testing.assert_array_equal(table[0, 3], [two + WHOLE, three + WHOLE, three, three])
    np.testing.assert_array_equal(table[1, 3] & 3, DEAD)


def test_refuses_with_a_reason() -> None:
    def reasons(*sizes: int, **params: Any) -> tuple[str | None, str | None]:
        forward, backward = calls(*sizes, **params)
        return tpu_forward.refuses(forward), tpu_backward.refuses(backward)

    assert reasons(1, 1, 1, 256, 64, extra={"bias": shapes(1, 1, 256, 256)}) == (None, None)
    for reason in reasons(1, 1, 1, 256, 512):
        assert reason == "it takes a head_dim from 8 to 256, not 512"
    small = {"extra": {"block_mask": shapes(1, 1, 4, 4, dtype=jnp.bool_)}, "block_size": (64, 64)}
    for reason in reasons(1, 1, 1, 256, 64, **small):
        assert reason == "blocks of its block mask are multiples of 128; these are 64 by 64"
    for reason in reasons(1, 1, 1, 0, 64, 0):
        assert reason == "an operand is empty"


def test_candidates_fit_vmem_and_divide_the_block_mask() -> None:
    forward, backward = calls(1, 8, 2, 4096, 128, causal=True)
    limit = vmem.limit(forward)
    assert all(tpu_forward.vmem_bytes(forward, c) <= limit for c in tpu_forward.candidates(forward))
    made = tpu_backward.candidates(backward)
    assert all(tpu_backward.vmem_bytes(backward, c) <= limit for c in made)
    assert made[0].fused
    _, long_backward = calls(1, 8, 8, 32768, 128, causal=True)
    assert not any(c.fused for c in tpu_backward.candidates(long_backward))  # a head's gradient is 16 MiB
    blocks = {"extra": {"block_mask": shapes(1, 1, 16, 8, dtype=jnp.bool_)}, "block_size": (256, 512)}
    masked, _ = calls(1, 8, 2, 4096, 128, **blocks)
    assert tpu_forward.candidates(masked)
    assert all(256 % c.block_q == 0 and 512 % c.block_k == 0 for c in tpu_forward.candidates(masked))


def test_heads_are_read_as_xla_lays_them_out() -> None:
    """A head_dim below the lanes lies with the length minor, unless the lengths are shorter still."""

    def first(*sizes: int) -> tuple[bool, bool]:
        forward, backward = calls(*sizes)
        made = tpu_forward.candidates(forward), tpu_backward.candidates(backward)
        if sizes[4] % 128:  # the other order stays a choice, after these
            assert all({c.length_minor for c in configs} == {True, False} for configs in made)
        return made[0][0].length_minor, made[1][0].length_minor

    assert first(1, 2, 2, 4096, 64) == first(1, 2, 1, 1000, 96) == first(1, 1, 1, 1, 32, 4096) == (True, True)
    assert first(1, 2, 2, 4096, 128) == first(1, 2, 2, 4096, 256) == first(1, 2, 2, 16, 64) == (False, False)


def test_nothing_but_length_minor_heads_enters_a_narrow_kernel() -> None:
    """XLA's order for narrow heads is the kernel's: around the call axes change places, which moves nothing."""
    forward, _ = calls(1, 2, 1, 256, 64)
    fn = functools.partial(tpu_forward.tpu_forward, config=tpu_forward.candidates(forward)[0], **PARAMS)
    x = shapes(1, 2, 256, 64)
    (call,) = [e for e in jax.make_jaxpr(fn)(x, x, x).eqns if e.primitive.name == "pallas_call"]
    heads = [v.aval.shape for v in (*call.invars, *call.outvars) if v.aval.dtype == jnp.bfloat16]
    assert heads == [(1, 2, 64, 256)] * 4


def test_config_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="block_q is a positive multiple of 128"):
        FlashConfig(block_q=100)
    with pytest.raises(ValueError, match="chunk_k divides block_k"):
        FlashConfig(block_k=384, chunk_k=256)
    assert FlashGradConfig(1024, 512, 512, 512, fused=False).fit(300, 77) == FlashGradConfig(
        384, 128, 128, 128, fused=False
    )


def test_inside_shard_map_lowers_for_tpu() -> None:
    """The kernel's tables vary over the mesh as its operands do, so a checked shard_map takes it."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])
    spec = jax.sharding.PartitionSpec("data")
    fn = functools.partial(tpu_forward.tpu_forward, config=FlashConfig(), **{**PARAMS, "causal": True})
    mapped = jax.shard_map(lambda q, k, v: fn(q, k, v), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    x = shapes(2, 2, 256, 64)
    with target("tpu", "TPU v4"):
        assert "tpu_custom_call" in jax.export.export(jax.jit(mapped), platforms=["tpu"])(x, x, x).mlir_module()
