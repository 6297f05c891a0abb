"""The backward pass of the recurrence for the TPU, in Pallas (Mosaic): one pass over a, h and the cotangent.

As the forward kernel, the other way: G_t = d_h_t + a_{t+1} · G_{t+1}. What waits in VMEM between blocks is a · G of the
row after, so that no decay of another block is needed. Of h a row before the block is needed, for da_t = G_t · h_{t-1}:
a few rows of the block before are fetched beside it.
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
from jax.experimental.pallas import tpu as pltpu

from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.scan.recurrence.planes import Number, choose, filled, join, split, store
from capibara.kernels.ops.scan.recurrence.tpu.forward import (
    ROWS,
    BlockConfig,
    Watch,
    block_specs,
    candidates_for,
    carry_scratch,
    last_row,
    ordered,
    padded_steps,
    put_row,
    read,
    refuses,
    roll,
    row_at,
    row_numbers,
    rows_of,
    scan_rows,
    specs,
    stacked,
    state_operand,
)


def candidates(call: Call) -> Sequence[BlockConfig]:
    a, h, d_h = (call.need(name) for name in ("a", "h", "d_h"))
    return candidates_for(call, (a, h, d_h, a, h))


def _body(*refs: Any, tree: Any, config: BlockConfig, steps: int, channels: int, reverse: bool) -> None:
    """`reverse` is the forward pass's; this one runs the other way."""
    operand_refs, result_refs, carried_ref = jax.tree.unflatten(tree, refs)
    a_ref, h_ref, edge_ref, flow_ref, initial_ref, final_ref = operand_refs
    da_ref, db_ref, start_ref = result_refs
    turn, turns = pl.program_id(2), pl.num_programs(2)
    block = turn if reverse else turns - 1 - turn

    @pl.when(turn == 0)
    def _start() -> None:
        if final_ref is None:
            store(carried_ref, ..., jax.tree.map(jnp.zeros_like, carried_ref))
        else:
            store(carried_ref, ..., jax.tree.map(lambda ref: ref[0], final_ref))

    # The state that the block's first step (its last row, where the forward pass ran backwards) took up.
    outermost = block == (turns - 1 if reverse else 0)
    edge = last_row(read(edge_ref, slice(None)), reverse)
    initial = filled(edge, 0.0) if initial_ref is None else jax.tree.map(lambda ref: ref[0], initial_ref)
    edge = choose(outermost, initial, edge)

    chunks = config.steps // config.chunk
    pieces = config.chunk // ROWS
    ragged = steps % config.steps != 0

    def chunk_operands(number: jax.Array) -> tuple[Any, Number, Number, Number, Number]:
        """A chunk's rows, its operands, and the state that its first step took up."""
        at = number if reverse else chunks - 1 - number
        rows = pl.ds(pl.multiple_of(at * config.chunk, config.chunk), config.chunk)
        decay, state, flow = read(a_ref, rows), read(h_ref, rows), read(flow_ref, rows)
        # The chunk that the forward pass took before this one, of which one row is needed.
        other = jnp.clip(at + (1 if reverse else -1), 0, chunks - 1)
        beyond = read(h_ref, pl.ds(pl.multiple_of(other * config.chunk, config.chunk), config.chunk))
        first = choose(at == (chunks - 1 if reverse else 0), edge, last_row(beyond, reverse))
        if ragged:
            inside = block * config.steps + at * config.chunk + row_numbers(decay) < steps
            decay, flow = choose(inside, decay, filled(decay, 1.0)), choose(inside, flow, filled(flow, 0.0))
            # Where the forward pass ran backwards, it took up the initial state at the last step, not past it.
            state = choose(inside, state, initial)
            if reverse:  # also where that step is a chunk's last
                first = choose(block * config.steps + (at + 1) * config.chunk < steps, first, initial)
        return rows, decay, state, flow, first

    def chunk(number: jax.Array, carry: tuple[Number, Watch]) -> tuple[Number, Watch]:
        carried, watch = carry
        rows, decay, state, flow, first = chunk_operands(number)
        tiles: list[Any] = [None] * pieces
        for piece in ordered(pieces, not reverse):
            own, values = rows_of(decay, piece), rows_of(state, piece)
            row = row_numbers(own)
            # Each row's carry is multiplied by the decay of the row after, the last one's by none: it holds it already.
            after = choose(row == (0 if reverse else ROWS - 1), filled(own, 1.0), roll(own, 1, not reverse))
            product, from_zero = scan_rows(after, rows_of(flow, piece), not reverse)
            total = from_zero + product * carried
            watch = watch.see(own, total)
            carried = last_row(own * total, not reverse)
            neighbour = piece + (1 if reverse else -1)
            taken_up = last_row(rows_of(state, neighbour), reverse) if 0 <= neighbour < pieces else first
            before = choose(row == (ROWS - 1 if reverse else 0), taken_up, roll(values, 1, reverse))
            tiles[piece] = (total * before, total)
        for ref, parts in zip((da_ref, db_ref), zip(*tiles, strict=True), strict=True):
            store(ref, (0, rows), stacked(parts))
        return carried, watch

    def row_by_row(number: jax.Array, carried: Number) -> Number:
        rows, decay, state, flow, first = chunk_operands(number)
        da, db = decay, flow
        for row in ordered(config.chunk, not reverse):
            total = row_at(flow, row) + carried
            carried = row_at(decay, row) * total
            neighbour = row + (1 if reverse else -1)
            before = row_at(state, neighbour) if 0 <= neighbour < config.chunk else first
            da, db = put_row(da, row, total * before), put_row(db, row, total)
        store(da_ref, (0, rows), da)
        store(db_ref, (0, rows), db)
        return carried

    start = jax.tree.map(lambda ref: ref[...], carried_ref)
    carried, watch = lax.fori_loop(0, chunks, chunk, (start, Watch.start(jax.tree.leaves(start)[0])))
    again = watch.any(pl.program_id(1), channels)

    @pl.when(again)
    def _again() -> None:
        store(carried_ref, ..., lax.fori_loop(0, chunks, row_by_row, jax.tree.map(lambda ref: ref[...], carried_ref)))

    @pl.when(jnp.logical_not(again))
    def _keep() -> None:
        store(carried_ref, ..., carried)

    if start_ref is not None:

        @pl.when(turn == turns - 1)
        def _finish() -> None:
            store(start_ref, 0, jax.tree.map(lambda ref: ref[...], carried_ref))


def recurrence_backward(
    a: jax.Array, h: jax.Array, initial: jax.Array | None, d_h: jax.Array, d_final: jax.Array | None = None,
    *, config: BlockConfig, reverse: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(da, db, d_initial) as one kernel over (batch, channels, time); see the module's text."""
    batch, length, channels = h.shape
    steps = padded_steps(length, config.chunk)
    if steps != length:
        padding = ((0, 0), (0, steps - length), (0, 0))
        a, d_h = jnp.pad(a, padding, constant_values=1), jnp.pad(d_h, padding)
        # Steps that change nothing keep what the forward pass started from where it ran backwards.
        past = jnp.zeros((batch, channels), h.dtype) if initial is None else initial.astype(h.dtype)
        h = jnp.concatenate([h, jnp.broadcast_to(past[:, None], (batch, steps - length, channels))], 1)
    turns = math.ceil(steps / config.steps)
    each = config.steps // config.chunk  # chunks of a block

    def block(turn: Any) -> Any:
        return turn if reverse else turns - 1 - turn

    def chunk_before(turn: Any) -> Any:
        before = (block(turn) + 1) * each if reverse else block(turn) * each - 1
        return jnp.clip(before, 0, math.ceil(steps / config.chunk) - 1)

    moving, beside, still = block_specs(config, block, chunk_before)
    parts = split(h)
    operands = (split(a), parts, parts, split(d_h), state_operand(initial), state_operand(d_final))
    da, db = (jax.tree.map(lambda plane: out_struct(plane.shape, plane.dtype, plane), operands[i]) for i in (0, 1))
    start = jax.tree.map(lambda plane: out_struct((batch, 1, channels), jnp.float32, plane), parts)
    results = (da, db, None if initial is None else start)
    carried = carry_scratch(config, parts)

    planes = pl.pallas_call(
        functools.partial(
            _body, tree=jax.tree.structure((operands, results, carried)), config=config, steps=steps, channels=channels,
            reverse=reverse,
        ),
        out_shape=jax.tree.leaves(results),
        grid=(batch, math.ceil(channels / config.channels), turns),
        in_specs=specs((moving, moving, beside, moving, still, still), operands),
        out_specs=specs((moving, moving, still), results),
        scratch_shapes=jax.tree.leaves(carried),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=3 * a.size,
            bytes_accessed=sum(2 * x.size * x.dtype.itemsize for x in (a, h)) + d_h.size * d_h.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_linear_recurrence_grad",
    )(*jax.tree.leaves(operands))  # fmt: skip
    da, db, start = jax.tree.unflatten(jax.tree.structure(results), planes)
    d_initial = None if initial is None else join(start).reshape(batch, channels).astype(initial.dtype)
    return join(da)[:, :length], join(db)[:, :length], d_initial


GRAD_IMPLEMENTATION = Implementation(
    "pallas_tpu",
    recurrence_backward,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    config_type=BlockConfig,
    candidates=candidates,
)
