"""The product of grouped rows with their groups' weights on Hopper, plain or gated, in Pallas (Mosaic GPU).

The kernel is persistent: one program a multiprocessor takes every so many tiles. One warpgroup of a program only
fetches (TMA, into a ring that runs on from tile to tile), two multiply (wgmma). `weights`, which contracts over grouped
rows, goes about it in the same way.

A tile is a block of one group's rows by a block of columns. A group's last tile has rows to spare, and reaches back
for rows of the tile before: both make the same numbers of them, and whole pieces leave at once. A group shorter than
a piece cannot: what its tile reads past the group's end is multiplied and not stored, and the rows leave in runs of
powers of two. A warpgroup without a row of its own in a tile multiplies nothing. The rows of no group are one more
group, whose tiles are zeros and need no contraction.

The gated product has a block of the gate and one of up in each stage, each half as wide, and two sums: a thread holds
both numbers that it multiplies.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
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
from capibara.kernels.ops.layers.grouped.rules import Sizes, floats, out_dtype_of, sizes
from capibara.kernels.ops.layers.grouped.tiles import row_tiles
from capibara.kernels.pallas.hopper import (
    SMEM_BYTES,
    multiprocessors,
    named,
    refuses_chip,
    row_tiled,
    smem_bytes,
    swizzle_columns,
    swizzled,
)

STEP = 64  # of the contraction: one swizzle atom of 16-bit numbers
PIECE_ROWS = 64  # results leave through shared memory in pieces of 64 rows by one swizzle atom
FETCH_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # a thread; 65,536 a multiprocessor over three warpgroups
FETCHER = 2  # the warpgroup that fetches; 0 and 1 multiply
RUNS = (32, 16, 8, 4, 2, 1)  # rows of a partial piece that leave together
FEWEST_ROWS = 8  # an axis of a single row would have no place in a TMA descriptor


@dataclasses.dataclass(frozen=True)
class GroupedHopperConfig:
    """One warpgroup's tile, the depth of the ring, and the order in which tiles are visited.

    The two multiplying warpgroups sit side by side along `split` ("m" or "n"), so a program's tile is twice as large
    there. Tiles are visited column by column in bands of `band` tiles of rows. `pieces` of each warpgroup's results
    can be on their way out at a time. The gated product gives half of `tile_n` to the gate and half to up.
    """

    tile_m: int
    tile_n: int
    stages: int = 4
    split: str = "m"
    band: int = 4
    pieces: int = 2

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128, 192, 256):
            raise rule_error("tile_m is 64, 128, 192 or 256", self.tile_m, "use 64")
        if self.tile_n not in (64, 128, 192, 256):
            raise rule_error("tile_n is 64, 128, 192 or 256", self.tile_n, "use 256")
        if self.tile_m * self.tile_n > 128 * 192:
            # 192 of the 232 registers that a thread has.
            raise rule_error(
                "A warpgroup holds at most 128 x 192 sums", f"{self.tile_m} x {self.tile_n}", "use a smaller tile"
            )
        if self.split not in ("m", "n"):
            raise rule_error("split is 'm' or 'n'", self.split, "use 'm'")
        if max(self.program_tile) > 256:
            raise rule_error("A program's tile is at most 256 long (TMA)", self.program_tile, "use a smaller tile")
        if self.stages < 2:
            raise rule_error("stages is two or more", self.stages, "use 4")
        if self.band < 1 or self.pieces < 1:
            raise rule_error("band and pieces are one or more", (self.band, self.pieces), "use 4 and 2")

    @property
    def program_tile(self) -> tuple[int, int]:
        return self.tile_m * (1 + (self.split == "m")), self.tile_n * (1 + (self.split == "n"))

    def smem_bytes(self) -> int:
        """Shared memory, barriers too; the kernel of `weights` has tiles of the same size."""
        return smem_bytes(_scratch(self, jnp.bfloat16, jnp.bfloat16, weights=1, transposed=False))


def _deepest(tile_m: int, tile_n: int, split: str, band: int, pieces: int = 2) -> GroupedHopperConfig:
    """With as many stages as fit, six at most: more would only fetch further ahead than a tile is long."""
    for stages in (6, 5, 4, 3):
        config = GroupedHopperConfig(tile_m, tile_n, stages, split, band, pieces)
        if config.smem_bytes() <= SMEM_BYTES:
            return config
    return GroupedHopperConfig(tile_m, tile_n, 2, split, band, pieces)


def deepest_of(choices: Iterable[tuple[Any, ...]]) -> list[GroupedHopperConfig]:
    return list(dict.fromkeys(_deepest(*choice) for choice in choices))


# What a row of a tile of 64 costs beside one of a taller tile, which are alike: eight products, which an H200 timed in
# eleven configs each.
SHORT_ROW_COST = 1.25
TALL = {64: (64, 128, "n", 4), 128: (128, 128, "n", 4), 192: (192, 128, "n", 2), 256: (128, 128, "m", 2)}


def expected_tiles(mean: float, height: int) -> float:
    """How many tiles so high a group takes, of groups that have `mean` rows and that a router fills by chance.

    >>> [round(expected_tiles(192, height), 2) for height in (64, 128, 192, 256)]
    [3.5, 2.0, 1.5, 1.0]
    """
    spread = math.sqrt(2 * mean) or 1.0
    most = math.ceil((mean + 4 * spread) / height)
    return sum(0.5 * math.erfc((number * height - mean) / spread) for number in range(most + 1))


def row_candidates(call: Call) -> Sequence[GroupedHopperConfig]:
    """For the products whose rows are grouped: those tiles first whose rows, full or not, cost the least."""
    rows, _, _, groups = sizes(call)

    def cost(height: int) -> float:
        each = height * (SHORT_ROW_COST if height == 64 else 1.0)
        return each * expected_tiles(rows / groups, height)

    heights = sorted((128, 64, 192, 256), key=cost)
    others = [
        (64, 256, "m", 4), (64, 256, "m", 8), (64, 256, "m", 2), (128, 128, "n", 2), (128, 128, "n", 8),
        (64, 128, "n", 2), (64, 64, "n", 2), (64, 128, "m", 2),
    ]  # fmt: skip
    return deepest_of([*(TALL[height] for height in heights), *others])


def gated_candidates(call: Call) -> Sequence[GroupedHopperConfig]:
    """Those of the plain product that leave both weights 64 columns a warpgroup."""
    return [config for config in row_candidates(call) if config.tile_n % (2 * PIECE_ROWS) == 0]


def refuses(call: Call) -> str | None:
    """Why the kernels do not take this call: the chip, the types, or a length that Mosaic cannot tile."""
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    operands = floats(call)
    names = {np.dtype(x.dtype).name for x in operands}
    if len(names) > 1 or not names <= {"bfloat16", "float16"}:
        return (
            f"its tensor-core form takes operands of one type, bfloat16 or float16, not {' and '.join(sorted(names))}"
        )
    out = out_dtype_of(call)
    if out not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it writes bfloat16, float16 or float32, not {out}"
    if any(0 in x.shape for x in operands):
        return "an operand is empty"
    n = sizes(call)
    for axis, length in (("K", n.inner), ("N", n.columns)):
        # Mosaic cuts arrays into pieces one swizzle atom wide and pads none; an array of a single piece loses that
        # axis from its TMA descriptor, and what lies past its edge is no longer dropped.
        if length % STEP or length < 2 * STEP:
            return f"{axis} is {length}; Mosaic cuts it into pieces of {STEP} and needs two or more"
    if _rows(call, n) >= 2**31:
        return "it counts rows and tiles in 32 bits"
    return None


def _rows(call: Call, n: Sizes) -> int:
    """The rows, or the tiles where those are more, that a kernel counts."""
    smallest = math.ceil(n.inner / STEP) * math.ceil(n.columns / STEP)
    return max(n.rows * math.ceil(n.columns / STEP), n.groups * smallest)


def banded(index: Any, rows: Any, columns: int, band: int) -> tuple[Any, Any]:
    """The tile (row, column) at `index`: column by column inside a band of rows, back and forth from band to band.

    Tiles that are near in time then share their operands in L2, and two bands of one group meet at the same column.
    """
    number = lax.div(index, band * columns)
    rest = index - number * (band * columns)
    first = number * band
    height = lax.min(rows - first, band)
    column = lax.div(rest, height)
    row = first + rest - column * height
    backwards = lax.rem(number, 2)
    return row, column + backwards * (columns - 1 - 2 * column)


def each_tile(count: Any, programs: int, visit: Callable[[Any, Any], Any]) -> None:
    """visit(tile index, steps before) -> steps of the tile, for this program's tiles among `count`."""
    program = lax.axis_index("program")
    mine = lax.div(count - program + (programs - 1), programs)

    def turn(number: Any, before: Any) -> Any:
        return before + visit(number * programs + program, before)

    lax.fori_loop(0, mine, turn, program * 0)


def fetch_steps(
    config: GroupedHopperConfig, drained: Any, steps: Any, before: Any, fetch: Callable[[Any, Any], None]
) -> None:
    """fetch(step, slot) for each step of a tile, as soon as both multiplying warpgroups are done with the slot."""

    @pl.loop(0, steps)
    def _step(step: Any) -> None:
        slot = lax.rem(before + step, config.stages)

        @pl.when(before + step >= config.stages)
        def _() -> None:
            plgpu.barrier_wait(drained.at[slot])

        fetch(step, slot)


def contract(
    config: GroupedHopperConfig, filled: Any, drained: Any, steps: Any, before: Any, shape: tuple[int, int],
    operands: Callable[[Any], tuple[Any, Sequence[Any]]], use: Callable[[list[Any]], None],
) -> None:  # fmt: skip
    """use(sums), float32 of `shape`: over a tile's steps, `operands(slot)`'s left one by each of its right ones."""
    count = config.tile_n // shape[1]  # the right operands share the tile's width

    def scoped(*sums: Any) -> None:
        @pl.loop(0, steps)
        def _step(step: Any) -> None:
            slot = lax.rem(before + step, config.stages)
            plgpu.barrier_wait(filled.at[slot])
            left, rights = operands(slot)
            for total, right in zip(sums, rights, strict=True):
                plgpu.wgmma(total, left, right)
            # This step's products stay in flight; those of the one before are done with their stage.
            plgpu.wgmma_wait(len(sums))

            @pl.when(step > 0)
            def _() -> None:
                plgpu.barrier_arrive(drained.at[lax.rem(before + step - 1, config.stages)])

        plgpu.wgmma_wait(0)

        def release_last() -> None:
            plgpu.barrier_arrive(drained.at[lax.rem(before + steps - 1, config.stages)])

        if isinstance(steps, int):
            release_last()
        else:
            pl.when(steps > 0)(release_last)  # an empty group has none
        use([total[...] for total in sums])

    pl.run_scoped(scoped, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in range(count)))


def skip(config: GroupedHopperConfig, filled: Any, drained: Any, steps: Any, before: Any) -> None:
    """What `contract` does to the ring, without the products: for a warpgroup that has no row of a tile."""

    @pl.loop(0, steps)
    def _step(step: Any) -> None:
        slot = lax.rem(before + step, config.stages)
        plgpu.barrier_wait(filled.at[slot])
        plgpu.barrier_arrive(drained.at[slot])


def staging(config: GroupedHopperConfig, dtype: Any) -> Any:
    """The pieces of both warpgroups on their way out."""
    shape = (2, config.pieces, PIECE_ROWS, swizzle_columns(dtype))
    return plgpu.SMEM(shape, dtype, transforms=row_tiled(dtype))


def send(staged: Any, number: int, value: Any, store: Callable[[Any], None]) -> None:
    """Write a piece to its slot of this warpgroup's `staged` and let `store(slot)` copy it out, as one group."""
    slots = staged.shape[0]
    slot = staged.at[number % slots]
    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
    slot[...] = value.astype(staged.dtype)
    plgpu.commit_smem()
    store(slot)
    plgpu.commit_smem_to_gmem_group()


def send_zeros(staged: Any, store: Callable[[Any], None]) -> None:
    """Let `store(slot)` copy a piece of zeros wherever it wants; nothing is on its way when it returns."""
    slot = staged.at[0]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    slot[...] = jnp.zeros(slot.shape, staged.dtype)
    plgpu.commit_smem()
    store(slot)
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def part(smem: Any, start: Any, size: int, axis: int, split: bool) -> Any:
    """A warpgroup's share of an operand's tile; the whole of it along the side that is not split."""
    if not split:
        return smem
    return smem.at[pl.ds(start, size), :] if axis == 0 else smem.at[:, pl.ds(start, size)]


def _sigmoid(z: Any) -> Any:
    return 1.0 / (1.0 + jnp.exp(-z))


def _gelu(z: Any) -> Any:
    """z times the normal distribution function, whose tail is a polynomial times an exponential.

    The formula (Abramowitz and Stegun, 7.1.26) is within 1.5e-7 of the tail: below what a 16-bit result can show.
    """
    x = jnp.abs(z) * math.sqrt(0.5)
    t = 1.0 / (1.0 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * jnp.exp(-x * x)
    return z * jnp.where(z < 0.0, tail, 1.0 - tail)


# Exponentials and quotients, which keep their relative accuracy in the tails when they are approximated; the
# hardware's approximate tanh would not.
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu": lambda z: z * _sigmoid(z),
    "gelu": _gelu,
    "gelu_tanh": lambda z: z * _sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z)),
    "relu": lambda z: jnp.maximum(z, 0.0),
    "sigmoid": _sigmoid,
}


def _grouped_rows(
    lhs: jax.Array, weights: tuple[jax.Array, ...], group_sizes: jax.Array, *, config: GroupedHopperConfig,
    transposed: bool, out_dtype: Any, activation: str | None = None, outputs: int = 1,
) -> list[jax.Array]:  # fmt: skip
    """`lhs` by its groups' one weight, or activation(by the first) times (by the second); see the module's text.

    Of the gated product three `outputs` are it and both products.
    """
    if (config.tile_n // len(weights)) % swizzle_columns(out_dtype):
        raise rule_error("The gated product halves tile_n, to multiples of 64", config.tile_n, "use 128 or 256")
    rows, _ = lhs.shape
    columns = weights[0].shape[1 if transposed else 2]
    if rows < FEWEST_ROWS:
        lhs = jnp.pad(lhs, ((0, FEWEST_ROWS - rows), (0, 0)))
    tiles = row_tiles(group_sizes, rows, config.program_tile[0], rest=True)
    out = out_struct((lhs.shape[0], columns), out_dtype, lhs)
    programs = multiprocessors(current_target().device_kind)
    kernel = plgpu.kernel(
        named(
            "grouped_gemm",
            _program,
            config=config,
            programs=programs,
            transposed=transposed,
            activation=activation,
            outputs=outputs,
        ),
        out_type=[out] * outputs,
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Exponentials good to 2 units of float32: far below what a 16-bit output can show.
            approx_math=out.dtype.itemsize == 2,
        ),
    )
    results = kernel(lhs, *weights, *tiles)
    return [x[:rows] for x in results] if rows < FEWEST_ROWS else results


def _scratch(config: GroupedHopperConfig, dtype: Any, out_dtype: Any, weights: int, transposed: bool) -> dict[str, Any]:
    """A ring of tiles of the rows and of each weight, and results on their way out."""
    program_m, program_n = config.program_tile
    across = program_n // weights
    b_tile = (across, STEP) if transposed else (STEP, across)

    def ring(tile: tuple[int, int], transforms: tuple[Any, ...]) -> Any:
        return plgpu.SMEM((config.stages, *tile), dtype, transforms=transforms)

    return {
        # The same bytes twice: as TMA fills them from any row, and as wgmma reads them.
        "a_smem": plgpu.RefUnion(ring((program_m, STEP), row_tiled(dtype)), ring((program_m, STEP), swizzled(dtype))),
        "b_smem": [ring(b_tile, swizzled(dtype)) for _ in range(weights)],
        "drained": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),  # by both multiplying warpgroups
        "filled": plgpu.Barrier(num_arrivals=1 + weights, num_barriers=config.stages),
        "staged": staging(config, out_dtype),
    }


def _program(
    *refs: Any, config: GroupedHopperConfig, programs: int, transposed: bool, activation: str | None, outputs: int
) -> None:
    lhs, *middle = refs[: len(refs) - outputs]
    outs = refs[len(refs) - outputs :]
    *weights, group_of, bounds, group_start, tile_count = middle
    groups, columns = weights[0].shape[0], weights[0].shape[1 if transposed else 2]
    contraction = lhs.shape[1] // STEP
    tile_m, tile_n = config.tile_m, config.tile_n
    program_m, program_n = config.program_tile
    share = tile_n // len(weights)  # a warpgroup's columns of each weight
    across = program_n // len(weights)  # a program's columns of the result
    column_tiles = math.ceil(columns / across)
    width = swizzle_columns(outs[0].dtype)
    pieces = [(r, c) for r in range(0, tile_m, PIECE_ROWS) for c in range(0, share, width)]
    scratch = _scratch(config, lhs.dtype, outs[0].dtype, len(weights), transposed)

    def _scoped(a_smem: Any, b_smem: Any, filled: Any, drained: Any, staged: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        a_fetched, a_read = a_smem
        tiles = tile_count[0]

        def place(index: Any) -> tuple[Any, Any, Any]:
            """The tile's place in the list, its first column, and whether its rows have a group."""
            row, column = banded(index, tiles, column_tiles, config.band)
            return row, column * across, group_of[row] < groups

        def span(row: Any) -> tuple[Any, Any]:
            """The tile's first row and the row after its last: whole pieces, as far as the group reaches back."""
            end = bounds[row + 1]
            pieces_long = lax.div(end - bounds[row] + (PIECE_ROWS - 1), PIECE_ROWS)
            return lax.max(group_start[row], end - pieces_long * PIECE_ROWS), end

        @pl.when(warpgroup == FETCHER)
        def _fetch() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def visit(index: Any, before: Any) -> Any:
                row, column, grouped = place(index)
                group, rows, columns_at = group_of[row], pl.ds(span(row)[0], program_m), pl.ds(column, across)

                def fetch(step: Any, slot: Any) -> None:
                    depth = pl.ds(step * STEP, STEP)
                    plgpu.copy_gmem_to_smem(lhs.at[rows, depth], a_fetched.at[slot], filled.at[slot])
                    at = (group, columns_at, depth) if transposed else (group, depth, columns_at)
                    for weight, block in zip(weights, b_smem, strict=True):
                        plgpu.copy_gmem_to_smem(weight.at[at], block.at[slot], filled.at[slot])

                @pl.when(grouped)
                def _grouped() -> None:
                    fetch_steps(config, drained, contraction, before, fetch)

                return jnp.where(grouped, contraction, 0)

            each_tile(tiles * column_tiles, programs, visit)

        @pl.when(warpgroup < FETCHER)
        def _multiply() -> None:
            plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            # Where this warpgroup's part starts inside the program's tile.
            inside_m = warpgroup * tile_m if config.split == "m" else 0
            inside_n = warpgroup * share if config.split == "n" else 0

            def operands(slot: Any) -> tuple[Any, list[Any]]:
                left = part(a_read.at[slot], inside_m, tile_m, 0, config.split == "m")
                axis = 0 if transposed else 1
                rights = [part(block.at[slot], inside_n, share, axis, config.split == "n") for block in b_smem]
                return left, [x.transpose((1, 0)) for x in rights] if transposed else rights

            def visit(index: Any, before: Any) -> Any:
                row, column, grouped = place(index)
                start, end = span(row)
                first = start + inside_m
                own = end - first  # rows of this warpgroup's part that are the group's

                def store(sums: list[Any]) -> None:
                    for number, (r, c) in enumerate(pieces):
                        values = [z[r : r + PIECE_ROWS, c : c + width] for z in sums]
                        if activation is not None:
                            values = [ACTIVATIONS[activation](values[0]) * values[1], *values]
                        for which, out in enumerate(outs):
                            copy = functools.partial(_store_rows, out, first + r, own - r, column + inside_n + c, width)
                            send(staged.at[warpgroup], number * outputs + which, values[which], copy)

                def store_zeros(slot: Any) -> None:
                    @pl.loop(0, share // width)
                    def _column(number: Any) -> None:
                        for r, out in itertools.product(range(0, tile_m, PIECE_ROWS), outs):
                            _store_rows(out, first + r, own - r, column + inside_n + number * width, width, slot)

                @pl.when(grouped & (own > 0))
                def _own() -> None:
                    contract(config, filled, drained, contraction, before, (tile_m, share), operands, store)

                @pl.when(grouped & (own <= 0))
                def _none() -> None:
                    skip(config, filled, drained, contraction, before)

                @pl.when(jnp.logical_not(grouped))
                def _rest() -> None:
                    send_zeros(staged.at[warpgroup], store_zeros)

                return jnp.where(grouped, contraction, 0)

            each_tile(tiles * column_tiles, programs, visit)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(_scoped, **scratch, collective_axes="warpgroup")


def _store_rows(out: Any, first: Any, count: Any, column: Any, width: int, slot: Any) -> None:
    """Copy the piece's first `count` rows, or all 64, to `out`; none where `count` is not above 0."""
    columns = pl.ds(column, width)

    @pl.when(count >= PIECE_ROWS)
    def _whole() -> None:
        plgpu.copy_smem_to_gmem(slot, out.at[pl.ds(first, PIECE_ROWS), columns], commit_group=False)

    @pl.when(count < PIECE_ROWS)
    def _partial() -> None:
        own = lax.max(count, 0)
        for rows in RUNS:  # the bits of the count
            at = lax.div(own, 2 * rows) * (2 * rows)

            @pl.when(own - at >= rows)
            def _run(at: Any = at, rows: int = rows) -> None:
                here, there = slot.at[pl.ds(at, rows)], out.at[pl.ds(first + at, rows), columns]
                plgpu.copy_smem_to_gmem(here, there, commit_group=False)


def grouped_forward(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, config: GroupedHopperConfig,
    transpose_rhs: bool = False, out_dtype: str | None = None,
) -> jax.Array:  # fmt: skip
    """grouped_gemm as one persistent kernel."""
    out = jnp.dtype(out_dtype) if out_dtype else lhs.dtype
    return _grouped_rows(lhs, (rhs,), group_sizes, config=config, transposed=transpose_rhs, out_dtype=out)[0]


def gated_forward(
    lhs: jax.Array, gate: jax.Array, up: jax.Array, group_sizes: jax.Array, *, config: GroupedHopperConfig,
    activation: str = "silu", return_products: bool = False,
) -> Any:  # fmt: skip
    """grouped_gated_gemm as one persistent kernel; with `return_products` it writes all three results."""
    results = _grouped_rows(
        lhs, (gate, up), group_sizes, config=config, transposed=False, out_dtype=lhs.dtype, activation=activation,
        outputs=3 if return_products else 1,
    )  # fmt: skip
    return tuple(results) if return_products else results[0]


IMPLEMENTATION = Implementation(
    "hopper",
    grouped_forward,
    platforms=("gpu",),
    refuses=refuses,
    kernel=True,
    config_type=GroupedHopperConfig,
    candidates=row_candidates,
)

GATED_IMPLEMENTATION = Implementation(
    "hopper",
    gated_forward,
    platforms=("gpu",),
    refuses=refuses,
    # On an H200 at 0.97 of the rate of the plain grouped product; beside XLA's form it was not timed.
    ahead_of=("xla",),
    kernel=True,
    config_type=GroupedHopperConfig,
    candidates=gated_candidates,
)
