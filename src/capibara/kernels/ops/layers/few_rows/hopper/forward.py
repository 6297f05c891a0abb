"""few_rows for Hopper, in Pallas (Mosaic GPU): the weight streams through the tensor cores once, the rows ride along.

A program has some of the outputs and a part of the inner axis. A warpgroup fetches pieces of the weight, and the same
pieces of the rows, by TMA into a ring that is as deep as shared memory allows: what is on its way is what keeps the
memory busy. Another multiplies them. The weight is the product's left operand, whose 64 rows are outputs, and the rows
of x are its columns, in eights: few rows cost few instructions. Tensor cores do not multiply 8-bit numbers with 16-bit
ones: a weight of 8 bits goes through registers, where its numbers are widened, which takes as long as the memory does.
Several warpgroups share that, each with a part of every piece's inner axis, or with one half of a gated product, and
add what they have at the end. Where the outputs alone are too few for all of the chip's multiprocessors, programs share
an output along the inner axis and write float32 parts of its sum, which a second kernel, `join`, adds up together with
the residual, and takes the norm of.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.trusting import trusted
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.activation.formulas import value
from capibara.kernels.ops.layers.few_rows.hopper.join import join, refuses_width
from capibara.kernels.ops.layers.few_rows.rules import Sizes, is_quantized, out_dtype_of, sizes
from capibara.kernels.ops.layers.norm.reference import shrink_of
from capibara.kernels.pallas.hopper import (
    SMEM_BYTES,
    SWIZZLE,
    load,
    multiprocessors,
    named,
    refuses_chip,
    smem_bytes,
    store_to_memory,
    sum_of,
    swizzled,
)
from capibara.kernels.pallas.overlap import await_previous, let_next_start, overlaps

MOST_ROWS = 64
EIGHT = 8  # rows of a swizzled tile, and what a product's columns are counted in
ATOM = 64  # 16-bit numbers of a swizzled tile's row
WIDE_ATOM = 128  # 8-bit numbers of one
THREADS = 128  # of a warpgroup
WARPS = 4
REGISTERS = 1 << 16  # of a multiprocessor
LARGE = 1 << 24  # numbers of a weight
AHEAD = 4  # pieces that are fetched before the kernel before is done: more are in the way of the rows
HEAD_START = 2  # pieces of an 8-bit weight that are fetched before a row is added up
RESERVED = 1024  # bytes of shared memory that the chip takes for each program
COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,  # the other has no memory that is swizzled and not tiled
    approx_math=True,  # of a gate, whose result is rounded to 16 bits
)


@dataclasses.dataclass(frozen=True)
class WeightStreamConfig:
    """How a weight is cut.

    Attributes:
      outputs: of a program, 64 or 128; with a gate so many of each half.
      depth: of a piece along the inner axis; of an 8-bit weight 128 at least, for each warpgroup that shares it.
      stages: pieces in the ring.
      splits: programs that share an output, along the inner axis; with a gate there is one.
      sharers: warpgroups that multiply: one, and of an 8-bit weight also two or four. They share a piece's inner axis;
        four of a gated product are two for each half.
    """

    outputs: int = 64
    depth: int = 128
    stages: int = 4
    splits: int = 1
    sharers: int = 1

    def __post_init__(self) -> None:
        if self.outputs not in (64, 128):
            raise rule_error("outputs is 64 or 128", self.outputs, "use 64")
        if self.depth not in (64, 128, 256, 512):
            raise rule_error("depth is 64, 128, 256 or 512", self.depth, "use 128")
        if self.stages < 2 or self.splits < 1:
            raise rule_error("stages is 2 or more, and splits 1 or more", self, "use stages=4, splits=1")
        if self.sharers not in (1, 2, 4):
            raise rule_error("sharers is 1, 2 or 4", self.sharers, "use 1, and 2 for an 8-bit weight")

    def shared(self, *, gated: bool) -> tuple[int, int]:
        """(across, along): warpgroups that the halves of a gated product are shared by, and those of an inner axis."""
        across = 2 if gated and self.sharers == 4 else 1
        return across, self.sharers // across


def scratch(
    config: WeightStreamConfig,
    rows: int,
    dtype: Any,
    weight_dtype: Any,
    out_dtype: Any,
    *,
    gated: bool,
    summed: int = 0,
) -> dict[str, Any]:
    """A program's shared memory: the ring of the weight and the rows, and the results on their way out.

    A row that the program itself adds up, of `summed` numbers, is not in the ring but whole beside it.
    """
    outputs, depth, stages = config.outputs, config.depth, config.stages
    halves = 2 if gated else 1
    across, _ = config.shared(gated=gated)
    eights = math.ceil(rows / EIGHT)
    pieces = summed // depth if summed else stages
    x: Any = plgpu.SMEM((pieces, eights * EIGHT, depth), dtype, transforms=swizzled(dtype))
    copies = 0 if summed else 1
    if summed:
        # The first row of a swizzled tile lies as it is: a tile is eight of such rows, one after another.
        x = plgpu.RefUnion(x, plgpu.SMEM((summed // ATOM, EIGHT * ATOM), dtype))
    elif rows % EIGHT:
        # TMA by whole tiles wants rows in eights. The same memory, seen as the tiles that it is made of, takes fewer;
        # what lies in the others is their own columns' of the product alone, and those are not written.
        swizzle = (plgpu.SwizzleTransform(SWIZZLE),)
        copies = 1 if _is_one_copy(rows, weight_dtype) else eights * (depth // ATOM)
        tiles = stages, eights, depth // ATOM, EIGHT, ATOM
        x = plgpu.RefUnion(x, plgpu.SMEM(tiles, dtype, transforms=swizzle))
    shared: dict[str, Any] = {}
    if summed:
        shared |= {"squares": plgpu.SMEM((WARPS,), jnp.float32), "prepared": plgpu.Barrier()}
    if (others := config.sharers - 1) > 0:
        sums = others, halves // across * outputs, eights * EIGHT
        shared |= {"others": plgpu.SMEM(sums, jnp.float32), "added": plgpu.Barrier(num_arrivals=others)}
    return {
        "weight": plgpu.SMEM((stages, halves * outputs, depth), weight_dtype, transforms=swizzled(weight_dtype)),
        "x": x,
        "out": plgpu.SMEM((eights * EIGHT, outputs), out_dtype),
        "filled": plgpu.Barrier(num_arrivals=halves + copies, num_barriers=stages),
        "drained": plgpu.Barrier(num_arrivals=config.sharers, num_barriers=stages),
        **shared,
    }


def _is_one_copy(rows: int, weight_dtype: Any) -> bool:
    """Whether one row's piece comes as one copy, of tiles whose other rows lie outside of x, where TMA puts zeros.

    Every thread of a warpgroup arrives for every copy. Pieces of 8-bit weights are twice as deep for as many bytes:
    tile by tile, copies of x would be most of what a program waits for.
    """
    return rows == 1 and jnp.dtype(weight_dtype) == jnp.int8


def program_bytes(
    config: WeightStreamConfig, rows: int, *, gated: bool, weight_dtype: Any = jnp.bfloat16, summed: int = 0
) -> int:
    """Shared memory of a program, of rows in 16-bit numbers and float32 results."""
    whole = math.ceil(rows / EIGHT) * EIGHT  # a union takes what its largest member does
    made = scratch(config, whole, jnp.bfloat16, weight_dtype, jnp.float32, gated=gated, summed=summed)
    return smem_bytes(made) + RESERVED


def fill(tiles: int, splits: int, cores: int) -> float:
    """The share of the multiprocessors that have work, if each program takes one for as long."""
    waves = math.ceil(tiles * splits / cores)
    return tiles * splits / (waves * cores)


def program_registers(config: WeightStreamConfig, rows: int, *, gated: bool) -> int:
    """Of a thread that multiplies 8-bit weights, about: a piece widened, the sums, and what every kernel has.

    ptxas took 63 and 103 of one row, plain and gated, 79 and 128 of 32 rows; this says 68, 104, 80 and 128.
    """
    across, along = config.shared(gated=gated)
    held = config.outputs * (2 if gated else 1) // across
    widened = held * config.depth // along // 2
    sums = held * math.ceil(rows / EIGHT) * EIGHT
    return 32 + (widened + sums) // THREADS


def stream_configs(
    n: Sizes, weight_dtype: Any, cores: int, *, gated: bool, out_parts: int | None = None, joined: bool = False,
    summed: int = 0,
) -> list[WeightStreamConfig]:  # fmt: skip
    """The fewest splits that leave few multiprocessors idle first, each cut with rings that fit once and twice.

    Args:
      n: of the product.
      weight_dtype: of the weight.
      cores: multiprocessors of the chip.
      gated: whether a program has outputs of both halves.
      out_parts: the splits, where they are asked for.
      joined: whether a pass that there is anyway adds the splits up.
      summed: numbers of a row that programs add up themselves.
    """
    eight_bits = jnp.dtype(weight_dtype) == jnp.int8
    # As many bytes of either weight: what is on its way counts.
    depths = (256, 512, 128) if eight_bits else (128, 256, 64)

    def fits(config: WeightStreamConfig, times: int) -> bool:
        """Whether a multiprocessor has room for so many programs at a time."""
        used = program_bytes(config, n.rows, gated=gated, weight_dtype=weight_dtype, summed=summed)
        if used * times > SMEM_BYTES + RESERVED:
            return False
        registers = program_registers(config, n.rows, gated=gated) if eight_bits else 0
        threads = THREADS * (1 + config.sharers)
        most = REGISTERS // threads // 8 * 8  # of a thread: they are handed out in eights
        return registers <= most and registers * threads * times <= REGISTERS

    def ways_to_share(depth: int) -> tuple[int, ...]:
        if not eight_bits:
            return (1,)
        return tuple(sharers for sharers in (2, 4) if depth // WIDE_ATOM >= (2 if gated else sharers)) or (1,)

    configs = []
    for outputs, depth in itertools.product((64, 128), depths):
        if n.outputs % outputs or n.inner // (out_parts or 1) % depth:
            continue
        tiles, steps = n.outputs // outputs, n.inner // depth
        ways = (1,) if gated else tuple(s for s in (1, 2, 3, 4, 6, 8) if s <= steps)
        # The sum of a plain product's parts is a pass of its own, of a microsecond and more: what it saves is more
        # only where most multiprocessors would have nothing to do.
        enough = 0.95 * max(fill(tiles, s, cores) for s in ways) if joined else 0.45
        splits = out_parts or next((s for s in ways if fill(tiles, s, cores) >= enough), ways[-1])
        # Six pieces on their way are as many as parts of a sum need, and leave room for the next kernel's programs.
        # Of 16-bit weights twelve are 5 % slower than eight.
        deepest = max(min(math.ceil(steps / splits), 6 if splits > 1 else 16 if eight_bits else 8), 2)
        for sharers, together in itertools.product(ways_to_share(depth), (1, 2)):
            rings = (WeightStreamConfig(outputs, depth, stages, splits, sharers) for stages in range(deepest, 1, -1))
            configs += [config for config in rings if fits(config, together)][:1]
    # Where programs are more than multiprocessors, two at a time leave none of them idle.
    crowded = [c for c in configs if (n.outputs // c.outputs) * c.splits > cores]
    half = [c for c in crowded if fits(c, 2)]
    return list(dict.fromkeys([c for c in configs if c not in crowded] + half + crowded))


def candidates(call: Call) -> Sequence[WeightStreamConfig]:
    cores, dtype = multiprocessors(call.target.device_kind), call.need("weight").dtype
    gated, joined = call.params["gate"] is not None, call["residual"] is not None
    out_parts: Any = call.params["out_parts"]
    return stream_configs(sizes(call), dtype, cores, gated=gated, out_parts=out_parts, joined=joined)


def parts_that_fill(n: Sizes, weight_dtype: Any, cores: int) -> int | None:
    """The fewest parts of a product that leave few multiprocessors idle; None where no cut fits."""
    configs = stream_configs(n, weight_dtype, cores, gated=False, joined=True)
    return next((config.splits for config in configs if not n.inner // config.depth % config.splits), None)


def refuses(call: Call) -> str | None:
    x, n = call.need("x"), sizes(call)
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    if np.dtype(x.dtype).name not in ("bfloat16", "float16"):
        return f"its tensor-core form takes bfloat16 or float16, not {x.dtype}"
    if not 1 <= n.rows <= MOST_ROWS:
        return f"it takes 1 to {MOST_ROWS} rows, not {n.rows}"
    if n.outputs % ATOM or n.outputs < 2 * ATOM or n.inner % ATOM or n.inner < 2 * ATOM:
        return f"the weight is {n.outputs} outputs by {n.inner}; it takes multiples of {ATOM}, from {2 * ATOM}"
    if is_quantized(call) and n.inner % WIDE_ATOM:
        return f"of 8-bit weights it takes inner axes of a multiple of {WIDE_ATOM}, not {n.inner}"
    out_parts: Any = call.params["out_parts"]
    if out_parts is not None and not candidates(call):
        return f"no piece of 64 inputs and more divides each of {out_parts} parts of {n.inner}"
    out = out_dtype_of(call)
    if out.name not in (np.dtype(x.dtype).name, "float32"):
        return f"its results are of x's type or float32, not {out}"
    return None if call["residual"] is None else refuses_width(n.outputs)


def few_rows_hopper(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    scale: jax.Array | None = None,
    weight_scale: jax.Array | None = None,
    *,
    config: WeightStreamConfig,
    gate: str | None,
    eps: float,
    out_dtype: str | None = None,
    out_parts: int | None = None,
) -> Any:
    """One kernel over (outputs, parts of the inner axis), and one over rows where there is something to join."""
    (rows, inner), out = x.shape, jnp.dtype(out_dtype or x.dtype)
    check_cut(config, weight, weight_scale, gate, out_parts)
    outputs = weight.shape[0] // (1 if gate is None else 2)
    whole = config.splits == 1 and residual is None and out_parts is None
    kernel = plgpu.kernel(
        named("few_rows", _program, config=config, gate=gate, early=overlaps()),
        out_type=[out_struct((config.splits, rows, outputs), out if whole else jnp.float32, x)],
        grid=(outputs // config.outputs, config.splits),
        grid_names=("tile", "split"),
        num_threads=config.sharers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
    )
    # As the tiles that a row is cut into: the same bytes.
    source = x.reshape(inner // ATOM, 1, ATOM) if _is_one_copy(rows, weight.dtype) else x
    (made,) = kernel(source, weight) if weight_scale is None else kernel(source, weight, weight_scale)
    if out_parts is not None:
        return made
    if residual is not None and scale is not None:
        return join(made, residual, scale, eps=eps)
    return made[0] if whole else made.sum(0).astype(out)


def check_cut(
    config: WeightStreamConfig, weight: jax.Array, weight_scale: jax.Array | None, gate: str | None,
    out_parts: int | None,
) -> None:  # fmt: skip
    """Raise on a cut that is none of this weight."""
    if gate is not None and config.splits > 1:
        raise rule_error("A gated product is not split: a gate needs the whole sum", config, "use splits=1")
    inner, outputs = weight.shape[1], weight.shape[0] // (1 if gate is None else 2)
    if out_parts is not None and (config.splits != out_parts or inner // out_parts % config.depth):
        raise rule_error("A cut has as many splits as there are parts, each of whole pieces", config, "leave it out")
    if outputs % config.outputs or inner % config.depth:
        raise rule_error("A cut's outputs and depth divide the weight's", f"{config} of {weight.shape}", "use 64")
    _, along = config.shared(gated=gate is not None)
    if weight_scale is not None and config.depth < WIDE_ATOM * along:
        rule = f"A cut of an 8-bit weight is {WIDE_ATOM} deep at least, for each warpgroup that shares it"
        raise rule_error(rule, config, f"use depth={WIDE_ATOM * along}")
    if weight_scale is None and config.sharers > 1:
        raise rule_error("Warpgroups share the widening of an 8-bit weight alone", config, "use sharers=1")


def _program(
    x_hbm: Any, weight_hbm: Any, *scale_and_out: Any, config: WeightStreamConfig, gate: str | None, early: bool
) -> None:
    *weight_scale, out_hbm = scale_and_out
    stream(x_hbm, weight_hbm, weight_scale, out_hbm, config=config, gate=gate, early=early)


class Summed(NamedTuple):
    """A row that is the norm of a residual and of a product's parts: what it is made of, and where the sum goes.

    Each but `parts` as the tiles that a row is cut into, [tiles, 64]; `parts` has an axis of them in front.
    """

    parts: Any
    residual: Any
    scale: Any
    total: Any
    eps: float


def stream(
    x_hbm: Any, weight_hbm: Any, weight_scale: Any, out_hbm: Any, *, config: WeightStreamConfig, gate: str | None,
    early: bool, summed: Summed | None = None,
) -> None:  # fmt: skip
    """A program's part of the product; of rows x_hbm, or of one that it adds up itself while the weight is fetched.

    `early` it is started before the rows are there (pallas/overlap.py).
    """
    outputs, depth, stages, splits = config.outputs, config.depth, config.stages, config.splits
    rows, inner = out_hbm.shape[1], weight_hbm.shape[1]
    halves = 1 if gate is None else 2
    columns = math.ceil(rows / EIGHT) * EIGHT
    steps = inner // depth
    each = math.ceil(steps / splits)
    sharers = config.sharers
    across, along = config.shared(gated=gate is not None)
    dtype = x_hbm.dtype if summed is None else summed.residual.dtype

    def run_warpgroups(smem: dict[str, Any]) -> None:
        tile, split = lax.axis_index("tile"), lax.axis_index("split")
        warpgroup = lax.axis_index("warpgroup")
        first = split * each
        count = lax.max(lax.min(steps - first, each), 0) if steps % splits else each
        x_smem, x_tiles = smem["x"] if rows % EIGHT or summed is not None else (smem["x"], None)

        def held(half: int) -> Any:
            """Rows of the weight that this program has of a half."""
            return pl.ds(half * (weight_hbm.shape[0] // halves) + tile * outputs, outputs)

        @pl.when(warpgroup == sharers)
        def _fetch() -> None:
            def fetch_weight(step: Any) -> None:
                slot, inner = lax.rem(step, stages), pl.ds((first + step) * depth, depth)
                for half in range(halves):
                    target = smem["weight"].at[slot, pl.ds(half * outputs, outputs)]
                    plgpu.copy_gmem_to_smem(weight_hbm.at[held(half), inner], target, smem["filled"].at[slot])

            def fetch_rows(step: Any) -> None:
                slot, start = lax.rem(step, stages), (first + step) * depth
                filled = smem["filled"].at[slot]
                if x_tiles is None:
                    plgpu.copy_gmem_to_smem(x_hbm.at[:, pl.ds(start, depth)], x_smem.at[slot], filled)
                    return
                if _is_one_copy(rows, weight_hbm.dtype):
                    # A first row that no compiler knows: else there would be too few.
                    source = x_hbm.at[pl.ds((first + step) * (depth // ATOM), depth // ATOM), pl.ds(tile * 0, EIGHT)]
                    plgpu.copy_gmem_to_smem(source, x_tiles.at[slot, 0], filled)
                    return
                for eight, atom in itertools.product(range(columns // EIGHT), range(depth // ATOM)):
                    some = min(EIGHT, rows - eight * EIGHT)
                    source = x_hbm.at[pl.ds(eight * EIGHT, some), pl.ds(start + atom * ATOM, ATOM)]
                    plgpu.copy_gmem_to_smem(source, x_tiles.at[slot, eight, atom, pl.ds(0, some)], filled)

            ahead: Any = 0
            if early and summed is None:
                ahead = lax.min(count, min(stages, AHEAD))
                pl.loop(0, ahead)(fetch_weight)
                await_previous()
                pl.loop(0, ahead)(fetch_rows)

            @pl.loop(ahead, count)
            def _step(step: Any) -> None:
                @pl.when(step >= stages)
                def _() -> None:
                    plgpu.barrier_wait(smem["drained"].at[lax.rem(step, stages)])

                if summed is not None and weight_scale:
                    # What is on its way already is in the way of what the row is made of. Widening takes as long as the
                    # memory does: the weight can wait. Of 16 bits it cannot: 0.8 us of 46 in a layer of a 1.1B model.
                    @pl.when(step == HEAD_START)
                    def _added_up() -> None:
                        plgpu.barrier_wait(smem["prepared"])

                fetch_weight(step)
                if summed is None:
                    fetch_rows(step)

        def multiply(sharer: int) -> None:
            half, part = divmod(sharer, along)
            mine = pl.ds(part * (depth // along), depth // along)
            held_here = halves // across * outputs
            my_outputs = pl.ds(half * outputs, held_here)

            def contract(acc: Any) -> Any:
                @pl.loop(0, count)
                def _step(step: Any) -> None:
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(smem["filled"].at[slot])
                    piece = slot if summed is None else first + step
                    if weight_scale:
                        narrow = load(smem["weight"].at[slot, my_outputs, mine], plgpu.Layout.WGMMA_UPCAST_2X)
                        # Neighbours exchange what they have while it is narrow.
                        narrow = plgpu.layout_cast(narrow, plgpu.Layout.WGMMA)
                        plgpu.wgmma(acc, narrow.astype(dtype), x_smem.at[piece, :, mine].transpose((1, 0)))
                        # Its registers are the next piece's too.
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(smem["drained"].at[slot])
                        return
                    plgpu.wgmma(acc, smem["weight"].at[slot], x_smem.at[piece].transpose((1, 0)))
                    # One product stays in flight; the one before it is done with its stage.
                    plgpu.wgmma_wait(1)

                    @pl.when(step > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(smem["drained"].at[lax.rem(step - 1, stages)])

                plgpu.wgmma_wait(0)
                return acc[...]

            # Asked for before the loop, so that they are there after it.
            of_outputs = [
                load(scales.at[held(half)], plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(jnp.float32)
                for scales in (weight_scale if sharer == 0 else ())
                for half in range(halves)
            ]
            if summed is not None:
                if sharer == 0:
                    if early:
                        await_previous()
                    prepare(summed, x_tiles, smem["squares"], writes=(tile == 0) & (split == 0))
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(smem["prepared"])
                plgpu.barrier_wait(smem["prepared"])
            z = pl.run_scoped(contract, plgpu.WGMMAAccumulatorRef((held_here, columns), jnp.float32))
            if early and sharer == 0:
                # Not sooner: programs of a kernel that joins parts would be there all along, and 2 % slower.
                let_next_start()
                if each * (splits - 1) >= steps:
                    # A part of the inner axis that has nothing was waited for by nobody: its zeros are written at once.
                    await_previous()
            if sharer > 0:
                store_to_memory(smem["others"].at[sharer - 1], z)
                plgpu.barrier_arrive(smem["added"])
                return
            sums = [z]
            if sharers > 1:
                plgpu.barrier_wait(smem["added"])
                every = [z] + [
                    load(smem["others"].at[i], plgpu.Layout.WGMMA, optimized=False) for i in range(sharers - 1)
                ]
                sums = [sum(every[at + 1 : at + along], start=every[at]) for at in range(0, sharers, along)]
            parts = sums if halves == across else [sums[0][:outputs], sums[0][outputs:]]
            if of_outputs:
                parts = [
                    part * lax.broadcast_in_dim(scale, part.shape, (0,))
                    for part, scale in zip(parts, of_outputs, strict=True)
                ]
            z = parts[0] if gate is None else value(gate, parts[0], short=True) * parts[1]
            # Pairs of outputs, where the accumulator has pairs of rows: they lie side by side in the result.
            z = plgpu.layout_cast(z.astype(out_hbm.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            store_to_memory(smem["out"].at[:, :].transpose((1, 0)), z)
            plgpu.commit_smem()
            target = out_hbm.at[split, :, pl.ds(tile * outputs, outputs)]
            plgpu.copy_smem_to_gmem(smem["out"].at[pl.ds(0, rows)], target)
            plgpu.wait_smem_to_gmem(0)

        for sharer in range(sharers):
            pl.when(warpgroup == sharer)(functools.partial(multiply, sharer))

    whole = 0 if summed is None else inner
    allocated = scratch(config, rows, dtype, weight_hbm.dtype, out_hbm.dtype, gated=gate is not None, summed=whole)
    pl.run_scoped(run_warpgroups, allocated, collective_axes="warpgroup")


def prepare(summed: Summed, tiles_smem: Any, scratch: Any, *, writes: Any) -> None:
    """The row into shared memory, by a warpgroup; one program of all `writes` the sum. As `join` computes it."""
    _, tiles, width = summed.parts.shape
    columns = tiles * width
    layout = plgpu.Layout.WG_STRIDED((tiles, width), vec_size=math.gcd(columns // THREADS, 4))
    shrink = shrink_of(summed.eps)

    def wide(ref: Any) -> Any:
        return load(ref, layout).astype(jnp.float32)

    terms = [wide(summed.parts.at[part]) for part in range(summed.parts.shape[0])]
    residual, scale = wide(summed.residual), wide(summed.scale)
    total = (sum(terms[1:], start=terms[0]) + residual).astype(summed.residual.dtype)

    @pl.when(writes)
    def _write() -> None:
        store_to_memory(summed.total, total)

    smaller = total.astype(jnp.float32) * shrink
    spread = lax.rsqrt(sum_of(smaller * smaller, layout, scratch) * (1 / columns) + summed.eps * shrink**2)
    store_to_memory(tiles_smem.at[:, pl.ds(0, width)], (smaller * spread * scale).astype(total.dtype))


def ahead_of(call: Call) -> tuple[str, ...]:
    """On an H200, against xla, at 1 and at 32 rows of a 1.1B model, the best of five cuts: gated by silu 1.18 and 1.22
    times its speed; with a residual and its norm 1.11 and 1.30 (2048 inner), 1.22 and 1.19 (8192). Alone 0.88 and 1.42:
    of one row xla makes a reduction, of 32 a product. Of 8-bit weights gated 1.51 and 1.60; with a residual 1.13 and
    1.17, 1.41 and 1.36; alone 0.92 and 1.24, and a head with float32 results 1.35 and 1.44. One row in parts is 0.92 of
    xla's 2048 by 2048, 1.08 of 8192 by 2048. Other numbers of rows and other gates were not timed: from eight rows on
    it is taken to be as at 32. Of 16-bit weights with float32 results it is predicted to be ahead, and goes ahead where
    predictions are trusted."""
    alone = call.params["gate"] is None and call["residual"] is None
    few = sizes(call).rows < EIGHT
    wide = out_dtype_of(call).name != np.dtype(call.need("x").dtype).name
    if call.params["out_parts"] is not None:
        timed = True
        behind = few and not is_quantized(call) and math.prod(call.need("weight").shape) < LARGE
    elif is_quantized(call):
        timed, behind = True, alone and few and not wide
    else:
        timed, behind = not wide, alone and few
    return () if behind or not (timed or trusted() == "predicted") else ("xla",)


IMPLEMENTATION = Implementation(
    "hopper",
    few_rows_hopper,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    config_type=WeightStreamConfig,
    candidates=candidates,
)
