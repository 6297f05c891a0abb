"""The selective scan for Hopper, in Pallas (Mosaic GPU): a channel a thread, its states in registers all along time.

A program is one warpgroup on 128 channels of one batch element. The copy engine fetches tiles of time into a ring; at
each step a thread reads its own x and dt, all read the same N numbers of B and of C, and no number is exchanged. What
binds is the exponential unit: one for each state and step. A is folded with log2(e), so that each is one instruction.

Few channels leave most of the chip idle. Time is then cut into segments that run at once, twice: from zeros, for the
state that each ends in, and from the state that it begins with, which follows from those and from the sums of its step
sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
from capibara.kernels.ops.scan.selective.reference import step_sizes
from capibara.kernels.ops.scan.selective.rules import sizes_of
from capibara.kernels.pallas.hopper import (
    LANE,
    LOG2E,
    SMEM_BYTES,
    load,
    multiprocessors,
    named,
    refuses_chip,
    smem_bytes,
    write_rows,
)

CHANNELS = 128  # of a program: the threads of a warpgroup
MOST_STATES = 64  # two registers each, of 255
WIDE = ("x", "dt", "z")  # over time and channels
LEAST_SEGMENTS, LEAST_STEPS = 3, 128  # what pays for a second pass, and for a launch

# Threads share what the copy engine brought and nothing else; where it may write again is said by hand.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=LANE)


@dataclasses.dataclass(frozen=True)
class TimeConfig:
    """Steps of a tile, how many tiles are fetched ahead, how many steps are written out one after another, and into how
    many segments time is cut."""

    steps: int
    stages: int
    unroll: int
    segments: int = 1

    def __post_init__(self) -> None:
        if min(self.steps, self.stages, self.unroll, self.segments) < 1 or self.steps % self.unroll:
            raise rule_error(
                "steps, stages, unroll and segments are 1 or more, and unroll divides steps", self,
                "use steps=32, unroll=4",
            )  # fmt: skip


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


def _scratch(dtypes: Mapping[str, Any], states: int, config: TimeConfig) -> dict[str, Any]:
    """A ring of tiles of every operand in `dtypes`, and two tiles of y on their way out."""

    def tiles(count: int, name: str) -> Any:
        return plgpu.SMEM((count, config.steps, CHANNELS if name in WIDE else states), dtypes[name])

    return {
        "arrived": plgpu.Barrier(num_arrivals=len(dtypes), num_barriers=config.stages),
        "buffers": [tiles(config.stages, name) for name in dtypes],
    } | ({"out": tiles(2, "x")} if "C" in dtypes else {})  # y has x's type


def candidates(call: Call) -> Sequence[TimeConfig]:
    states = sizes_of(call).states
    dtypes = {name: x.dtype for name in WIDE if (x := call[name]) is not None}
    dtypes |= {"B": jnp.dtype(jnp.float32), "C": jnp.dtype(jnp.float32)}

    def fits(config: TimeConfig) -> bool:
        needed = smem_bytes(_scratch(dtypes, padded_states(states), config))
        return needed <= SMEM_BYTES and config.unroll * states <= 128

    choices = ((32, 3, 4), (32, 2, 2), (64, 2, 4), (32, 3, 8), (16, 4, 2), (16, 2, 1))
    whole = [config for config in (TimeConfig(*choice) for choice in choices) if fits(config)]
    segments = segments_for(call)
    cut = [dataclasses.replace(config, segments=segments) for config in whole[:2]] if segments > 1 else []
    return [*cut, *whole]


def segments_for(call: Call) -> int:
    """As many as make two programs a multiprocessor, of equal length; 1 where two passes would gain nothing."""
    n = sizes_of(call)
    most = 2 * multiprocessors(call.target.device_kind) // max(1, n.batch * n.channels // CHANNELS)
    cuts = [s for s in range(LEAST_SEGMENTS, most + 1) if n.time % s == 0 and n.time // s >= LEAST_STEPS]
    return max(cuts, default=1)


def refuses_form(call: Call, wide: tuple[str, ...]) -> str | None:
    """What neither pass takes; `wide` names the operands over time and channels."""
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    n = sizes_of(call)
    if 0 in (n.batch, n.time):
        return "x is empty"
    for name in wide:
        x = call[name]
        if x is not None and np.dtype(x.dtype).name not in ("bfloat16", "float16", "float32"):
            return f"it takes bfloat16, float16 and float32; {name} is {x.dtype.name}"
    if any(x is not None and x.dtype.itemsize > 4 for x in call.args):
        return "it computes in float32"
    if n.channels % CHANNELS:
        return f"a program is {CHANNELS} channels; it takes a multiple of that, not {n.channels}"
    return None


def refuses(call: Call) -> str | None:
    form = refuses_form(call, WIDE)
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


def _program(*args: Any, plan: Plan, names: tuple[str, ...]) -> None:
    refs = dict(zip(names, args, strict=True))
    config, layout = plan.config, plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1)
    steps, stages = config.steps, config.stages
    tiles = math.ceil(plan.time / steps)
    sources = [name for name in (*WIDE, "B", "C") if name in refs]
    scratch = _scratch({name: refs[name].dtype for name in sources}, plan.states, config)

    def _scoped(buffers: Any, arrived: Any, out: Any = None) -> None:
        batch = lax.axis_index("batch")
        channels = pl.ds(lax.axis_index("block") * CHANNELS, CHANNELS)
        tile_of = dict(zip(sources, buffers, strict=True))

        def fetch(tile: Any) -> None:
            slot, times = lax.rem(tile, stages), pl.ds(tile * steps, steps)
            for name in sources:
                at = (batch, times, channels) if name in WIDE else (batch, times)
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
            following, terms = [], []
            for n in range(plan.states):
                h = jnp.exp2(delta * rates[n]) * states[n] + fed * tile_of["B"][slot, t, n]
                following.append(h)
                if out is not None:
                    terms.append(h * tile_of["C"][slot, t, n])
            if out is None:  # the last state alone is asked for
                return following
            while len(terms) > 1:  # in a tree: a chain would wait for each sum
                terms = [sum(terms[i : i + 2][1:], terms[i]) for i in range(0, len(terms), 2)]
            y = terms[0] if skip is None else terms[0] + skip * x
            if "z" in refs:
                z = now("z")
                y = y * z / (1.0 + jnp.exp2(-LOG2E * z))
            out.at[out_slot, t][...] = y.astype(out.dtype)
            return following

        def one_tile(tile: Any, states: Any) -> Any:
            slot, out_slot = lax.rem(tile, stages), lax.rem(tile, 2)
            plgpu.barrier_wait(arrived.at[slot])
            if out is not None:
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
            if out is not None:
                y = refs["y"]

                def leave(rows: int) -> None:
                    source = out.at[out_slot] if rows == steps else out.at[out_slot, pl.ds(0, rows)]
                    plgpu.copy_smem_to_gmem(source, y.at[batch, pl.ds(tile * steps, rows), channels])

                write_rows(leave, tile * steps, steps, y.shape[1], whole=y.shape[2] == CHANNELS)
            pl.when(tile + stages < tiles)(lambda: fetch(tile + stages))
            return states

        last = lax.fori_loop(0, tiles, one_tile, first)
        if "final" in refs:
            for n in range(plan.states):
                refs["final"].at[batch, n, channels][...] = last[n]
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(_scoped, **scratch)


def selective_forward(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array | None = None,
    z: jax.Array | None = None, dt_bias: jax.Array | None = None, initial_state: jax.Array | None = None, *,
    config: TimeConfig, dt_softplus: bool, return_final_state: bool,
) -> Any:  # fmt: skip
    """The forward pass as one kernel over (batch, blocks of channels), or two over segments too; see the module."""
    batch, time, channels = x.shape
    segments = config.segments
    if segments == 1:
        return _kernel(x, dt, A, B, C, D, z, dt_bias, initial_state, config, dt_softplus, return_final_state)
    if time % segments:
        raise rule_error("segments divides time", f"{segments} for {time} steps", "use segments=1")

    def cut(v: Any) -> Any:
        return None if v is None else v.reshape(batch * segments, time // segments, v.shape[-1])

    x_cut, dt_cut, B_cut, C_cut, z_cut = map(cut, (x, dt, B, C, z))
    _, ends = _kernel(x_cut, dt_cut, A, B_cut, None, None, None, dt_bias, None, config, dt_softplus, True)
    # A segment multiplies the state that it begins with by exp(A times the sum of its step sizes).
    total = step_sizes(dt_cut, dt_bias, dt_softplus, jnp.float32).sum(1).reshape(batch, segments, channels, 1)
    ends = ends.reshape(batch, segments, channels, -1)
    state = jnp.zeros_like(ends[:, 0]) if initial_state is None else initial_state.astype(jnp.float32)
    begins = []
    for segment in range(segments):
        begins.append(state)
        state = jnp.exp(total[:, segment] * A.astype(jnp.float32)) * state + ends[:, segment]
    first = jnp.stack(begins, 1).reshape(batch * segments, channels, -1)
    y = _kernel(x_cut, dt_cut, A, B_cut, C_cut, D, z_cut, dt_bias, first, config, dt_softplus, False)
    y = y.reshape(batch, time, channels)
    return (y, state) if return_final_state else y


def _kernel(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array | None, D: jax.Array | None,
    z: jax.Array | None, dt_bias: jax.Array | None, initial_state: jax.Array | None, config: TimeConfig,
    dt_softplus: bool, return_final_state: bool,
) -> Any:  # fmt: skip
    """y, or (y, the last state); without C y is None, and nothing is written for it."""
    batch, time, channels = x.shape
    states = A.shape[1]
    more, late = padded_states(states) - states, max(0, config.steps - time)
    laid = Laid(late, more)
    operands = {
        "x": laid.over_time(x),
        "dt": laid.over_time(dt),
        "A": laid.rows(A) * LOG2E,
        "B": laid.of_states(B),
    }
    if C is not None:
        operands["C"] = laid.of_states(C)
    if D is not None:
        operands["D"] = D.astype(jnp.float32)
    if z is not None:
        operands["z"] = laid.over_time(z)
    if dt_bias is not None:
        operands["dt_bias"] = dt_bias.astype(jnp.float32)
    if initial_state is not None:
        operands["initial_state"] = laid.rows(initial_state)
    outs = {} if C is None else {"y": out_struct((batch, time + late, channels), x.dtype, x)}
    if return_final_state:
        outs["final"] = out_struct((batch, states + more, channels), jnp.float32, x)
    plan = Plan(config, time, states + more, dt_softplus)
    made = plgpu.kernel(
        named("selective_scan", _program, plan=plan, names=(*operands, *outs)),
        out_type=list(outs.values()),
        grid=(batch, channels // CHANNELS),
        grid_names=("batch", "block"),
        compiler_params=COMPILER_PARAMS,
    )(*operands.values())
    out = dict(zip(outs, made, strict=True))
    y = out.get("y")
    y = y[:, :time] if late and y is not None else y
    return (y, out["final"][:, :states].mT) if return_final_state else y


IMPLEMENTATION = Implementation(
    "hopper",
    selective_forward,
    platforms=("gpu",),
    refuses=refuses,
    kernel=True,
    config_type=TimeConfig,
    candidates=candidates,
)
