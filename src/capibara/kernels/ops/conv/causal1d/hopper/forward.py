"""causal_conv1d for Hopper, in Pallas (Mosaic GPU): each input read once, each result written once; see walk.py.

A program walks forward in time, with the last inputs that a filter reaches in registers.
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
    refuses,
    stretch,
    write_back,
)
from capibara.kernels.ops.conv.causal1d.reference import last_inputs
from capibara.kernels.ops.layers.activation.tanh_formulas import value
from capibara.kernels.pallas.hopper import load, named, store_to_memory

SHAPES = ((8, 4), (8, 3), (16, 3), (4, 6))  # rows of a tile, and tiles of a ring


def candidates(call: Call) -> Sequence[WalkConfig]:
    width = call.need("w").shape[0]
    scratch = functools.partial(walk.scratch, 1, call.need("x"), call.need("w"), call["bias"])
    # As compiled: 54, 80 and 126 of a thread for vectors of 2, 4 and 8 channels and four taps.
    return configs_for(call, SHAPES, scratch, lambda vector: 28 + vector * (2 * width + 4))


def _program(*refs: Any, cut: Cut, config: WalkConfig, tiles: int, activation: str | None) -> None:
    x_hbm, w_hbm, *given, y_hbm = refs
    bias_hbm = given[0] if given else None
    width, rows, stages = w_hbm.shape[0], config.rows, config.stages
    reach = width - 1

    def _scoped(buffers: Any, taps: Any, arrived: Any, begun: Any, bias: Any = None) -> None:
        own, ring = stretch(cut, tiles, config.splits), Ring(buffers[0], rows)
        lines = cut.at(own.piece)

        def place(turn: Any) -> Any:
            return own.sequence, pl.ds((own.first + turn) * rows, rows), lines

        def fetch(turn: Any, slot: Any) -> None:
            plgpu.copy_gmem_to_smem(x_hbm.at[place(turn)], ring.tile(slot), arrived.at[slot])

        def fetch_first(turns: range) -> None:
            for turn in turns:
                pl.when(own.count > turn)(functools.partial(fetch, turn, turn))

        def read(ref: Any) -> Any:
            return load(ref, cut.layout).astype(jnp.float32)

        before = own.sequence, pl.ds(own.first * rows - reach, reach), lines
        plgpu.copy_gmem_to_smem(x_hbm.at[before], ring.tail(reach), begun)
        plgpu.copy_gmem_to_smem(w_hbm.at[pl.ds(0, width), lines], taps, begun)
        if bias_hbm is not None:
            plgpu.copy_gmem_to_smem(bias_hbm.at[lines], bias, begun)
        fetch_first(range(ring.before_tail(reach)))
        plgpu.barrier_wait(begun)
        w = [read(taps.at[k]) for k in range(width)]
        added = None if bias is None else read(bias)
        reached = tuple(read(ring.tail(reach).at[k]) for k in range(reach))
        plgpu.commit_smem()  # every thread has read the tail before the copy engine may write it
        fetch_first(range(ring.before_tail(reach), stages))

        def step(turn: Any, carry: Any) -> Any:
            slot, reached = carry
            plgpu.barrier_wait(arrived.at[slot])
            for row in range(rows):
                inputs = (*reached, read(ring.row(slot, row)))
                total = dot(w, inputs, added)
                y = total if activation is None else value(activation, total)
                store_to_memory(ring.row(slot, row), y.astype(y_hbm.dtype))
                reached = inputs[1:]
            plgpu.commit_smem()
            write_back(ring, slot, y_hbm, own, (own.first + turn) * rows, cut)
            # When no more than this tile is on its way out, the place of the one before is free.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            free, following = ring.slot_before(slot), turn - 1 + stages
            pl.when(jnp.logical_and(turn > 0, following < own.count))(functools.partial(fetch, following, free))
            return ring.slot_after(slot), reached

        lax.fori_loop(0, own.count, step, (jnp.int32(0), reached))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(_scoped, **walk.scratch(1, x_hbm, w_hbm, bias_hbm, cut, rows, stages))


def conv_forward(
    x: jax.Array, w: jax.Array, bias: jax.Array | None = None, initial_state: None = None,
    *, config: WalkConfig, activation: str | None, return_final_state: bool,
) -> Any:  # fmt: skip
    """The forward pass as one kernel; see the module's text."""
    del initial_state  # refuses has seen to it
    batch, time, channels = x.shape
    cut = cut_for(channels, config, w.shape[0] - 1)
    operands = [lined(v, cut) for v in (x, w, bias) if v is not None]
    (y,) = plgpu.kernel(
        named(
            "causal_conv1d", _program, cut=cut, config=config, tiles=-(-time // config.rows), activation=activation
        ),
        out_type=[out_struct(operands[0].shape, x.dtype, x)],
        grid=(batch * config.splits * cut.pieces,),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
    )(*operands)  # fmt: skip
    y = y.reshape(x.shape)
    return (y, last_inputs(x, w.shape[0])) if return_final_state else y


def ahead_of(call: Call) -> tuple[str, ...]:
    """Where it was timed, alone in 15 calls from 11 million numbers on, with its gradient from 5.8: XLA's form reads
    each input once for every tap. On an H200 the kernel took 13.4 us for 27.5 at 1x2048x5376 and 181 for 378 at
    64x476x5376, four taps and silu (2.0 to 2.4 times as fast), 60 for 101 at 4x5431x2560 without silu (1.7), and 24.4
    for 32.2 at 1x5466x4096 with three taps (1.3)."""
    return ("xla",) if like_the_timed(call) else ()


IMPLEMENTATION = Implementation(
    "hopper",
    conv_forward,
    platforms=("gpu",),
    refuses=refuses,
    ahead_of=ahead_of,
    kernel=True,
    config_type=WalkConfig,
    candidates=candidates,
)
