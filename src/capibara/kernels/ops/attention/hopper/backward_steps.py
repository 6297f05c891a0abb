"""What the kernels of Hopper's attention backward share: their config, the ring of steps, and who visits what.

A program has a tile of keys of one key head and visits the steps of queries that see them, of every query head that
shares the key head or of some of these. A third warpgroup streams the steps by TMA. Scores are computed transposed,
keys by queries, so that the probabilities and their gradients are already where the products with d_out and q want
them: in the registers of the warpgroup that has the keys.

What a call does not ask for leaves no trace in its program: every form is a branch taken while tracing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.ops.attention.hopper import masking
from capibara.kernels.ops.attention.hopper.calls import HEADS_TOGETHER, check_order
from capibara.kernels.ops.attention.hopper.masking import LAYOUT, Tile
from capibara.kernels.ops.attention.hopper.panels import Columns, columns_of
from capibara.kernels.pallas import hopper
from capibara.kernels.pallas.hopper import HIDDEN_STEPS, LOG2E, load, swizzled

FETCH_REGISTERS, COMPUTE_REGISTERS = 24, 240
WGMMA_ROWS = 64  # keys of a warpgroup's tile of scores
LEAST_WHOLE = 2 * WGMMA_ROWS  # rows of arrays whose columns come whole: room for both warpgroups
WORD = 32  # queries a word of the packed mask
COUNTS = 3  # the table's first entries: how many steps are whole, how many are live, whether there are unseen keys


@dataclasses.dataclass(frozen=True)
class HopperGradConfig:
    """Queries a step, how many steps are fetched ahead, the order in which programs start, and in how many launches.

    The axis that `order` names last changes first: with the tile last, neighbouring programs have different keys of
    one head. Each of `parts` launches takes its share of the key heads, so that only that share's float32 sums of dq
    exist at a time. A program visits as many as `sharers` of the query heads that share its key head; 0: all of them.
    With fewer there are more programs, each shorter, and the gradients of keys and values are summed in memory too.

    With `rounded` sums of dq are in the operands' type, scaled: each tile of keys that is added rounds them once, and
    nobody rounds them after. Float32 sums are three times as many bytes, beside the kernel, as sums of 16 bits.

    `divided` is the form of heads wider than 128 in which one warpgroup has the scores and the other their gradients
    (see backward_divided.py), and what follows is of that form alone: gradients of the output may have fewer stages
    than queries (`do_stages`; 0: as many), and a step's dq leaves `dq_columns` at a time for each warpgroup.
    """

    block_q: int = 64
    stages: int = 2
    order: str = HEADS_TOGETHER
    parts: int = 1
    sharers: int = 0
    rounded: bool = False
    divided: bool = False
    do_stages: int = 0
    dq_columns: int = 64

    @property
    def stages_of(self) -> dict[str, int]:
        """How many steps of queries are in memory, and of gradients of the output."""
        return {"q": self.stages, "do": self.do_stages if self.divided and self.do_stages else self.stages}

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128):
            raise rule_error("block_q is 64 or 128", self.block_q, "use 64")
        if self.stages < 2:
            raise rule_error("stages is two or more", self.stages, "use 2")
        if self.parts < 1:
            raise rule_error("parts is one or more", self.parts, "use 1")
        if self.sharers < 0 or (self.sharers and self.parts > 1):
            raise rule_error(
                "sharers is 0, or more where all key heads go in one launch",
                (self.sharers, self.parts),
                "use sharers=0",
            )
        if self.rounded and (self.sharers or self.parts > 1):
            rule = "rounded is of programs that visit all query heads of a key head, in one launch"
            raise rule_error(rule, (self.sharers, self.parts), "use sharers=0 and parts=1")
        if self.do_stages < 0:
            raise rule_error("do_stages is 0 or more", self.do_stages, "use 0")
        if self.dq_columns < 16 or self.dq_columns % 16:
            raise rule_error("dq_columns is a multiple of 16", self.dq_columns, "use 16")
        check_order(self.order)


def sums_dtype(config: HopperGradConfig, dtype: Any) -> Any:
    """Of dq's sums, where the operands are of `dtype`."""
    return dtype if config.rounded else jnp.float32


@dataclasses.dataclass(frozen=True)
class Lines:
    """Which lines of single numbers come with a program's keys and with each step's queries, beyond a plain call's."""

    segments: bool
    dropout: bool
    mask_words: int  # numbers a key that hold what a step of queries may see of it; 0 without a mask

    @classmethod
    def of(cls, refs: Mapping[str, Any], config: HopperGradConfig) -> Lines:
        mask_words = 0
        if "mask" in refs:
            mask_words = 1 if refs["mask"].shape[2] == 1 else config.block_q // WORD
        return cls("q_segments" in refs, "row_keys" in refs, mask_words)

    @property
    def arrivals(self) -> tuple[int, int]:
        """How many lines come once for a program's keys, and how many with each step's queries."""
        return int(self.segments), self.segments + 2 * self.dropout + self.mask_words

    def scratch(self, config: HopperGradConfig, tile: int) -> dict[str, Any]:
        refs = {}
        if self.segments:
            refs["q_segments"] = plgpu.SMEM((config.stages, config.block_q), jnp.int32)
            refs["kv_segments"] = plgpu.SMEM((tile,), jnp.int32)
        if self.dropout:
            refs["row_keys"] = plgpu.SMEM((config.stages, 2, config.block_q), jnp.int32)
        if self.mask_words:
            refs["mask"] = plgpu.SMEM((config.stages, self.mask_words, tile), jnp.int32)
        return refs


def ring_scratch(
    config: HopperGradConfig, head: Columns, dtype: Any, lines: Lines, tile: int, key_tiles: int
) -> dict[str, Any]:
    """What all kernels have: the ring of steps, the barriers, and the lines. The keys come in `key_tiles`."""
    block_q, stages = config.block_q, config.stages_of
    once, each_step = lines.arrivals
    copies = head.copies(dtype)
    return {
        "q": head.scratch((stages["q"],), block_q, dtype),
        "do": head.scratch((stages["do"],), block_q, dtype),
        "lse": plgpu.SMEM((stages["q"], block_q), jnp.float32),
        "delta": plgpu.SMEM((stages["do"], block_q), jnp.float32),
        "pairs": lines.scratch(config, tile),
        "kv_arrived": plgpu.Barrier(num_arrivals=2 * key_tiles * copies + once),
        # The rows and their lines.
        "q_arrived": plgpu.Barrier(num_arrivals=copies + 1 + each_step, num_barriers=stages["q"]),
        "do_arrived": plgpu.Barrier(num_arrivals=copies + 1, num_barriers=stages["do"]),
        "q_drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages["q"]),  # by both computing warpgroups
        "do_drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages["do"]),
        "both_here": plgpu.Barrier(num_arrivals=2),
    }


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static that a kernel knows of a call: a program has `tile` keys, and visits steps of block_q queries.

    Query i sees keys i + offset - left to i + offset + right; None is no limit.
    """

    config: HopperGradConfig
    tile: int
    keys: int
    length: int
    sharers: int  # query heads of a program, which share a key head
    programs: int  # that share a tile of keys, for their gradients are sums over all query heads of a key head
    offset: int
    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    physical: str
    dropout_rate: float = 0.0
    first_head: int = 0
    """The first key head of this launch."""

    @property
    def adds_keys(self) -> bool:
        """Whether gradients of keys and values are added to sums in memory: several programs make them."""
        return self.programs > 1

    @property
    def block_q(self) -> int:
        return self.config.block_q

    @property
    def steps(self) -> int:
        """Of the queries of one head."""
        return math.ceil(self.length / self.block_q)

    @property
    def upscale(self) -> float:
        """What makes up for the probabilities that dropout drops."""
        return 1 / (1 - self.dropout_rate)

    def summed(self, dq: Any) -> Any:
        """A step's gradient of the queries, as it is added to the sums."""
        return dq * self.scale if self.config.rounded else dq

    def at(self, batch: Any, head: Any, rows: Any) -> tuple[Any, ...]:
        """Where rows of one head lie in an operand."""
        return (batch, head, rows) if self.physical == "bhtd" else (batch, rows, head)

    def hidden_zeros(self, head_dim: int, done: Any, count: int) -> list[Any]:
        """What is added to the places of operands that stay: see `hidden_zero`, one a product.

        Where position masks, the program has a loop with a mask and one without, and so twice as much is made before
        them. On an H200 that made the causal backward 1.04 to 1.08 times as fast at head_dim 128 and 1.16 times at
        256; without a mask it cost 7 %, at 64 2 %. Programs with too many visits for it (a million queries of 64 heads
        that share their keys) go without.
        """
        masks = self.left is not None or self.right is not None or self.keys % self.tile != 0
        spilled = head_dim > 64 and masks
        if not spilled or self.sharers * self.steps > HIDDEN_STEPS:
            return [0] * count
        return [hopper.hidden_zero(done, stage) for stage in range(count)]


@dataclasses.dataclass(frozen=True)
class Visit:
    """One step of queries of one head: the `member`-th of the program's."""

    member: Any
    first_row: Any
    done: Any
    """How many visits came before."""


class Walk:
    """A program's place in the grid, and its visits: a range of steps for each head, or a table of them all."""

    def __init__(self, plan: Plan, refs: dict[str, Any]) -> None:
        self.plan = plan
        self.batch, self.launch_head, self.warpgroup = (lax.axis_index(n) for n in ("batch", "head", "warpgroup"))
        # Which of all sets of query heads that programs have; as many as `programs` of them share a key head.
        self.heads = self.launch_head + plan.first_head
        self.kv_head = lax.div(self.heads, self.heads * 0 + plan.programs) if plan.adds_keys else self.heads
        program = lax.axis_index("tile")
        # Programs with the most queries go first: with no right edge but a left one, those are the last keys.
        if plan.right is None and plan.left is not None:
            program = math.ceil(plan.keys / plan.tile) - 1 - program
        self.first_key = program * plan.tile
        self.table: Any = refs.get("table")
        if self.table is None:
            self.begin, self.end = self._live_steps()
        else:
            self.begin, self.end = self.first_key * 0, self.read(1)

    def shared(self, ref: Any, head: Any) -> tuple[Any, Any]:
        """The batch and head of an operand that may have one of either for all."""
        return self.batch if ref.shape[0] > 1 else 0, head if ref.shape[1] > 1 else 0

    def read(self, place: Any) -> Any:
        """An entry of the program's row of the table."""
        tile = lax.div(self.first_key, self.plan.tile)
        return self.table[(*self.shared(self.table, self.heads), tile, place)]

    def keys_at(self, keys: Any) -> tuple[Any, ...]:
        return self.plan.at(self.batch, self.kv_head, keys)

    def dq_at(self, member: Any, rows: Any) -> tuple[Any, ...]:
        """Where rows of queries of a head lie in the sums of dq, which hold the launch's heads alone."""
        return self.plan.at(self.batch, self.launch_head * self.plan.sharers + member, rows)

    def first_row(self, step: Any) -> Any:
        """Where a step's queries start. When every program sees every query each starts elsewhere, so that their
        sums into dq do not meet in the same rows."""
        plan = self.plan
        if plan.left is None and plan.right is None:
            step = lax.rem(step + lax.div(self.first_key, plan.block_q), plan.steps)
        return step * plan.block_q

    def _live_steps(self) -> tuple[Any, Any]:
        """The steps that see any of the program's keys. Bounds are values: newer Mosaic refuses literals."""
        plan, block_q, first_key = self.plan, self.plan.block_q, self.first_key
        zero = first_key * 0
        begin, end = zero, zero + plan.steps
        if plan.right is not None:
            begin = lax.clamp(zero, first_key - plan.offset - plan.right, zero + plan.length) // block_q
        if plan.left is not None:
            last = lax.clamp(zero, first_key + plan.tile - plan.offset + plan.left, zero + plan.length)
            end = lax.div(last + block_q - 1, block_q)
        return begin, lax.max(begin, end)

    def _whole_steps(self, first_key: Any, keys: int) -> tuple[Any, Any]:
        """The live steps whose queries all see all of `keys` keys: they need no mask."""
        plan, block_q, begin, end = self.plan, self.plan.block_q, self.begin, self.end
        zero = first_key * 0
        most = zero + plan.steps * block_q
        whole_begin, whole_end = begin, end
        if plan.right is not None:
            edge = lax.clamp(zero, first_key + keys - 1 - plan.offset - plan.right, most)
            whole_begin = lax.clamp(begin, lax.div(edge + block_q - 1, block_q), end)
        if plan.left is not None:
            edge = lax.clamp(zero, first_key - plan.offset + plan.left + 1, most)
            whole_end = lax.clamp(whole_begin, lax.div(edge, block_q), end)
        if plan.keys % plan.tile:  # keys past the end are masked in every step
            past_the_end = first_key + keys > plan.keys
            if self.masked_last:
                whole_end = jnp.where(past_the_end, whole_begin, whole_end)
            else:
                whole_begin = jnp.where(past_the_end, end, whole_begin)
        return whole_begin, whole_end

    @property
    def visits(self) -> Any:
        """How many of them there are."""
        return self.end if self.table is not None else (self.end - self.begin) * self.plan.sharers

    @property
    def masked_last(self) -> bool:
        """Whether steps with a mask may come after those without. Where they may come before as well the program has a
        third loop, and registers are short in all of them."""
        return self.plan.left is not None or (self.plan.right is None and self.plan.keys % self.plan.tile != 0)

    def compute(self, my_first_key: Any, keys: int, body: Callable[[Visit, bool], None], masks: bool) -> None:
        """body(visit, masked) for every visit, by a warpgroup with `keys` keys. A table's last ones are masked when
        `masks`: otherwise there are none that see the tile in part."""
        if self.table is None:
            self._visit_ranges(body, my_first_key, keys)
            return
        zero = self.first_key * 0
        whole_end = self.read(0)
        entry = self._visit_entries(zero, whole_end, self.read(COUNTS + zero), lambda visit: body(visit, False))
        if masks:
            self._visit_entries(whole_end, self.end, entry, lambda visit: body(visit, True))

    def each(self, body: Callable[[Visit], None]) -> None:
        """body(visit) for every visit, in the same order, by a warpgroup that does not ask who sees whom."""
        zero = self.first_key * 0
        if self.table is not None:
            self._visit_entries(zero, self.end, self.read(COUNTS + zero), body)
        elif self.plan.sharers == 1:
            # Once more, rather than from above: what fetches has few registers for values.
            begin, end = self._live_steps()

            @pl.loop(begin, end)
            def _(step: Any) -> None:
                body(Visit(zero, self.first_row(step), step - begin))
        else:
            ranges = self._ranges(self.first_key, self.plan.tile)

            @pl.loop(zero, (self.end - self.begin) * self.plan.sharers)
            def _(done: Any) -> None:
                (first, last, _), *others = ranges
                number = done
                for (_, before, _), (start, stop, _) in zip(ranges, others, strict=False):
                    left = number - (before - first) * self.plan.sharers
                    is_next = left >= 0
                    number = jnp.where(is_next, left, number)
                    first, last = jnp.where(is_next, start, first), jnp.where(is_next, stop, last)
                member = lax.div(number, last - first)
                body(Visit(member, self.first_row(first + number - member * (last - first)), done))

    def _ranges(self, first_key: Any, keys: int) -> list[tuple[Any, Any, bool]]:
        """(first, end, masked) of steps: before those whose queries see all of `keys` keys, these, and the rest."""
        whole_begin, whole_end = self._whole_steps(first_key, keys)
        ranges = [(whole_begin, whole_end, False)]
        if self.plan.right is not None:
            ranges.insert(0, (self.begin, whole_begin, True))
        if self.masked_last:
            ranges.append((whole_end, self.end, True))
        return ranges

    def _visit_ranges(self, body: Callable[[Visit, bool], None], my_first_key: Any, keys: int) -> None:
        """A range of steps of every head, and then the next range.

        Without a loop of heads around them: with one the compiler found too few registers to have several products in
        flight, where the last keys are masked. So all warpgroups have the ranges of the whole tile; of one head the
        order is the same for any, and a warpgroup has those of its own keys.
        """
        plan = self.plan
        zero = self.first_key * 0
        if plan.sharers > 1:
            my_first_key, keys = self.first_key, plan.tile
        before = zero
        for first, last, masked in self._ranges(my_first_key, keys):
            if plan.sharers == 1:

                @pl.loop(first, last)
                def _(step: Any, masked: bool = masked) -> None:
                    body(Visit(zero, self.first_row(step), step - self.begin), masked)

                continue

            def visit(number: Any, place: Any, first: Any = first, last: Any = last, masked: bool = masked) -> Any:
                done, member, step = place
                body(Visit(member, self.first_row(step), done), masked)
                ended = step + 1 == last
                return done + 1, jnp.where(ended, member + 1, member), jnp.where(ended, first, step + 1)

            before = lax.fori_loop(zero, (last - first) * plan.sharers, visit, (before, zero, first))[0]

    def _visit_entries(self, first: Any, last: Any, entry: Any, body: Callable[[Visit], None]) -> Any:
        """body(visit) from the table's entry of the first visit on; returns that of the last."""

        def visit(i: Any, entry: Any) -> Any:
            number = first + i
            next_entry = self.read(COUNTS + number + 1)  # a visit ahead: its latency is hidden
            body(self._listed(number, entry))
            return next_entry

        # From zero on: inside shard_map a counter may not start from what was read from an operand.
        return lax.fori_loop(first * 0, last - first, visit, entry)

    def _listed(self, number: Any, entry: Any) -> Visit:
        steps = self.plan.steps
        return Visit(lax.div(entry, steps), lax.rem(entry, steps) * self.plan.block_q, number)


class Pairs:
    """A tile of a warpgroup's 64 keys, from `my_first_key` on, by a step's queries: who sees whom, and gradients."""

    def __init__(self, walk: Walk, refs: dict[str, Any], smem: dict[str, Any]) -> None:
        self.walk, self.plan, self.refs, self.smem = walk, walk.plan, refs, smem["pairs"]
        self.mask_words = Lines.of(refs, walk.plan.config).mask_words
        self.tile = Tile(self.plan.block_q, WGMMA_ROWS, transposed=True)

    @property
    def masks(self) -> bool:
        """Whether some step may see the program's keys in part."""
        plan = self.plan
        by_position = plan.left is not None or plan.right is not None or plan.keys % plan.tile != 0
        return by_position or "q_segments" in self.refs or "mask" in self.refs

    def fetch_keys(self, arrived: Any) -> None:
        if "q_segments" in self.refs:
            line = self.refs["kv_segments"].at[self.walk.batch, pl.ds(self.walk.first_key, self.plan.tile)]
            plgpu.copy_gmem_to_smem(line, self.smem["kv_segments"], arrived)

    def lines(self, rows: Any, head: Any, slot: Any) -> list[tuple[Any, Any]]:
        """(from, to) of the lines that come with a step's queries, beyond a plain call's."""
        refs, smem, walk = self.refs, self.smem, self.walk
        copies = []
        if "q_segments" in refs:
            copies.append((refs["q_segments"].at[walk.batch, rows], smem["q_segments"].at[slot]))
        if "row_keys" in refs:
            copies += [(refs["row_keys"].at[n, walk.batch, head, rows], smem["row_keys"].at[slot, n]) for n in range(2)]
        if "mask" in refs:
            at, keys = walk.shared(refs["mask"], head), pl.ds(walk.first_key, self.plan.tile)
            first = 0 if refs["mask"].shape[2] == 1 else lax.div(rows.start, WORD)
            words = range(self.mask_words)
            copies += [(refs["mask"].at[(*at, first + n, keys)], smem["mask"].at[slot, n]) for n in words]
        return copies

    def hide_unseen(self, my_first_key: Any, *blocks: Any) -> None:
        """Clear what nobody may see in a block of keys or values; the table says whether the program has any."""
        if "visible" not in self.refs:
            return
        visible, walk = self.refs["visible"], self.walk

        def seen(start: int, size: int, layout: Any) -> Any:
            at = (*walk.shared(visible, walk.heads), pl.ds(my_first_key + start, size))
            return masking.load(visible.at[at], layout) != 0

        @pl.when(walk.read(2) != 0)
        def _() -> None:
            masking.zero_unseen([panel for block in blocks for _, panel in block.whole()], seen)

    def probabilities(self, s: Any, lse: Any) -> tuple[Any, Any]:
        """From products of keys and queries: the probabilities, and the soft cap's slope where there is one."""
        scale, softcap = self.plan.scale, self.plan.softcap
        slope, unit = None, scale * LOG2E
        if softcap is not None:
            s = hopper.tanh(s, scale / softcap)
            slope, unit = 1.0 - s * s, softcap * LOG2E
        return jnp.exp2(s * unit - lax.broadcast_in_dim(lse, s.shape, [1])), slope

    def allowed(self, my_first_key: Any, first_row: Any, slot: Any) -> Any:
        """Which pairs see each other, keys by queries."""
        plan, tile, smem = self.plan, self.tile, self.smem
        key = tile.column_numbers(my_first_key)
        row = plgpu.broadcasted_iota(jnp.int32, tile.shape, 1, layout=LAYOUT) + (first_row + plan.offset)
        seen = key < plan.keys
        if plan.right is not None:
            seen = seen & (key <= row + plan.right)
        if plan.left is not None:
            seen = seen & (key >= row - plan.left)
        own = pl.ds(my_first_key - self.walk.first_key, WGMMA_ROWS) if smem else None
        if "q_segments" in self.refs:
            of_queries = load(smem["q_segments"].at[slot], tile.row_layout)
            of_keys = load(smem["kv_segments"].at[own], tile.column_layout)
            seen = seen & tile.same_segment(of_queries, of_keys)
        if "mask" in self.refs:
            lines = [smem["mask"].at[slot, n, own] for n in range(self.mask_words)]
            words = [tile.spread_columns(load(line, tile.column_layout)) for line in lines]
            bits = words[0]
            if self.refs["mask"].shape[2] > 1:
                query = tile.row_numbers(0)
                for n in range(1, self.mask_words):
                    bits = jnp.where(query >= n * WORD, words[n], bits)
                bits = lax.shift_right_logical(bits, query & (WORD - 1)) & 1
            seen = seen & (bits != 0)
        return seen

    def dropped(self, p: Any, my_first_key: Any, slot: Any) -> Any:
        """Probabilities with a minus before those that dropout drops: one number tells both."""
        if not self.plan.dropout_rate:
            return p
        row_keys = tuple(load(self.smem["row_keys"].at[slot, n], self.tile.row_layout) for n in range(2))
        kept = self.tile.dropout_keeps(row_keys, my_first_key, self.plan.dropout_rate)
        return jnp.where(kept, p, -p)

    def weights(self, p: Any) -> Any:
        """What multiplies the values, but for the factor that makes up for dropout; from `dropped`."""
        return jnp.maximum(p, 0.0) if self.plan.dropout_rate else p

    def d_scores(self, p: Any, dp: Any, delta: Any) -> Any:
        """p (dp keep / (1 - rate) - delta), from `dropped`."""
        delta = lax.broadcast_in_dim(delta, p.shape, [1])
        if not self.plan.dropout_rate:
            return p * (dp - delta)
        return p * jnp.where(p > 0, dp * self.plan.upscale - delta, delta)

    def d_values(self, dv: Any) -> Any:
        return dv * self.plan.upscale if self.plan.dropout_rate else dv


def fetch_steps(walk: Walk, pairs: Pairs, refs: dict[str, Any], smem: dict[str, Any]) -> None:
    """Stream every visit's queries and gradients of the output, each with its lines, as the stages drain."""
    plan = walk.plan

    def copy(visit: Visit) -> None:
        done, head = visit.done, walk.heads * plan.sharers + visit.member
        rows = pl.ds(visit.first_row, plan.block_q)
        for name, source, line in (("q", "q", "lse"), ("do", "d_out", "delta")):
            num_stages = plan.config.stages_of[name]
            slot = lax.rem(done, num_stages)

            @pl.when(done >= num_stages)
            def _(name: str = name, slot: Any = slot) -> None:
                plgpu.barrier_wait(smem[f"{name}_drained"].at[slot])

            arrived = smem[f"{name}_arrived"].at[slot]
            smem[name].at(slot).fetch(refs[source], plan.at(walk.batch, head, rows), arrived)
            lines = [(refs[line].at[walk.batch, head, rows], smem[line].at[slot])]
            if name == "q":
                lines += pairs.lines(rows, head, slot)
            for from_gmem, to_smem in lines:
                plgpu.copy_gmem_to_smem(from_gmem, to_smem, arrived)

    walk.each(copy)


def swizzled_for(head: Columns, shape: tuple[int, ...], dtype: Any) -> dict[int, Any]:
    """What is multiplied by panels of a head, by the panel's swizzle: both sides of a product are swizzled alike."""
    widths = sorted({panel.swizzled for panel in head.panels(dtype)})
    swizzles = {width: swizzled(dtype, width * jnp.dtype(dtype).itemsize) for width in widths}
    return {width: plgpu.SMEM(shape, dtype, transforms=swizzle) for width, swizzle in swizzles.items()}


def add_to_sums(piece: Any, value: Any, target: Any, at: tuple[Any, ...], first_column: Any = 0) -> None:
    """Add what a warpgroup has in registers to rows of sums in memory, as many columns at a time as there are in
    `piece`, a tile that is the warpgroup's own."""
    width, value = piece.of.head_dim, value.astype(target.dtype)
    for column in range(0, value.shape[1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        piece.store(value[:, column : column + width])
        plgpu.commit_smem()
        piece.send(target, at, first_column=first_column + column, reduction_op="add")


@dataclasses.dataclass(frozen=True)
class Loop:
    """One of the three kernels: the keys of a program, the parts of its columns, its scratch, and its kernel."""

    tile: int
    parts: Callable[[HopperGradConfig], int]
    scratch: Callable[[HopperGradConfig, Columns, Any, Lines], dict[str, Any]]
    kernel: Callable[..., None]

    def columns(self, config: HopperGradConfig, head_dim: int, dtype: Any, lengths: Sequence[int]) -> Columns:
        """Of a call with `lengths` of queries and of keys."""
        rows = [(length, LEAST_WHOLE) for length in lengths]
        return columns_of(head_dim, dtype, rows, self.parts(config), two_widths=True)
