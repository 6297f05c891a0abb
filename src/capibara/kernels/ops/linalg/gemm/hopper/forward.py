"""gemm for Hopper's tensor cores, in Pallas (Mosaic GPU).

A persistent grid, one program a multiprocessor, walks the output tiles in a snake so that neighbours share operands
in L2. In each program one warpgroup only fetches tiles (TMA, several stages deep) and two multiply (wgmma) and
write back; the epilogue is applied to the float32 accumulator in registers and stored through shared memory in
double-buffered pieces while the next tile is already being fetched.

Few rows, whose tiles do not fill the chip, are for turned.py.

Sizes need not be multiples of a tile: TMA fills what lies past an edge with zeros and drops what is written there.
It does demand that rows lie 16 bytes apart, so the last axes are multiples of eight 16-bit numbers.

TMA and wgmma take shared memory in tiles of 8 rows, and arrays in global memory are not padded to them. Where those
tiles do not divide M, the rows of a and of the output are copied in tiles of one row. A block as wide as a swizzle has
the same bytes in it either way: wgmma still reads it in tiles of 8.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.linalg.gemm.rules import out_dtype_of, sizes
from capibara.kernels.pallas.hopper import (
    SMEM_BYTES,
    multiprocessors,
    refuses_64_bits,
    refuses_chip,
    row_tiled,
    smem_bytes,
    swizzle_columns,
    swizzled,
)

TMA_ALIGNMENT = 16  # bytes between rows
FETCH_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # a thread; 65,536 a multiprocessor over three warpgroups
PIECE = 64  # the epilogue goes through shared memory in pieces of 64 x 64
TILE_ROWS = 8  # of a tile of shared memory as wgmma reads it
# Rows and columns of a warpgroup's tile, and where the two sit side by side: microseconds that a program takes for 64
# numbers of K, and for a tile beside them. By 23 products of 80 to 8,192 rows on an H200, in the median 4 % off.
TILES = {
    (128, 128, "m"): (0.625, 4.2), (128, 128, "n"): (0.594, 4.8), (256, 64, "n"): (0.630, 4.2),
    (128, 192, "m"): (0.870, 7.4), (64, 256, "m"): (0.593, 4.8), (64, 192, "m"): (0.456, 3.5),
    (64, 128, "m"): (0.334, 1.8), (64, 64, "m"): (0.261, 0.5), (64, 64, "n"): (0.278, 0.4),
}  # fmt: skip
LARGE = (128, 128, "m")
# Rows with an activation, at the least, by K at the most.
FEWEST_ROWS, FEWEST_ROWS_SHALLOW = 512, {1024: 72, 1600: 200}
# Without an epilogue: the most rows, and K; and the fewest tiles a program.
BARE_ROWS, BARE_K, FILLED = 512, 1024, 0.9
MANY = 8  # large tiles a program, from which on how many there are no longer tells, and the chip's power does
DEPTHS = (5, 4, 3, 2)  # stages of a ring
MOST_COPIED = 256  # tiles along an axis that one TMA copy takes, single rows too


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """One warpgroup's tile, pipeline depth, and the order in which output tiles are visited.

    The two multiplying warpgroups sit side by side along `split` ("m" or "n"), so a program's tile is twice as
    large there. Tiles are visited along `minor` in bands `band` tiles wide.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 64
    stages: int = 4
    split: str = "m"
    minor: str = "n"
    band: int = 8

    def __post_init__(self) -> None:
        if self.tile_m % 64 or not 64 <= self.tile_m <= 256:
            raise rule_error("tile_m is 64, 128, 192 or 256", self.tile_m, "use 128")
        if self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            raise rule_error("tile_n is 64, 128, 192 or 256", self.tile_n, "use 128")
        if self.tile_k not in (64, 128):
            raise rule_error("tile_k is 64 or 128", self.tile_k, "use 64")
        if self.stages < 2:
            raise rule_error("stages is two or more", self.stages, "use 4")
        if self.split not in ("m", "n"):
            raise rule_error("split is 'm' or 'n'", self.split, "use 'm'")
        if self.minor not in ("m", "n"):
            raise rule_error("minor is 'm' or 'n'", self.minor, "use 'n'")

    @property
    def program_tile(self) -> tuple[int, int]:
        return self.tile_m * (1 + (self.split == "m")), self.tile_n * (1 + (self.split == "n"))

    def pieces(self, columns: int) -> list[tuple[int, int]]:
        """Where the pieces of what a warpgroup writes start that the epilogue goes through shared memory in."""
        return [(r, c) for r in range(0, self.tile_m, PIECE) for c in range(0, self.tile_n, columns)]

    def slots(self, columns: int) -> int:
        """Pieces of a warpgroup that are in shared memory together."""
        return min(2, len(self.pieces(columns)))


def _sigmoid(z: Any) -> Any:
    return 1.0 / (1.0 + jnp.exp(-z))


# Both activations as z times a sigmoid: an exponential and a quotient, which keep their relative accuracy in the
# tails when they are approximated; the hardware's approximate tanh would not.
ACTIVATIONS = {
    "gelu": lambda z: z * _sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z)),
    "silu": lambda z: z * _sigmoid(z),
}


def deepest(call: Call, tile_m: int, tile_n: int, split: str) -> int | None:
    """The most stages that fit beside such tiles."""
    return next((s for s in DEPTHS if fits(call, HopperConfig(tile_m, tile_n, 64, s, split))), None)


def candidates(call: Call) -> Sequence[HopperConfig]:
    """The tiles worth timing, those that did best on an H200 first, each with the deepest ring that fits."""
    configs = []
    for (m, n, split), minor, band in itertools.product(TILES, ("m", "n"), (4, 16, 8)):
        stages = deepest(call, m, n, split)
        if stages is not None:
            configs.append(HopperConfig(m, n, 64, stages, split, minor, band))
    return configs


def copies_rows(m: int) -> bool:
    """Whether a and the output are copied in tiles of one row: 8 do not divide M, or there would be a single tile."""
    return m % TILE_ROWS != 0 or m < 2 * TILE_ROWS


def piece_columns(out_dtype: Any, by_rows: bool) -> int:
    """Pieces that leave row by row are no wider than a swizzle: float32's are half as wide."""
    return swizzle_columns(out_dtype) if by_rows else PIECE


def scratch(
    config: HopperConfig, dtype: Any, out_dtype: Any, bias_dtype: Any = None, *, by_rows: bool,
    has_residual: bool = False, transpose_a: bool = False, transpose_b: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A program's shared memory: the operands' ring, the output's pieces of both warpgroups, and the bias."""
    columns = piece_columns(out_dtype, by_rows)
    tile_k, stages, slots = config.tile_k, config.stages, config.slots(columns)
    program_m, program_n = config.program_tile
    a_block = (tile_k, program_m) if transpose_a else (program_m, tile_k)
    b_block = (program_n, tile_k) if transpose_b else (tile_k, program_n)
    has_bias = bias_dtype is not None
    a_read = plgpu.SMEM((stages, *a_block), dtype, transforms=swizzled(dtype))
    a_fetched = plgpu.SMEM((stages, *a_block), dtype, transforms=row_tiled(dtype))
    out_layout = row_tiled(out_dtype) if by_rows else swizzled(out_dtype)
    return {
        "a_smem": plgpu.RefUnion(a_fetched, a_read) if by_rows else a_read,
        "b_smem": plgpu.SMEM((stages, *b_block), dtype, transforms=swizzled(dtype)),
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # a's tile and b's
        "drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # by both multiplying warpgroups
        "staged": plgpu.SMEM((2, slots, PIECE, columns), out_dtype, transforms=out_layout),
        "bias_smem": plgpu.SMEM((2, config.tile_n), bias_dtype) if has_bias else None,
        "bias_arrived": plgpu.Barrier(num_barriers=2) if has_bias else None,
        "residual_arrived": plgpu.Barrier(num_barriers=2 * slots) if has_residual else None,
    }


def fits(call: Call, config: HopperConfig) -> bool:
    _, m, _, _ = sizes(call)
    bias_dtype = None if call["bias"] is None else call.need("bias").dtype
    allocated = scratch(config, call.need("a").dtype, out_dtype_of(call), bias_dtype, by_rows=copies_rows(m))
    return smem_bytes(allocated) <= SMEM_BYTES


def default_config(call: Call) -> HopperConfig:
    """Large tiles where there are many; else those by which the program that has the most of them is done soonest."""
    *_, k = sizes(call)

    def cost(config: HopperConfig) -> float:
        step_us, tile_us = TILES[config.tile_m, config.tile_n, config.split]
        return math.ceil(_tiles_a_program(call, config)) * (math.ceil(k / 64) * step_us + tile_us)

    fitting = [
        HopperConfig(tile_m, tile_n, 64, stages, split, "n", 8)
        for tile_m, tile_n, split in TILES
        if (stages := deepest(call, tile_m, tile_n, split)) is not None
    ]
    large = [c for c in fitting if (c.tile_m, c.tile_n, c.split) == LARGE and _tiles_a_program(call, c) >= MANY]
    return large[0] if large else min(fitting, key=cost)


def _tiles_a_program(call: Call, config: HopperConfig) -> float:
    """In the mean."""
    count, m, n, _ = sizes(call)
    rows, columns = config.program_tile
    return count * math.ceil(m / rows) * math.ceil(n / columns) / multiprocessors(call.target.device_kind)


def refuses(call: Call) -> str | None:
    a, b, bias, residual = call.args
    assert a is not None
    assert b is not None
    cannot = refuses_chip(call.target.device_kind) or refuses_64_bits()
    if cannot is not None:
        return cannot
    if a.dtype != b.dtype or np.dtype(a.dtype).name not in ("bfloat16", "float16"):
        return f"its tensor-core form takes two bfloat16 or two float16 operands, not {a.dtype} and {b.dtype}"
    if residual is not None and residual.dtype != out_dtype_of(call):
        return f"the residual has the output's type {out_dtype_of(call)}, not {residual.dtype}"
    if out_dtype_of(call) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it writes bfloat16, float16 or float32, not {out_dtype_of(call)}"
    if 0 in a.shape or 0 in b.shape:
        return "an operand is empty"
    if bias is not None and len(bias.shape) == 2:
        return "the bias differs from one batch element to the next"
    _, m, n, _ = sizes(call)
    rows_of_m = 1 if copies_rows(m) else TILE_ROWS
    for name, shape, tile_rows, dtype in (
        ("a", a.shape, TILE_ROWS if call.params["transpose_a"] else rows_of_m, a.dtype),
        ("b", b.shape, TILE_ROWS, b.dtype),
        ("the output", (m, n), rows_of_m, out_dtype_of(call)),
    ):
        rows, columns = shape[-2:]
        row_bytes = columns * dtype.itemsize
        if row_bytes % TMA_ALIGNMENT:
            return f"rows of {name} are {row_bytes} bytes long, and TMA wants a multiple of {TMA_ALIGNMENT}"
        # Mosaic cuts arrays into pieces of so many rows by one swizzle atom (128 bytes) and pads neither; an array of a
        # single piece loses that axis from its TMA descriptor, and what lies past its edge is no longer dropped. Of
        # tiles of one row a copy takes many, and the axis stays even where the array has a single row.
        atom = swizzle_columns(dtype)
        few_rows = tile_rows > 1 and rows < 2 * tile_rows
        if rows % tile_rows or columns % atom or few_rows or columns < 2 * atom:
            return f"{name} is {rows} x {columns}; Mosaic tiles it by {tile_rows} x {atom} and needs two tiles or more"
    return None


def gemm_hopper(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    config: HopperConfig,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str | None = None,
    precision: str | None = None,
    out_dtype: str | None = None,
) -> jax.Array:
    """gemm as one persistent kernel; see the module's text. 16-bit operands have one precision."""
    m, k = a.shape[-2:][::-1] if transpose_a else a.shape[-2:]
    n = b.shape[-2] if transpose_b else b.shape[-1]
    if copies_rows(m) and (config.tile_k != swizzle_columns(a.dtype) or config.program_tile[0] > MOST_COPIED):
        raise rule_error(
            f"Where M is no multiple of 8, or 8, tile_k is {swizzle_columns(a.dtype)} and a program's tile at most "
            f"{MOST_COPIED} rows high (TMA)",
            f"M = {m}, tile_k = {config.tile_k}, {config.program_tile[0]} rows",
            "use another config",
        )
    batched = a.ndim == 3 or b.ndim == 3
    count = (a.shape[0] if a.ndim == 3 else b.shape[0]) if batched else 1
    out = out_struct((count, m, n) if batched else (m, n), jnp.dtype(out_dtype) if out_dtype else a.dtype, a)
    body = functools.partial(
        _program,
        config=config,
        sizes=(count, m, n, k),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        activation=activation,
        has_bias=bias is not None,
        has_residual=residual is not None,
    )
    kernel = plgpu.kernel(
        body,
        out_type=out,
        grid=(multiprocessors(current_target().device_kind),),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Exponentials good to 2 units of float32: far below what a 16-bit output can show.
            approx_math=out.dtype.itemsize == 2,
        ),
    )
    operands = [a, b]
    if bias is not None:
        operands.append(bias)
    if residual is not None:
        operands.append(residual)
    return kernel(*operands)


def _program(
    *refs: Any, config: HopperConfig, sizes: tuple[int, int, int, int], transpose_a: bool, transpose_b: bool,
    activation: str | None, has_bias: bool, has_residual: bool,
) -> None:  # fmt: skip
    a_hbm, b_hbm, *rest = refs
    bias_hbm = rest.pop(0) if has_bias else None
    residual_hbm = rest.pop(0) if has_residual else None
    (out_hbm,) = rest
    count, m, n, k = sizes
    tile_m, tile_n, tile_k, stages = config.tile_m, config.tile_n, config.tile_k, config.stages
    program_m, program_n = config.program_tile
    steps = math.ceil(k / tile_k)
    grid_m, grid_n = math.ceil(m / program_m), math.ceil(n / program_n)
    by_rows = copies_rows(m)
    # A copy that reaches past the end of a takes longer than a whole one. Where M is less than a tile it is of the rows
    # that there are; else the last tile starts early, and writes the rows that it shares with the one before again.
    rows_there = m if by_rows else math.ceil(m / TILE_ROWS) * TILE_ROWS
    fetched_m = program_m if transpose_a else min(program_m, rows_there)

    def first_row(row: Any) -> Any:
        """Of a tile of this row of tiles."""
        early = not transpose_a and program_m < m and m % program_m
        return jnp.minimum(row * program_m, m - program_m) if early else row * program_m

    columns_out = piece_columns(out_hbm.dtype, by_rows)
    pieces, slots = config.pieces(columns_out), config.slots(columns_out)
    allocated = scratch(
        config, a_hbm.dtype, out_hbm.dtype, None if bias_hbm is None else bias_hbm.dtype, by_rows=by_rows,
        has_residual=has_residual, transpose_a=transpose_a, transpose_b=transpose_b,
    )  # fmt: skip

    def each_tile(visit: Any) -> None:
        """Call visit(batch element, tile row, tile column, steps done before) for this program's tiles."""

        @plgpu.nd_loop((count * grid_m * grid_n,), collective_axes="program")
        def _tile(loop: Any) -> None:
            (index,) = loop.index
            row, column = plgpu.planar_snake(
                index % (grid_m * grid_n), (grid_m, grid_n), 0 if config.minor == "m" else 1, config.band
            )
            visit(index // (grid_m * grid_n), row, column, loop.local_index * steps)

    allocate: Any = functools.partial(pl.run_scoped, **allocated, collective_axes="warpgroup")

    @allocate
    def _scoped(
        a_smem: Any, b_smem: Any, filled: Any, drained: Any, staged: Any, bias_smem: Any, bias_arrived: Any,
        residual_arrived: Any,
    ) -> None:  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        a_fetched, a_read = a_smem if by_rows else (a_smem, a_smem)

        @pl.when(warpgroup == 2)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def fetch_tile(group: Any, row: Any, column: Any, before: Any) -> None:
                rows, columns = pl.ds(first_row(row), fetched_m), pl.ds(column * program_n, program_n)

                @pl.loop(0, steps)
                def _step(step: Any) -> None:
                    # Stages are one ring over all tiles, so the next tile is fetched while this one is written back.
                    slot = lax.rem(before + step, stages)

                    @pl.when(before + step >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(drained.at[slot])

                    depth = pl.ds(step * tile_k, tile_k)
                    a_at = (depth, rows) if transpose_a else (rows, depth)
                    b_at = (columns, depth) if transpose_b else (depth, columns)
                    room = a_fetched.at[slot]
                    if fetched_m < program_m:
                        room = room.at[pl.ds(0, fetched_m)]
                    plgpu.copy_gmem_to_smem(_matrix(a_hbm, group).at[a_at], room, filled.at[slot])
                    plgpu.copy_gmem_to_smem(_matrix(b_hbm, group).at[b_at], b_smem.at[slot], filled.at[slot])

            each_tile(fetch_tile)

        @pl.when(warpgroup < 2)
        def _multiply() -> None:
            plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            # Where this warpgroup's part starts inside the program's tile.
            inside_m = warpgroup * tile_m if config.split == "m" else 0
            inside_n = warpgroup * tile_n if config.split == "n" else 0

            def multiply_tile(group: Any, row: Any, column: Any, before: Any) -> None:
                start_m, start_n = first_row(row) + inside_m, column * program_n + inside_n
                slot_of = lambda number: staged.at[warpgroup, number % slots]  # noqa: E731

                def where(number: int) -> Any:
                    r, c = pieces[number]
                    return pl.ds(start_m + r, PIECE), pl.ds(start_n + c, columns_out)

                def fetch_residual(number: int) -> None:
                    """Into the slot that this piece of the output leaves from."""
                    arrived = residual_arrived.at[warpgroup * slots + number % slots]
                    plgpu.copy_gmem_to_smem(_matrix(residual_hbm, group).at[where(number)], slot_of(number), arrived)

                # What the epilogue reads is asked for before the contraction, and is there when it ends.
                if bias_hbm is not None:
                    line = bias_hbm.at[pl.ds(start_n, tile_n)]
                    plgpu.copy_gmem_to_smem(line, bias_smem.at[warpgroup], bias_arrived.at[warpgroup])
                if residual_hbm is not None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    fetch_residual(0)

                @functools.partial(pl.run_scoped, acc=plgpu.WGMMAAccumulatorRef((tile_m, tile_n), jnp.float32))
                def _contract(acc: Any) -> None:
                    @pl.loop(0, steps)
                    def _step(step: Any) -> None:
                        slot = lax.rem(before + step, stages)
                        plgpu.barrier_wait(filled.at[slot])
                        left = _part(a_read.at[slot], inside_m, tile_m, 1 if transpose_a else 0, config.split == "m")
                        right = _part(b_smem.at[slot], inside_n, tile_n, 0 if transpose_b else 1, config.split == "n")
                        plgpu.wgmma(
                            acc,
                            left.transpose((1, 0)) if transpose_a else left,
                            right.transpose((1, 0)) if transpose_b else right,
                        )
                        # One product stays in flight; the one before it is done with its stage.
                        plgpu.wgmma_wait(1)

                        @pl.when(step > 0)
                        def _() -> None:
                            plgpu.barrier_arrive(drained.at[lax.rem(before + step - 1, stages)])

                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(drained.at[lax.rem(before + steps - 1, stages)])
                    z = acc[...]
                    if bias_hbm is not None:
                        plgpu.barrier_wait(bias_arrived.at[warpgroup])
                    for number, (r, c) in enumerate(pieces):
                        value = z[r : r + PIECE, c : c + columns_out]
                        if bias_hbm is not None:
                            line = bias_smem[warpgroup, c : c + columns_out].astype(jnp.float32)
                            value = value + lax.broadcast_in_dim(line, value.shape, (1,))
                        if activation is not None:
                            value = ACTIVATIONS[activation](value)
                        if residual_hbm is not None:
                            plgpu.barrier_wait(residual_arrived.at[warpgroup * slots + number % slots])
                            value = value + slot_of(number)[...].astype(jnp.float32)
                        else:
                            # The last piece of the tile before may have left from the first slot.
                            others = slots - 1 if number or len(pieces) % slots == 0 else 0
                            plgpu.wait_smem_to_gmem(others, wait_read_only=True)
                        slot_of(number)[...] = value.astype(out_hbm.dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(slot_of(number), _matrix(out_hbm, group).at[where(number)])
                        if residual_hbm is not None and number + 1 < len(pieces):
                            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                            fetch_residual(number + 1)

            each_tile(multiply_tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _matrix(ref: Any, group: Any) -> Any:
    """One batch element of a batched operand; an operand without a batch is shared by all."""
    return ref.at[group] if len(ref.shape) == 3 else ref


def _part(smem: Any, start: Any, size: int, axis: int, split: bool) -> Any:
    """A warpgroup's share of an operand's tile; the whole of it along the side that is not split."""
    if not split:
        return smem
    return smem.at[pl.ds(start, size), :] if axis == 0 else smem.at[:, pl.ds(start, size)]


def ahead_of(call: Call) -> tuple[str, ...]:
    """On an H200 1.06 to 1.54 times XLA's speed where there is an activation, which XLA applies in a pass of its own,
    and at least so many rows: 1.07 to 1.24 times for 200 to 330 of 1600 x 6400, 1.2 to 1.5 times for 77 to 330 of
    1024 x 4096, where few rows do not go by the kernel for them; with fewer it was between 0.6 of it and level. Without
    an activation it was 0.4 to 1.02 times as fast as cuBLAS, the less the fewer rows; but 1.37 times as fast as XLA for
    504 rows of 1024 x 4096, of which nearly every program has a tile and none two: XLA shares them out by K, and sums
    in a second kernel."""
    count, m, _, k = sizes(call)
    if call.params["activation"] is not None:
        fewest = next((rows for deepest, rows in FEWEST_ROWS_SHALLOW.items() if k <= deepest), FEWEST_ROWS)
        return ("xla",) if count * m >= fewest else ()
    if k > BARE_K or call["bias"] is not None or call["residual"] is not None or refuses(call) is not None:
        return ()
    return ("xla",) if m <= BARE_ROWS and FILLED <= _tiles_a_program(call, default_config(call)) <= 1 else ()


def for_call(config: HopperConfig, call: Call) -> HopperConfig:
    """What a near call's tiles are says nothing of how many programs this one's fill: they are its own."""
    return default_config(call)


IMPLEMENTATION = Implementation(
    "hopper",
    gemm_hopper,
    platforms=("gpu",),
    refuses=refuses,
    # cuBLAS holds the bare product; what it cannot do is apply an activation on the way out.
    ahead_of=ahead_of,
    kernel=True,
    config_type=HopperConfig,
    default_config=default_config,
    for_call=for_call,
    candidates=candidates,
)
