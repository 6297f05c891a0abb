"""The product of two arrays of grouped rows, one result a group, as one persistent Hopper kernel (Pallas, Mosaic GPU).

A tile of a group's result contracts over the group's rows in steps of 64. Whole steps are read in place, from the
first multiple of 8 rows on (TMA cuts rows in eights here). The rows before and after them, fewer than 72, are
gathered beforehand into a block of the group's own, filled up with zeros, so that no other group's numbers, NaN among
them, are ever multiplied. Groups are visited from the longest to the shortest, which leaves the short ones to even
out the programs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.layers.grouped.hopper.forward import (
    FETCH_REGISTERS,
    FETCHER,
    MULTIPLY_REGISTERS,
    PIECE_ROWS,
    STEP,
    GroupedHopperConfig,
    banded,
    contract,
    deepest_of,
    each_tile,
    fetch_steps,
    part,
    refuses,
    send,
    staging,
)
from capibara.kernels.ops.layers.grouped.tiles import group_spans, longest_first
from capibara.kernels.pallas.hopper import multiprocessors, named, swizzle_columns, swizzled

EIGHT = 8  # rows of a swizzle atom: where TMA can start
EDGE_ROWS = STEP + EIGHT  # at most 7 rows before the whole steps and 63 after them


def weight_candidates(call: Call) -> Sequence[GroupedHopperConfig]:
    """For the product whose contraction is grouped. It writes much for what it multiplies: more pieces on their way."""
    return deepest_of(
        [
            (128, 128, "m", 8), (128, 128, "m", 8, 4), (64, 256, "m", 8), (64, 256, "m", 8, 4), (128, 128, "n", 8),
            (128, 128, "n", 8, 4), (128, 128, "m", 4), (128, 128, "m", 16), (64, 128, "m", 8, 4),
        ]
    )  # fmt: skip


def _contract_rows(
    left: jax.Array, right: jax.Array, group_sizes: jax.Array, *, config: GroupedHopperConfig, out_dtype: Any
) -> jax.Array:
    """[groups, P, Q] of left [rows, P] and right [rows, Q]: left_g transposed by right_g for each group g."""
    rows = left.shape[0]
    starts, ends = group_spans(group_sizes, rows)
    body = jnp.minimum(-(-starts // EIGHT) * EIGHT, ends)
    whole = (ends - body) // STEP
    edges = [_edge_rows(x, starts, body, body + whole * STEP, ends) for x in (left, right)]
    steps = whole + -(-(ends - starts - whole * STEP) // STEP)
    # Without a whole step the body may start, and end, at any row; it is then never read.
    lists = longest_first(steps, jnp.where(whole > 0, body, 0), whole)
    # TMA cuts rows in eights, and an axis of one eight would have no place in its descriptor.
    wanted = max(2 * EIGHT, -(-rows // EIGHT) * EIGHT)
    if rows != wanted:
        left, right = (jnp.pad(x, ((0, wanted - rows), (0, 0))) for x in (left, right))
    programs = multiprocessors(current_target().device_kind)
    (out,) = plgpu.kernel(
        named("grouped_weights", _program, config=config, programs=programs),
        out_type=[out_struct((len(ends), left.shape[1], right.shape[1]), out_dtype, left)],
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(left, right, *edges, *lists)
    return out


def _edge_rows(x: jax.Array, starts: jax.Array, body: jax.Array, rest: jax.Array, ends: jax.Array) -> jax.Array:
    """[groups, 72, columns]: each group's rows from start to body and from rest to end, then zeros."""
    place = jnp.arange(EDGE_ROWS, dtype=jnp.int32)[None]
    before = (body - starts)[:, None]
    row = jnp.where(place < before, starts[:, None] + place, rest[:, None] + place - before)
    inside = place < before + (ends - rest)[:, None]
    # Chosen, not multiplied: a row that is not the group's may hold NaN.
    return jnp.where(inside[..., None], x[jnp.where(inside, row, 0)], jnp.zeros((), x.dtype))


def _program(
    left: Any, right: Any, left_edges: Any, right_edges: Any, group_of: Any, steps_of: Any, body_of: Any,
    whole_of: Any, out: Any, *, config: GroupedHopperConfig, programs: int,
) -> None:  # fmt: skip
    groups, p, q = out.shape
    tile_m, tile_n, stages = config.tile_m, config.tile_n, config.stages
    program_m, program_n = config.program_tile
    grid_m, grid_n = math.ceil(p / program_m), math.ceil(q / program_n)
    width = swizzle_columns(out.dtype)
    pieces = [(r, c) for r in range(0, tile_m, PIECE_ROWS) for c in range(0, tile_n, width)]

    def place(index: Any) -> tuple[Any, Any, Any]:
        """The group's place in the lists, and the tile's first row and column in its result."""
        turn = lax.div(index, grid_m * grid_n)
        row, column = banded(index - turn * (grid_m * grid_n), grid_m, grid_n, config.band)
        return turn, row * program_m, column * program_n

    @functools.partial(
        pl.run_scoped,
        a_smem=plgpu.SMEM((stages, STEP, program_m), left.dtype, transforms=swizzled(left.dtype)),
        b_smem=plgpu.SMEM((stages, STEP, program_n), right.dtype, transforms=swizzled(right.dtype)),
        filled=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        drained=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # by both multiplying warpgroups
        staged=staging(config, out.dtype),
        collective_axes="warpgroup",
    )
    def _scoped(a_smem: Any, b_smem: Any, filled: Any, drained: Any, staged: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == FETCHER)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def visit(index: Any, before: Any) -> Any:
                turn, first_p, first_q = place(index)
                group, whole, steps = group_of[turn], whole_of[turn], steps_of[turn]
                body = pl.multiple_of(body_of[turn], EIGHT)
                across, down = pl.ds(first_q, program_n), pl.ds(first_p, program_m)

                def fetch(step: Any, slot: Any) -> None:
                    @pl.when(step < whole)
                    def _in_place() -> None:
                        rows = pl.ds(body + step * STEP, STEP)
                        plgpu.copy_gmem_to_smem(left.at[rows, down], a_smem.at[slot], filled.at[slot])
                        plgpu.copy_gmem_to_smem(right.at[rows, across], b_smem.at[slot], filled.at[slot])

                    @pl.when(step >= whole)
                    def _edge() -> None:
                        rows = pl.ds((step - whole) * STEP, STEP)
                        plgpu.copy_gmem_to_smem(left_edges.at[group, rows, down], a_smem.at[slot], filled.at[slot])
                        plgpu.copy_gmem_to_smem(right_edges.at[group, rows, across], b_smem.at[slot], filled.at[slot])

                fetch_steps(config, drained, steps, before, fetch)
                return steps

            each_tile(groups * grid_m * grid_n, programs, visit)

        @pl.when(warpgroup < FETCHER)
        def _multiply() -> None:
            plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            # Where this warpgroup's part starts inside the program's tile.
            inside_m = warpgroup * tile_m if config.split == "m" else 0
            inside_n = warpgroup * tile_n if config.split == "n" else 0

            def operands(slot: Any) -> tuple[Any, list[Any]]:
                left = part(a_smem.at[slot], inside_m, tile_m, 1, config.split == "m")
                right = part(b_smem.at[slot], inside_n, tile_n, 1, config.split == "n")
                return left.transpose((1, 0)), [right]

            def visit(index: Any, before: Any) -> Any:
                turn, first_p, first_q = place(index)
                group, steps = group_of[turn], steps_of[turn]

                def store(sums: list[Any]) -> None:
                    for number, (r, c) in enumerate(pieces):
                        rows = pl.ds(first_p + inside_m + r, PIECE_ROWS)
                        target = out.at[group, rows, pl.ds(first_q + inside_n + c, width)]
                        copy = functools.partial(plgpu.copy_smem_to_gmem, dst=target, commit_group=False)
                        send(staged.at[warpgroup], number, sums[0][r : r + PIECE_ROWS, c : c + width], copy)

                contract(config, filled, drained, steps, before, (tile_m, tile_n), operands, store)
                return steps

            each_tile(groups * grid_m * grid_n, programs, visit)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def grouped_weights(
    lhs: jax.Array, d_out: jax.Array, group_sizes: jax.Array, *, config: GroupedHopperConfig,
    transpose: bool = False, out_dtype: str | None = None,
) -> jax.Array:  # fmt: skip
    """grouped_gemm_weights as one persistent kernel, after a gather of each group's odd rows."""
    out = jnp.dtype(out_dtype) if out_dtype else lhs.dtype
    left, right = (d_out, lhs) if transpose else (lhs, d_out)
    return _contract_rows(left, right, group_sizes, config=config, out_dtype=out)


WEIGHTS_IMPLEMENTATION = Implementation(
    "hopper",
    grouped_weights,
    platforms=("gpu",),
    refuses=refuses,
    kernel=True,
    config_type=GroupedHopperConfig,
    candidates=weight_candidates,
)
