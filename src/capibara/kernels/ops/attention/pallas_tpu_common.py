"""What the TPU attention kernels share: block sizes, the static rules of a call, and the table of live blocks.

The grid of a kernel walks a prefetched table: for each block of the outer axis the live blocks of the inner one,
each with its kind. Dead blocks are not in the table, so they cost neither a copy nor a step; blocks that every rule
leaves whole are computed without any mask. Steps past the end of a row of the table name the block before them again,
which starts no copy, and do nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.context import matmul_precision
from capibara.kernels.ops.attention.masking import FAR, span

LANES = 128
LOG2_E = math.log2(math.e)
# Where a masked score is put, and where the running maximum starts. The floor lies above the mask, so a row that has
# seen no key yet adds exp2(MASKED - FLOOR) = 0 and needs no select of its own; no true score comes near either.
MASKED, FLOOR = -3e38, -1e30
DEAD, WHOLE, PARTIAL = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class FlashConfig:
    """Block sizes of the grid, and of the pieces that a block is worked through in.

    Attributes:
      block_q, block_k: queries and keys of one grid step.
      chunk_q, chunk_k: queries and keys of one score tile; smaller ones stay in registers, larger ones give the
        matrix units longer runs.
      length_minor: heads are read and written as [head_dim, length], with the length along the lanes: how XLA lays
        out a head_dim that does not fill them, so that nothing is copied around the kernel.
    """

    block_q: int = 1024
    block_k: int = 512
    chunk_q: int = 256
    chunk_k: int = 512
    length_minor: bool = False

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k", "chunk_q", "chunk_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0 or value % LANES:
                raise rule_error(f"{name} is a positive multiple of {LANES}", value, "use 256, 512 or 1024")
        for block, chunk in (("block_q", "chunk_q"), ("block_k", "chunk_k")):
            if getattr(self, block) % getattr(self, chunk):
                raise rule_error(f"{chunk} divides {block}", self, f"make {block} a multiple of {chunk}")

    def fit(self, rows: int, columns: int) -> Self:
        """The blocks cut to operands that are shorter than a block, kept multiples of a lane tile."""
        block_q, block_k = min(self.block_q, round_up(rows)), min(self.block_k, round_up(columns))
        chunk_q, chunk_k = math.gcd(self.chunk_q, block_q), math.gcd(self.chunk_k, block_k)
        return dataclasses.replace(self, block_q=block_q, block_k=block_k, chunk_q=chunk_q, chunk_k=chunk_k)


def round_up(n: int, to: int = LANES) -> int:
    return -(-n // to) * to


def matrix_precision(dtype: Any) -> jax.lax.Precision | None:
    """float32 operands take one bfloat16 pass, or six where jax's default precision asks for them."""
    if jnp.dtype(dtype) != jnp.float32:
        return None
    asked = matmul_precision()
    return jax.lax.Precision.HIGHEST if asked in ("highest", "float32") else jax.lax.Precision.DEFAULT


@dataclasses.dataclass(frozen=True)
class Rules:
    """Everything static that a kernel body knows of a call."""

    rows: int
    columns: int
    heads: int
    groups: int  # query heads of one key head
    depth: int
    below: int  # row i sees columns i + below to i + above
    above: int
    scale: float
    softcap: float | None
    dropout_rate: float
    precision: jax.lax.Precision | None

    @property
    def shapes_by_position(self) -> bool:
        return self.below != -FAR or self.above != FAR

    @property
    def seen(self) -> tuple[int, int]:
        """The columns (first, end) that some row may see by position."""
        first = 0 if self.below == -FAR else min(max(self.below, 0), self.columns)
        end = self.columns if self.above == FAR else min(max(self.rows + self.above, 0), self.columns)
        return first, max(first, end)

    @property
    def seeing(self) -> tuple[int, int]:
        """The rows (first, end) that may see some column by position."""
        first = 0 if self.above == FAR else min(max(-self.above, 0), self.rows)
        end = self.rows if self.below == -FAR else min(max(self.columns - self.below, 0), self.rows)
        return first, max(first, end)

    @property
    def log2_scale(self) -> float:
        """What turns the raw product into an exponent of two."""
        return self.scale * LOG2_E


def rules_of(q: Any, k: Any, params: Mapping[str, Any]) -> Rules:
    _, heads, rows, depth = q.shape
    below, above = span(params["causal"], params["q_offset"], params["window"])
    scale = params["scale"]
    return Rules(
        rows, k.shape[2], heads, heads // k.shape[1], depth, below, above,
        depth**-0.5 if scale is None else float(scale), params["softcap"], float(params["dropout_rate"]),
        matrix_precision(q.dtype),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def block_kinds(rules: Rules, block_q: int, block_k: int, *, ragged_rows: bool = False) -> np.ndarray:
    """DEAD, WHOLE or PARTIAL for each block of queries and keys, by position and by the end of the operands.

    A block that reaches past the last key is PARTIAL; with `ragged_rows` one that reaches past the last query too,
    which matters where queries are summed over.
    """
    rows, columns = np.arange(-(-rules.rows // block_q)), np.arange(-(-rules.columns // block_k))
    return np.asarray(_kind(rules, (block_q, block_k), rows[:, None], columns[None, :], ragged_rows, False, np))


def _kind(
    rules: Rules, blocks: tuple[int, int], row: Any, column: Any, ragged_rows: bool, masked: bool, xp: Any
) -> Any:
    """The kind of the blocks at these block coordinates; `masked` says that an operand rules single pairs out."""
    first_row, first_column = row * blocks[0], column * blocks[1]
    last_row = xp.minimum(first_row + blocks[0], rules.rows) - 1
    last_column = xp.minimum(first_column + blocks[1], rules.columns) - 1
    # The smallest and largest column - row inside the block, against the band that may be seen.
    least, most = first_column - last_row, last_column - first_row
    dead = (least > rules.above) | (most < rules.below)
    whole = (most <= rules.above) & (least >= rules.below) & (first_column + blocks[1] <= rules.columns)
    if ragged_rows:
        whole = whole & (first_row + blocks[0] <= rules.rows)
    return xp.where(dead, DEAD, PARTIAL if masked else xp.where(whole, WHOLE, PARTIAL)).astype(xp.int32)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks a kernel walks: for each one of the outer axis, the live ones of the inner.

    Attributes:
      by_key: the outer axis is the keys'; else the queries'.
      masked: an operand rules single pairs out, so no block is whole.
      ragged_rows: a block that reaches past the last query has to be masked.
    """

    rules: Rules
    sizes: tuple[int, int]
    by_key: bool = False
    masked: bool = False
    ragged_rows: bool = False

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks of queries, and of keys."""
        return -(-self.rules.rows // self.sizes[0]), -(-self.rules.columns // self.sizes[1])

    @property
    def outer(self) -> int:
        return self.counts[1 if self.by_key else 0]

    @property
    def kinds(self) -> np.ndarray:
        return block_kinds(self.rules, *self.sizes, ragged_rows=self.ragged_rows)

    @property
    def steps(self) -> int:
        return most_live(self.kinds.T if self.by_key else self.kinds)

    def has(self, kind: int) -> bool:
        """Whether position alone gives some block this kind."""
        return bool((self.kinds == kind).any())

    def banded_table(self, xp: Any = jnp) -> Any:
        """The table by position alone, where an outer block's live blocks are one run: [outer * steps].

        Made of arithmetic on counters only: an array made on the host would be a constant of the traced function,
        which custom_partitioning does not take.
        """
        rules, (bq, bk) = self.rules, self.sizes
        outer, step = xp.arange(self.outer)[:, None], xp.arange(self.steps)[None, :]
        if self.by_key:
            start, end = outer * bk, xp.minimum(outer * bk + bk, rules.columns) - 1
            first, last = (start - rules.above) // bq, (end - rules.below) // bq
        else:
            start, end = outer * bq, xp.minimum(outer * bq + bq, rules.rows) - 1
            first, last = (start + rules.below) // bk, (end + rules.above) // bk
        most = self.counts[0 if self.by_key else 1] - 1
        first, last = xp.clip(first, 0, most), xp.clip(last, 0, most)
        inner = xp.minimum(first + step, last)
        row, column = (inner, outer) if self.by_key else (outer, inner)
        kind = _kind(rules, self.sizes, row, column, self.ragged_rows, self.masked, xp)
        kind = xp.where(first + step <= last, kind, DEAD)
        return (inner * 4 + kind).astype(xp.int32).reshape(-1)

    def table(
        self, block_mask: jax.Array | None, block_size: Any, q_segments: jax.Array | None, kv_segments: jax.Array | None
    ) -> tuple[jax.Array, tuple[int, int]]:
        """The table with what the operands say, and its leading shape [B|1, H|1].

        Blocks that the caller's block mask kills are dead, and so are blocks of two packed sequences that do not meet.
        """
        if block_mask is None and q_segments is None:
            return self.banded_table(), (1, 1)
        kinds = self.refined(block_mask, block_size, q_segments, kv_segments)
        if self.by_key:
            kinds = kinds.swapaxes(2, 3)
        return live_table(kinds, self.steps), (kinds.shape[0], kinds.shape[1])

    def refined(
        self, block_mask: jax.Array | None, block_size: Any, q_segments: jax.Array | None, kv_segments: jax.Array | None
    ) -> jax.Array:
        """The kinds [B|1, H|1, query blocks, key blocks] with what the operands say."""
        rows, columns = (jnp.arange(count) for count in self.counts)
        kinds = _kind(self.rules, self.sizes, rows[:, None], columns, self.ragged_rows, self.masked, jnp)[None, None]
        if q_segments is not None and kv_segments is not None:
            q_low, q_high = (x[:, None, :, None] for x in _block_range(q_segments, self.sizes[0]))
            kv_low, kv_high = (x[:, None, None, :] for x in _block_range(kv_segments, self.sizes[1]))
            apart = (q_low > kv_high) | (kv_low > q_high)
            same = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
            kinds = jnp.where(apart, DEAD, jnp.where(same | (kinds == DEAD), kinds, PARTIAL))
        if block_mask is not None:
            at = rows * self.sizes[0] // block_size[0], columns * self.sizes[1] // block_size[1]
            alive = jnp.take(jnp.take(block_mask, at[0], axis=2), at[1], axis=3)
            kinds = jnp.where(alive, kinds, DEAD)
        return kinds


def _block_range(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest segment of each block, [B, blocks]; the last block may be short."""
    batch, length = segments.shape
    padded = jnp.pad(segments, ((0, 0), (0, round_up(length, block) - length)), mode="edge")
    grouped = padded.reshape(batch, -1, block)
    return grouped.min(-1), grouped.max(-1)


def live_table(kinds: jax.Array, steps: int) -> jax.Array:
    """The live blocks of each row, in order, as `index * 4 + kind`, flat for the scalar memory.

    kinds is [..., rows, columns]. Past its live blocks a row names its last one again, dead.
    """
    dead = kinds == DEAD
    order = jnp.argsort(dead, axis=-1, stable=True)[..., :steps]
    kind = jnp.take_along_axis(kinds, order, axis=-1)
    count = (~dead).sum(-1, keepdims=True)
    last = jnp.take_along_axis(order, jnp.clip(count - 1, 0, steps - 1), axis=-1)
    index = jnp.where(kind == DEAD, last, order)
    return (index * 4 + kind).astype(jnp.int32).reshape(-1)


def most_live(kinds: np.ndarray) -> int:
    """The longest row of the table: the length of the grid's last axis."""
    return max(int((kinds != DEAD).sum(-1).max()), 1)


def entry(table: Any, shape: tuple[int, int], rows: int, steps: int, at: tuple[Any, ...]) -> Any:
    """The table's entry for (batch, head, row, step); `shape` says which of batch and head it was made for."""
    batch, head, row, step = at
    lead = (batch if shape[0] > 1 else 0) * shape[1] + (head if shape[1] > 1 else 0)
    return table[(lead * rows + row) * steps + step]
