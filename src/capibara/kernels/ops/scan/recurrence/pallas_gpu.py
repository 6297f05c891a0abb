"""The recurrence for Hopper, in Pallas (Mosaic GPU): tiles of time stream through shared memory, each number once.

A program is one warpgroup, a thread of it owns a channel and keeps its state in a register. Tiles of a and b arrive
by the copy engine, several ahead, so that enough is on its way to keep the memory busy; h leaves by it as well, from
two buffers in turn. Where batch and channels give fewer programs than the chip has multiprocessors, time is cut into
segments: a first kernel reads a and b and gives each segment's product of decays and its state from a start at zero,
XLA links those, and the kernel proper computes all segments side by side. Where the segments do not meet (products of
decays overflowed; see `xla`), the kernel runs once more over all of time in one piece, into the same memory. It is
launched in any case and looks for itself whether there is something to do: a branch of XLA's would wait for the host,
and copy the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_like
from capibara.kernels.ops.scan.recurrence import xla
from capibara.kernels.ops.scan.recurrence.pallas_gpu_ring import (
    COMPILER_PARAMS,
    GROUP,
    OUT_STAGES,
    TileConfig,
    Walk,
    check_config,
    constant,
    fetch_rows,
    own_columns,
    read_rows,
    refuses,
    ring_candidates,
    rings,
    slot_of,
    state_at,
    store_rows,
    walk_tiles,
)
from capibara.kernels.ops.scan.recurrence.planes import Number, join, split, store
from capibara.kernels.ops.scan.recurrence.reference import shifted, start_of, state_type

LINK = 8  # steps of XLA's segments of the states between segments, which are a small recurrence


def candidates(call: Call) -> Sequence[TileConfig]:
    a, b = call.need("a"), call.need("b")
    return ring_candidates(call, a.dtype.itemsize + b.dtype.itemsize, b.dtype.itemsize)


def _program(*refs: Any, tree: Any, config: TileConfig, walk: Walk) -> None:
    (a_hbm, b_hbm, initial_hbm), (h_hbm, final_hbm) = jax.tree.unflatten(tree, refs)
    sources = (a_hbm, b_hbm)
    stores = len(jax.tree.leaves(h_hbm))

    @functools.partial(
        pl.run_scoped,
        buffers=rings(sources, config.stages, walk, config),
        made=rings(h_hbm, OUT_STAGES, walk, config),
        arrived=plgpu.Barrier(num_arrivals=len(jax.tree.leaves(sources)), num_barriers=config.stages),
    )
    def _scoped(buffers: Any, made: Any, arrived: Any) -> None:
        batch, columns = lax.axis_index("batch"), own_columns(config)

        def fetch(turn: Any, rows: int, at_edge: bool) -> None:
            slot = slot_of(turn, config.stages)
            fetch_rows(sources, buffers, arrived, slot, batch, walk.start(turn), rows, columns)

        def tile(turn: Any, slot: Any, rows: int, at_edge: bool, state: Number) -> Number:
            out = slot_of(turn, OUT_STAGES)
            # What these buffers held has left.
            plgpu.wait_smem_to_gmem(stores * (OUT_STAGES - 1), wait_read_only=True)

            def advance(group: Sequence[Any], state: Number) -> Number:
                decays, terms = (read_rows(buffer, slot, group, config.layout) for buffer in buffers)
                for row, decay, term in zip(group, decays, terms, strict=True):
                    state = decay * state + term
                    store(made, (out, row), state)
                return state

            state = walk.each_row(rows, advance, state)
            store_rows(made, h_hbm, out, batch, walk.start(turn), rows, columns)
            return state

        if initial_hbm is None:
            state = constant(0.0, b_hbm, config)
        else:
            state = state_at(initial_hbm, batch, columns, config)
        state = walk_tiles(walk, config, arrived, fetch, tile, state)
        if final_hbm is not None:
            store(final_hbm, (batch, columns), state)
        plgpu.wait_smem_to_gmem(0)


def _ends_program(*refs: Any, tree: Any, config: TileConfig, walk: Walk, multiply_last: bool) -> None:
    sources, (product_hbm, end_hbm) = jax.tree.unflatten(tree, refs)

    @functools.partial(
        pl.run_scoped,
        buffers=rings(sources, config.stages, walk, config),
        arrived=plgpu.Barrier(num_arrivals=len(jax.tree.leaves(sources)), num_barriers=config.stages),
    )
    def _scoped(buffers: Any, arrived: Any) -> None:
        batch, columns = lax.axis_index("batch"), own_columns(config)

        def fetch(turn: Any, rows: int, at_edge: bool) -> None:
            slot = slot_of(turn, config.stages)
            fetch_rows(sources, buffers, arrived, slot, batch, walk.start(turn), rows, columns)

        def tile(turn: Any, slot: Any, rows: int, at_edge: bool, carry: Any) -> Any:
            def advance(group: Sequence[Any], carry: Any) -> Any:
                product, state = carry
                decays, terms = (read_rows(buffer, slot, group, config.layout) for buffer in buffers)
                for decay, term in zip(decays, terms, strict=True):
                    product = product * decay
                    state = decay * (state + term) if multiply_last else decay * state + term
                return product, state

            carry = walk.each_row(rows, advance, carry)
            plgpu.commit_smem()  # every thread has read the slot before the copy engine may write it
            return carry

        start = (constant(1.0, end_hbm, config), constant(0.0, end_hbm, config))
        product, state = walk_tiles(walk, config, arrived, fetch, tile, start)
        store(product_hbm, (batch, columns), product)
        store(end_hbm, (batch, columns), state)


def launch(
    program: Callable[..., None], given: Any, made: Any, config: TileConfig, *, backwards: bool, edge: bool = False,
    **choices: Any,
) -> Any:  # fmt: skip
    """Run a program for each batch and each `width` channels of trees of arrays; results have the tree of `made`."""
    (like, *_) = jax.tree.leaves(given)
    results = plgpu.kernel(
        functools.partial(program, **_described(given, made, config, backwards, edge), **choices),
        out_type=jax.tree.leaves(made),
        compiler_params=COMPILER_PARAMS,
        **_grid(like, config),
    )(*jax.tree.leaves(given))
    return jax.tree.unflatten(jax.tree.structure(made), [vary_like(x, like) for x in results])


def launch_unless(
    met: jax.Array, program: Callable[..., None], given: Any, made: Any, config: TileConfig, *, backwards: bool,
    edge: bool = False,
) -> Any:  # fmt: skip
    """Run a program into the arrays `made`; where `met` is true they stay as they are."""
    (like, *_) = jax.tree.leaves(given)
    described = _described(given, made, config, backwards, edge)

    def guarded(met_hbm: Any, *refs: Any) -> None:
        @pl.when(met_hbm[0] == 0)
        def _() -> None:
            program(*refs, **described)

    # pl.kernel, since plgpu.kernel takes no array to write into.
    kernel = pl.kernel(
        guarded, out_type=(), mesh=plgpu.Mesh(**_grid(like, config)), compiler_params=COMPILER_PARAMS,
        name="recurrence_in_one_piece",
    )  # fmt: skip
    operands = (met.astype(jnp.int32).reshape(1), *jax.tree.leaves(given))

    def into(refs: tuple[Any, ...]) -> None:
        kernel(*operands, *refs)

    written = pl.run_state(into)(tuple(jax.tree.leaves(made)))
    return jax.tree.unflatten(jax.tree.structure(made), written)


def _grid(like: jax.Array, config: TileConfig) -> dict[str, Any]:
    rows, _, channels = like.shape
    return {"grid": (rows, channels // config.width), "grid_names": ("batch", "column")}


def _described(given: Any, made: Any, config: TileConfig, backwards: bool, edge: bool) -> dict[str, Any]:
    """What a program knows of the arrays that it is given, beside the arrays."""
    (like, *_) = jax.tree.leaves(given)
    group = GROUP // len(jax.tree.leaves(given[0]))  # as many registers for complex numbers
    walk = Walk(like.shape[1], min(config.steps, like.shape[1]), backwards=backwards, edge=edge, group=group)
    return {"tree": jax.tree.structure((given, made)), "config": config, "walk": walk}


def state_struct(like: Number) -> Number:
    """One step of every channel, in float32."""
    return jax.tree.map(lambda x: out_struct((x.shape[0], x.shape[2]), jnp.float32, x), like)


def whole_struct(like: Number) -> Number:
    return jax.tree.map(lambda x: out_struct(x.shape, x.dtype, x), like)


def segment_starts(
    a: jax.Array, b: jax.Array, start: jax.Array, config: TileConfig, *, reverse: bool, multiply_last: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state before each segment [batch · segments, channels], after each, and after the last [batch, channels].

    a and b have the segments in the batch already. With `multiply_last` a step is a · (state + b).
    """
    rows, _, channels = b.shape
    given = (split(a), split(b))
    state = state_struct(given[1])
    ends = launch(_ends_program, given, (state, state), config, backwards=reverse, multiply_last=multiply_last)
    products, states = (join(x).reshape(-1, config.segments, channels) for x in ends)
    linked, final, _ = xla.segments(products, states, start, LINK, reverse)
    return shifted(linked, start, reverse).reshape(rows, channels), linked.reshape(rows, channels), final


def segments_met(starts: jax.Array, linked: jax.Array, computed: jax.Array, segments: int, length: int) -> jax.Array:
    """Whether the kernel proper came to the states that the segments were linked by, all [batch · segments, channels].

    The largest state is looked for at the segments' ends alone: where it lies inside of one, and its rounding is seen
    at the end, the time of one more pass is lost and nothing else.
    """
    starts, linked, computed = (x.reshape(-1, segments, x.shape[-1]) for x in (starts, linked, computed))
    return xla.segments_meet(linked, computed, jnp.maximum(jnp.abs(starts), jnp.abs(computed)), length)


def in_segments(x: jax.Array, config: TileConfig) -> jax.Array:
    batch, length, channels = x.shape
    return x.reshape(batch * config.segments, length // config.segments, channels)


def mosaic_gpu(
    a: jax.Array, b: jax.Array, initial: jax.Array | None = None, *, config: TileConfig, reverse: bool,
    return_final: bool,
) -> Any:  # fmt: skip
    """The forward pass as one kernel over (batch, channels), or two where time is cut; see the module's text."""
    check_config(config, *b.shape[1:])
    wide = state_type(b)
    if config.segments == 1:
        given = (split(a), split(b), split(None if initial is None else initial.astype(wide)))
        made = (whole_struct(given[1]), state_struct(given[1]) if return_final else None)
        h, final = launch(_program, given, made, config, backwards=reverse)
        return (join(h), join(final)) if return_final else join(h)
    decays, terms = in_segments(a, config), in_segments(b, config)
    starts, linked, final = segment_starts(decays, terms, start_of(initial, b, wide), config, reverse=reverse)
    given = (split(decays), split(terms), split(starts))
    made = (whole_struct(given[1]), state_struct(given[1]))
    h, ends = (join(x) for x in launch(_program, given, made, config, backwards=reverse))
    met = segments_met(starts, linked, ends, config.segments, b.shape[1])
    h, one_piece = h.reshape(b.shape), dataclasses.replace(config, segments=1)
    if jax.typeof(h).manual_axis_type.varying:  # no kernel writes into what varies over the mesh of a checked shard_map
        again = functools.partial(mosaic_gpu, config=one_piece, reverse=reverse, return_final=return_final)
        return lax.cond(met, lambda: (h, final) if return_final else h, lambda: again(a, b, initial))
    whole = (split(a), split(b), split(None if initial is None else initial.astype(wide)))
    written = (split(h), split(final) if return_final else None)
    h, final = (join(x) for x in launch_unless(met, _program, whole, written, one_piece, backwards=reverse))
    return (h, final) if return_final else h


IMPLEMENTATION = Implementation(
    "hopper",
    mosaic_gpu,
    platforms=("gpu",),
    refuses=refuses,
    rank=lambda call: 30,  # on an H200 five times as fast as XLA's passes, at 3.8 TB/s
    kernel=True,
    config_type=TileConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
