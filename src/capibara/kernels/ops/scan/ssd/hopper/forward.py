"""State space duality for Hopper, in Pallas (Mosaic GPU): three warpgroups on two neighbouring slices of 64 columns.

A head's columns do not meet, so a wide head is several slices of 64, and two slices of one group share its B and C.
One warpgroup streams chunks of 64 steps by TMA into a ring; two compute a slice each, the state of the slice in the
accumulators of its warpgroup from the first chunk to the last. A chunk is four products: the scores C·Bᵀ, C on the
state so far, the scores with their decays on x, and Bᵀ on weighted x into the state. XLA prepares the running sums of
log_decay, so the only exponentials in the kernel are those of pairs, of differences that are never positive.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.scan.ssd.decays import running_sums
from capibara.kernels.ops.scan.ssd.rules import sizes_of
from capibara.kernels.pallas.hopper import LANE, LOG2E, SMEM_BYTES, load, named, refuses_chip, smem_bytes, swizzled

# Every store to shared memory is followed by commit_smem, which waits for all threads by itself.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
# For the gradient's kernels, whose instructions are the same without inferring layouts; this one's spills are not.
SAID_LAYOUTS = dataclasses.replace(COMPILER_PARAMS, lowering_semantics=LANE)
CHUNK = 64
SLICE = 64  # columns of x a warpgroup holds
LAYOUT = plgpu.Layout.WGMMA
FETCH_REGISTERS, COMPUTE_REGISTERS = 40, 232
UNSEEN = -1e30  # an exponent whose power is 0
# The vectors of a chunk and head: running sums (of log2), their powers, dt with the decay to the chunk's end, dt, and
# the sums again: two loads of one place, for rows and for columns, would become one, which has one layout.
SUMS, POWERS, TO_END, STEPS, COLUMN_SUMS, VECTORS = 0, 1, 2, 3, 4, 5


STATES = (64, 128)  # N: rows of whole products, whose accumulators fit beside the others


@dataclasses.dataclass(frozen=True)
class ChunksConfig:
    """How many chunks are on their way or in use at a time."""

    stages: int

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise rule_error("stages is 1 or more", self, "use stages=2")


def _scratch(dtype: Any, states: int, stages: int) -> dict[str, Any]:
    """Shared memory and barriers by name: a ring of operands, and for each computing warpgroup what it writes."""

    def tiles(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype))

    return {
        "B": tiles(stages, CHUNK, states),
        "C": tiles(stages, CHUNK, states),
        "x": tiles(stages, 2, CHUNK, SLICE),
        "vectors": plgpu.SMEM((stages, 2, VECTORS, CHUNK), jnp.float32),
        "state": tiles(2, states, SLICE),
        "weighted": tiles(2, CHUNK, SLICE),
        "out": tiles(2, CHUNK, SLICE),
        "arrived": plgpu.Barrier(num_arrivals=6, num_barriers=stages),
        "drained": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }


def candidates(call: Call) -> Sequence[ChunksConfig]:
    dtype, states = call.need("x").dtype, sizes_of(call).states
    return [ChunksConfig(n) for n in (3, 2, 4) if smem_bytes(_scratch(dtype, states, n)) <= SMEM_BYTES]


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    n = sizes_of(call)
    if 0 in (n.batch, n.time):
        return "x is empty"
    kinds = {np.dtype(call.need(name).dtype).name for name in ("x", "B", "C")}
    if len(kinds) > 1 or not kinds <= {"bfloat16", "float16"}:
        return f"x, B and C are all bfloat16 or all float16, not {', '.join(sorted(kinds))}"
    if any(x is not None and x.dtype.itemsize > 4 for x in call.args):
        return "it sums in float32"
    if n.states not in STATES:
        return f"N is {' or '.join(map(str, STATES))}, not {n.states}"
    if n.width % SLICE:
        return f"P is a multiple of {SLICE}, not {n.width}"
    if n.heads // n.groups * (n.width // SLICE) % 2:
        return f"two warpgroups share B and C; a group of {n.heads // n.groups} heads has no pairs of {SLICE} columns"
    if call.params["chunk"] not in (None, CHUNK):
        return f"its chunks are {CHUNK} steps, not {call.params['chunk']}"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a program is told while it is traced."""

    batch: int
    chunks: int
    slices: int  # of all heads
    slices_of_head: int
    slices_of_group: int
    states: int
    stages: int
    has_steps: bool


def _program(*args: Any, plan: Plan, names: tuple[str, ...]) -> None:
    """Set up shared memory and barriers, then run the three warpgroups."""
    refs = dict(zip(names, args, strict=True))

    def compute(smem: dict[str, Any], warpgroup: Any) -> None:
        small = plgpu.WGMMAAccumulatorRef((CHUNK, SLICE), jnp.float32)
        state = plgpu.WGMMAAccumulatorRef((plan.states, SLICE), jnp.float32)
        pl.run_scoped(functools.partial(_compute, plan, refs, smem, warpgroup), small, small, state)

    scratch = _scratch(refs["x"].dtype, plan.states, plan.stages)
    fetch_and_compute(scratch, functools.partial(_fetch, plan, refs), compute)


def fetch_and_compute(
    scratch: dict[str, Any], fetch: Callable[[dict[str, Any]], None], compute: Callable[[dict[str, Any], Any], None]
) -> None:
    """With shared memory by name: `compute` by the first two warpgroups, told which it is, and `fetch` by the third."""

    def scoped(*allocated: Any) -> None:
        smem = dict(zip(scratch, allocated, strict=True))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _() -> None:
            plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")
            fetch(smem)

        @pl.when(warpgroup < 2)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            compute(smem, warpgroup)
            plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(scoped, *scratch.values(), collective_axes="warpgroup")


def _fetch(plan: Plan, refs: dict[str, Any], smem: dict[str, Any]) -> None:
    """Every chunk's operands, as the stages drain."""
    batch, pair = lax.axis_index("batch"), lax.axis_index("pair")
    group = lax.div(2 * pair, jnp.int32(plan.slices_of_group))

    @pl.loop(0, plan.chunks)
    def _chunk(number: Any) -> None:
        slot = lax.rem(number, jnp.int32(plan.stages))

        @pl.when(number >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(smem["drained"].at[slot])

        arrived, times = smem["arrived"].at[slot], pl.ds(number * CHUNK, CHUNK)
        for name in ("B", "C"):
            plgpu.copy_gmem_to_smem(refs[name].at[batch, times, group], smem[name].at[slot], arrived)
        for mine in range(2):
            part = 2 * pair + mine
            head = lax.div(part, jnp.int32(plan.slices_of_head))
            plgpu.copy_gmem_to_smem(refs["x"].at[batch, times, part], smem["x"].at[slot, mine], arrived)
            plgpu.copy_gmem_to_smem(refs["vectors"].at[batch, head, number], smem["vectors"].at[slot, mine], arrived)


def _compute(
    plan: Plan, refs: dict[str, Any], smem: dict[str, Any], mine: Any, scores: Any, sums: Any, state: Any
) -> None:
    """One slice through every chunk; the three accumulators are scores, y and the state."""
    batch, pair = lax.axis_index("batch"), lax.axis_index("pair")
    part = 2 * pair + mine
    head = lax.div(part, jnp.int32(plan.slices_of_head))
    columns = pl.ds(lax.rem(part, jnp.int32(plan.slices_of_head)) * SLICE, SLICE)
    dtype = refs["x"].dtype
    square, tall = (CHUNK, SLICE), (plan.states, SLICE)

    def zeros(shape: tuple[int, int]) -> Any:
        return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), LAYOUT)

    if "initial_state" in refs:
        state[...] = load(refs["initial_state"].at[batch, head, :, columns], LAYOUT, optimized=False)
    else:
        state[...] = zeros(tall)
    smem["state"][mine] = state[...].astype(dtype)
    plgpu.commit_smem()
    skip = refs["D"][head] if "D" in refs else None

    def chunk(number: Any, carry: None) -> None:
        slot = lax.rem(number, jnp.int32(plan.stages))
        vectors, x_tile = smem["vectors"].at[slot, mine], smem["x"].at[slot, mine]

        def vector(which: int, axis: int) -> Any:
            """One number a row (axis 0) or a column (axis 1), over a tile."""
            read = load(vectors.at[which], LAYOUT.reduce(1 - axis), optimized=False)
            return lax.broadcast_in_dim(read, square, [axis])

        scores[...] = zeros(square)
        sums[...] = zeros(square)
        plgpu.barrier_wait(smem["arrived"].at[slot])
        b_turned = smem["B"].at[slot].transpose((1, 0))
        plgpu.wgmma(scores, smem["C"].at[slot], b_turned)
        plgpu.wgmma(sums, smem["C"].at[slot], smem["state"].at[mine])

        # Under the products: x with what is left of it at the chunk's end, and the decays of pairs.
        x = load(x_tile, LAYOUT).astype(jnp.float32)
        smem["weighted"][mine] = (x * vector(TO_END, 0)).astype(dtype)
        row, column = (plgpu.broadcasted_iota(jnp.int32, square, axis, layout=LAYOUT) for axis in (0, 1))
        between = jnp.where(row >= column, vector(SUMS, 0) - vector(COLUMN_SUMS, 1), UNSEEN)
        weights = jnp.exp2(between)
        if plan.has_steps:
            weights = weights * vector(STEPS, 1)
        weights = (plgpu.wgmma_accumulator_load(scores, wait_n=1) * weights).astype(dtype)

        carried = plgpu.wgmma_accumulator_load(sums, wait_n=0) * vector(POWERS, 0)
        sums[...] = carried if skip is None else carried + x * skip
        state[...] = state[...] * vectors[POWERS, CHUNK - 1]
        plgpu.commit_smem()
        plgpu.wgmma(sums, weights, x_tile)
        plgpu.wgmma(state, b_turned, smem["weighted"].at[mine])

        y = plgpu.wgmma_accumulator_load(sums, wait_n=1).astype(dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the chunk before has left
        smem["out"][mine] = y
        after = plgpu.wgmma_accumulator_load(state, wait_n=0).astype(dtype)
        plgpu.barrier_arrive(smem["drained"].at[slot])
        smem["state"][mine] = after
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["out"].at[mine], refs["y"].at[batch, pl.ds(number * CHUNK, CHUNK), part])
        return carry

    lax.fori_loop(0, plan.chunks, chunk, None)
    if "final" in refs:
        refs["final"].at[batch, head, :, columns][...] = state[...]


def launch_over(
    name: str,
    grid: dict[str, int],
    body: Callable[..., None],
    operands: dict[str, Any],
    outs: dict[str, Any],
    plan: Any,
    compiler_params: Any = None,
) -> list[Any]:
    """`body`, told the names of its references, in three warpgroups for each place of the grid."""
    return plgpu.kernel(
        named(name, body, plan=plan, names=(*operands, *outs)),
        out_type=list(outs.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS if compiler_params is None else compiler_params,
    )(*operands.values())


def by_chunk(v: jax.Array, chunks: int) -> jax.Array:
    """[batch, time, heads] as [batch, heads, chunks, steps] in float32; zeros past the end."""
    padded = jnp.pad(v.astype(jnp.float32), ((0, 0), (0, chunks * CHUNK - v.shape[1]), (0, 0)))
    return padded.mT.reshape(v.shape[0], v.shape[2], chunks, CHUNK)


def _vectors(log_decay: jax.Array, dt: jax.Array | None, chunks: int) -> jax.Array:
    """[batch, heads, chunks, 5, steps]: what the kernel names SUMS, POWERS, TO_END, STEPS, COLUMN_SUMS."""

    wholes, parts = running_sums(by_chunk(log_decay, chunks) * LOG2E, -1)
    sums, after = wholes + parts, (wholes[..., -1:] - wholes) + (parts[..., -1:] - parts)
    steps = jnp.ones_like(sums) if dt is None else by_chunk(dt, chunks)
    return jnp.stack([sums, jnp.exp2(sums), jnp.exp2(after) * steps, steps, sums], -2)


def ssd_forward(
    x: jax.Array, log_decay: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array | None = None,
    D: jax.Array | None = None, initial_state: jax.Array | None = None, *, config: ChunksConfig,
    return_final_state: bool, chunk: int | None = None,
) -> Any:  # fmt: skip
    """The forward pass as one kernel over (batch, pairs of 64 columns); see the module's text."""
    assert chunk in (None, CHUNK)  # `refuses` has seen to it
    batch, time, heads, width = x.shape
    groups, states = B.shape[2:]
    each = width // SLICE
    # TMA takes lengths in multiples of 8, and an axis of a single tile would not be clipped.
    length = max(CHUNK, math.ceil(time / 8) * 8)
    chunks = math.ceil(length / CHUNK)

    def over_time(v: jax.Array) -> jax.Array:
        return jnp.pad(v, ((0, 0), (0, length - time), *((0, 0),) * (v.ndim - 2))) if length > time else v

    operands = {
        "x": over_time(x).reshape(batch, length, heads * each, SLICE),
        "B": over_time(B),
        "C": over_time(C),
        "vectors": _vectors(log_decay, dt, chunks),
    }
    if D is not None:
        operands["D"] = D.astype(jnp.float32)
    if initial_state is not None:
        operands["initial_state"] = initial_state.astype(jnp.float32)
    operands = dict(zip(operands, vary_alike(tuple(operands.values())), strict=True))
    outs = {"y": out_struct(operands["x"].shape, x.dtype, x)}
    if return_final_state:
        outs["final"] = out_struct((batch, heads, states, width), jnp.float32, x)
    plan = Plan(
        batch=batch,
        chunks=chunks,
        slices=heads * each,
        slices_of_head=each,
        slices_of_group=heads // groups * each,
        states=states,
        stages=config.stages,
        has_steps=dt is not None,
    )
    y, *last = launch_over("ssd", {"batch": batch, "pair": plan.slices // 2}, _program, operands, outs, plan)
    y = y[:, :time].reshape(x.shape)
    return (y, last[0]) if return_final_state else y


IMPLEMENTATION = Implementation(
    "hopper",
    ssd_forward,
    platforms=("gpu",),
    refuses=refuses,
    kernel=True,
    hints=("chunk",),
    config_type=ChunksConfig,
    candidates=candidates,
)
