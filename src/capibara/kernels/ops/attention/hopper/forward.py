"""Attention forward for Hopper's tensor cores, in Pallas (Mosaic GPU): its blocks, its launch, and the kernel.

A program computes 128 rows of queries of one head with three warpgroups. One streams blocks of keys and values by TMA
into a ring of stages. Two compute 64 rows each with the online softmax, and barriers make them take turns on the
tensor cores, so that one's softmax runs under the other's products. Only blocks that some query sees in part are
masked. A mask or bias of pairs comes by TMA too, each warpgroup's own tile one block ahead. Causal programs with the
most work start first. What a call does not ask for leaves no trace in its program: every form is a branch taken while
tracing.

Blocks that no query of the program can see are never fetched: by position they are left out of a range, by the
operands (block mask, segments, mask) out of a table (see masking). Lengths and head sizes may be any: copies end where
the arrays do (see panels).

Keys that nobody sees: what lies in them has no effect, NaN included, when position or the segments or the mask rule
them out for every query of the head, or the block mask does in whole tiles (128 queries by a block of keys). A value
that some query sees may reach, if it is NaN, other queries of the same tile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.attention.hopper.calls import (
    AHEAD_OF_CUDNN,
    BEHIND_CUDNN,
    HEADS_TOGETHER,
    LENGTH_AXIS,
    best_order,
    check_order,
    refuses,
)
from capibara.kernels.ops.attention.hopper.masking import (
    DEAD,
    LAYOUT,
    WHOLE,
    Band,
    Grid,
    Tile,
    laid_out,
    load,
    pad_to,
    pad_to_blocks,
    round_up,
    some_and_every,
    zero_unseen,
)
from capibara.kernels.ops.attention.hopper.panels import Columns, aligned, columns_of, contract, multiply
from capibara.kernels.ops.attention.hopper.walks import walk_of_tiles
from capibara.kernels.ops.attention.masking import FAR, Window, both, expand_blocks, span
from capibara.kernels.ops.attention.rules import window_of
from capibara.kernels.pallas import hopper, prng
from capibara.kernels.pallas.hopper import LOG2E, SMEM_BYTES, multiprocessors, smem_bytes, swizzled

REDUCTION_BYTES = 1024  # a row's maximum and sum stay inside a warp, so that little of it is used
MOST_REGISTERS, MOST_AHEAD = 224, 176  # of a thread's 232 for tiles; the second with two products in flight
FETCH_REGISTERS, COMPUTE_REGISTERS = 40, 232
# What a row's maximum starts from: low enough for any score, and finite, so that a row that has seen no key yet
# subtracts it without making a NaN.
LOWEST = -1e30
# A soft cap up to which no running maximum is taken: exponentials of scores between plus and minus it are within
# 2^±73, which leaves a million keys' sum of the values that they weigh, up to 2^34, its place in float32.
BOUNDING_CAP = 50.0
PAIR_TILES = ("bias_tile", "mask_tile")  # operands that have a number for each pair of query and key
COUNTS = 2  # the table's first entries: how many blocks are whole, and how many are live
UNSEEN = 1  # the entry's flag for a block with keys that no query may see
LONG = 4096  # queries
MANY_HEADS = 240  # of all sequences
MOST_KEYS_UNLIMITED = 1500  # where position limits nothing, and our kernel goes before cuDNN's
# Heads of so many columns, and operands, with which scores ahead made every call that was timed slower, on an H200 by 1
# to 5 %, and by 9 and 10 % with a mask and segments.
NARROW = 64
WITHOUT_AHEAD = ("mask", "q_segments", "bias")


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """Rows of queries a warpgroup, keys a block, and how many blocks are fetched ahead.

    With `programs` that many programs go over the tiles of queries, one after another, so that a tile's first keys are
    fetched while the one before it ends; with 0 each tile is a program of its own. `order` is that in which tiles
    start: the axis named last changes first. With `section` the heads of all batches are taken so many at a time, and
    of those the last tiles first, which with causality are the longest. With `ahead` the scores of a block are started
    right before the values of the block before it, which are added under the block's exponentials.
    """

    block_q: int = 64
    block_k: int = 128
    stages: int = 2
    take_turns: bool = True
    programs: int = 0
    order: str = HEADS_TOGETHER
    section: int = 0
    ahead: bool = False

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128):
            raise rule_error("block_q is 64 or 128", self.block_q, "use 64")
        if self.block_k % 64 or not 64 <= self.block_k <= 256:
            raise rule_error("block_k is a multiple of 64 up to 256", self.block_k, "use 128")
        if self.stages < 2:
            raise rule_error("stages is two or more", self.stages, "use 2")
        if self.programs < 0:
            raise rule_error("programs is 0 or more", self.programs, "use 0, a program for each tile")
        if self.section < 0 or (self.section and not self.programs):
            raise rule_error(
                "section is 0, or more where programs go over several tiles", self.section, "use 0, or set programs"
            )
        check_order(self.order)

    @property
    def tile(self) -> int:
        """Rows of queries a program: two warpgroups' worth."""
        return 2 * self.block_q

    def divides(self, block_size: tuple[int, int]) -> bool:
        """Whether every tile of the kernel lies inside one block of the caller's block mask."""
        return block_size[0] % self.tile == 0 and block_size[1] % self.block_k == 0

    def registers(self, head_dim: int) -> int:
        """A thread's share of the scores, the probabilities in half precision, and the output."""
        return self.block_q * (Columns(head_dim).width + self.block_k + self.block_k // 2) // 128


def scratch(
    config: HopperConfig, head: Columns, dtype: Any, pair_dtypes: Mapping[str, Any], with_lse: bool
) -> dict[str, Any]:
    """A program's shared memory; `pair_dtypes` are those of the PAIR_TILES that it has."""
    block_q, block_k, num_stages = config.block_q, config.block_k, config.stages
    copies = head.copies(dtype)
    refs: dict[str, Any] = {
        "q": head.scratch((2,), block_q, dtype),  # the output's too, if alone
        "k": head.scratch((num_stages,), block_k, dtype),
        "v": head.scratch((num_stages,), block_k, dtype),
    }
    for name, pair_dtype in pair_dtypes.items():
        transforms = swizzled(pair_dtype, pair_swizzle(block_k, pair_dtype))
        refs[name] = plgpu.SMEM((2, block_q, block_k), pair_dtype, transforms=transforms)
    refs |= {
        "q_arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=2),
        "k_arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=num_stages),
        "v_arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=num_stages),
        "k_drained": plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        "v_drained": plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
    }
    if config.programs:
        # The next tile's queries arrive while this one's output leaves.
        refs["out"] = head.scratch((2,), block_q, dtype)
    if with_lse:
        refs["lse"] = plgpu.SMEM((2, block_q), jnp.float32)
    if config.ahead:
        refs["word"] = plgpu.SMEM((1,), jnp.int32)
    if pair_dtypes:
        refs["pairs_arrived"] = plgpu.Barrier(num_arrivals=len(pair_dtypes), num_barriers=2)
    return refs


def pair_swizzle(block_k: int, dtype: Any) -> int:
    """Bytes of the swizzle of a tile whose rows have `block_k` elements."""
    return 128 if block_k * jnp.dtype(dtype).itemsize % 128 == 0 else 64


@functools.lru_cache(maxsize=4096)
def fits(config: HopperConfig, head_dim: int, dtype: Any, pair_dtypes: tuple[tuple[str, Any], ...]) -> bool:
    # With a log-sum-exp, whether the call returns one or not: tuned configs serve both.
    # Columns that come whole take as much as those that come in panels.
    refs = scratch(config, Columns(head_dim), dtype, dict(pair_dtypes), with_lse=True)
    return smem_bytes(refs, REDUCTION_BYTES) <= SMEM_BYTES and config.registers(head_dim) <= MOST_REGISTERS


def bias_tile_dtype(bias: Any) -> Any:
    """Of a bias that is streamed tile by tile, None for other ones: float64 is narrowed, one row needs no tile."""
    if bias is None or bias.shape[2] == 1:
        return None
    return jnp.dtype(jnp.float32 if bias.dtype.itemsize > 4 else bias.dtype)


def folds_mask(head_dim: int, bias: Any, masked_by_tile: bool) -> bool:
    """Whether the widest heads leave no room for a mask beside a bias in float32: it travels in the bias."""
    bias_dtype = bias_tile_dtype(bias)
    return masked_by_tile and bias_dtype == jnp.float32 and head_dim > 128


def _fits(call: Call, config: HopperConfig) -> bool:
    q, bias, mask = call.need("q"), call["bias"], call["mask"]
    size = cast("tuple[int, int] | None", call.params["block_size"])
    masked_by_tile = (mask is not None and mask.shape[2] > 1) or (size is not None and not config.divides(size))
    pair_dtypes = {"bias_tile": bias_tile_dtype(bias)} if bias_tile_dtype(bias) is not None else {}
    if masked_by_tile and not folds_mask(q.shape[-1], bias, masked_by_tile):
        pair_dtypes["mask_tile"] = jnp.dtype(jnp.int8)
    return fits(config, q.shape[-1], jnp.dtype(q.dtype), tuple(pair_dtypes.items()))


def _plain(call: Call) -> bool:
    """Whether position alone decides who sees whom, and nothing is added to the scores or drawn for them."""
    absent = ("bias", "mask", "q_segments", "block_mask")
    return not call.params["dropout_rate"] and all(call[name] is None for name in absent)


def _goes_ahead(config: HopperConfig, head_dim: int) -> bool:
    """Whether what is in flight together leaves registers for the rest. Of 192 keys, at head_dim 64, masked blocks
    spill."""
    return config.take_turns and config.stages == 2 and config.registers(head_dim) <= MOST_AHEAD


def candidates(call: Call) -> Sequence[HopperConfig]:
    """Block sizes whose tiles fit shared memory, and whose scores and outputs fit the registers."""
    keys = call.need("k").shape[2]
    configs = [
        HopperConfig(block_q, block_k, num_stages, turns, order=best_order(call.need("q").shape[-1]))
        for block_q, block_k in ((64, 128), (64, 64), (64, 192), (64, 256), (128, 64), (128, 128))
        for num_stages in (2, 3, 4)
        for turns in (True, False)
        if block_k <= max(round_up(keys, 64), 64)
    ]
    if _plain(call):
        programs = multiprocessors(call.target.device_kind)
        walks = {c: walk_of_tiles(call, c.block_q, c.block_k) | {"programs": programs} for c in configs if c.take_turns}
        configs += [dataclasses.replace(c, **walk) for c, walk in walks.items()]
    head_dim = call.need("q").shape[-1]
    configs += [dataclasses.replace(c, ahead=True) for c in configs if _goes_ahead(c, head_dim)]
    configs = [c for c in configs if _fits(call, c)]
    size = call.params["block_size"]
    # A block mask costs nothing where it is made of whole tiles; otherwise it becomes a mask of pairs.
    dividing = [c for c in configs if size is None or c.divides(cast(tuple[int, int], size))]
    return dividing or configs


def default_config(call: Call) -> HopperConfig:
    """128 keys a block, twice as many where heads are narrow and rows long, fewer where the call leaves less room."""
    rows, head_dim = call.need("q").shape[2:]
    fitting = [c for c in candidates(call) if c.block_q == 64 and c.stages == 2 and c.take_turns]
    preferred = 256 if head_dim <= 64 and rows >= LONG and _plain(call) and window_of(call) is None else 128
    block_k = max((c.block_k for c in fitting if c.block_k <= preferred), default=fitting[0].block_k)
    return for_call(next(c for c in fitting if c.block_k == block_k), call)


def for_call(config: HopperConfig, call: Call) -> HopperConfig:
    """The same tiles, in the order in which this call's are done soonest, and with scores ahead where that is sooner.

    Both together are not: on an H200 scores ahead made programs of one tile up to 8 % faster, the more the longer these
    are, and programs that go over tiles between 6 % slower and 7 % faster.
    """
    head_dim, alone = call.need("q").shape[-1], dataclasses.replace(config, programs=0, section=0, ahead=False)
    early = dataclasses.replace(alone, ahead=True)
    masked = any(call[name] is not None for name in WITHOUT_AHEAD)
    if head_dim > NARROW and not masked and _goes_ahead(early, head_dim) and _fits(call, early):
        alone = early
    if not _plain(call) or not config.take_turns:
        return alone
    walk = walk_of_tiles(call, config.block_q, config.block_k, alone.ahead)
    made = dataclasses.replace(config, **walk, ahead=False) if walk["programs"] else alone
    return made if _fits(call, made) else alone


def ahead_of(call: Call) -> tuple[str, ...]:
    """Where no table has the call, and where models of times cannot tell it from cuDNN. On an H200, cuDNN without what
    XLA fills before it where a program returns its result, it was ahead wherever position limits what is seen, by up to
    11 %; but for 512 to 1,024 queries of 240 heads and more, of all sequences together, which have keys of their own:
    there it was between 10 % behind and level. Without a limit it was ahead by 3 to 15 % up to 1,500 keys, and from
    there on behind by 1 to 4 %. Head sizes that 64 does not divide (72 to 240) were ahead by 14 to 38 % at any length;
    smaller heads than 64 were not timed."""
    q, k = call.need("q"), call.need("k")
    if q.shape[-1] < 64:
        return BEHIND_CUDNN
    if not call.params["causal"] and call.params["window"] is None:
        return AHEAD_OF_CUDNN if k.shape[2] <= MOST_KEYS_UNLIMITED or q.shape[-1] % 64 else BEHIND_CUDNN
    own_keys = q.shape[1] == k.shape[1] and call.params["window"] is None and q.shape[-1] % 64 == 0
    many = q.shape[0] * q.shape[1] >= MANY_HEADS and 512 <= q.shape[2] <= 1024
    return BEHIND_CUDNN if own_keys and many else AHEAD_OF_CUDNN


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static that the kernel knows of a call."""

    config: HopperConfig
    grid: Grid
    batch: int
    heads: int
    group: int  # query heads of one key head
    scale: float
    softcap: float | None
    bounded: bool  # by the soft cap: exponentials stay in range without a running maximum of each row
    dropout_rate: float
    heads_first: bool  # [batch, heads, length, head_dim] in memory; else the length comes before the heads
    folded: bool  # a bias of minus infinity stands for a mask

    @property
    def sizes(self) -> dict[str, int]:
        return {"batch": self.batch, "head": self.heads, "tile": self.grid.counts[0]}

    @property
    def tiles(self) -> int:
        """Tiles of queries of all heads."""
        return self.batch * self.grid.counts[0] * self.heads

    @property
    def launch(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The kernel's grid: a program for each tile, or as many as run at a time, which go over the tiles."""
        if self.config.programs:
            return (min(self.config.programs, self.tiles),), ("program",)
        names = tuple(self.config.order.split())
        return tuple(self.sizes[name] for name in names), names

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """(batch, head, tile) of the number-th tile."""

        def divided(by: int) -> tuple[Any, Any]:
            whole = lax.div(number, number * 0 + by)
            return whole, number - whole * by

        if section := self.config.section:
            tiles, pairs = self.grid.counts[0], self.batch * self.heads
            before, number = divided(section * tiles)
            first = before * section
            size = lax.min(number * 0 + section, pairs - first)  # the last section has what is left
            tile = lax.div(number, size)
            number = first + number - tile * size
            batch, head = divided(self.heads)
            return batch, head, tile
        place = {}
        for name in reversed(self.config.order.split()):
            rest = lax.div(number, number * 0 + self.sizes[name])
            place[name] = number - rest * self.sizes[name]
            number = rest
        return place["batch"], place["head"], place["tile"]

    def columns(self, head_dim: int, dtype: Any) -> Columns:
        lengths = (self.grid.rows, self.config.tile), (self.grid.band.columns, self.config.block_k)
        return columns_of(head_dim, dtype, lengths)

    def at(self, batch: Any, head: Any, rows: Any) -> tuple[Any, ...]:
        """Rows of one head in an operand that lies as the queries do."""
        return (batch, head, rows) if self.heads_first else (batch, rows, head)


def hopper_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None, mask: jax.Array | None = None,
    q_segments: jax.Array | None = None, kv_segments: jax.Array | None = None, block_mask: jax.Array | None = None,
    dropout_seed: jax.Array | None = None, *, config: HopperConfig, causal: bool = False, q_offset: int = 0,
    window: Window = None, scale: float | None = None, softcap: float | None = None, dropout_rate: float = 0.0,
    block_size: tuple[int, int] | None = None, return_lse: bool = False, physical: str = "bhtd",
) -> Any:  # fmt: skip
    """One kernel over all tiles of queries; see the module's text.

    `physical` says how the caller's arrays lie in memory. With "bthd" the kernel reads and writes [batch, length,
    heads, head_dim]; the transposes here and the caller's own cancel, so that none is ever made.
    """
    if physical not in LENGTH_AXIS:
        raise rule_error(f"physical is one of {', '.join(LENGTH_AXIS)}", repr(physical), "use 'bhtd'")
    batch, heads, rows, head_dim = q.shape
    kv_heads, columns = k.shape[1:3]
    below, above = span(causal, q_offset, window)
    grid = Grid(rows, Band(below, above, columns), config.tile, config.block_k)

    if block_mask is not None and block_size is not None and not config.divides(block_size):
        # Blocks that cut through a tile: from here on it is a mask of pairs.
        mask = both(mask, expand_blocks(block_mask, jnp.arange(rows), jnp.arange(columns), block_size))
        block_mask = None
    folded = mask is not None and folds_mask(head_dim, bias, mask.shape[2] > 1)
    if folded and mask is not None and bias is not None:  # the mask travels in the bias, as minus infinity
        bias = jnp.where(mask, bias.astype(jnp.float32), -jnp.inf)

    visible = grid.visible_keys(
        mask, q_segments, kv_segments, {"causal": causal, "q_offset": q_offset, "window": window}
    )
    operands: dict[str, jax.Array] = {}
    if any(x is not None for x in (mask, q_segments, block_mask)):
        kinds = grid.kinds(mask, q_segments, kv_segments, block_mask, block_size)
        operands["table"] = key_block_table(grid, kinds, visible)
    if visible is not None:
        operands["visible"] = pad_to_blocks(visible.astype(jnp.int32), config.block_k)
    if q_segments is not None and kv_segments is not None:
        operands["q_segments"] = pad_to_blocks(q_segments, config.tile)
        operands["kv_segments"] = pad_to_blocks(kv_segments, config.block_k)
    for name, x in (("bias", bias), ("mask", None if folded else mask)):
        if x is None:
            continue
        if name == "mask":
            x = x.astype(jnp.int8)
        elif x.dtype.itemsize > 4:
            x = x.astype(jnp.float32)  # float64 has no place in a tile of float32 scores
        if x.shape[2] == 1:  # one row for all queries
            operands[f"{name}_row"] = pad_to_blocks(x[:, :, 0], config.block_k)
        else:  # padded, where it must be, so that TMA takes it in tiles and clips at its end
            minor = pair_swizzle(config.block_k, x.dtype) // x.dtype.itemsize
            sizes = max(round_up(x.shape[2], 8), config.tile), max(round_up(x.shape[3], minor), config.block_k)
            operands[f"{name}_tile"] = pad_to(x, (0, 0, *sizes))
    if dropout_rate:
        assert dropout_seed is not None  # the op's check has seen to it
        operands["seed"] = jax.lax.bitcast_convert_type(dropout_seed, jnp.int32)

    # Transposed before padding and after cutting, so that nothing stands between the caller's transposes and these.
    q, k, v = (laid_out(x, physical) for x in (q, k, v))
    q, k, v = (pad_to(x, (0, 0, 0, aligned(head_dim, q.dtype))) for x in (q, k, v))
    outs = {"out": out_struct(q.shape, q.dtype, q)}
    if return_lse:
        # One number a row is stored without a TMA descriptor, so nothing drops what lies past the last row: the
        # array is made long enough for whole tiles and cut afterwards.
        outs["lse"] = out_struct((batch, heads, grid.counts[0] * config.tile), jnp.float32, q)
    plan = Plan(
        config=config,
        grid=grid,
        batch=batch,
        heads=heads,
        group=heads // kv_heads,
        scale=head_dim**-0.5 if scale is None else float(scale),
        softcap=softcap,
        bounded=softcap is not None and softcap <= BOUNDING_CAP and q.dtype == jnp.bfloat16,
        dropout_rate=dropout_rate,
        heads_first=physical == "bhtd",
        folded=folded,
    )
    launch, axes = plan.launch
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan, names=("q", "k", "v", *operands, *outs)),
        out_type=list(outs.values()),
        grid=launch,
        grid_names=axes,
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=REDUCTION_BYTES,
            # Every store to shared memory is followed by commit_smem, which waits for all threads by itself.
            unsafe_no_auto_barriers=True,
        ),
    )
    out, *lse = kernel(*vary_alike((q, k, v, *operands.values())))
    out = laid_out(out[..., :head_dim], physical)
    return (out, lse[0][:, :, :rows]) if return_lse else out


def key_block_table(grid: Grid, kinds: jax.Array, visible: Any) -> jax.Array:
    """The live blocks of each tile of queries, int32 [B|1, H|1, tiles, COUNTS + blocks + 1].

    First the counts, then `block * 2 + flag` for each live block. One entry more than blocks: the kernel reads one
    ahead. `visible` [B|1, H|1, keys] is what flags the blocks with unseen keys.
    """
    order = jnp.argsort(kinds, axis=-1, stable=True)
    entries = order * 2
    if visible is not None:
        _, every = some_and_every(visible[:, :, None], (1, grid.block_k))
        flags = jnp.broadcast_to((~every).astype(order.dtype), jnp.broadcast_shapes(every.shape, order.shape))
        order = jnp.broadcast_to(order, flags.shape)
        entries = order * 2 + jnp.take_along_axis(flags, order, axis=-1) * UNSEEN
        kinds = jnp.broadcast_to(kinds, flags.shape)
    counts = [(kinds == WHOLE).sum(-1, keepdims=True), (kinds != DEAD).sum(-1, keepdims=True)]
    return jnp.concatenate([*counts, entries, jnp.zeros_like(counts[0])], axis=-1).astype(jnp.int32)


# From here on: the kernel.


def _kernel(*args: Any, plan: Plan, names: tuple[str, ...]) -> None:
    """Set up shared memory and barriers, then run the three warpgroups."""
    refs = dict(zip(names, args, strict=True))
    q = refs["q"]
    pair_dtypes = {name: refs[name].dtype for name in PAIR_TILES if name in refs}
    head = plan.columns(q.shape[-1], q.dtype)
    specs = scratch(plan.config, head, q.dtype, pair_dtypes, "lse" in refs)

    def run_warpgroups(*allocated: Any) -> None:
        smem = dict(zip(specs, allocated, strict=True))
        smem |= {name: head.tiles(smem[name]) for name in ("q", "k", "v", "out") if name in smem}
        smem.setdefault("out", smem["q"])
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            _for_each_tile(plan, lambda turn, fetched: _fetch(plan, refs, smem, Walk(plan, refs, turn.place, fetched)))

        @pl.when(warpgroup < 2)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            compute = functools.partial(_compute, plan, refs, smem, warpgroup)
            _for_each_tile(plan, lambda turn, fetched: compute(turn, Walk(plan, refs, turn.place, fetched)))
            plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(run_warpgroups, *specs.values(), collective_axes="warpgroup")


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A tile of the program's: whether it is the first, and what follows. All None: it is known to be the only one."""

    place: tuple[Any, Any, Any]
    is_first: Any = None
    is_last: Any = None
    next_place: tuple[Any, Any, Any] | None = None


def _for_each_tile(plan: Plan, body: Callable[[_Turn, Any], Any]) -> None:
    """body(turn, fetched) for every tile of this program; it returns how many blocks were fetched with its own."""
    if not plan.config.programs:
        batch, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        body(_Turn((batch, head, tile)), 0)
        return
    program = lax.axis_index("program")
    (programs,), _ = plan.launch
    zero = program * 0
    count = lax.div(zero + (plan.tiles + programs - 1) - program, zero + programs)

    def one_tile(number: Any, fetched: Any) -> Any:
        place = plan.place(program + number * programs)
        # Of the last tile nothing follows; its own place stands in.
        next_place = plan.place(program + lax.min(number + 1, count - 1) * programs)
        return body(_Turn(place, number == 0, number + 1 == count, next_place), fetched)

    lax.fori_loop(zero, count, one_tile, zero)


class Walk:
    """A tile's place, and the blocks of keys it goes through: steps `begin` to `end` of a range, or of a table.

    `fetched` counts the blocks that the program has fetched for the tiles before this one.
    """

    def __init__(self, plan: Plan, refs: dict[str, Any], place: tuple[Any, Any, Any], fetched: Any = 0) -> None:
        self.plan, self.fetched = plan, fetched
        grid, block_k, band = plan.grid, plan.config.block_k, plan.grid.band
        self.batch, self.head, tile = place
        if band.above != FAR:  # later rows see more keys: the longest programs go first
            tile = grid.counts[0] - 1 - tile
        self.tile = tile
        self.first_row = tile * plan.config.tile
        # Bounds are values of the kernel even where they are constants: newer Mosaic refuses loops over literals.
        self.zero = tile * 0
        self.table: Any = refs.get("table")
        if self.table is not None:
            self.begin = self.zero
            self.end = self._read(1)
            return
        # Blocks of keys that some row of the program sees.
        columns = band.columns
        self.begin = self.zero if band.below == -FAR else lax.max(self.first_row + band.below, 0) // block_k
        end_key = self.zero + columns
        if band.above != FAR:
            end_key = lax.min(self.first_row + plan.config.tile + band.above, columns)
        self.end = lax.max(lax.div(end_key + block_k - 1, block_k), self.begin)

    def shared(self, ref: Any) -> tuple[Any, Any]:
        """The batch and head of an operand that may have one of either for all."""
        return self.batch if ref.shape[0] > 1 else 0, self.head if ref.shape[1] > 1 else 0

    def _read(self, place: Any) -> Any:
        return self.table[(*self.shared(self.table), self.tile, place)]

    def entry(self, step: Any) -> Any:
        """The table's entry, or the step itself."""
        return step if self.table is None else self._read(COUNTS + step)

    def block(self, entry: Any) -> Any:
        return entry if self.table is None else lax.shift_right_logical(entry, 1)

    def fetched_before(self, step: Any) -> Any:
        """How many blocks the program has fetched before this step."""
        return self.fetched + step - self.begin

    def slot(self, step: Any) -> Any:
        return lax.rem(self.fetched_before(step), self.plan.config.stages)

    def whole_steps(self, start: Any) -> tuple[Any, Any]:
        """The steps (first, end) whose blocks every row of the warpgroup from `start` on sees whole."""
        if self.table is not None:
            return self.begin, self._read(0)
        config, band = self.plan.config, self.plan.grid.band
        first, end = self.begin, self.zero + band.columns // config.block_k
        if band.above != FAR:
            end = lax.min(end, lax.max(start + band.above + 1, 0) // config.block_k)
        if band.below != -FAR:
            last_row_edge = lax.max(start + config.block_q - 1 + band.below, 0)
            first = lax.div(last_row_edge + config.block_k - 1, config.block_k)
        first = lax.clamp(self.begin, first, self.end)
        return first, lax.clamp(first, end, self.end)


def _fetch(plan: Plan, refs: dict[str, Any], smem: dict[str, Any], walk: Walk) -> Any:
    """Keys and values, block by block, as the stages drain."""
    block_k, num_stages = plan.config.block_k, plan.config.stages
    kv_head = lax.div(walk.head, jnp.asarray(plan.group, walk.head.dtype))

    @pl.loop(walk.begin, walk.end)
    def _block(step: Any) -> None:
        slot = walk.slot(step)
        at = plan.at(walk.batch, kv_head, pl.ds(walk.block(walk.entry(step)) * block_k, block_k))
        for name in ("k", "v"):

            @pl.when(walk.fetched_before(step) >= num_stages)
            def _(name: str = name) -> None:
                plgpu.barrier_wait(smem[f"{name}_drained"].at[slot])

            smem[name].at(slot).fetch(refs[name], at, smem[f"{name}_arrived"].at[slot])

    return walk.fetched_before(walk.end)


def _compute(plan: Plan, refs: dict[str, Any], smem: dict[str, Any], warpgroup: Any, turn: _Turn, walk: Walk) -> Any:
    """64 rows of queries through every block of the walk, and their output."""
    config, grid, band = plan.config, plan.grid, plan.grid.band
    block_q, block_k = config.block_q, config.block_k
    width, dtype = Columns(refs["q"].shape[-1]).width, refs["q"].dtype
    tile = Tile(block_q, block_k)
    start = walk.first_row + warpgroup * block_q
    rows = pl.ds(start, block_q)

    def fetch_queries(walk: Walk) -> None:
        at = plan.at(walk.batch, walk.head, pl.ds(walk.first_row + warpgroup * block_q, block_q))
        smem["q"].at(warpgroup).fetch(refs["q"], at, smem["q_arrived"].at[warpgroup])

    if turn.is_first is None:
        fetch_queries(walk)
    else:
        pl.when(turn.is_first)(lambda: fetch_queries(walk))

    pair_names = [name for name in PAIR_TILES if name in refs]

    def fetch_pairs(block: Any) -> None:
        for name in pair_names:
            at = (*walk.shared(refs[name]), rows, pl.ds(block * block_k, block_k))
            plgpu.copy_gmem_to_smem(refs[name].at[at], smem[name].at[warpgroup], smem["pairs_arrived"].at[warpgroup])

    if pair_names:
        pl.when(walk.begin < walk.end)(lambda: fetch_pairs(walk.block(walk.entry(walk.begin))))
    if "q_segments" in refs:
        segments = load(refs["q_segments"].at[walk.batch, rows], tile.row_layout)
    if plan.dropout_rate:
        # The part of the generator that is computed once a row, counted over batch, heads and queries.
        first = (walk.batch * plan.heads + walk.head) * grid.rows + start
        numbers = plgpu.broadcasted_iota(jnp.int32, (block_q,), 0, layout=tile.row_layout) + first
        row_keys = prng.row_keys((refs["seed"][0], refs["seed"][1]), numbers)

    def key_row(name: str, block: Any) -> Any:
        """One number a key of the block, over the tile."""
        at = (*walk.shared(refs[name]), pl.ds(block * block_k, block_k))
        return tile.spread_columns(load(refs[name].at[at], tile.column_layout))

    def allowed_pairs(block: Any, pairs: dict[str, Any]) -> Any:
        """Which pairs of the tile see each other; None where nothing is ruled out."""
        first_column = block * block_k
        rules = []
        column = tile.column_numbers(first_column)
        if band.columns % block_k:
            rules.append(column < band.columns)
        if band.above != FAR:
            rules.append(column <= tile.row_numbers(start + band.above))
        if band.below != -FAR:
            rules.append(column >= tile.row_numbers(start + band.below))
        rules = [functools.reduce(lambda x, y: x & y, rules)] if rules else []
        if "q_segments" in refs:
            of_keys = load(refs["kv_segments"].at[walk.batch, pl.ds(first_column, block_k)], tile.column_layout)
            rules.append(tile.same_segment(segments, of_keys))
        if "mask_tile" in pairs:
            rules.append(pairs["mask_tile"] != 0)
        if plan.folded:  # by the bias itself: a soft cap has made its minus infinity finite
            rules.append(pairs["bias_tile"].astype(jnp.float32) != -jnp.inf)
        if "mask_row" in refs:
            rules.append(key_row("mask_row", block) != 0)
        return functools.reduce(lambda x, y: x & y, rules) if rules else None

    def exponents(s: Any, block: Any, pairs: dict[str, Any], masked: bool) -> tuple[Any, float]:
        """(x, unit), unit > 0, of raw products: x * unit are the exponents of two of bias, soft cap and masks."""
        scale = plan.scale
        if "bias_tile" in pairs or "bias_row" in refs:
            bias = pairs["bias_tile"] if "bias_tile" in pairs else key_row("bias_row", block)
            s, scale = s * scale + bias.astype(jnp.float32), 1.0
        unit = scale * LOG2E
        if plan.softcap is not None:
            # On an H200 by 7 % slower in heads of 256, by 9 % sooner in those of 128; off by more the larger the cap.
            by_newton = width <= 128 and plan.softcap <= BOUNDING_CAP
            s, unit = hopper.capped(s, scale / plan.softcap, plan.softcap * LOG2E, LAYOUT, by_newton), 1.0
        if unit <= 0:  # the maximum is taken before the unit is applied, and minus infinity must stay what it is
            s, unit = s * unit, 1.0
        if masked:
            allowed = allowed_pairs(block, pairs)
            s = s if allowed is None else jnp.where(allowed, s, -jnp.inf)
        return s, unit

    def hide_unseen_values(values: Any, entry: Any, block: Any) -> None:
        """Clear the values of keys that no query may see, in a block that has some."""
        first_column = block * block_k
        if "visible" in refs:
            visible = refs["visible"]

            def seen(offset: int, size: int, layout: Any) -> Any:
                return load(visible.at[(*walk.shared(visible), pl.ds(first_column + offset, size))], layout) != 0

            pl.when((entry & UNSEEN) != 0)(lambda: zero_unseen([ref for _, ref in values], seen))
        elif grid.splits_a_block:
            first, end = grid.seen

            def seen_by_position(offset: int, size: int, layout: Any) -> Any:
                column = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout) + (first_column + offset)
                return (column >= first) & (column < end)

            unseen = (first_column < first) | (first_column + block_k > end)
            pl.when(unseen)(lambda: zero_unseen([ref for _, ref in values], seen_by_position))

    # A warpgroup has the tensor cores for one block's values and the next block's keys, and then the other has them.
    def give_turn() -> None:
        if config.take_turns:
            hopper.give_turn()

    def await_turn() -> None:
        if config.take_turns:
            hopper.await_turn()

    def start_scores(ref: Any, slot: Any) -> None:
        contract(ref, smem["q"].at(warpgroup).whole(), smem["k"].at(slot).whole())

    def scores(slot: Any) -> Any:
        def queries_by_keys(ref: Any) -> Any:
            start_scores(ref, slot)
            give_turn()
            return ref[...]

        s = pl.run_scoped(queries_by_keys, plgpu.WGMMAAccumulatorRef((block_q, block_k), jnp.float32))
        plgpu.barrier_arrive(smem["k_drained"].at[slot])
        return s

    def weights(step: Any, entry: Any, next_entry: Any, s: Any, m_i: Any, l_i: Any, masked: bool) -> tuple[Any, ...]:
        """Of a step's scores: (what weighs its values, in float32, the rows' maxima and sums with it, and the scale of
        what was summed before, which is None where no maximum is taken)."""
        block, pairs = walk.block(entry), {}
        if pair_names:
            plgpu.barrier_wait(smem["pairs_arrived"].at[warpgroup])
            for name in pair_names:
                if masked or name != "mask_tile":
                    pairs[name] = load(smem[name].at[warpgroup], LAYOUT)
            # Every thread has read its part: the next tile may land on it.
            plgpu.commit_smem()
            pl.when(step + 1 < walk.end)(lambda: fetch_pairs(walk.block(next_entry)))

        s, unit = exponents(s, block, pairs, masked)
        alpha = None
        if plan.bounded:
            p = jnp.exp2(s * unit)
            l_i = l_i + p.sum(axis=1)
        else:
            m_next = jnp.maximum(m_i, s.max(axis=1) * unit)
            alpha = jnp.exp2(m_i - m_next)
            m_i = m_next
            p = jnp.exp2(s * unit - lax.broadcast_in_dim(m_i, s.shape, [0]))
            l_i = l_i * alpha + p.sum(axis=1)
        if plan.dropout_rate:  # after the rows' sums
            p = jnp.where(tile.dropout_keeps(row_keys, block * block_k, plan.dropout_rate), p, 0.0)
        return p, m_i, l_i, alpha

    def scaled(acc: Any, alpha: Any) -> Any:
        return acc if alpha is None else acc * lax.broadcast_in_dim(alpha, acc.shape, [0])

    def await_values(slot: Any, entry: Any, masked: bool) -> None:
        plgpu.barrier_wait(smem["v_arrived"].at[slot])
        if masked:
            hide_unseen_values(smem["v"].at(slot).whole(), entry, walk.block(entry))

    def entries(step: Any, carried: Sequence[Any]) -> tuple[Any, Any]:
        """The table's of this step and of the next: it was read a step ahead, so that its latency is hidden."""
        return (carried[0] if carried else step), walk.entry(step + 1)

    listed = walk.table is not None

    def block_step(step: Any, carry: Any, masked: bool) -> Any:
        acc, m_i, l_i, *carried = carry
        slot = walk.slot(step)
        entry, next_entry = entries(step, carried)
        p, m_i, l_i, alpha = weights(step, entry, next_entry, scores(slot), m_i, l_i, masked)
        acc, l_i, m_i, p16 = lax.optimization_barrier((scaled(acc, alpha), l_i, m_i, p.astype(dtype)))
        await_values(slot, entry, masked)
        await_turn()

        def add_values(ref: Any) -> None:
            multiply(ref, p16, smem["v"].at(slot).whole())

            @pl.when(step + 1 < walk.end)
            def _() -> None:
                plgpu.barrier_wait(smem["k_arrived"].at[walk.slot(step + 1)])

        acc = pl.run_state(add_values)(plgpu.WGMMAAccumulatorRef.init(acc))
        plgpu.barrier_arrive(smem["v_drained"].at[slot])
        return (acc, m_i, l_i, *([next_entry] if listed else []))

    # With `ahead` a step starts its own scores and then the values of the step before, whose product goes on under this
    # step's exponentials. The first step has no values to add, and the last one's are added at the end.

    def first_step(step: Any, carry: Any, masked: bool) -> Any:
        acc, m_i, l_i, _, *carried = carry
        entry, next_entry = entries(step, carried[1:])
        p, m_i, l_i, _ = weights(step, entry, next_entry, scores(walk.slot(step)), m_i, l_i, masked)
        return (acc, m_i, l_i, p.astype(dtype), *([entry, next_entry] if listed else []))

    def later_step(step: Any, carry: Any, masked: bool) -> Any:
        acc, m_i, l_i, p16, *carried = carry
        slot, slot_before = walk.slot(step), walk.slot(step - 1)
        entry_before = carried[0] if listed else step - 1
        entry, next_entry = entries(step, carried[1:])
        plgpu.barrier_wait(smem["k_arrived"].at[slot])
        await_turn()

        def products(state: tuple[Any, ...]) -> None:
            acc_ref, *others = state

            def begun(ref: Any) -> Any:
                start_scores(ref, slot)
                await_values(slot_before, entry_before, masked=True)
                values = smem["v"].at(slot_before).whole()
                multiply(acc_ref, p16, values)
                give_turn()
                return plgpu.wgmma_accumulator_load(ref, wait_n=len(values))

            s = pl.run_scoped(begun, plgpu.WGMMAAccumulatorRef((block_q, block_k), jnp.float32))
            plgpu.barrier_arrive(smem["k_drained"].at[slot])
            made = [x for x in weights(step, entry, next_entry, s, m_i, l_i, masked) if x is not None]
            made = lax.optimization_barrier(made)
            hopper.kept_before_wait(made[2], LAYOUT.reduce(1), smem["word"])
            for ref, value in zip(others, made, strict=False):
                ref[...] = value

        # What the places of the weights and of the scale hold before is of no account.
        before = plgpu.layout_cast(jnp.full((block_q, block_k), 0, jnp.float32), LAYOUT), m_i, l_i, l_i
        acc, p, m_i, l_i, alpha = pl.run_state(products)((plgpu.WGMMAAccumulatorRef.init(acc), *before))
        # Rounded no sooner: the product that has just ended read the registers that the weights go to.
        acc, p = lax.optimization_barrier((acc, p))
        plgpu.barrier_arrive(smem["v_drained"].at[slot_before])
        acc = scaled(acc, None if plan.bounded else alpha)
        return (acc, m_i, l_i, p.astype(dtype), *([entry, next_entry] if listed else []))

    def last_values(carry: Any) -> Any:
        acc, m_i, l_i, p16, *carried = carry
        slot = walk.slot(walk.end - 1)
        await_values(slot, carried[0] if listed else walk.end - 1, masked=True)
        await_turn()
        product = pl.run_state(lambda ref: multiply(ref, p16, smem["v"].at(slot).whole()))
        acc = product(plgpu.WGMMAAccumulatorRef.init(acc))
        plgpu.barrier_arrive(smem["v_drained"].at[slot])
        return (acc, m_i, l_i, p16, *carried)

    plgpu.barrier_wait(smem["q_arrived"].at[warpgroup])
    carry: Any = (
        plgpu.layout_cast(jnp.full((block_q, width), 0, jnp.float32), LAYOUT),
        plgpu.layout_cast(jnp.full((block_q,), 0 if plan.bounded else LOWEST, jnp.float32), LAYOUT.reduce(1)),
        plgpu.layout_cast(jnp.full((block_q,), 0, jnp.float32), LAYOUT.reduce(1)),
    )

    @pl.when(walk.begin < walk.end)
    def _() -> None:
        plgpu.barrier_wait(smem["k_arrived"].at[walk.slot(walk.begin)])

    # The first of all turns is the first warpgroup's.
    pl.when((warpgroup == 1) if turn.is_first is None else (warpgroup == 1) | ~turn.is_first)(await_turn)
    # Whether blocks that are seen in part may come after the whole ones, and before.
    by_pairs = any(name in refs for name in ("q_segments", "mask_tile", "mask_row"))
    masked_last = by_pairs or band.above != FAR or band.columns % block_k != 0 or (listed and band.below != -FAR)
    masked_first = not listed and band.below != -FAR
    # Counted from zero: a count that starts from what was read from an operand varies over the mesh in shard_map.
    zero = warpgroup * 0 if listed else walk.end * 0
    begin, step_of = walk.begin, block_step
    whole_begin, whole_end = walk.whole_steps(start)
    if config.ahead:
        step_of = later_step
        nothing = plgpu.layout_cast(jnp.full((block_q, block_k), 0, dtype), LAYOUT)
        carry = (*carry, nothing, *([walk.entry(begin)] * 2 if listed else []))
        begin = lax.min(begin + 1, walk.end)
        first = functools.partial(first_step, masked=masked_first or masked_last)
        carry = lax.fori_loop(walk.begin, begin, first, carry)
        whole_begin, whole_end = lax.max(whole_begin, begin), lax.max(whole_end, begin)
    elif listed:
        carry = (*carry, walk.entry(begin))
    partial_step = functools.partial(step_of, masked=True)
    if masked_first:
        carry = lax.fori_loop(begin, whole_begin, partial_step, carry)
    carry = lax.fori_loop(whole_begin, whole_end, functools.partial(step_of, masked=False), carry)
    if masked_last:
        carry = lax.fori_loop(zero, walk.end - whole_end, lambda n, c: partial_step(whole_end + n, c), carry)
    if config.ahead:
        carry = lax.fori_loop(zero, begin - walk.begin, lambda n, c: last_values(c), carry)
    # Of the very last turn nobody waits for the end.
    pl.when((warpgroup == 0) if turn.is_last is None else (warpgroup == 0) | ~turn.is_last)(give_turn)
    if turn.next_place is not None:
        plgpu.commit_smem()  # all threads are done with these queries
        following = Walk(plan, refs, turn.next_place)
        pl.when(~turn.is_last)(lambda: fetch_queries(following))

    acc, m_i, l_i = carry[:3]
    alive = l_i != 0  # a NaN that a query sees stays one
    kept = 1.0 - plan.dropout_rate
    inverse = jnp.where(alive, 1.0 / jnp.where(alive, l_i * kept, 1.0), 0.0)
    acc = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
    if turn.next_place is not None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
    smem["out"].at(warpgroup).store(acc.astype(dtype))
    if "lse" in refs:
        lse = (m_i + jnp.log2(jnp.where(alive, l_i, 1.0))) / LOG2E
        smem["lse"][warpgroup] = jnp.where(alive, lse, -jnp.inf)
    plgpu.commit_smem()
    smem["out"].at(warpgroup).send(refs["out"], plan.at(walk.batch, walk.head, rows))
    if "lse" in refs:
        plgpu.copy_smem_to_gmem(smem["lse"].at[warpgroup], refs["lse"].at[walk.batch, walk.head, rows])
    return walk.fetched_before(walk.end)


IMPLEMENTATION = Implementation(
    "hopper",
    hopper_forward,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    hints=("physical",),
    config_type=HopperConfig,
    default_config=default_config,
    for_call=for_call,
    candidates=candidates,
)
