"""Blocks of the TPU attention kernels: sizes and which of them fit, the rules of a call, and the table of live blocks.

The grid of a kernel walks a prefetched table: for each block of the outer axis the live blocks of the inner one,
each with its kind. Dead blocks are not in the table, so they cost neither a copy nor a step; blocks that every rule
leaves whole are computed without any mask. Steps past the end of a row of the table name the block before them again,
which starts no copy, and do nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.context import matmul_precision
from capibara.kernels.core.spec import Call
from capibara.kernels.ops.attention.masking import FAR, span
from capibara.kernels.pallas import vmem

LANES = 128
LOG2_E = math.log2(math.e)
# Where a masked score is put, and where the running maximum starts. The floor lies above the mask, so a row that has
# seen no key yet adds exp2(MASKED - FLOOR) = 0 and needs no select of its own; no true score comes near either.
MASKED, FLOOR = -3e38, -1e30
DEAD, WHOLE, PARTIAL = 0, 1, 2
# The tables live in a core's scalar memory (1 MiB on v4), beside the compiler's own.
TABLE_BYTES = 256 * 1024
# Fixed cost of one grid step (DMA issue, semaphores): only to order candidates before any measurement.
STEP_SECONDS = 0.35e-6


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
        block_q, chunk_q = _cut(self.block_q, self.chunk_q, rows)
        block_k, chunk_k = _cut(self.block_k, self.chunk_k, columns)
        return dataclasses.replace(self, block_q=block_q, block_k=block_k, chunk_q=chunk_q, chunk_k=chunk_k)


def _cut(block: int, chunk: int, length: int) -> tuple[int, int]:
    block = min(block, round_up(length))
    return block, math.gcd(chunk, block)


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


AnyConfig = TypeVar("AnyConfig", bound=FlashConfig)
Buffers = dict[str, tuple[tuple[int, ...], Any]]
"""A kernel's scratch in VMEM, shape and type by name: what is allocated is what is counted."""


def tile_bytes(rows: int, columns: int, dtype: Any) -> int:
    """Bytes of a VMEM buffer: rows to a whole packed tile, columns to whole lanes."""
    size = np.dtype(dtype).itemsize
    return round_up(rows, 8 * (4 // size)) * round_up(columns) * size


def scratch_bytes(buffers: Buffers) -> int:
    return sum(math.prod(shape[:-2]) * tile_bytes(shape[-2], shape[-1], dtype) for shape, dtype in buffers.values())


def head_bytes(config: FlashConfig, depth: int, length: int, dtype: Any) -> int:
    """Bytes of a block of one head, as the config has it lie."""
    return tile_bytes(depth, length, dtype) if config.length_minor else tile_bytes(length, depth, dtype)


def orders(call: Call) -> tuple[bool, ...]:
    """`length_minor` of the orders that the call's heads may be read in, XLA's own layout first."""
    q, k = call.need("q"), call.need("k")
    depth, packed = q.shape[3], 32 // np.dtype(q.dtype).itemsize
    # A head_dim that fills the lanes lies along them; one that is no whole number of packed rows is never turned.
    if depth % LANES == 0 or depth % packed:
        return (False,)
    lengths = (q.shape[2], k.shape[2])
    turned = sum(tile_bytes(depth, n, q.dtype) for n in lengths) < sum(tile_bytes(n, depth, q.dtype) for n in lengths)
    return (turned, not turned)


def table_bytes(call: Call, config: FlashConfig) -> int:
    """Scalar memory of the longer of the two tables: by query block and by key block."""
    q, mask = call.need("q"), call["block_mask"]
    rows, columns = -(-q.shape[2] // config.block_q), -(-call.need("k").shape[2] // config.block_k)
    if rows * columns > 2**22:  # more blocks than are worth looking at, or than a table of them would hold
        return 4 * rows * columns
    kinds = block_kinds(rules_of(q, call.need("k"), call.params), config.block_q, config.block_k)
    batch = max(1 if mask is None else mask.shape[0], 1 if call["q_segments"] is None else q.shape[0])
    tables = batch * (1 if mask is None else mask.shape[1])
    if call["bias"] is not None and "d_out" in call.op.operands:
        return 4 * tables * rows * columns  # the gradient of the bias walks every block
    return 4 * tables * max(rows * most_live(kinds), columns * most_live(kinds.T))


def divides_mask_blocks(call: Call, config: FlashConfig) -> bool:
    """Whether every block of the grid lies inside one block of the caller's block mask (True without one)."""
    if call["block_mask"] is None:
        return True
    size: Any = call.params["block_size"]
    rows, columns = call.need("q").shape[2], call.need("k").shape[2]
    # A mask block that holds the whole operand is divided by any block.
    inside_rows = size[0] >= rows or size[0] % config.block_q == 0
    return inside_rows and (size[1] >= columns or size[1] % config.block_k == 0)


def refuses(call: Call) -> str | None:
    """What neither the forward nor the backward kernels take."""
    q, k, v = (call.need(name) for name in "qkv")
    if not q.dtype == k.dtype == v.dtype:
        return f"its operands have one type; these are {q.dtype}, {k.dtype} and {v.dtype}"
    if np.dtype(q.dtype).name not in ("bfloat16", "float32"):
        return f"the v4 matrix units take bfloat16 and float32, not {q.dtype}"
    if 0 in q.shape or 0 in k.shape:
        return "an operand is empty"
    if not 8 <= q.shape[3] <= 256:
        return f"it takes a head_dim from 8 to 256, not {q.shape[3]}"
    if v.shape[3] != q.shape[3]:
        return f"queries and values have one head_dim; these are {q.shape[3]} and {v.shape[3]}"
    asked = matmul_precision()
    if q.dtype == jnp.float32 and asked in ("high", "tensorfloat32", "bfloat16_3x"):
        return f"Mosaic has no {asked!r} precision between one pass and the full six"
    for name in ("bias", "mask"):
        extra = call[name]
        if extra is not None and extra.shape[3] != k.shape[2]:
            return f"its {name} names every key; this one has {extra.shape[3]} for {k.shape[2]} keys"
    bias = call["bias"]
    if bias is not None and np.dtype(bias.dtype).name not in ("bfloat16", "float32"):
        return f"its bias is bfloat16 or float32, not {bias.dtype}"
    if call.params["dropout_rate"] and call["dropout_seed"] is None:
        return "dropout needs a seed"
    size: Any = call.params["block_size"]
    if call["block_mask"] is not None:
        short = [s for s, n in zip(size, (q.shape[2], k.shape[2]), strict=True) if s % LANES and s < n]
        if short:
            return f"blocks of its block mask are multiples of {LANES}; these are {size[0]} by {size[1]}"
    return None


def fitting(call: Call, like: AnyConfig, vmem_bytes: Callable[[Call, FlashConfig], int]) -> Iterator[AnyConfig]:
    """Every distinct block that fits VMEM and the caller's block mask; the rest as in `like`."""
    rows, columns = call.need("q").shape[2], call.need("k").shape[2]
    limit = vmem.limit(call)
    tried: set[tuple[int, ...]] = set()
    for bq, bk in itertools.product((128, 256, 512, 1024, 2048), repeat=2):
        for cq, ck in itertools.product((128, 256, 512), (128, 256, 512, 1024)):
            if cq * ck > 512 * 512:
                continue
            (block_q, chunk_q), (block_k, chunk_k) = _cut(bq, min(bq, cq), rows), _cut(bk, min(bk, ck), columns)
            if (block_q, block_k, chunk_q, chunk_k) in tried:  # most are, for short lengths
                continue
            tried.add((block_q, block_k, chunk_q, chunk_k))
            config = dataclasses.replace(like, block_q=block_q, block_k=block_k, chunk_q=chunk_q, chunk_k=chunk_k)
            fits = vmem_bytes(call, config) <= limit and table_bytes(call, config) <= TABLE_BYTES
            if fits and divides_mask_blocks(call, config):
                yield config


def candidates(call: Call, like: AnyConfig, vmem_bytes: Callable[[Call, FlashConfig], int]) -> list[AnyConfig]:
    """Those that fit, best predicted first."""
    return sorted(fitting(call, like, vmem_bytes), key=functools.partial(_predicted_seconds, call))


def _predicted_seconds(call: Call, config: FlashConfig) -> float:
    """An ordering, not a measurement: matrix work of the live blocks, the vector work around it, a fee a step."""
    rules = rules_of(call.need("q"), call.need("k"), call.params)
    kinds = block_kinds(rules, config.block_q, config.block_k)
    whole, partial = int((kinds == WHOLE).sum()), int((kinds == PARTIAL).sum())
    pairs = config.block_q * config.block_k
    depth = round_up(rules.depth)
    # Cycles of one core: 65,536 multiply-adds each; seven vector operations a register of scores, two at a time.
    matrix, vector = 2 * pairs * depth / 65536, 7 * pairs / 1024 / 2
    # A strip's output is read, shrunk and written once a chunk; short strips leave the matrix units waiting.
    strips = (config.block_q // config.chunk_q) * (config.block_k // config.chunk_k)
    vector += 3 * strips * depth * config.chunk_q / 1024 + 100 * strips * 256 / config.chunk_q
    spilled = max(config.chunk_q * config.chunk_k / 1024 - 128, 0) * strips
    vector += depth * config.block_k / 1024 * 4  # the values' transpose
    step = max(matrix, vector) + 0.3 * min(matrix, vector) + spilled
    batch = call.need("q").shape[0] * rules.heads
    return batch * ((whole + 1.2 * partial) * step / 1.05e9 + (whole + partial) * STEP_SECONDS)
