"""The backward pass of the recurrence for Hopper, in Pallas (Mosaic GPU): one pass over a, h and the cotangent.

As the forward kernel, the other way: G_t = d_h_t + a_{t+1} · G_{t+1}. What a thread carries is a · G of the step after,
so that a is read where it lies; h is fetched one row off, since da_t = G_t · h_{t-1}. The tile that holds the forward
pass's first step is told apart: its row before is the initial state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.scan.recurrence.hopper.forward import (
    OUT_STAGES,
    TileConfig,
    Walk,
    check_config,
    constant,
    fetch_rows,
    in_segments,
    launch,
    own_columns,
    read_rows,
    refuses,
    ring_candidates,
    ring_scratch,
    segment_starts,
    segments_met,
    slot_of,
    state_at,
    state_struct,
    store_rows,
    walk_tiles,
    whole_struct,
)
from capibara.kernels.ops.scan.recurrence.planes import Number, join, split, store
from capibara.kernels.ops.scan.recurrence.reference import shifted, start_of, state_type


def candidates(call: Call) -> Sequence[TileConfig]:
    a, d_h, h = (call.need(name) for name in ("a", "d_h", "h"))
    return ring_candidates(call, (a, d_h, h), (a, h))


def _program(*refs: Any, tree: Any, config: TileConfig, walk: Walk) -> None:
    (a_hbm, flow_hbm, h_hbm, initial_hbm, final_hbm), (da_hbm, db_hbm, start_hbm) = jax.tree.unflatten(tree, refs)
    sources, targets = (a_hbm, flow_hbm, h_hbm), (da_hbm, db_hbm)
    stores = len(jax.tree.leaves(targets))
    scratch = ring_scratch(sources, targets, config, walk.steps)

    def _scoped(buffers: Any, outs: Any, arrived: Any) -> None:
        batch, columns = lax.axis_index("batch"), own_columns(config)

        def end_state(refs: Number) -> Number:
            return constant(0.0, h_hbm, config) if refs is None else state_at(refs, batch, columns, config)

        def fetch(turn: Any, rows: int, at_edge: bool) -> None:
            """h lies one row earlier where the forward pass ran forwards (this walk is backwards), else one later."""
            slot, first, into = slot_of(turn, config.stages), walk.start(turn), 0
            fetch_rows(sources[:2], buffers[:2], arrived, slot, batch, first, rows, columns)
            if not at_edge:
                first = first - 1 if walk.backwards else first + 1
            elif rows > 1:  # the row outside of time is the initial state's
                rows, into = rows - 1, int(walk.backwards)
                first = first if walk.backwards else first + 1
            # A lone row at the edge is fetched for the barrier, which counts the copies, and not read.
            fetch_rows(h_hbm, buffers[2], arrived, slot, batch, first, rows, columns, into)

        def tile(turn: Any, slot: Any, rows: int, at_edge: bool, carried: Number) -> Number:
            out_slot = slot_of(turn, OUT_STAGES)
            # What these buffers held has left.
            plgpu.wait_smem_to_gmem(stores * (OUT_STAGES - 1), wait_read_only=True)

            def advance(group: Sequence[Any], befores: Sequence[Number], carried: Number) -> Number:
                decays, flows = (read_rows(buffer, slot, group, config.layout) for buffer in buffers[:2])
                for row, decay, flow, before in zip(group, decays, flows, befores, strict=True):
                    total = flow + carried
                    carried = decay * total
                    store(outs[0], (out_slot, row), total * before)
                    store(outs[1], (out_slot, row), total)
                return carried

            def inside(group: Sequence[Any], carried: Number) -> Number:
                return advance(group, read_rows(buffers[2], slot, group, config.layout), carried)

            if at_edge:
                # The row that the walk reaches last is the forward pass's first.
                carried = walk.each_row(rows - 1, inside, carried, first=int(walk.backwards))
                carried = advance([0 if walk.backwards else rows - 1], [end_state(initial_hbm)], carried)
            else:
                carried = walk.each_row(rows, inside, carried)
            store_rows(outs, targets, out_slot, batch, walk.start(turn), rows, columns)
            return carried

        carried = walk_tiles(walk, config, arrived, fetch, tile, end_state(final_hbm))
        if start_hbm is not None:
            store(start_hbm, (batch, columns), carried)
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(_scoped, **scratch)


def recurrence_backward(
    a: jax.Array, h: jax.Array, initial: jax.Array | None, d_h: jax.Array, d_final: jax.Array | None = None,
    *, config: TileConfig, reverse: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(da, db, d_initial) as one kernel over (batch, channels), or two where time is cut."""
    check_config(config, *h.shape[1:])
    wide = state_type(h)
    if config.segments == 1:
        start, ending = (None if x is None else x.astype(wide) for x in (initial, d_final))
        da, db, carried = _launch(a, d_h, h, start, ending, config, reverse, initial is not None)
        return da, db, None if initial is None else carried.astype(initial.dtype)
    decays, flows, states = (in_segments(x, config) for x in (a, d_h, h))
    endings, linked, first = segment_starts(
        decays, flows, start_of(d_final, h, wide), config, reverse=not reverse, multiply_last=True
    )
    last = states[:, 0 if reverse else -1].astype(wide).reshape(-1, config.segments, h.shape[2])
    starts = shifted(last, start_of(initial, h, wide), reverse).reshape(-1, h.shape[2])
    da, db, carried = _launch(decays, flows, states, starts, endings, config, reverse, True)
    met = segments_met(endings, linked, carried, config.segments, h.shape[1])
    da, db, one_piece = da.reshape(h.shape), db.reshape(h.shape), dataclasses.replace(config, segments=1)
    if jax.typeof(da).manual_axis_type.varying:
        # No kernel writes into what varies over the mesh of a checked shard_map.
        linked_grads = (da, db, None if initial is None else first.astype(initial.dtype))
        in_one = functools.partial(recurrence_backward, config=one_piece, reverse=reverse)
        return lax.cond(met, lambda: linked_grads, lambda: in_one(a, h, initial, d_h, d_final))
    start, ending = (None if x is None else x.astype(wide) for x in (initial, d_final))
    whole = tuple(map(split, (a, d_h, h, start, ending)))
    written = (split(da), split(db), None if initial is None else split(first))
    d_a, d_b, first_flow = launch(_program, whole, written, one_piece, backwards=not reverse, edge=True, unless=met)
    return join(d_a), join(d_b), None if initial is None else join(first_flow).astype(initial.dtype)


def _launch(
    a: jax.Array, d_h: jax.Array, h: jax.Array, start: Any, ending: Any, config: TileConfig, reverse: bool, keep: bool
) -> tuple[Any, Any, Any]:
    """(da, db) of each batch, and, to `keep`, what is carried out of its first step."""
    operands = (split(a), split(d_h), split(h), split(start), split(ending))
    results = (whole_struct(operands[0]), whole_struct(operands[2]), state_struct(operands[2]) if keep else None)
    da, db, carried = launch(_program, operands, results, config, backwards=not reverse, edge=True)
    return join(da), join(db), join(carried) if keep else None


GRAD_IMPLEMENTATION = Implementation(
    "hopper",
    recurrence_backward,
    platforms=("gpu",),
    refuses=refuses,
    kernel=True,
    config_type=TileConfig,
    candidates=candidates,
)
