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
    WalkConfig,
    configs_for,
    cut_channels,
    dot,
    lined,
    stretch,
)
from capibara.kernels.ops.layers.activation.tanh_formulas import value_and_slope
from capibara.kernels.pallas.hopper import load, named, store_to_memory

MOST_PROGRAMS = 4  # of a multiprocessor: what their registers leave room for


def _scratch(x: Any, w: Any, bias: Any, cut: Cut, rows: int, stages: int) -> dict[str, Any]:
    """What a program allocates: rings of both sources' tiles, what lies behind the last of them, filters and bias."""
    reach, piece = w.shape[0] - 1, (cut.depth, cut.width)
    scratch = {
        "rings": [plgpu.SMEM((stages, rows, *piece), x.dtype) for _ in range(2)],
        "behind": [plgpu.SMEM((2 * reach, *piece), x.dtype), plgpu.SMEM((reach, *piece), x.dtype)],
        "taps": plgpu.SMEM((w.shape[0], *piece), w.dtype),
        "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "begun": plgpu.Barrier(num_arrivals=3 if bias is None else 4),
    }
    return scratch if bias is None else scratch | {"bias": plgpu.SMEM(piece, bias.dtype)}


def candidates(call: Call) -> Sequence[WalkConfig]:
    scratch = functools.partial(_scratch, call.need("x"), call.need("w"), call["bias"])
    return configs_for(call, ((8, 2, 4), (8, 3, 3), (4, 4, 4), (16, 2, 3)), scratch, MOST_PROGRAMS)


def refuses(call: Call) -> str | None:
    if call["d_state"] is not None:
        return "it has no place for the cotangent of the last inputs"
    return walk.refuses(call)


def _program(*refs: Any, cut: Cut, config: WalkConfig, tiles: int, activation: str | None, has_bias: bool) -> None:
    x_hbm, w_hbm, *given, flow_hbm, dx_hbm, sums_hbm = refs
    bias_hbm = given[0] if has_bias else None
    width, rows, stages = w_hbm.shape[0], config.rows, config.stages
    reach = width - 1

    def _scoped(rings: Any, behind: Any, taps: Any, arrived: Any, begun: Any, bias: Any = None) -> None:
        own = stretch(cut, tiles, config.splits)
        lines = cut.at(own.piece)
        end = (own.first + own.count) * rows

        def time(turn: Any) -> Any:
            """Where the tile begins: the last one is the first to come."""
            return end - (turn + 1) * rows

        def fetch(turn: Any) -> None:
            """The cotangents of a tile, and the inputs that lie a filter's reach before them."""
            slot = lax.rem(turn, stages)
            for source, ring, back in ((x_hbm, rings[0], reach), (flow_hbm, rings[1], 0)):
                at = own.sequence, pl.ds(time(turn) - back, rows), lines
                plgpu.copy_gmem_to_smem(source.at[at], ring.at[slot], arrived.at[slot])

        for source, buffer, first, size in (
            (x_hbm, behind[0], end - reach, 2 * reach), (flow_hbm, behind[1], end, reach),
        ):  # fmt: skip
            plgpu.copy_gmem_to_smem(source.at[own.sequence, pl.ds(first, size), lines], buffer, begun)
        plgpu.copy_gmem_to_smem(w_hbm.at[pl.ds(0, width), lines], taps, begun)
        if bias_hbm is not None:
            plgpu.copy_gmem_to_smem(bias_hbm.at[lines], bias, begun)
        for turn in range(stages):
            pl.when(own.count > turn)(functools.partial(fetch, jnp.int32(turn)))

        def read(ref: Any) -> Any:
            return load(ref, cut.layout).astype(jnp.float32)

        plgpu.barrier_wait(begun)
        w = [read(taps.at[k]) for k in range(width)]
        added = None if bias is None else read(bias)

        def through(flow: Any, inputs: Sequence[Any]) -> Any:
            """An output's cotangent before its activation."""
            if activation is None:
                return flow
            slope = value_and_slope(activation, dot(w, inputs, added))[1]
            return flow if slope is None else flow * slope

        after = [read(behind[0].at[k]) for k in range(2 * reach)]
        flows = tuple(through(read(behind[1].at[k]), after[k : k + width]) for k in range(reach))

        def step(turn: Any, carry: Any) -> Any:
            reached, flows, sums = carry
            slot = lax.rem(turn, stages)
            plgpu.barrier_wait(arrived.at[slot])
            for row in reversed(range(rows)):
                inputs = (read(rings[0].at[slot, row]), *reached)
                flows = (through(read(rings[1].at[slot, row]), inputs), *flows)
                # An input is the last that its own output reads, and the first of the one a filter's reach after it.
                dx = dot(w[::-1], flows)
                store_to_memory(rings[1].at[slot, row], dx.astype(dx_hbm.dtype))
                terms = [flows[0] * number for number in inputs] + ([flows[0]] if has_bias else [])
                sums = tuple(total + term for total, term in zip(sums, terms, strict=True))
                reached, flows = inputs[:-1], flows[:-1]
            plgpu.commit_smem()
            at = own.sequence, pl.ds(time(turn), rows), lines
            plgpu.copy_smem_to_gmem(rings[1].at[slot], dx_hbm.at[at])
            # When no more than this tile is on its way out, the place of the one before is free.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            following = turn - 1 + stages
            pl.when(jnp.logical_and(turn > 0, following < own.count))(functools.partial(fetch, following))
            return reached, flows, sums

        nothing = plgpu.layout_cast(jnp.zeros((cut.depth, cut.width), jnp.float32), cut.layout)
        start = tuple(after[:reach]), flows, (nothing,) * (width + has_bias)
        _, _, sums = lax.fori_loop(0, own.count, step, start)
        for k, total in enumerate(sums):
            store_to_memory(sums_hbm.at[own.number, k, lines], total)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(_scoped, **_scratch(x_hbm, w_hbm, bias_hbm, cut, rows, stages))


def conv_backward(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, initial_state: None, d_out: jax.Array, d_state: None = None,
    *, config: WalkConfig, activation: str | None,
) -> tuple[Any, Any, Any, None]:  # fmt: skip
    """(dx, dw, dbias, None) as one kernel and a sum over its programs; see the module's text."""
    del initial_state, d_state  # refuses has seen to it
    (batch, time, channels), width, has_bias = x.shape, w.shape[0], bias is not None
    cut = cut_channels(channels, config.vector)
    assert cut is not None  # refuses has seen to it
    operands = [lined(v, cut) for v in (x, w, bias, d_out.astype(x.dtype)) if v is not None]
    # Whole pieces, so that the sums of the last one have a place past the last channel.
    sums_shape = (batch * config.splits, width + has_bias, cut.pieces * cut.depth, cut.width)
    dx, sums = plgpu.kernel(
        named(
            "causal_conv1d_backward", _program, cut=cut, config=config, tiles=-(-time // config.rows),
            activation=activation, has_bias=has_bias,
        ),
        out_type=[out_struct(operands[0].shape, x.dtype, x), out_struct(sums_shape, jnp.float32, x)],
        grid=(batch * config.splits * cut.pieces,),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
    )(*operands)  # fmt: skip
    total = sums.sum(0)[:, : cut.lines].reshape(width + has_bias, channels)
    dbias = None if bias is None else total[width].astype(bias.dtype)
    return dx.reshape(x.shape), total[:width].astype(w.dtype), dbias, None


def ahead_of(call: Call) -> tuple[str, ...]:
    """Before XLA's form, which keeps float32 copies of what the activation sends back, as large as x, and passes over
    them once for the inputs and again for the filters: on an H200 1,720 us for forward and backward passes of 294 MB
    of x, which take 350 where each number moves once."""
    return ("xla",)


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
