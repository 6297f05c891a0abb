"""The gradient of state space duality for Hopper, in Pallas (Mosaic GPU): three kernels, and what XLA does around them.

Two sweeps over time (`states`) keep, in x's type, the state that each chunk of 64 steps starts from and the gradient of
the state that it leaves. With these chunks do not wait for each other, and the kernel here has one chunk a program, for
all slices of 64 columns of a part of a group. Of its three warpgroups one fetches slices. One has the pairs of steps,
rows j of x by columns i of y: the scores B·Cᵀ, their gradient, and the gradient of x. One has what goes through the
states, which is most of the gradients of B and C. What the slices share stays in registers from slice to slice, so sums
over heads are in one order and in float32. Where batch, groups and chunks are few, a group's heads go in several parts,
whose sums XLA adds in float32.
"""

from __future__ import annotations

import dataclasses
import functools
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
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.scan.ssd.decays import running_sums
from capibara.kernels.ops.scan.ssd.hopper.forward import (
    CHUNK,
    LAYOUT,
    SAID_LAYOUTS,
    SLICE,
    UNSEEN,
    by_chunk,
    launch_over,
)
from capibara.kernels.ops.scan.ssd.hopper.forward import refuses as refuses_forward
from capibara.kernels.ops.scan.ssd.hopper.states import SweepPlan, sweep
from capibara.kernels.ops.scan.ssd.rules import Sizes, sizes_of
from capibara.kernels.ops.scan.ssd.spans import over_spans
from capibara.kernels.pallas.hopper import (
    LOG2E,
    REDUCTION_BYTES,
    SMEM_BYTES,
    load,
    multiprocessors,
    smem_bytes,
    store_to_memory,
    swizzled,
)

FETCH_REGISTERS, COMPUTE_REGISTERS = 24, 240
SQUARE = (CHUNK, CHUNK)
# The vectors of a chunk and head: running sums (of log2) of whole numbers and of the rest, twice as one place is read
# in one layout, their powers, the decay to the chunk's end, dt, and D.
WHOLES, PARTS, COLUMN_WHOLES, COLUMN_PARTS, POWERS, AFTER, STEPS, SKIP, VECTORS = 0, 1, 2, 3, 4, 5, 6, 7, 8
# What is summed of a chunk and slice, one number a step: pairs around it, x·dy, (C·state)·dy, x·(B·flow), and of the
# pairs that it is the earlier one of, without dt.
PAIRS, SKIPS, ONWARD, OUTWARD, LEAVING, SUMS = 0, 1, 2, 3, 4, 5
SWEEP_STAGES = 3  # chunks on their way or in use
f32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class GradConfig:
    """How many slices of a chunk are on their way or in use at a time, and in how many parts a group's heads go."""

    stages: int
    parts: int

    def __post_init__(self) -> None:
        if self.stages < 1 or self.parts < 1:
            raise rule_error("stages and parts are 1 or more", self, "use stages=2, parts=1")


def candidates(call: Call) -> Sequence[GradConfig]:
    n = sizes_of(call)
    fewest = parts_of_a_group(n, multiprocessors(call.target.device_kind))
    slices = n.heads // n.groups * (n.width // SLICE)
    parts = [fewest, 2 * fewest] if slices % (2 * fewest) == 0 else [fewest]
    dtype, limit = call.need("x").dtype, SMEM_BYTES - REDUCTION_BYTES
    # Two stages first: on an H200 three took 6 % longer.
    fitting = [stages for stages in (2, 3) if smem_bytes(_scratch(dtype, n.states, stages)) <= limit]
    return [GradConfig(stages, p) for p in parts for stages in fitting]


def _scratch(dtype: Any, states: int, stages: int) -> dict[str, Any]:
    """Shared memory and barriers by name: what all slices share, a ring of slices, and what warpgroups exchange."""

    def tiles(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype))

    return {
        "B": tiles(CHUNK, states),
        "C": tiles(CHUNK, states),
        "x": tiles(stages, CHUNK, SLICE),
        "d_out": tiles(stages, CHUNK, SLICE),
        "starts": tiles(stages, states, SLICE),
        "flows": tiles(stages, states, SLICE),
        "vectors": plgpu.SMEM((stages, VECTORS, CHUNK), jnp.float32),
        "later": tiles(*SQUARE),
        # Two of them: one is written while the other is read.
        "pairs": tiles(2, *SQUARE),
        "dx": tiles(CHUNK, SLICE),
        "shared": plgpu.Barrier(num_arrivals=2),
        "arrived": plgpu.Barrier(num_arrivals=5, num_barriers=stages),
        "drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "written": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "used": plgpu.Barrier(num_arrivals=1, num_barriers=2),
    }


def refuses(call: Call) -> str | None:
    if any(call.need(name).dtype == jnp.float16 for name in ("x", "B", "C")):
        return "products of gradients, which it rounds to x's type, leave float16's range"
    return refuses_forward(call)


def parts_of_a_group(n: Sizes, programs: int) -> int:
    """In how many parts a group's slices go: the fewest that make so many programs, or as many as there are slices.

    >>> parts_of_a_group(Sizes(8, 4096, 32, 64, 1, 128), 132), parts_of_a_group(Sizes(1, 4096, 32, 64, 1, 128), 132)
    (1, 4)
    """
    slices = n.heads // n.groups * (n.width // SLICE)
    alone = n.batch * n.groups * math.ceil(n.time / CHUNK)
    fitting = (parts for parts in range(1, slices + 1) if slices % parts == 0 and parts * alone >= programs)
    return next(fitting, slices)


@dataclasses.dataclass(frozen=True)
class GradPlan:
    """What a program is told while it is traced."""

    batch: int
    chunks: int
    parts: int  # of all heads
    slices: int  # of a part
    slices_of_head: int
    parts_of_group: int
    states: int
    stages: int
    has_steps: bool
    has_skip: bool


def _program(*args: Any, plan: GradPlan, names: tuple[str, ...]) -> None:
    """Set up shared memory and barriers, then run the three warpgroups."""
    refs = dict(zip(names, args, strict=True))
    scratch = _scratch(refs["x"].dtype, plan.states, plan.stages)

    def scoped(*allocated: Any) -> None:
        smem = dict(zip(scratch, allocated, strict=True))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            _fetch(plan, refs, smem)

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _pairs(plan, refs, smem)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 1)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            tall = plgpu.WGMMAAccumulatorRef((CHUNK, plan.states), jnp.float32)
            pl.run_scoped(functools.partial(_states, plan, refs, smem), tall, tall)

    pl.run_scoped(scoped, *scratch.values(), collective_axes="warpgroup")


def _place() -> tuple[Any, Any, Any]:
    return lax.axis_index("batch"), lax.axis_index("part"), lax.axis_index("chunk")


def _fetch(plan: GradPlan, refs: dict[str, Any], smem: dict[str, Any]) -> None:
    batch, part, number = _place()
    times, group = pl.ds(number * CHUNK, CHUNK), lax.div(part, jnp.int32(plan.parts_of_group))
    for name in ("B", "C"):
        plgpu.copy_gmem_to_smem(refs[name].at[batch, times, group], smem[name], smem["shared"])

    @pl.loop(0, plan.slices)
    def _(turn: Any) -> None:
        slot = lax.rem(turn, jnp.int32(plan.stages))

        @pl.when(turn >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(smem["drained"].at[slot])

        arrived, mine = smem["arrived"].at[slot], part * plan.slices + turn
        head = lax.div(mine, jnp.int32(plan.slices_of_head))
        for name in ("x", "d_out"):
            plgpu.copy_gmem_to_smem(refs[name].at[batch, times, mine], smem[name].at[slot], arrived)
        plgpu.copy_gmem_to_smem(refs["vectors"].at[batch, head, number], smem["vectors"].at[slot], arrived)
        for name in ("starts", "flows"):
            plgpu.copy_gmem_to_smem(refs[name].at[batch, mine, number], smem[name].at[slot], arrived)


class _Slice:
    """What has arrived of one slice, and where its sums go."""

    def __init__(self, plan: GradPlan, refs: dict[str, Any], smem: dict[str, Any], turn: Any) -> None:
        batch, part, number = _place()
        mine, slot = part * plan.slices + turn, lax.rem(turn, jnp.int32(plan.stages))
        plgpu.barrier_wait(smem["arrived"].at[slot])
        self.number, self.mine = number, mine
        self._drained = smem["drained"].at[slot]
        self._sums, self.through = refs["sums"].at[batch, mine, number], refs["through"].at[batch, mine, number]
        self._vectors = smem["vectors"].at[slot]
        self.x, self.d_out, self.start, self.flow = (smem[n].at[slot] for n in ("x", "d_out", "starts", "flows"))

    def wide(self, tile: Any) -> Any:
        """A tile in float32. It is read again at each use: kept over a product, it would take too many registers."""
        return load(tile, LAYOUT).astype(jnp.float32)

    def vector(self, which: int, axis: int) -> Any:
        """One number a row (axis 0) or a column (axis 1), over a tile."""
        read = load(self._vectors.at[which], LAYOUT.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(read, SQUARE, [axis])

    def decays(self) -> Any:
        """From the steps of rows to those of columns; 0 against time."""
        row, column = _numbers()
        wholes = self.vector(COLUMN_WHOLES, 1) - self.vector(WHOLES, 0)
        parts = self.vector(COLUMN_PARTS, 1) - self.vector(PARTS, 0)
        return jnp.exp2(jnp.where(column >= row, wholes + parts, UNSEEN))

    def store(self, which: int, tile: Any) -> None:
        store_to_memory(self._sums.at[which], tile.sum(axis=1))

    def done(self) -> None:
        plgpu.barrier_arrive(self._drained)


def _numbers() -> tuple[Any, Any]:
    row, column = (plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=LAYOUT) for axis in (0, 1))
    return row, column


def _square() -> Any:
    return plgpu.WGMMAAccumulatorRef(SQUARE, jnp.float32)


def _zeros() -> Any:
    return plgpu.layout_cast(jnp.full(SQUARE, 0, jnp.float32), LAYOUT)


def _pairs(plan: GradPlan, refs: dict[str, Any], smem: dict[str, Any]) -> None:
    """Rows are steps j of x, columns steps i of y: the gradients of x and of the scores, and each pair's product."""
    dtype = refs["x"].dtype
    batch, _, number = _place()
    plgpu.barrier_wait(smem["shared"])

    def multiply(sums: Any) -> Any:
        plgpu.wgmma(sums, smem["B"], smem["C"].transpose((1, 0)))
        return sums[...]

    scores = pl.run_scoped(multiply, _square())

    def one_slice(turn: Any, d_scores: Any) -> Any:
        now, half = _Slice(plan, refs, smem, turn), lax.rem(turn, jnp.int32(2))

        def multiply(meet: Any, reached: Any) -> Any:
            plgpu.wgmma(meet, now.x, now.d_out.transpose((1, 0)))
            plgpu.wgmma(reached, smem["B"], now.flow)
            decays = now.decays()
            weights = decays * scores
            if plan.has_steps:
                decays = decays * now.vector(STEPS, 0)
            products = plgpu.wgmma_accumulator_load(meet, wait_n=1)
            now.store(LEAVING, weights * products)
            d_pairs = decays * products

            @pl.when(turn >= 2)
            def _() -> None:
                plgpu.barrier_wait(smem["used"].at[half])

            smem["pairs"][half] = (d_pairs * scores).astype(dtype)
            leaving = plgpu.wgmma_accumulator_load(reached, wait_n=0)
            reached[...] = leaving * now.vector(AFTER, 0)
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem["written"].at[half])
            plgpu.wgmma(reached, weights.astype(dtype), now.d_out)
            now.store(OUTWARD, now.wide(now.x) * leaving)
            return d_pairs, plgpu.wgmma_accumulator_load(reached, wait_n=0)

        d_pairs, dx = pl.run_scoped(multiply, _square(), _square())
        if plan.has_steps:
            dx = dx * now.vector(STEPS, 0)
        if plan.has_skip:
            dx = dx + now.wide(now.d_out) * now.vector(SKIP, 0)
        now.done()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the slice before has left
        smem["dx"][...] = dx.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["dx"], refs["dx"].at[batch, pl.ds(number * CHUNK, CHUNK), now.mine])
        return d_scores + d_pairs

    d_scores = lax.fori_loop(0, plan.slices, one_slice, _zeros())
    half = plan.slices % 2
    if plan.slices >= 2:
        plgpu.barrier_wait(smem["used"].at[half])
    smem["pairs"][half] = d_scores.astype(dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem["written"].at[half])


def _states(plan: GradPlan, refs: dict[str, Any], smem: dict[str, Any], d_b: Any, d_c: Any) -> None:
    """The gradients of B and C, what passes each step, and what reaches each from the state before the chunk."""
    dtype = refs["x"].dtype
    row, column = _numbers()
    smem["later"][...] = jnp.where(column >= row, 1.0, 0.0).astype(dtype)
    plgpu.commit_smem()
    plgpu.barrier_wait(smem["shared"])

    def one_slice(turn: Any, carry: None) -> None:
        now, half = _Slice(plan, refs, smem, turn), lax.rem(turn, jnp.int32(2))
        to_end = now.vector(AFTER, 0)
        if plan.has_steps:
            to_end = to_end * now.vector(STEPS, 0)

        def through(carried: Any) -> None:
            plgpu.wgmma(carried, smem["C"], now.start)
            faded = (now.wide(now.d_out) * now.vector(POWERS, 0)).astype(dtype)
            plgpu.wgmma(d_c, faded, now.start.transpose((1, 0)))
            weighted = (now.wide(now.x) * to_end).astype(dtype)
            plgpu.wgmma(d_b, weighted, now.flow.transpose((1, 0)))
            if plan.has_skip:
                now.store(SKIPS, now.wide(now.x) * now.wide(now.d_out))
            now.store(ONWARD, now.wide(now.d_out) * plgpu.wgmma_accumulator_load(carried, wait_n=2))

        pl.run_scoped(through, _square())
        for first in range(0, plan.states, CHUNK):
            rows = pl.ds(first, CHUNK)
            both = now.wide(now.start.at[rows]) * now.wide(now.flow.at[rows])
            store_to_memory(now.through.at[rows], both.sum(axis=1))

        def passing(sums: Any) -> None:
            # Of each pair to every step after j up to i: over i by the product, over j by the sum.
            plgpu.barrier_wait(smem["written"].at[half])
            plgpu.wgmma(sums, smem["later"], smem["pairs"].at[half].transpose((1, 0)))
            row, column = _numbers()
            now.store(PAIRS, jnp.where(column < row, plgpu.wgmma_accumulator_load(sums, wait_n=0), 0.0))

        pl.run_scoped(passing, _square())
        plgpu.barrier_arrive(smem["used"].at[half])
        now.done()
        return carry

    lax.fori_loop(0, plan.slices, one_slice, None)
    half = plan.slices % 2
    plgpu.barrier_wait(smem["written"].at[half])
    d_scores = smem["pairs"].at[half]
    plgpu.wgmma(d_b, d_scores, smem["C"])
    plgpu.wgmma(d_c, d_scores.transpose((1, 0)), smem["B"])
    _store_shared(refs["dB"], d_b)
    _store_shared(refs["dC"], d_c)


def _store_shared(ref: Any, sums: Any) -> None:
    batch, part, number = _place()
    store_to_memory(ref.at[batch, pl.ds(number * CHUNK, CHUNK), part], sums[...].astype(ref.dtype))


def ssd_backward(
    x: jax.Array, log_decay: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array | None, D: jax.Array | None,
    initial_state: jax.Array | None, d_out: jax.Array, d_final: jax.Array | None = None, *, config: GradConfig,
    chunk: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The cotangents of the seven operands; None for an absent one. See the module's text."""
    assert chunk in (None, CHUNK)  # `refuses` has seen to it
    n = Sizes(*x.shape, *B.shape[2:])
    each = n.width // SLICE
    slices, in_parts = n.heads * each, config.parts
    if slices // n.groups % in_parts:
        raise rule_error(f"parts divides the {slices // n.groups} slices of a group", config, "use parts=1")
    # TMA takes lengths in multiples of 8, and an axis of a single tile would not be clipped.
    length = max(CHUNK, math.ceil(n.time / 8) * 8)
    chunks = math.ceil(length / CHUNK)

    def over_time(v: jax.Array) -> jax.Array:
        return jnp.pad(v, ((0, 0), (0, length - n.time), (0, 0), (0, 0))) if length > n.time else v

    def in_slices(v: jax.Array) -> jax.Array:
        return over_time(v).reshape(n.batch, length, slices, SLICE)

    wholes, parts = running_sums(by_chunk(log_decay, chunks) * LOG2E, -1)
    powers = jnp.exp2(wholes + parts)
    after = jnp.exp2((wholes[..., -1:] - wholes) + (parts[..., -1:] - parts))
    steps = jnp.ones_like(powers) if dt is None else by_chunk(dt, chunks)
    to_end, decay = after * steps, powers[..., -1:]
    skip = jnp.zeros(n.heads, f32) if D is None else D.astype(f32)
    skips = jnp.broadcast_to(skip[:, None, None], powers.shape)
    vectors = jnp.stack([wholes, parts, wholes, parts, powers, after, steps, skips], -2)
    sliced_x, flow, b, c, vectors, to_end = vary_alike(
        (in_slices(x), in_slices(d_out.astype(x.dtype)), over_time(B), over_time(C), vectors, to_end)
    )

    def borders(
        left: jax.Array, right: jax.Array, weights: jax.Array, first: jax.Array | None, *, backward: bool, last: bool
    ) -> list[jax.Array]:
        """The states around every chunk, [batch, slices, chunks, N, 64], and the one after all of them."""
        operands = {
            "left": left, "right": right, "vectors": jnp.stack([weights, jnp.broadcast_to(decay, weights.shape)], -2)
        }  # fmt: skip
        if first is not None:
            operands["first"] = first.astype(f32)
        operands = dict(zip(operands, vary_alike(tuple(operands.values())), strict=True))
        outs = {"borders": out_struct((n.batch, slices, chunks, n.states, SLICE), x.dtype, sliced_x)}
        if last:
            outs["last"] = out_struct((n.batch, n.heads, n.states, n.width), f32, sliced_x)
        of_group = slices // n.groups
        plan = SweepPlan(n.batch, chunks, slices, each, of_group, n.states, SWEEP_STAGES, backward)
        return sweep(operands, outs, plan)

    starts, *_ = borders(b, sliced_x, to_end, initial_state, backward=False, last=False)
    has_start = initial_state is not None
    flows, *d_initial = borders(c, flow, vectors[..., POWERS, :], d_final, backward=True, last=has_start)

    all_parts = n.groups * in_parts
    operands = {
        "x": sliced_x, "d_out": flow, "B": b, "C": c, "vectors": vectors, "starts": starts, "flows": flows
    }  # fmt: skip
    # Sums that are added once more stay in float32.
    shared = out_struct((n.batch, chunks * CHUNK, all_parts, n.states), x.dtype if in_parts == 1 else f32, sliced_x)
    outs = {
        "dx": out_struct(sliced_x.shape, x.dtype, sliced_x),
        "dB": shared,
        "dC": shared,
        "sums": out_struct((n.batch, slices, chunks, SUMS, CHUNK), f32, sliced_x),
        "through": out_struct((n.batch, slices, chunks, n.states), f32, sliced_x),
    }
    plan = GradPlan(
        n.batch, chunks, all_parts, slices // all_parts, each, in_parts, n.states, config.stages, dt is not None,
        D is not None,
    )  # fmt: skip
    grid = {"batch": n.batch, "part": all_parts, "chunk": chunks}
    dx, d_b, d_c, sums, through = launch_over("ssd_backward", grid, _program, operands, outs, plan, SAID_LAYOUTS)

    sums = sums.reshape(n.batch, n.heads, each, *sums.shape[2:]).sum(2)
    through = through.reshape(n.batch, n.heads, each, chunks, n.states).sum((2, 4)) * decay[..., 0]

    def by_time(v: jax.Array, like: jax.Array) -> jax.Array:
        """[batch, heads, chunks, steps] as an operand is."""
        return v.reshape(n.batch, n.heads, -1).mT[:, : n.time].astype(like.dtype)

    def of_groups(v: jax.Array, like: jax.Array) -> jax.Array:
        return v[:, : n.time].reshape(*like.shape[:3], in_parts, n.states).sum(3).astype(like.dtype)

    def line(which: int) -> jax.Array:
        return sums[..., which, :]

    d_log_decay = over_spans(line(PAIRS), powers * line(ONWARD), to_end * line(OUTWARD), through)
    return (
        dx[:, : n.time].reshape(x.shape),
        by_time(d_log_decay, log_decay),
        of_groups(d_b, B),
        of_groups(d_c, C),
        None if dt is None else by_time(line(LEAVING) + after * line(OUTWARD), dt),
        None if D is None else line(SKIPS).sum((0, 2, 3)).astype(D.dtype),
        None if initial_state is None else d_initial[0].astype(initial_state.dtype),
    )


GRAD_IMPLEMENTATION = Implementation(
    "hopper",
    ssd_backward,
    platforms=("gpu",),
    refuses=refuses,
    kernel=True,
    hints=("chunk",),
    config_type=GradConfig,
    candidates=candidates,
)
