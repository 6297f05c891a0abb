"""The Hopper kernel of paged attention: its numbers by emulation, for every way its work is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from tests.kernels.ops.attention.paged.test_paged_attention import loops
from tests.kernels.pallas import hopper_emulator as emulator

from capibara.kernels import explain, target, trust
from capibara.kernels.ops.attention.hopper import panels
from capibara.kernels.ops.attention.paged import PAGED_ATTENTION
from capibara.kernels.ops.attention.paged.hopper import forward, join
from capibara.kernels.ops.attention.paged.hopper.forward import StreamConfig
from capibara.kernels.ops.attention.paged.rules import Sizes
from capibara.kernels.ops.attention.paged.tiles import tile_of_tokens, work_list
from capibara.kernels.pallas.hopper import SMEM_ALIGNMENT


@dataclass(frozen=True)
class Form:
    """A batch, and how the kernel cuts it."""

    config: StreamConfig
    contexts: tuple[int, ...]
    heads: int = 16
    kv_heads: int = 8
    depth: int = 64
    page_size: int = 16
    counts: tuple[int, ...] | None = None
    window: int | None = None
    softcap: float | None = None
    splits: int | None = None
    programs: int = 5
    """Multiprocessors: fewer than there are items makes programs take several."""

    def arrays(self) -> tuple[Any, ...]:
        draw = np.random.default_rng(7)
        sequences, most = len(self.contexts), -(-max(self.contexts) // self.page_size)
        pages, tokens, starts = sequences * most + 3, sequences, None
        if self.counts is not None:
            starts = np.cumsum([2, *self.counts]).astype(np.int32)  # tokens before the first and after the last
            tokens = int(starts[-1]) + 3
        shape = (pages, self.page_size, self.kv_heads, self.depth)
        query, keys, values = (
            jnp.asarray(draw.normal(size=size), jnp.bfloat16)
            for size in ((tokens, self.heads, self.depth), shape, shape)
        )
        table = draw.permutation(pages)[: sequences * most].reshape(sequences, most).astype(np.int32)
        return query, keys, values, table, np.array(self.contexts, np.int32), starts

    def run(self, query: Any, keys: Any, values: Any, *rest: Any, return_lse: bool = True) -> Any:
        flat = [pool.reshape(*pool.shape[:2], -1) for pool in (keys, values)]
        with target("gpu", "NVIDIA H200"):
            return forward.hopper_forward(
                query, *flat, *rest, config=self.config, window=self.window, scale=None, softcap=self.softcap,
                key_splits=self.splits, return_lse=return_lse,
            )  # fmt: skip


UNEVEN = (80, 1, 0, 33, 64, 17)
FORMS = {
    "eight rows hold four heads": Form(StreamConfig(1, 64, 4, 1), UNEVEN),
    "in parts": Form(StreamConfig(1, 64, 3, 1, 2), (144, 90, 5)),
    "two pairs of warpgroups": Form(StreamConfig(1, 64, 3, 2), (144, 20, 300, 64, 65)),
    "long sequences in parts, others whole": Form(StreamConfig(1, 64, 3, 2, 3, 2), (400, 20, 150, 0, 128, 300)),
    "one item a program": Form(StreamConfig(1, 64, 4, 1), (80, 40), programs=132),
    "eight heads share a key": Form(StreamConfig(1, 128, 2, 1), UNEVEN, kv_heads=2, page_size=64),
    "three heads share a key, padded": Form(StreamConfig(1, 64, 4, 1), UNEVEN, heads=6, kv_heads=2),
    "a head to itself": Form(StreamConfig(1, 64, 4, 1), UNEVEN, heads=8, depth=128, page_size=64),
    "a window": Form(StreamConfig(1, 64, 4, 1), (128, 3, 20, 21, 77), heads=8, kv_heads=4, window=20),
    "prompts and single tokens": Form(
        StreamConfig(8, 64, 4, 1), (60, 9, 128, 17, 33), heads=8, kv_heads=4, counts=(40, 0, 1, 17, 3)
    ),
    "a token a tile": Form(StreamConfig(1, 64, 4, 1), (60, 9, 128, 17), kv_heads=2, counts=(4, 0, 1, 7)),
    "prompts, two pairs, a window": Form(
        StreamConfig(16, 64, 4, 2), (60, 9, 128, 17), heads=8, kv_heads=4, counts=(40, 0, 1, 17), window=30
    ),
    # Panels of 64, 32 and 16 columns, and heads too wide for their values to be in registers at once.
    "heads of 80": Form(StreamConfig(1, 64, 3, 2), UNEVEN, heads=8, depth=80),
    "heads of 80, two of them": Form(StreamConfig(1, 64, 3, 1, 2), (144, 90, 5), heads=8, kv_heads=4, depth=80),
    "heads of 96, a page in parts": Form(StreamConfig(1, 64, 3, 2, 3, 2), (400, 20, 150, 0), depth=96, page_size=128),
    "heads of 96, a window": Form(StreamConfig(1, 128, 2, 1), (128, 3, 20, 21, 277), kv_heads=4, depth=96, window=20),
    "one head of 112": Form(StreamConfig(1, 64, 3, 1), UNEVEN, heads=8, kv_heads=1, depth=112, splits=2),
    "heads of 112, prompts, a window": Form(
        StreamConfig(8, 64, 3, 2), (60, 9, 128, 17), heads=8, kv_heads=4, depth=112, counts=(40, 0, 1, 17), window=30
    ),
    "heads of 160, three share a key": Form(StreamConfig(1, 64, 2, 2), UNEVEN, heads=6, kv_heads=2, depth=160),
    "heads of 160, in parts": Form(StreamConfig(1, 64, 2, 2, 3), (144, 190, 5), heads=8, depth=160, softcap=5.0),
    "heads of 192": Form(StreamConfig(1, 64, 4, 1), UNEVEN, heads=8, depth=192, page_size=64),
    "heads of 192, a window, in parts": Form(
        StreamConfig(1, 64, 4, 1, 2), (128, 3, 200), heads=8, kv_heads=4, depth=192, window=100
    ),
    "heads of 208": Form(StreamConfig(1, 64, 3, 1), UNEVEN, heads=8, kv_heads=4, depth=208),
    "heads of 256": Form(StreamConfig(1, 64, 3, 1, 3, 2), (400, 20, 150, 0), heads=8, kv_heads=4, depth=256),
    "heads of 256, prompts": Form(
        StreamConfig(16, 64, 3, 1), (60, 9, 128, 17), heads=8, kv_heads=4, depth=256, counts=(40, 0, 1, 17), window=30
    ),
    "soft cap": Form(StreamConfig(1, 64, 4, 1), (128, 30, 64), heads=8, kv_heads=4, softcap=5.0, splits=3),
}


@pytest.mark.parametrize("name", FORMS)
def test_numbers_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS[name]
    monkeypatch.setattr(forward, "multiprocessors", lambda kind: form.programs)
    arrays = form.arrays()
    with emulator.emulated(forward, panels):
        out, lse = jax.block_until_ready(jax.jit(form.run)(*arrays))
    wanted, wanted_lse = loops(*arrays, form.window, form.softcap)
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    seen = np.isfinite(wanted_lse)
    assert (np.isneginf(lse) == ~seen).all()
    assert (out[~seen] == 0).all(), "a token that sees nothing gives zeros"
    error = np.linalg.norm(out - wanted) / np.linalg.norm(wanted)
    with target("gpu", "NVIDIA H200"):
        assert error <= PAGED_ATTENTION.tolerance(PAGED_ATTENTION.call(*arrays)), error  # NaN anywhere fails too
    # A score is a sum of `depth` products in float32, each rounded to 2^-24 of the sum; four for an unlucky draw.
    np.testing.assert_allclose(lse[seen], wanted_lse[seen], atol=4 * 2.0**-24 * form.depth * 4)


JOINED = {
    "four heads' rows together": Form(StreamConfig(1, 64, 3, 1, 3), (144, 90, 5), depth=128),
    "parts that nobody wrote": Form(StreamConfig(1, 64, 3, 2, 3, 2), (400, 20, 0, 300), depth=128),
    "eight heads share a key": Form(StreamConfig(1, 64, 2, 1, 2), (130, 0), kv_heads=2, depth=128, page_size=64),
    "two stretches of 128 columns": Form(StreamConfig(1, 64, 3, 1, 3), (144, 90, 5), heads=8, kv_heads=4, depth=160),
    "heads of 192": Form(StreamConfig(1, 64, 3, 1, 2, 2), (400, 20, 0, 300), heads=8, kv_heads=2, depth=192),
    "prompts": Form(
        StreamConfig(8, 64, 2, 1, 2), (60, 128, 33), heads=8, kv_heads=4, depth=256, counts=(20, 1, 3), splits=2
    ),
}


@pytest.mark.parametrize("name", JOINED)
def test_parts_are_joined_by_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = JOINED[name]
    monkeypatch.setattr(forward, "multiprocessors", lambda kind: form.programs)
    arrays = form.arrays()
    taken: list[Any] = []
    monkeypatch.setattr(forward, "join", lambda *given: taken.append(given) or join.join(*given))
    with emulator.emulated(forward, panels, join):
        out = jax.block_until_ready(jax.jit(lambda *given: form.run(*given, return_lse=False))(*arrays))
    assert len(taken) == 1
    wanted, wanted_lse = loops(*arrays, form.window, form.softcap)
    out = np.asarray(out, np.float64)
    assert (out[~np.isfinite(wanted_lse)] == 0).all(), "a token that sees nothing gives zeros"
    error = np.linalg.norm(out - wanted) / np.linalg.norm(wanted)
    with target("gpu", "NVIDIA H200"):
        assert error <= PAGED_ATTENTION.tolerance(PAGED_ATTENTION.call(*arrays)), error


@pytest.mark.quick
@pytest.mark.parametrize("module", [None, forward, join], ids=["all await", "attention does not", "the join does not"])
def test_started_early_nothing_is_read_before_the_kernel_before_is_done(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = JOINED["eight heads share a key"]
    monkeypatch.setattr(forward, "multiprocessors", lambda kind: form.programs)
    if module is not None:
        monkeypatch.setattr(module, "await_previous", lambda: None)

    def run() -> Any:
        with emulator.emulated(forward, panels, join), emulator.started_early():
            return jax.block_until_ready(jax.jit(lambda *x: form.run(*x, return_lse=False))(*form.arrays()))

    if module is not None:
        with pytest.raises(Exception, match="before the kernel before is done"):
            run()
        return
    with emulator.emulated(forward, panels, join):
        wanted = jax.jit(lambda *x: form.run(*x, return_lse=False))(*form.arrays())
    np.testing.assert_array_equal(np.asarray(run(), np.float32), np.asarray(wanted, np.float32))


@pytest.mark.quick
def test_a_store_inside_the_pattern_of_a_swizzle_is_a_mistake() -> None:
    ref = emulator.Ref(np.zeros((72, 80), np.float16), tiled=False)
    rows = np.ones((64, 80), np.float16)
    ref.at[pl.ds(0, 64)].store(rows)
    with pytest.raises(AssertionError, match="stored from byte 1120 on"):
        ref.at[pl.ds(7, 64)].store(rows)


@pytest.mark.quick
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("depth", [64, 80, 96, 112, 160, 208, 256])
def test_a_pair_of_warpgroups_has_its_query_and_result_to_itself(depth: int, out_dtype: Any) -> None:
    n = Sizes(tokens=3, heads=8, kv_heads=8, depth=depth, pages=9, page_size=64, sequences=3, max_pages=3)
    union = forward.scratch(StreamConfig(pairs=2), n, jnp.bfloat16, out_dtype)["q_out"]
    owner: dict[int, int] = {}
    for group in union.refs:
        begin = 0
        for array in jax.tree.leaves(group):
            each = math.prod(array.shape[1:]) * jnp.dtype(array.dtype).itemsize
            assert each % SMEM_ALIGNMENT == 0, "a pair's part begins inside the pattern of a swizzle"
            for block in range(2 * each // SMEM_ALIGNMENT):
                pair = block * SMEM_ALIGNMENT // each
                assert owner.setdefault(begin // SMEM_ALIGNMENT + block, pair) == pair
            begin += 2 * each


@pytest.mark.quick
def test_a_prompt_among_many_tokens_has_tiles_of_its_own_size() -> None:
    def tokens_of_a_tile(tokens: int, sequences: int, heads: int = 16) -> int:
        of = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in
              {"q": (tokens, heads, 128), "pool": (300, 64, 8 * 128)}.items()}  # fmt: skip
        table, lengths, starts = (
            jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((sequences, 12), (sequences,), (sequences + 1,))
        )
        with target("gpu", "NVIDIA H200"):
            call = PAGED_ATTENTION.call(of["q"], of["pool"], of["pool"], table, lengths, starts)
            return forward.candidates(call)[0].tokens

    assert [tokens_of_a_tile(n, 256) for n in (256, 512, 2048, 8192)] == [1, 8, 8, 32]
    assert tokens_of_a_tile(512, 256, heads=64) == 2


@pytest.mark.quick
def test_which_parts_the_joining_kernel_takes() -> None:
    assert join.takes(16, 128)
    assert join.takes(16, 160)
    assert not join.takes(33, 128)
    assert not join.takes(2, 64)
    assert not join.takes(2, 112)


@pytest.mark.quick
@pytest.mark.parametrize("starts", [[0, 5, 5, 6, 13], [3, 3, 11, 12, 12]])
def test_a_token_finds_the_row_that_was_made_of_it(starts: list[int]) -> None:
    tokens, per_tile = 16, 4
    contexts = jnp.full(len(starts) - 1, 50)
    tiles = work_list(tokens, contexts, jnp.array(starts), per_tile, window=None, capacity=64)
    rows = np.asarray(tiles.rows(per_tile, tokens))
    tile, row = (np.asarray(x) for x in tile_of_tokens(tokens, jnp.array(starts), per_tile))
    for token in range(tokens):
        if starts[0] <= token < starts[-1]:
            assert rows[tile[token], row[token]] == token
        else:
            assert tile[token] == len(rows), "padding has no tile"


@pytest.mark.quick
@pytest.mark.parametrize("depth", [96, 128, 192, 256])
def test_head_sizes_that_were_not_timed_are_taken_where_predictions_are_trusted(depth: int) -> None:
    taken = "hopper" if depth in forward.TIMED_DEPTHS else "xla"
    shapes = {"q": (24, 16, depth), "pool": (400, 64, 8 * depth)}
    query, pool = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes.values())
    table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((24, 16), (24,)))
    with target("gpu", "NVIDIA H200"):
        asked = explain(PAGED_ATTENTION, query, pool, pool, table, lengths)
        assert asked.implementation == taken
        with trust("predicted"):
            assert explain(PAGED_ATTENTION, query, pool, pool, table, lengths).implementation == "hopper"
    if taken == "xla":
        assert f"head_dim {depth} has not been timed on a chip" in str(asked)
