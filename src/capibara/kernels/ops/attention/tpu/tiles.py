"""Pieces that the TPU attention kernels are put together from: operands walked by a table, and what a tile may see."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from capibara.kernels.ops.attention.masking import FAR, by_position
from capibara.kernels.ops.attention.tpu.blocks import LANES, Rules, round_up
from capibara.kernels.pallas import prng


class Operands:
    """The blocked inputs of one kernel, by name and in order.

    `walk` turns the grid's coordinates and the prefetched table into (batch, head, query block, key block). With
    `length_minor` heads lie as [depth, length].
    """

    def __init__(
        self,
        walk: Callable[..., tuple[Any, Any, Any, Any]],
        rules: Rules,
        blocks: tuple[int, int],
        length_minor: bool = False,
    ) -> None:
        self.walk = walk
        self.rules = rules
        self.blocks = blocks
        self.length_minor = length_minor
        self.arrays: dict[str, Any] = {}
        self.specs: list[pl.BlockSpec] = []

    def spec(self, block: tuple[Any, ...], pick: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        """A block chosen by (batch, head, query block, key block)."""
        return pl.BlockSpec(block, lambda *at: pick(*self.walk(*at)))

    def of_heads(self, length: int, pick: Callable[..., tuple[Any, Any, Any]]) -> pl.BlockSpec:
        """A block of `length` positions of one head; `pick` gives (batch, head, block)."""
        return head_block(length, self.rules.depth, self.length_minor, lambda *at: pick(*self.walk(*at)))

    @property
    def by_query(self) -> pl.BlockSpec:
        return self.of_heads(self.blocks[0], lambda b, h, i, j: (b, h, i))

    @property
    def by_key(self) -> pl.BlockSpec:
        groups = self.rules.groups
        # lax.div: floor division of traced integers takes signs that a head does not have.
        return self.of_heads(self.blocks[1], lambda b, h, i, j: (b, jax.lax.div(h, groups), j))

    @property
    def query_row(self) -> pl.BlockSpec:
        """One number a query, as [B, H, 1, T]."""
        return self.spec((None, None, 1, self.blocks[0]), lambda b, h, i, j: (b, h, 0, i))

    def add_heads(self, name: str, x: jax.Array, spec: pl.BlockSpec) -> None:
        self.add(name, turned(x, self.length_minor), spec)

    def add(self, name: str, x: jax.Array, spec: pl.BlockSpec) -> None:
        self.arrays[name] = x
        self.specs.append(spec)

    def add_pairs(self, name: str, x: jax.Array) -> None:
        """An operand [B|1, H|1, T|1, S]: an axis of one is not walked."""
        shared = tuple(n == 1 for n in x.shape[:3])

        def pick(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
            return *(0 if once else at for once, at in zip(shared, (b, h, i), strict=True)), j

        self.add(name, x, self.spec((None, None, 1 if shared[2] else self.blocks[0], self.blocks[1]), pick))

    def add_bias(self, bias: jax.Array | None) -> None:
        if bias is not None:
            # One row is not worth packing.
            self.add_pairs("bias", bias.astype(jnp.float32) if bias.shape[2] == 1 else bias)

    def add_masks(self, mask: Any, q_segments: Any, kv_segments: Any, visible: Any) -> None:
        if mask is not None:
            # One row is not worth packing; a whole mask is, and four to a word is how bytes lie in VMEM.
            self.add_pairs("mask", mask.astype(jnp.int32 if mask.shape[2] == 1 else jnp.int8))
        if q_segments is not None:
            rows = self.spec((None, None, 1, self.blocks[0]), lambda b, h, i, j: (b, 0, 0, i))
            self.add("q_segments", q_segments[:, None, None, :], rows)
            self.add_pairs("kv_segments", kv_segments[:, None, None, :])
        if visible is not None:
            self.add_pairs("visible", visible)


def turned(x: Any, length_minor: bool) -> Any:
    """Heads [B, H, T, D] as the kernel reads them, and what it wrote as [B, H, T, D] again."""
    return x.swapaxes(2, 3) if length_minor else x


def head_block(length: int, depth: int, length_minor: bool, pick: Callable[..., tuple[Any, Any, Any]]) -> pl.BlockSpec:
    """A block of one head of [B, H, T, D] or [B, H, D, T]; `pick` makes (batch, head, block) of the grid's place."""
    if not length_minor:
        return pl.BlockSpec((None, None, length, depth), lambda *at: (*pick(*at), 0))

    def turned_pick(*at: Any) -> tuple[Any, Any, Any, Any]:
        batch, head, block = pick(*at)
        return batch, head, 0, block

    return pl.BlockSpec((None, None, depth, length), turned_pick)


def as_columns(x: jax.Array, refs: dict[str, Any], length_minor: bool) -> jax.Array:
    """A block of a head as [depth, n], whichever way it came."""
    return x if length_minor else transposed(x, refs.get("pad"))


def transposed(x: jax.Array, pad: Any) -> jax.Array:
    """x [n, depth] as [depth, n]; a depth that does not fill its lanes goes through the padded buffer `pad`."""
    rows, depth = x.shape
    if depth % LANES == 0:
        return x.T
    pad[:rows, :depth] = x
    return pad[:rows, :].T[:depth]


def transposed_back(x: jax.Array, wide: Any) -> jax.Array:
    """x [depth, n] as [n, depth], likewise through `wide`."""
    depth = x.shape[0]
    if depth % LANES == 0:
        return x.T
    wide[:depth, :] = x
    return wide[...].T[:, :depth]


def only_seen(rules: Rules, block: int, visible: Any, key_block: Any, x: jax.Array) -> jax.Array:
    """x [depth, keys] with the keys that nothing sees put to zero: what memory holds there may be NaN."""
    first, end = rules.seen
    seen = []
    if first > 0 or end < round_up(rules.columns, block):
        place = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) + key_block * block
        seen.append((place >= first) & (place < end))
    if visible is not None:
        seen.append(jnp.broadcast_to(visible[...], x.shape) != 0)
    for rule in seen:  # in float32: a select between packed halves would need its mask packed as well
        x = jnp.where(rule, x.astype(jnp.float32), 0.0).astype(x.dtype)
    return x


def piece(most: int, block: int, chunk: int) -> int:
    """The largest multiple of the chunk that is at most `most` and the block, and at least a chunk."""
    return max(min(most, block) // chunk, 1) * chunk


def tile_is_dead(rules: Rules, row: Any, column: Any, rows: int, columns: int) -> Any:
    """Whether no pair of a tile at (row, column) may see each other by position (a traced scalar, or False)."""
    dead = column >= rules.columns
    if rules.above != FAR:
        dead = dead | (column - (row + rows - 1) > rules.above)
    if rules.below != -FAR:
        dead = dead | (column + columns - 1 - row < rules.below)
    return dead


def pairs_by_position(rules: Rules, row: Any, column: Any, shape: tuple[int, int], tails: tuple[bool, bool]) -> Any:
    """Which pairs of a tile [keys, queries] are inside the operands and the band; None where every pair is.

    `tails` says whether the last block of queries, and of keys, reaches past its operand. The offsets inside a tile
    are constants, so a tile's place enters as one scalar in each comparison.
    """
    keys = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    queries = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    inside = [queries < rules.rows - row] if tails[0] else []
    if tails[1]:
        inside.append(keys < rules.columns - column)
    if rules.above != FAR:
        inside.append(keys - queries <= rules.above + row - column)
    if rules.below != -FAR:
        inside.append(keys - queries >= rules.below + row - column)
    return functools.reduce(jnp.logical_and, inside) if inside else None


def pairs_allowed(
    rules: Rules,
    refs: dict[str, Any],
    at: tuple[Any, Any],
    starts: tuple[int, int],
    shape: tuple[int, int],
    tails: tuple[bool, bool],
) -> list[jax.Array]:
    """Every rule on a tile [keys, queries] of a masked block, each as a boolean tile.

    `at` is the tile's first query and key in the operands, `starts` in the block.
    """
    queries, keys = pl.ds(starts[0], shape[1]), pl.ds(starts[1], shape[0])
    placed = pairs_by_position(rules, at[0], at[1], shape, tails)
    allowed = [] if placed is None else [placed]
    if "q_segments" in refs:
        of_keys = jnp.broadcast_to(refs["kv_segments"][:, keys], shape[::-1]).T
        allowed.append(of_keys == refs["q_segments"][:, queries])
    if "mask" in refs:
        mask = refs["mask"][queries if refs["mask"].shape[0] > 1 else slice(None), keys].astype(jnp.int32)
        allowed.append(jnp.broadcast_to(mask, shape[::-1]).T != 0)
    return allowed


def bias_tile(refs: dict[str, Any], starts: tuple[int, int], shape: tuple[int, int]) -> jax.Array:
    """The bias of a tile [keys, queries] that starts at (query, key) of the block, in float32."""
    queries, keys = pl.ds(starts[0], shape[1]), pl.ds(starts[1], shape[0])
    bias = refs["bias"][queries if refs["bias"].shape[0] > 1 else slice(None), keys].astype(jnp.float32)
    return jnp.broadcast_to(bias, shape[::-1]).T


def keep_pairs(rules: Rules, seed: Any, head: Any, row: Any, column: Any, shape: tuple[int, int]) -> jax.Array:
    """Which pairs of a tile [keys, queries] dropout keeps; `head` counts heads over the whole batch."""
    keys = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + column
    rows = jax.lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1) + (head * rules.rows + row)
    return prng.keep_mask((seed[0], seed[1]), rows, keys, rules.dropout_rate)


def visible_keys(q: jax.Array, k: jax.Array, mask: Any, segments: tuple[Any, Any], params: Any) -> jax.Array | None:
    """[B|1, H|1, 1, S]: whether some query may see the key, where operands decide it; None where position does."""
    seen = None
    if mask is not None:
        allowed = mask
        near = _by_position(q.shape[2], k.shape[2], params)
        if near is not None and mask.shape[2] > 1:
            allowed = mask & near
        seen = allowed.any(2, keepdims=True)
    if segments[0] is not None:
        # Sorted membership: comparing every pair would cost as much as a head of the attention itself.
        met = jax.vmap(lambda own, others: jnp.isin(own, others, method="sort"))(segments[1], segments[0])
        met = met[:, None, None, :]
        seen = met if seen is None else seen & met
    return None if seen is None else seen.astype(jnp.int32)


def _by_position(rows: int, columns: int, params: Any) -> jax.Array | None:
    i, j = jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]
    return by_position(i, j, params["causal"], params["q_offset"], params["window"])
