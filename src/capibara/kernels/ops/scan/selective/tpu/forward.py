"""The selective scan for the TPU, in Pallas (Mosaic): channels in lanes, their states in sublanes, time block by block.

The grid is (batch, blocks of channels, blocks of time), the last in order: the state [N, channels] waits in VMEM from
one block of time to the next. B and C lie with time in lanes. A step needs its N numbers down the sublanes, so sixteen
steps are written out, each with a fixed lane, and then the registers are rolled to the next sixteen.
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
from jax.experimental.pallas import tpu as pltpu

from capibara.errors import rule_error
from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.scan.selective.reference import step_sizes
from capibara.kernels.ops.scan.selective.rules import sizes_of
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

LANES, SUBLANES = 128, 8
STEPS = 16  # written out at a time: a packed register of bfloat16
MOST_STATES = 128


@dataclasses.dataclass(frozen=True)
class ChannelsConfig:
    """Channels of a block."""

    channels: int

    def __post_init__(self) -> None:
        if self.channels < LANES or self.channels % LANES:
            raise rule_error(f"channels is a multiple of {LANES}", self, "use channels=512")


def round_up(number: int, unit: int) -> int:
    return math.ceil(number / unit) * unit


def candidates(call: Call) -> Sequence[ChannelsConfig]:
    n = sizes_of(call)
    width, states = round_up(n.channels, LANES), round_up(n.states, SUBLANES)

    def fits(channels: int) -> bool:
        # With every operand, and all as in float32.
        blocks = [(spec, jnp.float32) for spec in _specs(states, channels).values()]
        return vmem_bytes(blocks, _state_scratch(states, channels)) <= vmem.limit(call)

    return [ChannelsConfig(channels) for channels in (512, 256, 128) if width % channels == 0 and fits(channels)]


def _specs(states: int, channels: int) -> dict[str, pl.BlockSpec]:
    """The blocks of a grid (batch, blocks of channels, blocks of time), by the name of their array."""
    over_time = pl.BlockSpec((None, LANES, channels), lambda b, c, t: (b, t, c))
    over_lanes = pl.BlockSpec((None, states, LANES), lambda b, c, t: (b, 0, t))
    of_state = pl.BlockSpec((None, states, channels), lambda b, c, t: (b, 0, c))
    line = pl.BlockSpec((1, channels), lambda b, c, t: (0, c))
    return {
        **dict.fromkeys(("x", "dt", "z", "y"), over_time),
        "A": pl.BlockSpec((states, channels), lambda b, c, t: (0, c)),
        **dict.fromkeys(("B", "C"), over_lanes),
        **dict.fromkeys(("D", "dt_bias"), line),
        **dict.fromkeys(("initial_state", "final"), of_state),
    }


def _state_scratch(states: int, channels: int) -> Any:
    return pltpu.VMEM((states, channels), jnp.float32)


def refuses_operands(call: Call) -> str | None:
    n = sizes_of(call)
    if 0 in (n.batch, n.time):
        return "x is empty"
    for name, x in zip(call.op.operands, call.args, strict=True):
        if x is not None and np.dtype(x.dtype).name not in ("bfloat16", "float32"):
            return f"a TPU's vector units take bfloat16 and float32; {name} is {x.dtype.name}"
    if n.states > MOST_STATES:
        return f"the states of a channel stay in registers, up to {MOST_STATES}; N is {n.states}"
    return None


def refuses(call: Call) -> str | None:
    return refuses_operands(call) or (None if candidates(call) else "no block fits the core's VMEM")


def _body(*args: Any, names: tuple[str, ...], softplus: bool, time: int) -> None:
    refs = dict(zip(names, args, strict=True))
    block, state = pl.program_id(2), refs["state"]

    @pl.when(block == 0)
    def _() -> None:
        state[...] = refs["initial_state"][...] if "initial_state" in refs else jnp.zeros_like(state)

    A = refs["A"][...]

    def some_steps(turn: Any, carry: Any) -> Any:
        h, b, c = carry
        at = pl.ds(pl.multiple_of(turn * STEPS, STEPS), STEPS)
        x = refs["x"][at, :].astype(jnp.float32)
        bias = refs["dt_bias"][...] if "dt_bias" in refs else None
        delta = step_sizes(refs["dt"][at, :], bias, softplus, jnp.float32)
        if time % LANES:  # past the end a step leaves the state as it is
            number = lax.broadcasted_iota(jnp.int32, delta.shape, 0) + (block * LANES + turn * STEPS)
            delta = jnp.where(number < time, delta, 0.0)
        rows = []
        for step in range(STEPS):
            now = slice(step, step + 1)
            h = jnp.exp(delta[now] * A) * h + (delta[now] * x[now]) * b[:, now]
            rows.append((h * c[:, now]).sum(0, keepdims=True))
        y = jnp.concatenate(rows, 0)
        if "D" in refs:
            y = y + refs["D"][...] * x
        if "z" in refs:
            y = y * jax.nn.silu(refs["z"][at, :].astype(jnp.float32))
        refs["y"][at, :] = y.astype(refs["y"].dtype)
        return h, pltpu.roll(b, LANES - STEPS, 1), pltpu.roll(c, LANES - STEPS, 1)

    h, _, _ = lax.fori_loop(0, LANES // STEPS, some_steps, (state[...], refs["B"][...], refs["C"][...]))
    state[...] = h
    if "final" in refs:

        @pl.when(block == pl.num_programs(2) - 1)
        def _() -> None:
            refs["final"][...] = h


def selective_forward(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array | None = None,
    z: jax.Array | None = None, dt_bias: jax.Array | None = None, initial_state: jax.Array | None = None, *,
    config: ChannelsConfig, dt_softplus: bool, return_final_state: bool,
) -> Any:  # fmt: skip
    """The forward pass as one Pallas call; see the module's text."""
    batch, time, channels = x.shape
    states = A.shape[1]
    more_time, more_channels = round_up(time, LANES) - time, round_up(channels, LANES) - channels
    more_states = round_up(states, SUBLANES) - states
    width = config.channels

    def wide(v: jax.Array) -> jax.Array:
        return jnp.pad(v, ((0, 0), (0, more_time), (0, more_channels)))

    def rows(v: jax.Array) -> jax.Array:
        """[..., channels, N] as [..., N, channels] in float32."""
        lead = ((0, 0),) * (v.ndim - 2)
        return jnp.pad(v.astype(jnp.float32).mT, (*lead, (0, more_states), (0, more_channels)))

    def in_lanes(v: jax.Array) -> jax.Array:
        """[batch, time, N] as [batch, N, time] in float32."""
        return jnp.pad(v.astype(jnp.float32).mT, ((0, 0), (0, more_states), (0, more_time)))

    def line(v: jax.Array) -> jax.Array:
        return jnp.pad(v.astype(jnp.float32), (0, more_channels))[None]

    specs = _specs(states + more_states, width)
    operands = {"x": wide(x), "dt": wide(dt), "A": rows(A), "B": in_lanes(B), "C": in_lanes(C)}
    if D is not None:
        operands["D"] = line(D)
    if z is not None:
        operands["z"] = wide(z)
    if dt_bias is not None:
        operands["dt_bias"] = line(dt_bias)
    if initial_state is not None:
        operands["initial_state"] = rows(initial_state)
    outs = {"y": out_struct((batch, time + more_time, channels + more_channels), x.dtype, x)}
    if return_final_state:
        shape = (batch, states + more_states, channels + more_channels)
        outs["final"] = out_struct(shape, jnp.float32, x)
    work = batch * (time + more_time) * (channels + more_channels) * (states + more_states)
    y, *last = pl.pallas_call(
        functools.partial(_body, names=(*operands, *outs, "state"), softplus=dt_softplus, time=time),
        out_shape=list(outs.values()),
        grid=(batch, (channels + more_channels) // width, (time + more_time) // LANES),
        in_specs=[specs[name] for name in operands],
        out_specs=[specs[name] for name in outs],
        scratch_shapes=[_state_scratch(states + more_states, width)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=6 * work,
            transcendentals=work,
            bytes_accessed=sum(v.size * v.dtype.itemsize for v in operands.values()) + x.size * x.dtype.itemsize,
        ),
        interpret=current_interpret().pallas_argument(),
        name="capibara_selective_scan",
    )(*operands.values())
    y = y[:, :time, :channels]
    return (y, last[0][:, :states, :channels].mT) if return_final_state else y


IMPLEMENTATION = Implementation(
    "pallas_tpu",
    selective_forward,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    config_type=ChannelsConfig,
    candidates=candidates,
)
