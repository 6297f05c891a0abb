"""The work list of a ragged batch against a plain one, the parts of its keys, and how they are joined."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from capibara.kernels.ops.attention.paged import tiles as work

COUNTS, CONTEXTS = (5, 1, 0, 8, 3), (9, 30, 4, 8, 0)
STARTS = np.cumsum([0, *COUNTS])
TOKENS = int(STARTS[-1]) + 2  # two of padding


def _plain(per_tile: int, window: int | None) -> list[tuple[int, ...]]:
    made = []
    for sequence, (count, context) in enumerate(zip(COUNTS, CONTEXTS, strict=True)):
        for before in range(0, count, per_tile):
            held = min(per_tile, count - before)
            position = context - count + before
            end = max(position + held, 0)
            begin = 0 if window is None else min(max(position - window + 1, 0), end)
            made.append((sequence, int(STARTS[sequence]) + before, held, position, begin, end))
    return made


@pytest.mark.parametrize("per_tile", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [None, 3])
def test_tiles_of_a_ragged_batch(per_tile: int, window: int | None) -> None:
    tiles = work.work_list(TOKENS, jnp.array(CONTEXTS), jnp.array(STARTS), per_tile, window=window, capacity=32)
    plain = _plain(per_tile, window)
    got = np.stack(tiles, axis=1)
    assert len(plain) <= len(got) == work.most_tiles(TOKENS, len(COUNTS), per_tile)
    np.testing.assert_array_equal(got[: len(plain)], plain)
    assert not got[len(plain) :, [2, 4, 5]].any(), "tiles past the list hold no tokens and no keys"
    rows = np.asarray(tiles.rows(per_tile, TOKENS))
    assert sorted(rows[rows < TOKENS].tolist()) == list(range(STARTS[-1])), "each token is in one tile"


def test_the_longest_list_is_long_enough() -> None:
    """One sequence of all tokens, and one token each with empty sequences between."""
    for counts in ([17, 0, 0], [1, 1, 15], [6, 6, 5]):
        starts = jnp.cumsum(jnp.array([0, *counts]))
        tiles = work.work_list(17, jnp.array([40] * 3), starts, 4, window=None, capacity=64)
        assert int(tiles.tokens.sum()) == 17


def test_parts_cover_each_block_once() -> None:
    tiles = work.work_list(3, jnp.array([1, 37, 0]), None, 1, window=None, capacity=64)
    first, last = (np.asarray(x) for x in work.split_blocks(tiles, 8, 3))
    for row, blocks in enumerate((1, 5, 0)):
        walked = [b for part in range(3) for b in range(first[row, part], last[row, part])]
        assert walked == list(range(blocks))


def test_a_window_starts_at_its_first_block() -> None:
    tiles = work.work_list(1, jnp.array([40]), None, 1, window=10, capacity=64)
    first, last = work.split_blocks(tiles, 8, 1)
    assert (int(first[0, 0]), int(last[0, 0])) == (3, 5)


@pytest.mark.parametrize(
    ("programs", "blocks", "cores", "splits"),
    [
        (512, 128, 132, 1),  # four full rounds: nothing to gain
        (8, 2048, 132, 16),  # one long context: a part for each core
        (1, 1, 132, 1),
        (64, 16, 1, 1),
    ],
)
def test_choice_of_splits(programs: int, blocks: int, cores: int, splits: int) -> None:
    assert work.choose_splits(programs, blocks, cores) == splits


def test_joining_parts_is_attention_over_all() -> None:
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((3, 4)), rng.standard_normal((3, 4, 5))
    lse = np.log(np.exp(scores).sum(1))
    parts = np.einsum("ps,psd->pd", np.exp(scores - lse[:, None]), values)
    whole = np.exp(scores) / np.exp(scores).sum()
    # A part without keys changes nothing.
    out, joined = work.join_splits(
        jnp.asarray([*parts, np.zeros(5)], jnp.float32), jnp.asarray([*lse, -np.inf], jnp.float32), axis=0
    )
    # A dozen float32 roundings.
    np.testing.assert_allclose(out, np.einsum("ps,psd->d", whole, values), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(joined, np.log(np.exp(scores).sum()), rtol=1e-6)
    nothing = work.join_splits(jnp.zeros((2, 5)), jnp.full((2,), -jnp.inf), axis=0)
    assert not nothing[0].any()
    assert np.isneginf(nothing[1])
