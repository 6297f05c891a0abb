"""The gradient of the selective scan for the TPU, in Pallas (Mosaic): laid out as the forward pass, in two kernels.

The first goes forth over the blocks of time and leaves the state before each in memory. The second goes back: of a
block it makes the states of every step again, which wait in VMEM, and then runs the cotangents of the states through
it from the far end. The sums over channels that the gradients of B and C are come out a column of N numbers a step,
which is put in its lane; those of several blocks of channels are summed outside.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.scan.selective.reference import step_sizes
from capibara.kernels.ops.scan.selective.rules import sizes_of
from capibara.kernels.ops.scan.selective.tpu.forward import (
    LANES,
    STEPS,
    SUBLANES,
    ChannelsConfig,
    refuses_operands,
    round_up,
)
from capibara.kernels.pallas import vmem
from capibara.kernels.pallas.scratch import vmem_bytes

TURNS = LANES // STEPS  # of a block


def candidates(call: Call) -> Sequence[ChannelsConfig]:
    n = sizes_of(call)
    width, states = round_up(n.channels, LANES), round_up(n.states, SUBLANES)

    def fits(channels: int) -> bool:
        return block_bytes(states, channels) <= vmem.limit(call)

    return [ChannelsConfig(channels) for channels in (256, 128, 512) if width % channels == 0 and fits(channels)]


def block_bytes(states: int, channels: int) -> int:
    """VMEM of the second kernel, the larger, with every operand and all as in float32."""
    specs = _specs(states, channels, lambda t: t)
    blocks = [(spec, jnp.float32) for name, spec in specs.items() if name != "initial_state"]
    return vmem_bytes(blocks, _scratch(states, channels))


def _specs(states: int, channels: int, at: Callable[[Any], Any]) -> dict[str, pl.BlockSpec]:
    """The blocks of both kernels by the name of their array, `at` being the block of time at a turn."""
    over_time = pl.BlockSpec((None, LANES, channels), lambda b, c, t: (b, at(t), c))
    over_lanes = pl.BlockSpec((None, states, LANES), lambda b, c, t: (b, 0, at(t)))
    sums = pl.BlockSpec((None, None, states, LANES), lambda b, c, t: (b, c, 0, at(t)))
    of_state = pl.BlockSpec((None, states, channels), lambda b, c, t: (b, 0, c))
    line = pl.BlockSpec((1, channels), lambda b, c, t: (0, c))
    return {
        **dict.fromkeys(("x", "dt", "z", "d_out", "dx", "ddt", "dz"), over_time),
        "A": pl.BlockSpec((states, channels), lambda b, c, t: (0, c)),
        **dict.fromkeys(("B", "C"), over_lanes),
        **dict.fromkeys(("dB", "dC"), sums),
        **dict.fromkeys(("D", "dt_bias"), line),
        "starts": pl.BlockSpec((None, None, states, channels), lambda b, c, t: (b, at(t), 0, c)),
        **dict.fromkeys(("initial_state", "d_final", "dA", "d_initial"), of_state),
        "d_lines": pl.BlockSpec((None, SUBLANES, channels), lambda b, c, t: (b, 0, c)),
    }


def _scratch(states: int, channels: int) -> dict[str, Any]:
    """Of the second kernel; the first has a state alone."""
    shapes = {
        "kept": (LANES, states, channels), "flow": (states, channels), "d_rates": (states, channels),
        "lines": (SUBLANES, channels),
    }  # fmt: skip
    return {name: pltpu.VMEM(shape, jnp.float32) for name, shape in shapes.items()}


def refuses(call: Call) -> str | None:
    return refuses_operands(call) or (None if candidates(call) else "no block fits the core's VMEM")


class Steps(NamedTuple):
    """Sixteen steps, [16, channels] each in float32: x, what softplus is given, and the step sizes."""

    x: jax.Array
    raw: jax.Array
    delta: jax.Array


def _rows(turn: Any) -> Any:
    return pl.ds(pl.multiple_of(turn * STEPS, STEPS), STEPS)


def _read(refs: dict[str, Any], turn: Any, block: Any, *, softplus: bool, time: int) -> Steps:
    x = refs["x"][_rows(turn), :].astype(jnp.float32)
    raw = step_sizes(
        refs["dt"][_rows(turn), :], refs["dt_bias"][...] if "dt_bias" in refs else None, False, jnp.float32
    )
    delta = jax.nn.softplus(raw) if softplus else raw
    return Steps(x, raw, _inside(delta, turn, block, time))


def _inside(v: jax.Array, turn: Any, block: Any, time: int) -> jax.Array:
    """Zeros past the end of time, where a step leaves the state as it is."""
    if time % LANES == 0:
        return v
    number = lax.broadcasted_iota(jnp.int32, v.shape, 0) + (block * LANES + turn * STEPS)
    return jnp.where(number < time, v, 0.0)


def _forth(
    refs: dict[str, Any], first: Any, block: Any, met: Callable[[Any, Any], None], *, softplus: bool, time: int
) -> Any:
    """The state after a block; `met(step, state)` is called with the state before each of its steps."""
    A = refs["A"][...]

    def some_steps(turn: Any, carry: Any) -> Any:
        h, b = carry
        x, _, delta = _read(refs, turn, block, softplus=softplus, time=time)
        for step in range(STEPS):
            now = slice(step, step + 1)
            met(turn * STEPS + step, h)
            h = jnp.exp(delta[now] * A) * h + (delta[now] * x[now]) * b[:, now]
        return h, pltpu.roll(b, LANES - STEPS, 1)

    return lax.fori_loop(0, TURNS, some_steps, (first, refs["B"][...]))[0]


def _body_forth(*args: Any, names: tuple[str, ...], softplus: bool, time: int) -> None:
    refs = dict(zip(names, args, strict=True))
    block, state = pl.program_id(2), refs["state"]

    @pl.when(block == 0)
    def _() -> None:
        state[...] = refs["initial_state"][...] if "initial_state" in refs else jnp.zeros_like(state)

    refs["starts"][...] = state[...]
    state[...] = _forth(refs, state[...], block, lambda step, h: None, softplus=softplus, time=time)


def _body_back(*args: Any, names: tuple[str, ...], softplus: bool, time: int) -> None:
    refs = dict(zip(names, args, strict=True))
    turns, block = pl.num_programs(2), pl.num_programs(2) - 1 - pl.program_id(2)
    kept, flow, d_rates, lines = (refs[name] for name in ("kept", "flow", "d_rates", "lines"))

    @pl.when(block == turns - 1)
    def _() -> None:
        flow[...] = refs["d_final"][...] if "d_final" in refs else jnp.zeros_like(flow)
        d_rates[...] = jnp.zeros_like(d_rates)
        lines[...] = jnp.zeros_like(lines)

    def keep(step: Any, h: Any) -> None:
        kept[step] = h

    _forth(refs, refs["starts"][...], block, keep, softplus=softplus, time=time)
    A = refs["A"][...]
    lane = lax.broadcasted_iota(jnp.int32, (A.shape[0], LANES), 1)

    def some_steps(number: Any, carry: Any) -> Any:
        g, dA, b, c, dB, dC = carry
        # The lanes of these sixteen steps come to the front, and the sums of those before make room.
        b, c, dB, dC = (pltpu.roll(v, STEPS, 1) for v in (b, c, dB, dC))
        turn = TURNS - 1 - number
        at = _rows(turn)
        x, raw, delta = _read(refs, turn, block, softplus=softplus, time=time)
        out = refs["d_out"][at, :].astype(jnp.float32)
        z = refs["z"][at, :].astype(jnp.float32) if "z" in refs else None
        dy = out if z is None else out * jax.nn.silu(z)
        fed = delta * x
        lines_of: list[list[Any]] = [[None] * STEPS for _ in range(3)]
        into_input, into_size, y = lines_of
        for step in reversed(range(STEPS)):
            now = slice(step, step + 1)
            decay = jnp.exp(delta[now] * A)
            decayed = decay * kept[turn * STEPS + step]
            h = decayed + fed[now] * b[:, now]
            dh = g + dy[now] * c[:, now]
            into_decay = dh * decayed
            into_input[step] = (dh * b[:, now]).sum(0, keepdims=True)
            into_size[step] = (into_decay * A).sum(0, keepdims=True)
            if z is not None:
                y[step] = (h * c[:, now]).sum(0, keepdims=True)
            dA = dA + into_decay * delta[now]
            dB = jnp.where(lane == step, (dh * fed[now]).sum(1, keepdims=True), dB)
            dC = jnp.where(lane == step, (h * dy[now]).sum(1, keepdims=True), dC)
            g = decay * dh
        input_flow = jnp.concatenate(into_input, 0)
        d_raw = jnp.concatenate(into_size, 0) + input_flow * x
        if softplus:
            d_raw = d_raw * jax.nn.sigmoid(raw)
        d_raw = _inside(d_raw, turn, block, time)
        dx = input_flow * delta
        if "D" in refs:
            dx = dx + dy * refs["D"][...]
            lines[0:1] += (dy * x).sum(0, keepdims=True)
        if "dt_bias" in refs:
            lines[1:2] += d_raw.sum(0, keepdims=True)
        refs["dx"][at, :] = dx.astype(refs["dx"].dtype)
        refs["ddt"][at, :] = d_raw.astype(refs["ddt"].dtype)
        if z is not None:
            ungated = jnp.concatenate(y, 0)
            ungated = ungated + refs["D"][...] * x if "D" in refs else ungated
            gate = jax.nn.sigmoid(z)
            refs["dz"][at, :] = (out * ungated * (gate * (1.0 + z * (1.0 - gate)))).astype(refs["dz"].dtype)
        return g, dA, b, c, dB, dC

    zero = jnp.zeros(lane.shape, jnp.float32)
    carry = (flow[...], d_rates[...], refs["B"][...], refs["C"][...], zero, zero)
    g, dA, _, _, dB, dC = lax.fori_loop(0, TURNS, some_steps, carry)
    flow[...], d_rates[...] = g, dA
    refs["dB"][...], refs["dC"][...] = dB, dC

    @pl.when(block == 0)
    def _() -> None:
        refs["dA"][...], refs["d_lines"][...] = dA, lines[...]
        if "d_initial" in refs:
            refs["d_initial"][...] = g


def selective_backward(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array | None, z: jax.Array | None,
    dt_bias: jax.Array | None, initial_state: jax.Array | None, d_out: jax.Array, d_final: jax.Array | None = None, *,
    config: ChannelsConfig, dt_softplus: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The backward pass as two Pallas calls; see the module's text."""
    batch, time, channels = x.shape
    states, width = A.shape[1], config.channels
    all_time, all_channels, all_states = round_up(time, LANES), round_up(channels, LANES), round_up(states, SUBLANES)
    blocks, turns = all_channels // width, all_time // LANES

    def wide(v: jax.Array) -> jax.Array:
        return jnp.pad(v, ((0, 0), (0, all_time - time), (0, all_channels - channels)))

    def rows(v: jax.Array) -> jax.Array:
        """[..., channels, N] as [..., N, channels] in float32."""
        lead = ((0, 0),) * (v.ndim - 2)
        return jnp.pad(v.astype(jnp.float32).mT, (*lead, (0, all_states - states), (0, all_channels - channels)))

    def in_lanes(v: jax.Array) -> jax.Array:
        """[batch, time, N] as [batch, N, time] in float32."""
        return jnp.pad(v.astype(jnp.float32).mT, ((0, 0), (0, all_states - states), (0, all_time - time)))

    def line(v: jax.Array) -> jax.Array:
        return jnp.pad(v.astype(jnp.float32), (0, all_channels - channels))[None]

    def call(
        name: str, body: Any, at: Callable[[Any], Any], operands: Any, outs: Any, scratch: Any, passes: int
    ) -> Any:
        specs = _specs(all_states, width, at)
        work = passes * batch * all_time * all_channels * all_states
        results = pl.pallas_call(
            functools.partial(body, names=(*operands, *outs, *scratch), softplus=dt_softplus, time=time),
            out_shape=[out_struct(shape, dtype, x) for shape, dtype in outs.values()],
            grid=(batch, blocks, turns),
            in_specs=[specs[name] for name in operands],
            out_specs=[specs[name] for name in outs],
            scratch_shapes=list(scratch.values()),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            cost_estimate=pl.CostEstimate(
                flops=7 * work,
                transcendentals=work,
                bytes_accessed=sum(v.size * v.dtype.itemsize for v in operands.values())
                + sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in outs.values()),
            ),
            interpret=current_interpret().pallas_argument(),
            name=name,
        )(*operands.values())
        return dict(zip(outs, results, strict=True))

    shared = {"x": wide(x), "dt": wide(dt), "A": rows(A), "B": in_lanes(B)}
    if dt_bias is not None:
        shared["dt_bias"] = line(dt_bias)
    first = {} if initial_state is None else {"initial_state": rows(initial_state)}
    f32, of_state = jnp.float32, (all_states, all_channels)
    starts = call(
        "capibara_selective_scan_starts", _body_forth, lambda t: t, {**shared, **first},
        {"starts": ((batch, turns, *of_state), f32)}, {"state": pltpu.VMEM((all_states, width), f32)}, 1,
    )["starts"]  # fmt: skip

    over_time = (batch, all_time, all_channels)
    operands = {**shared, "C": in_lanes(C), "d_out": wide(d_out), "starts": starts}
    outs: dict[str, tuple[tuple[int, ...], Any]] = {
        "dx": (over_time, x.dtype),
        "ddt": (over_time, dt.dtype),
        "dB": ((batch, blocks, all_states, all_time), f32),
        "dC": ((batch, blocks, all_states, all_time), f32),
        "dA": ((batch, *of_state), f32),
        "d_lines": ((batch, SUBLANES, all_channels), f32),
    }
    if D is not None:
        operands["D"] = line(D)
    if z is not None:
        operands["z"], outs["dz"] = wide(z), (over_time, z.dtype)
    if d_final is not None:
        operands["d_final"] = rows(d_final)
    if initial_state is not None:
        outs["d_initial"] = ((batch, *of_state), f32)
    scratch = _scratch(all_states, width)
    grads = call("capibara_selective_scan_grad", _body_back, lambda t: turns - 1 - t, operands, outs, scratch, 3)

    def of_lanes(name: str, like: jax.Array) -> jax.Array:
        return grads[name].sum(1)[:, :states, :time].mT.astype(like.dtype)

    def of_line(row: int, like: jax.Array | None) -> Any:
        return None if like is None else grads["d_lines"][:, row, :channels].sum(0).astype(like.dtype)

    return (
        grads["dx"][:, :time, :channels], grads["ddt"][:, :time, :channels],
        grads["dA"].sum(0)[:states, :channels].T.astype(A.dtype), of_lanes("dB", B), of_lanes("dC", C), of_line(0, D),
        None if z is None else grads["dz"][:, :time, :channels], of_line(1, dt_bias),
        None if initial_state is None else grads["d_initial"][:, :states, :channels].mT.astype(initial_state.dtype),
    )  # fmt: skip


GRAD_IMPLEMENTATION = Implementation(
    "pallas_tpu",
    selective_backward,
    platforms=("tpu",),
    refuses=refuses,
    kernel=True,
    config_type=ChannelsConfig,
    candidates=candidates,
)
