"""The selective scan for Hopper, in Pallas (Mosaic GPU): a channel a thread, its states in registers all along time.

A program is one warpgroup on 128 channels of one batch element. The copy engine fetches tiles of time into a ring; at
each step a thread reads its own x and dt, all read the same N numbers of B and of C, and no number is exchanged. What
binds is the exponential unit: one for each state and step. A is folded with log2(e), so that each is one instruction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.scan.selective.rules import sizes_of
from capibara.kernels.pallas.hopper import LOG2E, SMEM_BYTES, load, refuses_chip

CHANNELS = 128  # of a program: the threads of a warpgroup
MOST_STATES = 64  # two registers each, of 255
COPIED = 16  # bytes: what the copy engine takes a multiple of

# Threads share what the copy engine brought and nothing else; where it may write again is said by hand.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True)
class TimeConfig:
    """Steps of a tile, how many tiles are fetched ahead, and how many steps are written out one after another."""

    steps: int
    stages: int
    unroll: int

    def __post_init__(self) -> None:
        if min(self.steps, self.stages, self.unroll) < 1 or self.steps % self.unroll:
            raise rule_error(
                "steps, stages and unroll are 1 or more, and unroll divides steps", self, "use steps=32, unroll=4"
            )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a program is told while it is traced."""

    config: TimeConfig
    time: int
    states: int
    softplus: bool


def padded_states(states: int) -> int:
    """A row of B in float32 is copied in pieces of 16 bytes."""
    return math.ceil(states / 4) * 4


def candidates(call: Call) -> Sequence[TimeConfig]:
    n = sizes_of(call)
    row = CHANNELS * sum(x.dtype.itemsize for x in (call.need("x"), call.need("dt"), call["z"]) if x is not None)
    row += 2 * 4 * padded_states(n.states)
    out = 2 * CHANNELS * call.need("x").dtype.itemsize
    made = []
    for steps, stages, unroll in ((32, 3, 4), (32, 2, 2), (64, 2, 4), (32, 3, 8), (16, 4, 2), (16, 2, 1)):
        if steps * (stages * row + out) <= SMEM_BYTES - 2048 and unroll * n.states <= 128:
            made.append(TimeConfig(steps, stages, unroll))
    return made


def refuses_form(call: Call, wide: tuple[str, ...]) -> str | None:
    """What neither pass takes; `wide` names the operands over time and channels."""
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    n = sizes_of(call)
    if 0 in (n.batch, n.time):
        return "x is empty"
    for name in wide:
        given = call[name]
        if given is not None and np.dtype(given.dtype).name not in ("bfloat16", "float16", "float32"):
            return f"it takes bfloat16, float16 and float32; {name} is {given.dtype.name}"
    if any(x is not None and x.dtype.itemsize > 4 for x in call.args):
        return "it computes in float32"
    if n.channels % CHANNELS:
        return f"a program is {CHANNELS} channels; it takes a multiple of that, not {n.channels}"
    return None


def refuses(call: Call) -> str | None:
    form = refuses_form(call, ("x", "dt", "z"))
    if form is not None:
        return form
    states = sizes_of(call).states
    if states > MOST_STATES:
        return f"a channel's states stay in registers, up to {MOST_STATES}; N is {states}"
    if not candidates(call):
        return "a ring of tiles does not fit shared memory"
    return None


@dataclasses.dataclass(frozen=True)
class Laid:
    """How operands are laid out for a program: `late` steps more, so that no tile is longer than time (it would have no
    place in a descriptor to be clipped by), and `more` states of zero."""

    late: int
    more: int

    def over_time(self, v: jax.Array, extra: int = 0) -> jax.Array:
        return jnp.pad(v, ((0, 0), (0, self.late), (0, extra))) if self.late or extra else v

    def of_states(self, v: jax.Array) -> jax.Array:
        """B or C, [batch, time, N]."""
        return self.over_time(v.astype(jnp.float32), self.more)

    def rows(self, v: jax.Array) -> jax.Array:
        """[..., channels, N] as [..., N, channels] in float32."""
        turned = v.astype(jnp.float32).mT
        return jnp.pad(turned, (*((0, 0),) * (turned.ndim - 2), (0, self.more), (0, 0))) if self.more else turned


def softplus(v: Any) -> Any:
    """max(v, 0) + log(1 + e) for e = exp(-|v|), by the series of 2·atanh(e / (2 + e)): exact also where e is small."""
    e = jnp.exp2(-LOG2E * jnp.abs(v))
    s = e / (2.0 + e)
    square = s * s
    total: Any = 1 / 11
    for odd in (9, 7, 5, 3, 1):
        total = total * square + 1 / odd
    return jnp.maximum(v, 0.0) + 2.0 * s * total


def _program(*given: Any, plan: Plan, names: tuple[str, ...]) -> None:
    refs = dict(zip(names, given, strict=True))
    config, layout = plan.config, plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1)
    steps, stages = config.steps, config.stages
    tiles = math.ceil(plan.time / steps)
    wide = [name for name in ("x", "dt", "z") if name in refs]
    sources = [*wide, "B", "C"]

    def buffer(name: str, count: int, width: int) -> Any:
        return plgpu.SMEM((count, steps, width), refs[name].dtype)

    @functools.partial(
        pl.run_scoped,
        buffers=[buffer(name, stages, CHANNELS if name in wide else plan.states) for name in sources],
        out=buffer("y", 2, CHANNELS),
        arrived=plgpu.Barrier(num_arrivals=len(sources), num_barriers=stages),
    )
    def _scoped(buffers: Any, out: Any, arrived: Any) -> None:
        batch = lax.axis_index("batch")
        channels = pl.ds(lax.axis_index("block") * CHANNELS, CHANNELS)
        tile_of = dict(zip(sources, buffers, strict=True))

        def fetch(tile: Any) -> None:
            slot, times = lax.rem(tile, stages), pl.ds(tile * steps, steps)
            for name in sources:
                at = (batch, times, channels) if name in wide else (batch, times)
                plgpu.copy_gmem_to_smem(refs[name].at[at], tile_of[name].at[slot], arrived.at[slot])

        for tile in range(min(stages, tiles)):
            fetch(jnp.int32(tile))

        def per_channel(ref: Any) -> Any:
            return load(ref, layout, optimized=False)

        rates = [per_channel(refs["A"].at[n, channels]) for n in range(plan.states)]
        skip = per_channel(refs["D"].at[channels]) if "D" in refs else None
        bias = per_channel(refs["dt_bias"].at[channels]) if "dt_bias" in refs else None
        if "initial_state" in refs:
            first = [per_channel(refs["initial_state"].at[batch, n, channels]) for n in range(plan.states)]
        else:
            first = [plgpu.layout_cast(jnp.full((CHANNELS,), 0, jnp.float32), layout) for _ in range(plan.states)]

        def one_step(slot: Any, out_slot: Any, t: Any, inside: Any, states: list[Any]) -> list[Any]:
            def now(name: str) -> Any:
                return per_channel(tile_of[name].at[slot, t]).astype(jnp.float32)

            x, delta = now("x"), now("dt")
            if bias is not None:
                delta = delta + bias
            if plan.softplus:
                delta = softplus(delta)
            if inside is not None:  # past the end a step must leave the state as it is
                delta = delta * inside
            fed = delta * x
            made, terms = [], []
            for n in range(plan.states):
                h = jnp.exp2(delta * rates[n]) * states[n] + fed * tile_of["B"][slot, t, n]
                made.append(h)
                terms.append(h * tile_of["C"][slot, t, n])
            while len(terms) > 1:  # in a tree: a chain would wait for each sum
                terms = [sum(terms[i : i + 2][1:], terms[i]) for i in range(0, len(terms), 2)]
            y = terms[0] if skip is None else terms[0] + skip * x
            if "z" in refs:
                z = now("z")
                y = y * z / (1.0 + jnp.exp2(-LOG2E * z))
            out.at[out_slot, t][...] = y.astype(out.dtype)
            return made

        def one_tile(tile: Any, states: Any) -> Any:
            slot, out_slot = lax.rem(tile, stages), lax.rem(tile, 2)
            plgpu.barrier_wait(arrived.at[slot])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the tile before the last has left its place

            def some_steps(turn: Any, states: Any) -> Any:
                for ahead in range(config.unroll):
                    t = turn * config.unroll + ahead
                    inside = None
                    if plan.time % steps:
                        inside = jnp.where(tile * steps + t < plan.time, 1.0, 0.0)
                    states = one_step(slot, out_slot, t, inside, states)
                return states

            states = lax.fori_loop(0, steps // config.unroll, some_steps, states)
            plgpu.commit_smem()  # every thread has read its part and written its own
            plgpu.copy_smem_to_gmem(out.at[out_slot], refs["y"].at[batch, pl.ds(tile * steps, steps), channels])
            pl.when(tile + stages < tiles)(lambda: fetch(tile + stages))
            return states

        last = lax.fori_loop(0, tiles, one_tile, first)
        if "final" in refs:
            for n in range(plan.states):
                refs["final"].at[batch, n, channels][...] = last[n]
        plgpu.wait_smem_to_gmem(0)


def mosaic_gpu(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array | None = None,
    z: jax.Array | None = None, dt_bias: jax.Array | None = None, initial_state: jax.Array | None = None, *,
    config: TimeConfig, dt_softplus: bool, return_final_state: bool,
) -> Any:  # fmt: skip
    """The forward pass as one kernel over (batch, blocks of channels); see the module's text."""
    batch, time, channels = x.shape
    states = A.shape[1]
    more, late = padded_states(states) - states, max(0, config.steps - time)
    laid = Laid(late, more)
    operands = {
        "x": laid.over_time(x),
        "dt": laid.over_time(dt),
        "A": laid.rows(A) * LOG2E,
        "B": laid.of_states(B),
        "C": laid.of_states(C),
    }
    if D is not None:
        operands["D"] = D.astype(jnp.float32)
    if z is not None:
        operands["z"] = laid.over_time(z)
    if dt_bias is not None:
        operands["dt_bias"] = dt_bias.astype(jnp.float32)
    if initial_state is not None:
        operands["initial_state"] = laid.rows(initial_state)
    made = {"y": out_struct((batch, time + late, channels), x.dtype, x)}
    if return_final_state:
        made["final"] = out_struct((batch, states + more, channels), jnp.float32, x)
    plan = Plan(config, time, states + more, dt_softplus)
    y, *last = plgpu.kernel(
        functools.partial(_program, plan=plan, names=(*operands, *made)),
        out_type=list(made.values()),
        grid=(batch, channels // CHANNELS),
        grid_names=("batch", "block"),
        compiler_params=COMPILER_PARAMS,
    )(*operands.values())
    y = y[:, :time] if late else y
    return (y, last[0][:, :states].mT) if return_final_state else y


IMPLEMENTATION = Implementation(
    "hopper",
    mosaic_gpu,
    platforms=("gpu",),
    refuses=refuses,
    rank=lambda call: 30,  # see docs/sequences.md for what it was timed at
    kernel=True,
    config_type=TimeConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
