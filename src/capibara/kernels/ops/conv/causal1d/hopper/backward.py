"""The gradient of causal_conv1d for Hopper, in Pallas (Mosaic GPU): one pass over x and the cotangent; see walk.py.

A program walks back in time. What reaches an input is what the outputs from it on have made of their cotangents, and
those it has just been through: they stay in registers, as the inputs do that an output is made of, by which the
activation's argument is computed again. The sums for the filters and the bias stay in registers too, from the first
tile to the last, and leave once; XLA adds the programs' sums up. Before its first tile a program goes through the few
outputs behind its stretch, for what they send back into it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.conv.causal1d.hopper import walk
from capibara.kernels.ops.conv.causal1d.hopper.walk import (
    COMPILER_PARAMS,
    Cut,
    Ring,
    WalkConfig,
    configs_for,
    cut_for,
    dot,
    like_the_timed,
    lined,
    stretch,
    write_back,
)
from capibara.kernels.ops.layers.activation.tanh_formulas import value_and_slope
from capibara.kernels.pallas.hopper import load, named, store_to_memory

SHAPES = ((8, 3), (8, 2), (4, 4), (4, 6), (16, 2))  # rows of a tile, and tiles of a ring


def candidates(call: Call) -> Sequence[WalkConfig]:
    width = call.need("w").shape[0]
    scratch = functools.partial(walk.scratch, 2, call.need("x"), call.need("w"), call["bias"])
    # As compiled: 79, 110 and 192 of a thread for vectors of 2, 4 and 8 channels and four taps.
    return configs_for(call, SHAPES, scratch, lambda vector: 42 + vector * (4 * width + 3))


def refuses(call: Call) -> str | None:
    if call["d_state"] is not None:
        return "it has no place for the cotangent of the last inputs"
    return walk.refuses(call)


def _program(*refs: Any, cut: Cut, config: WalkConfig, tiles: int, activation: str | None, has_bias: bool) -> None:
    x_hbm, w_hbm, *rest = refs
    bias_hbm = rest.pop(0) if has_bias else None
    flow_hbm, dx_hbm, dw_hbm, *dbias_hbm = rest
    width, rows, stages = w_hbm.shape[0], config.rows, config.stages
    reach = width - 1

    def _scoped(buffers: Any, taps: Any, arrived: Any, begun: Any, bias: Any = None) -> None:
        own, (inputs_ring, flows_ring) = stretch(cut, tiles, config.splits), (Ring(ref, rows) for ref in buffers)
        lines = cut.at(own.piece)
        end = (own.first + own.count) * rows

        def part(first: Any, size: int) -> Any:
            return own.sequence, pl.ds(first, size), lines

        def time(turn: Any) -> Any:
            """Where the tile begins: the last one is the first to come."""
            return end - (turn + 1) * rows

        def fetch_inputs(turn: Any, slot: Any) -> None:
            """Those that lie a filter's reach before the outputs of a tile: the first that each of these reads."""
            at = part(time(turn) - reach, rows)
            plgpu.copy_gmem_to_smem(x_hbm.at[at], inputs_ring.tile(slot), arrived.at[slot])

        def fetch_flows(turn: Any, slot: Any) -> None:
            at = part(time(turn), rows)
            plgpu.copy_gmem_to_smem(flow_hbm.at[at], flows_ring.tile(slot), arrived.at[slot])

        def fetch_first(fetch: Any, turns: range) -> None:
            for turn in turns:
                pl.when(own.count > turn)(functools.partial(fetch, turn, turn))

        def read(ref: Any) -> Any:
            return load(ref, cut.layout).astype(jnp.float32)

        around, behind = inputs_ring.tail(2 * reach), flows_ring.tail(reach)
        plgpu.copy_gmem_to_smem(x_hbm.at[part(end - reach, 2 * reach)], around, begun)
        plgpu.copy_gmem_to_smem(flow_hbm.at[part(end, reach)], behind, begun)
        plgpu.copy_gmem_to_smem(w_hbm.at[pl.ds(0, width), lines], taps, begun)
        if bias_hbm is not None:
            plgpu.copy_gmem_to_smem(bias_hbm.at[lines], bias, begun)
        early = inputs_ring.before_tail(2 * reach), flows_ring.before_tail(reach)
        for fetch, count in zip((fetch_inputs, fetch_flows), early, strict=True):
            fetch_first(fetch, range(count))
        plgpu.barrier_wait(begun)
        w = [read(taps.at[k]) for k in range(width)]
        added = None if bias is None else read(bias)

        def through(flow: Any, inputs: Sequence[Any]) -> Any:
            """An output's cotangent before its activation."""
            if activation is None:
                return flow
            slope = value_and_slope(activation, dot(w, inputs, added))[1]
            return flow if slope is None else flow * slope

        after = [read(around.at[k]) for k in range(2 * reach)]
        flows = tuple(through(read(behind.at[k]), after[k : k + width]) for k in range(reach))
        plgpu.commit_smem()  # every thread has read the tails before the copy engine may write them
        for fetch, count in zip((fetch_inputs, fetch_flows), early, strict=True):
            fetch_first(fetch, range(count, stages))

        def step(turn: Any, carry: Any) -> Any:
            slot, reached, flows, sums = carry
            plgpu.barrier_wait(arrived.at[slot])
            for row in reversed(range(rows)):
                inputs = (read(inputs_ring.row(slot, row)), *reached)
                flows = (through(read(flows_ring.row(slot, row)), inputs), *flows)
                # An input is the last that its own output reads, and the first of the one a filter's reach after it.
                dx = dot(w[::-1], flows)
                store_to_memory(flows_ring.row(slot, row), dx.astype(dx_hbm.dtype))
                terms = [flows[0] * number for number in inputs] + ([flows[0]] if has_bias else [])
                sums = tuple(total + term for total, term in zip(sums, terms, strict=True))
                reached, flows = inputs[:-1], flows[:-1]
            plgpu.commit_smem()
            write_back(flows_ring, slot, dx_hbm, own, time(turn), cut)
            pl.when(turn + stages < own.count)(functools.partial(fetch_inputs, turn + stages, slot))
            # When no more than this tile is on its way out, the place of the one before is free.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            free, following = flows_ring.slot_before(slot), turn - 1 + stages
            pl.when(jnp.logical_and(turn > 0, following < own.count))(functools.partial(fetch_flows, following, free))
            return flows_ring.slot_after(slot), reached, flows, sums

        nothing = plgpu.layout_cast(jnp.zeros((cut.depth, cut.width), jnp.float32), cut.layout)
        start = jnp.int32(0), tuple(after[:reach]), flows, (nothing,) * (width + has_bias)
        *_, sums = lax.fori_loop(0, own.count, step, start)
        places = [dw_hbm.at[own.number, k, lines] for k in range(width)]
        places += [ref.at[own.number, lines] for ref in dbias_hbm]
        for place, total in zip(places, sums, strict=True):
            store_to_memory(place, total)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(_scoped, **walk.scratch(2, x_hbm, w_hbm, bias_hbm, cut, rows, stages))


def conv_backward(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, initial_state: None, d_out: jax.Array, d_state: None = None,
    *, config: WalkConfig, activation: str | None,
) -> tuple[Any, Any, Any, None]:  # fmt: skip
    """(dx, dw, dbias, None) as one kernel and a sum over its programs; see the module's text."""
    del initial_state, d_state  # refuses has seen to it
    (batch, time, channels), width, has_bias = x.shape, w.shape[0], bias is not None
    cut = cut_for(channels, config, 2 * (width - 1))
    operands = [lined(v, cut) for v in (x, w, bias, d_out.astype(x.dtype)) if v is not None]
    # Whole pieces, so that the sums of the last one have a place past the last channel. Those of the bias are apart:
    # of one array XLA would cut both gradients in passes of their own.
    number, lines = batch * config.splits, (cut.pieces * cut.depth, cut.width)
    sums = [(number, width, *lines), *([(number, *lines)] if has_bias else [])]
    dx, *partial = plgpu.kernel(
        named(
            "causal_conv1d_backward", _program, cut=cut, config=config, tiles=-(-time // config.rows),
            activation=activation, has_bias=has_bias,
        ),
        out_type=[
            out_struct(operands[0].shape, x.dtype, x), *(out_struct(shape, jnp.float32, x) for shape in sums)
        ],
        grid=(number * cut.pieces,),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
    )(*operands)  # fmt: skip
    dw, *dbias = (
        added.sum(0)[..., : cut.lines, :].reshape(like.shape).astype(like.dtype)
        for added, like in zip(partial, (v for v in (w, bias) if v is not None), strict=True)
    )
    return dx.reshape(x.shape), dw, dbias[0] if dbias else None, None


def ahead_of(call: Call) -> tuple[str, ...]:
    """Where it was timed, in 12 calls of both passes: XLA's form writes each tap's products as a float32 array as large
    as x, for the sums of the filters. On an H200 the kernels took 426 us for 2,178 at 9x2048x8192 with four taps and
    silu (3.7 to 5.1 times as fast, at 1,536 channels up to 17), and 171 for 374 at 7x2048x4096 with three taps (2.2 to
    4.0). Most of that is the gradient's: the forward kernel alone is 1.3 to 2.4 times as fast."""
    return ("xla",) if like_the_timed(call) else ()


GRAD_IMPLEMENTATION = Implementation(
    "hopper",
    conv_backward,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    config_type=WalkConfig,
    candidates=candidates,
)
