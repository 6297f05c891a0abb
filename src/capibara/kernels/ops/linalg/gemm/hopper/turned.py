"""gemm of few rows for Hopper's tensor cores: the product turned over, so that rows are counted in eights.

A tensor core's product has 64 rows, or a multiple, and any multiple of eight columns. Here the columns of b are its
rows, 64 to a program, and the rows of a its columns: 77 rows are 80, or two programs' 40 each, where forward.py's tiles
have 128. What a program fetches is then least, which is what takes the time: a multiprocessor is given some 110 GB/s,
and all together ten TB/s. A warpgroup fetches by TMA into a ring of stages, another multiplies, and the sums are turned
back on their way out. A program has one tile, or a part of the products along K where tiles are few and K is long: the
parts' sums are then added up, in float32 and together with what follows the product, by XLA. Programs should be no more
than multiprocessors.

Of rows that no tile divides the last tile starts early, and writes those again that it shares with the one before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.linalg.gemm.hopper import forward
from capibara.kernels.ops.linalg.gemm.hopper.forward import ACTIVATIONS, FETCH_REGISTERS, MULTIPLY_REGISTERS
from capibara.kernels.ops.linalg.gemm.reference import epilogue
from capibara.kernels.ops.linalg.gemm.rules import out_dtype_of, sizes
from capibara.kernels.pallas.hopper import (
    LANE,
    SMEM_BYTES,
    load,
    multiprocessors,
    named,
    row_tiled,
    smem_bytes,
    store_to_memory,
    swizzled,
)

EIGHT = 8
COLUMNS, DEPTH = 64, 64  # of b, that a program has; and of K, that a stage has
MOST_TILE_ROWS, MOST_TILES, PARTS, MOST_CANDIDATES = 128, 8, (1, 2, 3, 4, 6, 8), 8
# A ring of 8 or 16 stages takes up to a third less than one of 9 to 15: which slot is next is then no quotient.
RINGS = (8, 4, 2)
# Microseconds that a program takes for itself and for a row, and for a stage at the least; what a stage takes by its
# own bytes (a multiprocessor's GB/s) and by those of all (the cache's TB/s); what a pass takes that adds parts up. By
# 150 products of up to 330 rows on an H200, 8 % off in the median; by its choice 0.7 % are lost in the mean.
PROGRAM_US, ROW_US, STAGE_US, OWN_GB_S, ALL_TB_S, SUM_US, SUM_TB_S = 1.8, 0.005, 0.12, 113, 9.6, 1.35, 5.5
# Rows that it goes first with, where it has as many programs as multiprocessors or less, by K at the most: as far as
# runs on an H200 reach, and it was the sooner one. One row it has first up to the last of them.
AHEAD = {2048: range(1, 337), 4096: range(40, 257), 8192: range(64, 129)}


@dataclasses.dataclass(frozen=True)
class TurnedConfig:
    """A program's rows of a, a multiple of eight, the stages of its ring, and how many programs share a tile's K."""

    rows: int
    stages: int
    parts: int = 1

    def __post_init__(self) -> None:
        if self.rows % EIGHT or not EIGHT <= self.rows <= 2 * MOST_TILE_ROWS:
            raise rule_error(
                f"rows is a multiple of {EIGHT}, from {EIGHT} to {2 * MOST_TILE_ROWS}", self.rows, "use 64"
            )
        if self.stages < 2:
            raise rule_error("stages is two or more", self.stages, "use 8")
        if self.parts < 1:
            raise rule_error("parts is one or more", self.parts, "use 1")


def scratch(config: TurnedConfig, dtype: Any, out_dtype: Any, *, by_rows: bool) -> dict[str, Any]:
    """A program's shared memory: the ring of both operands, and the result on its way out. A piece of b is square, so
    transposed or not."""
    rows, stages = config.rows, config.stages
    a_read = plgpu.SMEM((stages, rows, DEPTH), dtype, transforms=swizzled(dtype))
    a_fetched = plgpu.SMEM((stages, rows, DEPTH), dtype, transforms=row_tiled(dtype))
    return {
        "a": plgpu.RefUnion(a_fetched, a_read) if by_rows else a_read,
        "b": plgpu.SMEM((stages, DEPTH, COLUMNS), dtype, transforms=swizzled(dtype)),
        "out": plgpu.SMEM((rows, COLUMNS), out_dtype),
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # a's piece and b's
        "drained": plgpu.Barrier(num_barriers=stages),
    }


def gemm_turned(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    config: TurnedConfig,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str | None = None,
    precision: str | None = None,
    out_dtype: str | None = None,
) -> jax.Array:
    """gemm of one matrix by another; see the module's text. 16-bit operands have one precision."""
    assert not transpose_a  # `refuses` says so
    (m, k), n = a.shape, b.shape[0 if transpose_b else 1]
    dtype = jnp.dtype(out_dtype) if out_dtype else a.dtype
    whole = config.parts == 1 and residual is None
    out = out_struct((m, n) if whole else (config.parts, m, n), dtype if whole else jnp.float32, a)
    kernel = plgpu.kernel(
        named("gemm_few_rows", _program, config=config, sizes=(m, n, k), transpose_b=transpose_b,
              activation=activation if whole else None),
        out_type=out,
        grid=(math.ceil(m / config.rows), n // COLUMNS, config.parts),
        grid_names=("row", "column", "part"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=LANE,
            # Exponentials good to 2 units of float32: far below what a 16-bit output can show.
            approx_math=dtype.itemsize == 2,
        ),
    )  # fmt: skip
    if not whole:
        return epilogue(kernel(a, b).sum(0), bias, residual, activation).astype(dtype)
    return kernel(a, b) if bias is None else kernel(a, b, bias)


def _program(
    a_hbm: Any, b_hbm: Any, *bias_and_out: Any, config: TurnedConfig, sizes: tuple[int, int, int], transpose_b: bool,
    activation: str | None,
) -> None:  # fmt: skip
    *bias_hbm, out_hbm = bias_and_out
    m, _, k = sizes
    rows, stages, steps = config.rows, config.stages, k // DEPTH
    each = math.ceil(steps / config.parts)
    by_rows = forward.copies_rows(m)
    there = min(rows, m)  # rows of a that are copied: of those behind them in shared memory nothing is written

    def run_warpgroups(smem: dict[str, Any]) -> None:
        warpgroup = lax.axis_index("warpgroup")
        mine = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)
        first = jnp.minimum(lax.axis_index("row") * rows, m - there) if m > rows else 0
        part = lax.axis_index("part")
        # Where parts are not of like length the last ones have fewer steps, or none: their sums are zeros.
        count = jnp.clip(steps - part * each, 0, each) if each * config.parts != steps else each
        a_fetched, a_read = smem["a"] if by_rows else (smem["a"], smem["a"])

        @pl.when(warpgroup == 1)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            @pl.loop(0, count)
            def _step(step: Any) -> None:
                slot, depth = lax.rem(step, stages), pl.ds((part * each + step) * DEPTH, DEPTH)

                @pl.when(step >= stages)
                def _() -> None:
                    plgpu.barrier_wait(smem["drained"].at[slot])

                filled = smem["filled"].at[slot]
                plgpu.copy_gmem_to_smem(b_hbm.at[(mine, depth) if transpose_b else (depth, mine)], smem["b"].at[slot],
                                        filled)  # fmt: skip
                room = a_fetched.at[slot]
                plgpu.copy_gmem_to_smem(
                    a_hbm.at[pl.ds(first, there), depth], room.at[pl.ds(0, there)] if there < rows else room, filled
                )

        @pl.when(warpgroup == 0)
        def _multiply() -> None:
            plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            # Asked for before the loop, so that it is there after it.
            lines = [load(ref.at[mine], plgpu.Layout.WGMMA.reduce(1), optimized=False) for ref in bias_hbm]

            def contract(acc: Any) -> Any:
                @pl.loop(0, count)
                def _step(step: Any) -> None:
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(smem["filled"].at[slot])
                    left = smem["b"].at[slot]
                    plgpu.wgmma(acc, left if transpose_b else left.transpose((1, 0)), a_read.at[slot].transpose((1, 0)))
                    # One product stays in flight; the one before it is done with its stage.
                    plgpu.wgmma_wait(1)

                    @pl.when(step > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(smem["drained"].at[lax.rem(step - 1, stages)])

                plgpu.wgmma_wait(0)
                return acc[...]

            z = pl.run_scoped(contract, plgpu.WGMMAAccumulatorRef((COLUMNS, rows), jnp.float32))
            for line in lines:
                z = z + lax.broadcast_in_dim(line.astype(jnp.float32), z.shape, (0,))
            if activation is not None:
                z = ACTIVATIONS[activation](z)
            # Pairs of columns, where the accumulator has pairs of rows: they lie side by side in the result.
            z = plgpu.layout_cast(z.astype(out_hbm.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            store_to_memory(smem["out"].at[:, :].transpose((1, 0)), z)
            plgpu.commit_smem()
            target = out_hbm if len(out_hbm.shape) == 2 else out_hbm.at[part]
            plgpu.copy_smem_to_gmem(smem["out"].at[pl.ds(0, there)], target.at[pl.ds(first, there), mine])
            plgpu.wait_smem_to_gmem(0)

    allocated = scratch(config, a_hbm.dtype, out_hbm.dtype, by_rows=by_rows)
    pl.run_scoped(run_warpgroups, allocated, collective_axes="warpgroup")


def refuses(call: Call) -> str | None:
    if call.params["transpose_a"]:
        return "its rows are a's, which lie one after another: not transposed"
    if any(len(call.need(name).shape) == 3 for name in ("a", "b")):
        return "it takes one product, not a batch of them"
    cannot = forward.refuses(call)
    columns = sizes(call)[2]
    if cannot is None and columns % COLUMNS:  # of a b that is transposed, where the output is float32
        return f"the output has {columns} columns, and a program {COLUMNS}"
    return cannot


def programs(call: Call, rows: int, parts: int) -> int:
    _, m, n, _ = sizes(call)
    return math.ceil(m / rows) * (n // COLUMNS) * parts


def microseconds(call: Call, rows: int, parts: int) -> float:
    """What the product takes, about, with tiles of so many rows that so many programs share; memory apart, which takes
    as long for any."""
    _, m, n, k = sizes(call)
    there, count = multiprocessors(call.target.device_kind), programs(call, rows, parts)
    stage_kb = (COLUMNS + rows) * DEPTH * 2e-3
    stage_us = max(STAGE_US, stage_kb / OWN_GB_S, stage_kb * min(count, there) / (ALL_TB_S * 1e3))
    program_us = PROGRAM_US + ROW_US * rows + math.ceil(k / DEPTH / parts) * stage_us
    return math.ceil(count / there) * program_us + (SUM_US + parts * m * n * 4e-6 / SUM_TB_S if parts > 1 else 0.0)


def candidates(call: Call) -> Sequence[TurnedConfig]:
    """The rows shared out evenly, the fewest microseconds first, each with the deepest ring that fits."""
    _, m, _, k = sizes(call)
    steps = k // DEPTH
    shares = {min(MOST_TILE_ROWS, EIGHT * math.ceil(m / tiles / EIGHT)) for tiles in range(1, MOST_TILES + 1)}
    cuts = [(rows, parts) for rows in shares for parts in PARTS if parts <= steps]
    cuts = sorted(cuts, key=lambda cut: (microseconds(call, *cut), -cut[0]))[:MOST_CANDIDATES]
    a, by_rows = call.need("a").dtype, forward.copies_rows(m)

    def deepest(rows: int, parts: int) -> TurnedConfig:
        written = out_dtype_of(call) if parts == 1 and call["residual"] is None else jnp.dtype(jnp.float32)
        rings = (TurnedConfig(rows, stages, parts) for stages in RINGS)
        return next(c for c in rings if smem_bytes(scratch(c, a, written, by_rows=by_rows)) <= SMEM_BYTES)

    return [deepest(*cut) for cut in cuts]


def ahead_of(call: Call) -> tuple[str, ...]:
    """On an H200, with no more programs than there are multiprocessors, 0.97 to 4.1 times as fast as XLA, which shares
    out K and sums in a second kernel, and of one row makes a reduction; 0.88 to 1.5 times as fast as torch's cuBLAS.
    A b that is transposed fetches the same bytes, and was not timed."""
    _, m, _, k = sizes(call)
    rows = next((rows for deepest, rows in AHEAD.items() if k <= deepest), range(0))
    if refuses(call) is not None or call["residual"] is not None or not (m in rows or (m == 1 and k <= max(AHEAD))):
        return ()
    best = candidates(call)[0]
    fits = programs(call, best.rows, best.parts) <= multiprocessors(call.target.device_kind)
    return ("xla", "hopper") if fits else ()


IMPLEMENTATION = Implementation(
    "hopper_turned",
    gemm_turned,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    config_type=TurnedConfig,
    candidates=candidates,
    for_call=lambda config, call: candidates(call)[0],
)
