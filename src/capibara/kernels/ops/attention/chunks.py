"""Attention cut into chunks of queries and keys: what the forward and backward passes in plain XLA share.

Chunks need not divide the lengths. The last one starts early enough to be whole, and what it shares with the one
before is masked out, so nothing is padded or copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.attention.masking import FAR, Window, both, columns_seen, expand_blocks, rows_seen, span
from capibara.kernels.ops.attention.rules import sizes
from capibara.kernels.pallas import prng

# One chunk of scores over the whole batch and all heads, in bytes. Larger ones leave the CPU's caches.
CHUNK_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Queries and keys of one chunk; `upcast` multiplies in float32, which a CPU does faster than in bfloat16."""

    block_q: int
    block_k: int
    upcast: bool = True

    def __post_init__(self) -> None:
        if self.block_q < 1 or self.block_k < 1:
            raise rule_error("A chunk has one query and one key or more", self, "use 512 x 512")


def default_config(call: Call) -> ChunkConfig:
    """512 x 512, halved while a chunk of scores is too large; measured on a CPU at lengths of 4k and 8k.

    With a block mask, a chunk is a block, or a few small ones, so that dead blocks cost nothing.
    """
    batch, heads = sizes(call)[:2]
    blocks = call.params["block_size"]
    if blocks is not None:
        q, k = (min(n * -(-128 // n), 1024) for n in cast(tuple[int, int], blocks))
        return ChunkConfig(q, k, call.target.platform == "cpu")
    q = k = 512
    while batch * heads * q * k * 4 > CHUNK_BYTES and q > 128:
        q, k = (q // 2, k) if q == k else (q, k // 2)
    return ChunkConfig(q, k, call.target.platform == "cpu")


def candidates(call: Call) -> list[ChunkConfig]:
    """The sizes worth timing, less those that are the same for lengths as short as this call's."""
    upcast = call.target.platform == "cpu"
    _, _, _, rows, columns, _ = sizes(call)
    chosen = default_config(call)
    distinct = {(min(chosen.block_q, rows), min(chosen.block_k, columns)): chosen}
    for q, k in ((512, 512), (256, 1024), (1024, 1024), (256, 256), (128, 128)):
        distinct.setdefault((min(q, rows), min(k, columns)), ChunkConfig(q, k, upcast))
    return list(distinct.values())


def loop(first: Any, end: Any, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """A loop over chunks; one chunk or none is no loop, which compiles in half the time."""
    if isinstance(first, int) and isinstance(end, int) and end - first <= 1:
        return body(first, start) if end > first else start
    return jax.lax.fori_loop(first, end, body, start)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of the problem: scores after bias and soft cap, and who may see whom (None: all)."""

    rows: jax.Array
    columns: jax.Array
    query: jax.Array  # [B, Hkv, G, rows, D]
    key: jax.Array  # [B, Hkv, columns, D]
    value: jax.Array
    scores: jax.Array  # [B, Hkv, G, rows, columns]
    allowed: jax.Array | None  # broadcasts against the scores
    seen_rows: jax.Array | None  # [B|1, Hkv|1, G|1, rows]: those that see anything here


class Chunked:
    """The operands and parameters of a call, with the arithmetic of its chunks."""

    def __init__(self, operands: tuple[Any, ...], params: dict[str, Any], config: ChunkConfig) -> None:
        self.q, self.k, self.v, self.bias, self.mask, self.q_segments, self.kv_segments = operands[:7]
        self.block_mask, self.seed = operands[7:9]
        self.batch, self.heads, self.rows, self.depth = self.q.shape
        self.kv_heads, self.columns = self.k.shape[1:3]
        self.groups = self.heads // self.kv_heads
        self.wide = jnp.promote_types(jnp.float32, self.q.dtype)
        self.product = self.wide if config.upcast else self.q.dtype
        self.scale = self.depth**-0.5 if params["scale"] is None else params["scale"]
        self.softcap: float | None = params["softcap"]
        self.rate: float = params["dropout_rate"]
        self.block_size: tuple[int, int] | None = params["block_size"]
        window: Window = params["window"]
        self.below, self.above = span(params["causal"], params["q_offset"], window)
        self.cq, self.ck = min(config.block_q, self.rows), min(config.block_k, self.columns)
        self.row_chunks, self.column_chunks = -(-self.rows // self.cq), -(-self.columns // self.ck)
        self.grouped = self.by_group(self.q)

    def by_group(self, x: jax.Array) -> jax.Array:
        """[B, H, ...] as [B, Hkv, G, ...]; an axis of 1 for the heads stays 1."""
        heads = (self.kv_heads, self.groups) if x.shape[1] == self.heads else (1, 1)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def key_chunks(self, row_chunk: Any) -> tuple[Any, Any]:
        """The chunks of keys (first, end) that a chunk of queries may see by position."""
        start = self._start(row_chunk, self.cq, self.rows)
        first, end = columns_seen(start, start + self.cq - 1, self.columns, self.below, self.above)
        return first // self.ck, (end + self.ck - 1) // self.ck

    def query_chunks(self, column_chunk: Any) -> tuple[Any, Any]:
        """The chunks of queries (first, end) that may see a chunk of keys by position."""
        start = self._start(column_chunk, self.ck, self.columns)
        first, end = rows_seen(start, start + self.ck - 1, self.rows, self.below, self.above)
        return first // self.cq, (end + self.cq - 1) // self.cq

    def _start(self, chunk: Any, size: int, length: int) -> Any:
        if isinstance(chunk, int):
            return min(chunk * size, length - size)
        return jnp.minimum(chunk * size, length - size)

    def row_start(self, chunk: Any) -> Any:
        return self._start(chunk, self.cq, self.rows)

    def column_start(self, chunk: Any) -> Any:
        return self._start(chunk, self.ck, self.columns)

    @property
    def skips(self) -> bool:
        """Whether data, not position alone, leaves chunks with nothing to do."""
        return self.block_mask is not None or self.q_segments is not None

    def live(self, row_chunk: Any, column_chunk: Any) -> jax.Array:
        """Whether the block mask and the segments leave anything of a chunk."""
        rows, columns = self._indices(row_chunk, column_chunk)
        allowed = self._by_data(rows, columns, with_mask=False)
        return allowed.any()  # type: ignore[union-attr]

    def _indices(self, row_chunk: Any, column_chunk: Any) -> tuple[jax.Array, jax.Array]:
        rows = self.row_start(row_chunk) + jnp.arange(self.cq)
        return rows, self.column_start(column_chunk) + jnp.arange(self.ck)

    def _by_data(self, rows: jax.Array, columns: jax.Array, *, with_mask: bool = True) -> jax.Array | None:
        """What the mask, the segments and the block mask allow, as [B|1, Hkv|1, G|1, rows, columns]."""
        allowed = None
        if self.q_segments is not None and self.kv_segments is not None:
            left = slice_of(self.q_segments, rows[0], self.cq, 1)
            right = slice_of(self.kv_segments, columns[0], self.ck, 1)
            allowed = (left[:, :, None] == right[:, None, :])[:, None, None]
        if self.block_mask is not None and self.block_size is not None:
            blocks = expand_blocks(self.block_mask, rows, columns, self.block_size)
            allowed = both(allowed, self.by_group(blocks))
        if with_mask and self.mask is not None:
            allowed = both(allowed, self.tile(self.mask, rows, columns))
        return allowed

    def tile(self, x: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        """A mask's or bias's part of a chunk, [B|1, Hkv|1, G|1, rows|1, columns]."""
        if x.shape[2] == self.rows and self.rows > 1:
            x = slice_of(x, rows[0], self.cq, 2)
        return self.by_group(slice_of(x, columns[0], self.ck, 3))

    def chunk(self, row_chunk: Any, column_chunk: Any, *, once: bool) -> Chunk:
        """The scores of one chunk; with `once`, rows that an earlier chunk has seen already are masked out."""
        rows, columns = self._indices(row_chunk, column_chunk)
        query = slice_of(self.grouped, rows[0], self.cq, 3).astype(self.product)
        key = slice_of(self.k, columns[0], self.ck, 2).astype(self.product)
        value = slice_of(self.v, columns[0], self.ck, 2).astype(self.product)

        fresh_rows = rows >= row_chunk * self.cq if once and self.rows % self.cq else None
        fresh_columns = columns >= column_chunk * self.ck if self.columns % self.ck else None
        apart = columns[None, :] - rows[:, None]
        allowed = None if self.above == FAR else apart <= self.above
        allowed = both(allowed, None if self.below == -FAR else apart >= self.below)
        allowed = both(allowed, None if fresh_rows is None else fresh_rows[:, None])
        allowed = both(allowed, None if fresh_columns is None else fresh_columns[None, :])
        by_data = self._by_data(rows, columns)
        allowed = both(allowed, by_data)
        seen_rows = None
        if allowed is not None:
            # A product with zero would keep a NaN alive: what nobody sees here is put to zero.
            allowed = allowed.reshape((1,) * (5 - allowed.ndim) + allowed.shape)
            seen_rows = allowed.any(-1)
            seen = allowed.any(-2).any(2)[..., None]
            key, value = jnp.where(seen, key, 0), jnp.where(seen, value, 0)

        scores = dot("bhgtd,bhsd->bhgts", query, key, self.wide) * self.scale
        if self.bias is not None:
            scores = scores + self.tile(self.bias, rows, columns).astype(self.wide)
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        return Chunk(rows, columns, query, key, value, scores, allowed, seen_rows)

    def kept(self, chunk: Chunk) -> jax.Array | None:
        """Which probabilities of a chunk dropout keeps; None without dropout."""
        if not self.rate:
            return None
        heads = jnp.arange(self.batch * self.heads, dtype=jnp.uint32)
        first = heads.reshape(self.batch, self.kv_heads, self.groups, 1, 1) * jnp.uint32(self.rows)
        rows = first + chunk.rows.astype(jnp.uint32)[:, None]
        return prng.keep_mask(self.seed, rows, chunk.columns.astype(jnp.uint32), self.rate)


def slice_of(x: jax.Array, start: Any, size: int, axis: int) -> jax.Array:
    return x if size == x.shape[axis] else jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def dot(spec: str, left: jax.Array, right: jax.Array, wide: Any) -> jax.Array:
    return jnp.einsum(spec, left, right, preferred_element_type=wide)
