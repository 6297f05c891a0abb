"""The work list of a ragged batch: tiles of tokens that share a sequence, their keys, and the parts these are cut into.

Every implementation walks the same list. It is made on the device from the starts and the lengths, so that one
compiled program serves every mixture of prompts and single tokens of the same shapes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from capibara import hardware
from capibara.kernels.core.spec import Call


class Tiles(NamedTuple):
    """One entry a tile; a tile past the end of the list has no tokens and no keys."""

    sequence: jax.Array
    token: jax.Array  # its first token
    tokens: jax.Array  # how many of its rows are tokens
    position: jax.Array  # of its first token, in its sequence
    begin: jax.Array  # the keys that some token of it sees: begin <= key < end
    end: jax.Array

    def rows(self, per_tile: int, all_tokens: int) -> jax.Array:
        """Which token each row of each tile is, [tiles, per_tile]; `all_tokens` where it is none."""
        row = jnp.arange(per_tile, dtype=jnp.int32)
        return jnp.where(row < self.tokens[:, None], self.token[:, None] + row, all_tokens)


def most_tiles(tokens: int, sequences: int, per_tile: int) -> int:
    """No ragged batch of so many tokens has more tiles: each sequence wastes less than one."""
    return min(tokens, (tokens + sequences * (per_tile - 1)) // per_tile)


def work_list(
    tokens: int,
    context_lengths: jax.Array,
    query_starts: jax.Array | None,
    per_tile: int,
    *,
    window: int | None,
    capacity: int,
) -> Tiles:
    """The tiles of a batch. `capacity` is how many keys a row of the page table can name."""
    contexts = jnp.clip(context_lengths, 0, capacity)
    if query_starts is None:
        sequence = jnp.arange(tokens, dtype=jnp.int32)
        token, count, position = sequence, jnp.ones_like(sequence), contexts - 1
    else:
        starts = jnp.clip(query_starts, 0, tokens)
        counts = jnp.maximum(jnp.diff(starts), 0)
        tiles = -(-counts // per_tile)
        ends = jnp.cumsum(tiles)
        index = jnp.arange(most_tiles(tokens, contexts.shape[0], per_tile), dtype=jnp.int32)
        sequence = _found(ends, index)
        live = sequence < contexts.shape[0]
        sequence = jnp.where(live, sequence, 0)
        before = (index - (ends - tiles)[sequence]) * per_tile  # tokens of the sequence in its earlier tiles
        token = starts[sequence] + before
        count = jnp.where(live, jnp.minimum(per_tile, counts[sequence] - before), 0)
        position = contexts[sequence] - counts[sequence] + before
    end = jnp.where(count > 0, jnp.maximum(position + count, 0), 0)
    begin = jnp.zeros_like(end) if window is None else jnp.clip(position - (window - 1), 0, end)
    return Tiles(*(x.astype(jnp.int32) for x in (sequence, token, count, position, begin, end)))


def _found(ends: jax.Array, at: jax.Array) -> jax.Array:
    """Which range, by where they end, each place lies in."""
    # All against all in one pass: a search by halves is a loop of small programs.
    return jnp.searchsorted(ends, at, side="right", method="compare_all").astype(jnp.int32)


def tile_of_tokens(tokens: int, query_starts: jax.Array, per_tile: int) -> tuple[jax.Array, jax.Array]:
    """(the tile of each token, its row there), the inverse of `Tiles.rows`; a tile past the last for padding."""
    starts = jnp.clip(query_starts, 0, tokens)
    tiles = -(-jnp.maximum(jnp.diff(starts), 0) // per_tile)
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = _found(starts[1:], token)
    live = (sequence < tiles.shape[0]) & (token >= starts[0])
    sequence = jnp.where(live, sequence, 0)
    inside = token - starts[sequence]
    tile = (jnp.cumsum(tiles) - tiles)[sequence] + inside // per_tile
    return jnp.where(live, tile, most_tiles(tokens, tiles.shape[0], per_tile)), inside % per_tile


def split_blocks(tiles: Tiles, block: int, splits: int, least: int = 1) -> tuple[jax.Array, jax.Array]:
    """The blocks of `block` keys that each part of each tile walks: first and end, [tiles, splits].

    Parts have `least` blocks or more, but the last: of a tile of few blocks the later parts have none.
    """
    first, last = tiles.begin // block, -(-tiles.end // block)
    share = jnp.maximum(-(-(last - first) // splits), least)
    part = jnp.arange(splits, dtype=jnp.int32)
    start = jnp.minimum(first[:, None] + part * share[:, None], last[:, None])
    return start, jnp.minimum(start + share[:, None], last[:, None])


def cores_of(call: Call) -> int:
    """Cores that parts are spread over. XLA runs one product on all cores of a host, so there it counts as one."""
    chip = hardware.chip_for(call.target.device_kind)
    if chip is None or call.target.platform == "cpu":
        return 1
    return max(1, chip.cores_per_chip // chip.devices_per_chip)


def choose_splits(programs: int, blocks: int, cores: int, *, startup_blocks: int = 4, most: int = 128) -> int:
    """Into how many parts to cut the keys, so that every core has work and none much more than another.

    `programs` are there without a cut, each with `blocks` blocks of keys at most. A part costs its blocks and a
    start; cores take parts in rounds. The least cut among the quickest wins: a cut's results are to be joined.
    """

    def rounds(splits: int) -> int:
        return math.ceil(programs * splits / cores) * (math.ceil(blocks / splits) + startup_blocks)

    choices = range(1, max(1, min(blocks, most)) + 1)
    best = min(map(rounds, choices))
    return next(s for s in choices if rounds(s) <= 1.02 * best)


def join_splits(out: jax.Array, lse: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """One result from those of the parts along `axis` of lse; out has one axis more, the head's, at its end."""
    # Three short passes on a GPU. One reduction of both together is one pass and took longer (16 parts: 5.9 us against
    # 3.5 on an H200), and part by part it is ten.
    highest = lse.max(axis, keepdims=True)
    weight = jnp.exp(lse - jnp.where(jnp.isneginf(highest), 0, highest))
    total = weight.sum(axis, keepdims=True)
    alive = total != 0  # a NaN stays one
    share = weight / jnp.where(alive, total, 1)
    joined = jnp.where(alive, highest + jnp.log(jnp.where(alive, total, 1)), -jnp.inf)
    return (out * share[..., None]).sum(axis), joined.squeeze(axis)
