"""between_attentions for Hopper, in Pallas (Mosaic GPU): four products, one kernel, and weights that never stop coming.

Kernels that follow each other leave the memory idle: the next one's weights are asked for when the last program of the
one before has ended, and of a weight that is read in four microseconds that is half of the time. Here one program runs
on every multiprocessor, and its first warpgroup fetches the pieces of all four weights, one product's after another's,
into one ring, as soon as there is room. Another multiplies, and a third makes the row that it multiplies with: it waits
for what other programs have made of the product before (`pallas/grid.py`), while the ring fills up. What is on its way
is kept small: everything that programs tell one another waits behind it, for as long as the memory takes to bring it.

Outputs that are too few for all programs are shared along the inner axis: programs announce float32 parts of sums. Some
of them add up a column for each of their threads, and announce the sums, which all read.

A weight of 8 bits is multiplied as it is, by a row of 8-bit digits: the largest number of a row's part is 127 * 2^14,
and what it counts in that is three digits, of 7 bits each, which are three columns of the product. What they leave out
is 2^-22 of the largest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara import hardware
from capibara.errors import rule_error
from capibara.kernels.core.context import current_target
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.trusting import trusted
from capibara.kernels.core.varying import out_struct, vary_like
from capibara.kernels.ops.layers.activation.formulas import value
from capibara.kernels.ops.layers.between_attentions.rules import WEIGHTS, is_quantized, sizes
from capibara.kernels.ops.layers.norm.reference import shrink_of
from capibara.kernels.pallas import grid
from capibara.kernels.pallas.hopper import (
    SMEM_BYTES,
    load,
    multiprocessors,
    named,
    reduced,
    refuses_chip,
    smem_bytes,
    store_to_memory,
    swizzled,
)
from capibara.kernels.pallas.overlap import await_previous, let_next_start, overlaps

EIGHT = 8  # rows of a swizzled tile, and what a product's columns are counted in
PIECE_BYTES = 1 << 14
OUTPUTS = 64  # of a unit; with a gate so many of each half
THREADS = 128  # of a warpgroup
WARPS = 4
DIGITS = 3
LEAST_STAGES = 4
MOST_PROGRAMS = 144  # multiprocessors of any Hopper
TIMED_HIDDEN = 2048
LEAST_NUMBERS = 1 << 25  # of the layer's weights: half of those that were timed
EVENTS = 3  # the first sum is there, the second is, the gated product is
GATED = 2
MULTIPLIES, FETCHES, PREPARES = range(3)  # warpgroups
COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    approx_math=True,  # of a gate, whose result is rounded to 16 bits
)


@dataclasses.dataclass(frozen=True)
class LayerStreamConfig:
    """How the weights are fetched.

    Attributes:
      stages: pieces of 16 KiB in the ring.
      in_flight: pieces that are on their way at a time. On an H200 a layer of a 1.1B model of 8-bit weights took
        21.2 us with 2, 21.5 with 3, 22.8 with 4 and 23.7 with 6; 16-bit weights take twice the bytes.
    """

    stages: int = 10
    in_flight: int = 3

    def __post_init__(self) -> None:
        if self.stages < 2 or not 1 <= self.in_flight <= self.stages:
            rule = "stages is 2 or more, and in_flight 1 to as many"
            raise rule_error(rule, self, "use stages=10, in_flight=3")


class Product(NamedTuple):
    """How one of the products is shared by the programs: a unit is a tile of outputs and a part of the inner axis."""

    outputs: int
    depth: int
    halves: int
    tiles: int
    splits: int
    pieces: int
    """Of a unit."""

    @property
    def units(self) -> int:
        return self.tiles * self.splits

    def rounds(self, programs: int) -> int:
        """Units of a program, at most."""
        return math.ceil(self.units / programs)


def cut(held: int, inner: int, halves: int, itemsize: int, programs: int) -> Product | None:
    """The most splits that leave a program one unit, or the fewest units; None where no piece divides the weight."""
    rows = halves * OUTPUTS
    depth = PIECE_BYTES // itemsize // rows
    if held % rows or inner % depth or not held or not inner:
        return None
    tiles, steps = held // rows, inner // depth
    ways = [s for s in range(1, steps + 1) if steps % s == 0 and tiles * s <= programs] if halves == 1 else []
    splits = max(ways, default=1)
    return Product(OUTPUTS, depth, halves, tiles, splits, steps // splits)


class Plan(NamedTuple):
    products: tuple[Product, ...]
    programs: int
    config: LayerStreamConfig
    int8: bool
    gate: str
    eps: float
    early: bool
    """Whether it is started before the kernel before it is done (pallas/overlap.py)."""

    @property
    def hidden(self) -> int:
        return self.products[0].tiles * self.products[0].outputs

    @property
    def joiners(self) -> int:
        """Programs that add up the parts of a sum, each of as many columns as a warpgroup has threads."""
        return self.hidden // THREADS

    @property
    def gated_depth(self) -> int:
        return self.products[1].depth

    @property
    def columns(self) -> int:
        return EIGHT * (DIGITS if self.int8 else 1)

    @property
    def atom(self) -> int:
        """Numbers of a swizzled tile's row, which one row of x is cut into."""
        return 128 if self.int8 else 64

    @property
    def wide(self) -> tuple[int, int]:
        """A row's pieces: how the arrays lie that one row is in."""
        return self.gated_depth // self.atom, self.atom

    @property
    def pairs(self) -> tuple[int, ...]:
        """Where on the board each of the first three products begins, the two sums, and the end."""
        counts = [p.tiles * p.outputs * p.splits for p in self.products[:3]] + [self.hidden] * 2
        return tuple(itertools.accumulate(counts, initial=0))

    @property
    def longest(self) -> int:
        """Pieces of the row that a program holds at most; of what it adds up it holds all."""
        inner = [p.pieces * p.depth * (p.splits if number % 2 else 1) for number, p in enumerate(self.products)]
        return max(inner) // self.gated_depth


def scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    weight = jnp.int8 if plan.int8 else dtype
    first, gated = plan.products[0], plan.products[1]
    views = [
        plgpu.SMEM((plan.config.stages, p.halves * p.outputs, p.depth), weight, transforms=swizzled(weight))
        for p in (first, gated)
    ]
    held, tiles = plan.longest, plan.columns // EIGHT
    x = (
        plgpu.SMEM((held, plan.columns, plan.gated_depth), weight, transforms=swizzled(weight)),
        # The first row of a swizzled tile lies as it is: a tile is eight of such rows, one after another.
        plgpu.SMEM((held, tiles, plan.wide[0], EIGHT * plan.atom), weight),
    )
    return {
        "weight": plgpu.RefUnion(*views),
        "x": plgpu.RefUnion(*x),
        "out": plgpu.SMEM((EIGHT, OUTPUTS), jnp.float32),
        "sums": plgpu.SMEM((WARPS,), jnp.float32),
        "digit": plgpu.SMEM((THREADS,), jnp.float32),
        "between": plgpu.SMEM((THREADS,), dtype),
        "joined": plgpu.SMEM((THREADS,), jnp.float32),
        "turn_read": plgpu.Barrier(num_arrivals=2),
        "made": plgpu.Barrier(),
        "used": plgpu.Barrier(),
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=plan.config.stages),
        "drained": plgpu.Barrier(num_barriers=plan.config.stages),
    }


class Memory(NamedTuple):
    """References to global memory."""

    x: Any
    residual: Any
    scales: tuple[Any, Any]
    weights: tuple[Any, ...]
    weight_scales: tuple[Any, ...]
    board: Any
    total: Any
    out: Any


def program(memory: Memory, plan: Plan) -> None:
    """What a program does, by its three warpgroups."""
    warpgroup = lax.axis_index("warpgroup")

    def run(smem: dict[str, Any]) -> None:
        for role, work in ((FETCHES, fetch), (MULTIPLIES, multiply), (PREPARES, prepare)):
            pl.when(warpgroup == role)(functools.partial(work, memory, plan, smem))

    pl.run_scoped(run, scratch(plan, memory.residual.dtype), collective_axes="warpgroup")


def each_unit(plan: Plan, number: int, work: Callable[..., None]) -> None:
    """`work(round, tile, split, pieces before)` of this program's units of a product."""
    me = lax.axis_index("program")
    pieces: Any = jnp.int32(0)
    for n, product in enumerate(plan.products[: number + 1]):
        for round_ in range(product.rounds(plan.programs)):
            unit = me + round_ * plan.programs
            has = unit < product.units
            if n == number:
                tile, split = lax.div(unit, product.splits), lax.rem(unit, product.splits)
                pl.when(has)(functools.partial(work, round_, tile, split, pieces))
            pieces = pieces + jnp.where(has, product.pieces, 0)


def fetch(memory: Memory, plan: Plan, smem: dict[str, Any]) -> None:
    """All pieces of the weights that are this program's, into the ring."""
    for number, product in enumerate(plan.products):
        weight, ring = memory.weights[number], smem["weight"][number == 1]
        # Two copies of every piece, whatever it is: of a gated one, the halves.
        apart, some = (weight.shape[0] // 2, product.outputs) if product.halves == 2 else (product.outputs // 2,) * 2

        def unit(
            round_: int, tile: Any, split: Any, before: Any, weight: Any = weight, ring: Any = ring,
            product: Product = product, apart: int = apart, some: int = some,
        ) -> None:  # fmt: skip
            @pl.loop(0, product.pieces)
            def _piece(step: Any) -> None:
                slot = lax.rem(before + step, plan.config.stages)

                @pl.when(before + step >= plan.config.stages)
                def _() -> None:
                    plgpu.barrier_wait(smem["drained"].at[slot])

                @pl.when(before + step >= plan.config.in_flight)
                def _() -> None:
                    earlier = before + step - plan.config.in_flight
                    plgpu.barrier_wait(smem["filled"].at[lax.rem(earlier, plan.config.stages)])

                inner = pl.ds((split * product.pieces + step) * product.depth, product.depth)
                for n in range(2):
                    source = weight.at[pl.ds(tile * product.outputs + n * apart, some), inner]
                    plgpu.copy_gmem_to_smem(source, ring.at[slot, pl.ds(n * some, some)], smem["filled"].at[slot])

        each_unit(plan, number, unit)


def multiply(memory: Memory, plan: Plan, smem: dict[str, Any]) -> None:
    """This program's units, each as its row and the pieces of its weight are there."""
    if plan.early:
        let_next_start()
        await_previous()
    turn = grid.turn_of(memory.board)
    plgpu.barrier_arrive(smem["turn_read"])
    for number in range(len(plan.products)):
        each_unit(plan, number, functools.partial(_multiply_unit, memory, plan, smem, turn, number))
        if number == 1:
            # When all programs have come so far the turn is ended; one without a unit is here at once.
            plgpu.barrier_wait(smem["turn_read"])
            grid.arrive(memory.board, GATED)


def _multiply_unit(
    memory: Memory, plan: Plan, smem: dict[str, Any], turn: Any, number: int, round_: int, tile: Any, split: Any,
    before: Any,
) -> None:  # fmt: skip
    product = plan.products[number]
    ring, (x, _) = smem["weight"][number == 1], smem["x"]
    held, along = product.halves * product.outputs, product.depth // plan.gated_depth
    is_sum = number % 2 == 1
    # A row that was added up is there whole, another only as much of it as is multiplied.
    first = split * (product.pieces * along) if is_sum else 0
    place = tile * product.outputs
    scales = [
        load(
            memory.weight_scales[number].at[pl.ds(half * product.tiles * product.outputs + place, product.outputs)],
            plgpu.Layout.WGMMA.reduce(1), optimized=False,
        ).astype(jnp.float32)
        for half in range(product.halves if plan.int8 else 0)
    ]  # fmt: skip
    if round_ == 0 or not is_sum:
        plgpu.barrier_wait(smem["made"])

    def contract(acc: Any) -> Any:
        @pl.loop(0, product.pieces)
        def _piece(step: Any) -> None:
            slot = lax.rem(before + step, plan.config.stages)
            plgpu.barrier_wait(smem["filled"].at[slot])
            for part in range(along):
                some = pl.ds(part * plan.gated_depth, plan.gated_depth)
                plgpu.wgmma(acc, ring.at[slot, :, some], x.at[first + step * along + part].transpose((1, 0)))
            # One piece's products stay in flight; the one before it is done with its stage.
            plgpu.wgmma_wait(along)

            @pl.when(step > 0)
            def _() -> None:
                plgpu.barrier_arrive(smem["drained"].at[lax.rem(before + step - 1, plan.config.stages)])

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(smem["drained"].at[lax.rem(before + product.pieces - 1, plan.config.stages)])
        return acc[...]

    sums = jnp.int32 if plan.int8 else jnp.float32
    z = pl.run_scoped(contract, plgpu.WGMMAAccumulatorRef((held, plan.columns), sums))
    if plan.int8:
        z = z.astype(jnp.float32)
        high, middle, low = (z[:, n * EIGHT : (n + 1) * EIGHT] for n in range(DIGITS))
        z = ((high * 2.0**14 + middle * 2.0**7) + low) * smem["digit"][0]
    if not is_sum and round_ + 1 < product.rounds(plan.programs):
        plgpu.barrier_arrive(smem["used"])
    parts = [z] if product.halves == 1 else [z[: product.outputs], z[product.outputs :]]
    if scales:
        parts = [
            part * lax.broadcast_in_dim(scale, part.shape, (0,)) for part, scale in zip(parts, scales, strict=True)
        ]
    if product.halves == 1:
        z = parts[0]
    else:
        z = value(plan.gate, parts[0], short=True) * parts[1]
        z = z.astype(memory.residual.dtype).astype(jnp.float32)
    store_to_memory(smem["out"].at[:, :].transpose((1, 0)), plgpu.layout_cast(z, plgpu.Layout.WGMMA_TRANSPOSED))
    plgpu.commit_smem()
    row = smem["out"].at[0]
    if number < 3:
        at = plan.pairs[number] + split * product.tiles * product.outputs + place
        grid.announce(row, grid.pairs(memory.board, EVENTS, at, product.outputs), turn)
    else:
        plgpu.copy_smem_to_gmem(row, memory.out.at[split, 0, pl.ds(place, product.outputs)])
        plgpu.wait_smem_to_gmem(0)


def prepare(memory: Memory, plan: Plan, smem: dict[str, Any]) -> None:
    """The row that each unit multiplies with, into shared memory, as soon as all of it was written."""
    if plan.early:
        await_previous()
    me, turn = lax.axis_index("program"), grid.turn_of(memory.board)
    plgpu.barrier_arrive(smem["turn_read"])

    def put(values: Any) -> None:
        _put(values, plan, smem)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["made"])

    for number, product in enumerate(plan.products):
        if number % 2:
            row = _added_up(memory, plan, smem, turn, number // 2)
            pl.when(me < product.units)(functools.partial(put, row))
            continue
        if number == 2:
            grid.wait(memory.board, GATED, plan.programs, turn)

            @pl.when(me == 0)
            def _() -> None:
                grid.end_turn(memory.board, turn)

        def unit(
            round_: int, tile: Any, split: Any, before: Any, number: int = number, product: Product = product
        ) -> None:
            if round_ > 0:
                plgpu.barrier_wait(smem["used"])
            pieces = product.pieces * product.depth // plan.gated_depth
            shape = pieces, *plan.wide
            if number == 0:
                values = load(memory.x.at[pl.ds(split * pieces, pieces)], _layout(shape)).astype(jnp.float32)
            else:
                count = math.prod(shape)
                asked = grid.pairs(memory.board, EVENTS, plan.pairs[1] + split * count, count)
                (values,) = grid.gather([asked], shape, _layout(shape), turn)
            put(values)

        each_unit(plan, number, unit)
    if len(plan.products) < 4:

        @pl.when(me < plan.joiners)
        def _last() -> None:
            row = _added_up(memory, plan, smem, turn, 1)

            @pl.when(me == 0)
            def _write() -> None:
                store_to_memory(memory.out, row.astype(memory.out.dtype))


def _layout(shape: tuple[int, ...]) -> Any:
    return plgpu.Layout.WG_STRIDED(shape, vec_size=math.gcd(math.prod(shape) // THREADS, 4))


def _added_up(memory: Memory, plan: Plan, smem: dict[str, Any], turn: Any, which: int) -> Any:
    """The RMS norm of the residual stream with a product's parts added, rounded as a row is.

    Some programs add up some columns each, and all read the sums: were every program to add up all of them, the
    second-level cache would have four times as much to say, which takes longer than to wait once more.
    """
    me, dtype = lax.axis_index("program"), memory.residual.dtype

    @pl.when(me < plan.joiners)
    def _join() -> None:
        column = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
        before = load(memory.residual.at[me] if which == 0 else smem["between"], column).astype(jnp.float32)
        asked = [
            grid.pairs(memory.board, EVENTS, plan.pairs[2 * which] + part * plan.hidden + me * THREADS, THREADS)
            for part in range(plan.products[2 * which].splits)
        ]
        parts = grid.gather(asked, (THREADS,), column, turn)
        total = (sum(parts[1:], start=parts[0]) + before).astype(dtype)
        store_to_memory(smem["between"] if which == 0 else memory.total.at[me], total)
        store_to_memory(smem["joined"], total.astype(jnp.float32))
        sums = grid.pairs(memory.board, EVENTS, plan.pairs[3 + which] + me * THREADS, THREADS)
        grid.announce(smem["joined"], sums, turn)  # each thread reads what it wrote
        grid.arrive(memory.board, which)

    shape = plan.hidden // plan.gated_depth, *plan.wide
    layout, shrink = _layout(shape), shrink_of(plan.eps)
    scale = load(memory.scales[which], layout).astype(jnp.float32)
    grid.wait(memory.board, which, plan.joiners, turn)
    asked = grid.pairs(memory.board, EVENTS, plan.pairs[3 + which], plan.hidden)
    (total,) = grid.gather([asked], shape, layout, turn)
    smaller = total * shrink
    mean = reduced("add", smaller * smaller, layout, smem["sums"]) * (1 / plan.hidden)
    return (smaller * lax.rsqrt(mean + plan.eps * shrink**2) * scale).astype(dtype).astype(jnp.float32)


def _put(values: Any, plan: Plan, smem: dict[str, Any]) -> None:
    """A row's numbers, or their digits, as the first rows of swizzled tiles, where a row lies as it is."""
    _, tiles = smem["x"]
    pieces = pl.ds(0, values.shape[0])
    if not plan.int8:
        store_to_memory(tiles.at[pieces, 0, :, pl.ds(0, plan.atom)], values.astype(tiles.dtype))
        return
    layout = _layout(values.shape)
    largest = lax.max(reduced("max", lax.abs(values), layout, smem["sums"]), jnp.float32(1e-30))
    counted = values * (127 * 2.0**14 / largest)
    one = lax.broadcast_in_dim(largest * (1 / (127 * 2.0**14)), (THREADS,), ())
    store_to_memory(smem["digit"], plgpu.layout_cast(one, plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)))
    high = _rounded(counted * 2.0**-14)
    rest = counted - high * 2.0**14
    middle = _rounded(rest * 2.0**-7)
    low = _rounded(rest - middle * 2.0**7)
    for number, digit in enumerate((high, middle, low)):
        whole = digit.astype(jnp.int32).astype(jnp.int8)
        store_to_memory(tiles.at[pieces, number, :, pl.ds(0, plan.atom)], whole)


def _rounded(x: Any) -> Any:
    """To the nearest whole number, of numbers below 2^22: added to what has no room for a fraction."""
    return (x + 1.5 * 2.0**23) - 1.5 * 2.0**23


def plan_of(
    weights: Sequence[Any], config: LayerStreamConfig, *, programs: int, gate: str = "silu", eps: float = 1e-6,
    early: bool = False,
) -> Plan | None:  # fmt: skip
    """Of weights in their order; None where one of them is in no way cut into pieces."""
    int8 = jnp.dtype(weights[0].dtype) == jnp.int8
    products = [
        cut(weight.shape[0], weight.shape[1], 2 if number == 1 else 1, 1 if int8 else 2, programs)
        for number, weight in enumerate(weights)
    ]
    known = tuple(product for product in products if product is not None)
    return Plan(known, programs, config, int8, gate, eps, early) if len(known) == len(products) else None


def _weights(call: Call) -> list[Any]:
    return [call.need(name) for name in WEIGHTS if call[name] is not None]


def candidates(call: Call) -> Sequence[LayerStreamConfig]:
    """The deepest ring that fits, and how much of it is on its way at a time."""
    programs, dtype = multiprocessors(call.target.device_kind), call.need("x").dtype
    for stages in range(10, LEAST_STAGES - 1, -1):
        plan = plan_of(_weights(call), LayerStreamConfig(stages), programs=programs)
        if plan is not None and smem_bytes(scratch(plan, dtype)) <= SMEM_BYTES:
            first, second = (2, 3) if is_quantized(call) else (3, 2)
            return [LayerStreamConfig(stages, in_flight) for in_flight in (first, second, 4)]
    return []


def parts_of(call: Call) -> int | None:
    """That the last product is left in; None of weights that are not cut into pieces."""
    plan = plan_of(_weights(call), LayerStreamConfig(), programs=multiprocessors(call.target.device_kind))
    if plan is None:
        return None
    return plan.products[-1].splits if len(plan.products) == 4 else 1


def refuses(call: Call) -> str | None:
    n, dtype = sizes(call), np.dtype(call.need("x").dtype).name
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    if hardware.chip_for(call.target.device_kind) is None:
        return f"its programs all have to run at a time, and how many do on {call.target.device_kind} is not known"
    if dtype not in ("bfloat16", "float16"):
        return f"its tensor-core form takes bfloat16 or float16, not {dtype}"
    if n.rows != 1:
        return f"it takes one row, not {n.rows}"
    programs = multiprocessors(call.target.device_kind)
    plan = plan_of(_weights(call), LayerStreamConfig(), programs=programs)
    # Pieces of 16 KiB are whole rounds of a warpgroup's threads along the inner axis, but of the 64-wide gated ones.
    if plan is None or n.hidden % THREADS or plan.joiners > programs:
        return (
            f"{n.inner} inputs, {n.hidden} of the residual stream, {n.ffn} of the mlp and {n.outputs} outputs are not "
            f"all multiples of {2 * THREADS if is_quantized(call) else THREADS}"
        )
    if not candidates(call):
        return (
            f"a row of {plan.longest * plan.gated_depth} numbers leaves no room for {LEAST_STAGES} pieces of a weight"
        )
    out_parts: Any = call.params["out_parts"]
    if n.outputs and (out_parts or 1) != (parts := parts_of(call)):
        return f"the last product is left in {parts} parts here, not {out_parts or 1}"
    return None


def new_board(hidden: int, ffn: int) -> jax.Array:
    """For any plan of these sizes: products that are split have a unit a program at most, others the outputs."""
    parts = max(MOST_PROGRAMS * OUTPUTS, hidden)
    return jnp.zeros(grid.board_words(EVENTS, 2 * parts + ffn + 2 * hidden), jnp.int32)


def between_attentions_hopper(
    x: jax.Array, residual: jax.Array, out_weight: jax.Array, scale: jax.Array, up_weight: jax.Array,
    down_weight: jax.Array, next_scale: jax.Array, next_weight: jax.Array | None = None,
    out_weight_scale: jax.Array | None = None, up_weight_scale: jax.Array | None = None,
    down_weight_scale: jax.Array | None = None, next_weight_scale: jax.Array | None = None,
    board: jax.Array | None = None, *, config: LayerStreamConfig, gate: str, eps: float, out_parts: int | None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """One kernel, of as many programs as the chip has multiprocessors."""
    (rows, hidden), dtype, programs = residual.shape, residual.dtype, multiprocessors(current_target().device_kind)
    weights = [w for w in (out_weight, up_weight, down_weight, next_weight) if w is not None]
    weight_scales = [
        s for s in (out_weight_scale, up_weight_scale, down_weight_scale, next_weight_scale) if s is not None
    ]
    plan = plan_of(weights, config, programs=programs, gate=gate, eps=eps, early=overlaps())
    if plan is None or smem_bytes(scratch(plan, dtype)) > SMEM_BYTES:
        raise rule_error("A ring fits beside the row in shared memory", config, "leave the config out")
    given = board
    words = grid.board_words(EVENTS, plan.pairs[-1])
    if board is None:
        board = vary_like(jnp.zeros(words, jnp.int32), x)
    if board.shape[0] < words:
        raise rule_error(
            f"A board has {words} words here", board.shape, f"use new_board({hidden}, {down_weight.shape[1]})"
        )
    wide = hidden // plan.gated_depth, *plan.wide
    row, last = out_struct((plan.joiners, THREADS), dtype, x), out_struct(wide, dtype, x)
    if next_weight is not None:
        last = out_struct((plan.products[3].splits, rows, next_weight.shape[0]), jnp.float32, x)
    # pl.kernel, since plgpu.kernel takes no array to write into.
    kernel = pl.kernel(
        named("between_attentions", _program, plan=plan),
        out_type=[row, last],
        mesh=plgpu.Mesh(grid=(programs,), grid_names=("program",), num_threads=3, thread_name="warpgroup"),
        compiler_params=COMPILER_PARAMS,
        name="between_attentions",
    )
    cuts = (residual.reshape(row.shape), *(one.reshape(wide) for one in (scale, next_scale)))
    operands = x.reshape(-1, *plan.wide), *cuts, *weights, *weight_scales

    def into(refs: Any) -> None:
        total, out, board = refs
        total[...], out[...] = kernel(*operands, board)

    # What the results start from is overwritten and never made.
    empty = (vary_like(jnp.zeros(like.shape, like.dtype), x) for like in (row, last))
    total, made, board = pl.run_state(into)((*empty, board))
    total, made = total.reshape(residual.shape), made if next_weight is not None else made.reshape(residual.shape)
    return (total, made) if given is None else (total, made, board)


def _program(*refs: Any, plan: Plan) -> None:
    count = len(plan.products)
    x, residual, *rest = refs
    scales, weights, rest = rest[:2], rest[2 : 2 + count], rest[2 + count :]
    weight_scales = rest[: count if plan.int8 else 0]
    board, total, out = rest[len(weight_scales) :]
    first, second = scales
    program(Memory(x, residual, (first, second), tuple(weights), tuple(weight_scales), board, total, out), plan)


def ahead_of(call: Call) -> tuple[str, ...]:
    """On an H200 a decoding step of a 1.1B model took 770 us with it and 801 with few_rows and summed_row, of 8-bit
    weights 557 and 678. Wider layers were not timed, nor ones of few weights, where programs would wait for one another
    most of the time."""
    numbers = sum(math.prod(weight.shape) for weight in _weights(call))
    timed = sizes(call).hidden <= TIMED_HIDDEN and numbers >= LEAST_NUMBERS
    return ("xla",) if timed or trusted() == "predicted" else ()


IMPLEMENTATION = Implementation(
    "hopper",
    between_attentions_hopper,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    config_type=LayerStreamConfig,
    candidates=candidates,
)
