"""The gradient of the selective scan for Hopper, in Pallas (Mosaic GPU): a channel a thread, as in the forward pass.

A program is a few warpgroups on the same 128 channels of one batch element, each with a part of their states. It goes
forth over time once, leaving the state before each chunk in memory, and then back, chunk by chunk. Of a chunk the
states before each group of steps are made again in shared memory, of a group those before each step in registers, where
the decays stay too: three exponentials for each state and step in all, and nothing of the size of time times N is ever
kept. What a channel sums over its states goes from warpgroup to warpgroup through shared memory, a group of steps at a
time. What the gradients of B and C sum over channels is summed over the threads by exchanges within warps, then over
warps, then outside over programs: always in one order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.scan.selective.hopper.forward import CHANNELS, COMPILER_PARAMS, Laid, refuses_form, softplus
from capibara.kernels.ops.scan.selective.rules import sizes_of
from capibara.kernels.pallas.hopper import LOG2E, SMEM_BYTES, load, named, smem_bytes, store_to_memory

WARPGROUP = 128
LN2 = math.log(2)
WARP = 32
OWN_STATES = WARP // 2  # of a warpgroup, at most: one thread of a warp has the sum of each, of B and of C
MOST_STATES = 2 * OWN_STATES
WIDE = ("x", "dt", "z", "d_out")  # over time and channels
FORTH = ("x", "dt", "B")  # what the way forth reads


def one_a_thread() -> Any:
    """The layout of a line of 128 numbers of which every thread of a warpgroup has one."""
    return plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)


def warp_sums(values: Sequence[Any]) -> Any:
    """Of 32 lines of 128 numbers, one a thread: line i summed over each warp, in the warp's thread i.

    At each of five turns a thread sends half of what it has to the thread whose number differs in one bit, and adds
    what it gets to the other half: 31 numbers cross, where a sum by itself would take five for each line.
    """
    from jax.experimental.mosaic.gpu import FragmentedArray, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    assert len(values) == WARP
    layout = one_a_thread()
    line = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * WARP, return_type=line)
    def exchange(_: Any, *lines: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        thread = utils.thread_idx()
        sums = [vector.extract(v.registers[0], dynamic_position=[], static_position=[0]) for v in lines]
        while len(sums) > 1:
            bit = len(sums) // 2
            masked = arith.andi(thread, utils.c(bit, i32))
            upper = arith.cmpi(arith.CmpIPredicate.ne, masked, utils.c(0, i32))
            kept = []
            for low, high in zip(sums[:bit], sums[bit:], strict=True):
                sent = utils.shfl_bfly(arith.select(upper, low, high), bit)
                kept.append(arith.addf(arith.select(upper, high, low), sent))
            sums = kept
        registers = lines[0].registers.copy()
        registers[0] = vector.from_elements(registers[0].type, sums)
        return FragmentedArray(_registers=registers, _layout=lines[0].layout, _is_signed=None)

    return exchange(*values)


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Steps of a chunk, of which one state is left in memory; steps of a group, whose states are in registers; how many
    chunks are fetched ahead; and how many warpgroups share the states of a channel."""

    steps: int
    group: int
    stages: int
    warpgroups: int = 2

    def __post_init__(self) -> None:
        counted = min(self.steps, self.group, self.stages) >= 1 and self.warpgroups in (1, 2, 4)
        if not counted or self.steps % 16 or self.steps % self.group or self.group % 4:
            raise rule_error(
                "steps is a multiple of 16 and of group, group one of 4, and warpgroups 1, 2 or 4",
                self,
                "use steps=32, group=4, stages=2, warpgroups=2",
            )

    def own_states(self, states: int) -> int:
        """Of a channel's states those of one warpgroup, with some of zero: a warp's threads divide among their sums."""
        return max(4, 1 << math.ceil(math.log2(math.ceil(states / self.warpgroups))))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a program is told while it is traced."""

    config: ChunkConfig
    time: int
    own: int  # states of a warpgroup
    softplus: bool

    @property
    def chunks(self) -> int:
        return math.ceil(self.time / self.config.steps)

    @property
    def states(self) -> int:
        return self.own * self.config.warpgroups

    @property
    def together(self) -> int:
        """Steps whose sums over a warp are made in one exchange."""
        return WARP // (2 * self.own)


def candidates(call: Call) -> Sequence[ChunkConfig]:
    n = sizes_of(call)
    dtypes = {name: x.dtype for name in WIDE if (x := call[name]) is not None}
    dtypes |= {"B": jnp.dtype(jnp.float32), "C": jnp.dtype(jnp.float32)}
    configs = []
    for choice in ((32, 4, 2, 2), (32, 8, 2, 2), (32, 4, 2, 4), (32, 4, 2, 1), (16, 4, 2, 2), (16, 4, 1, 2)):
        config = ChunkConfig(*choice)
        plan = Plan(config, n.time, config.own_states(n.states), False)
        if plan.own <= OWN_STATES and smem_bytes(_scratch(dtypes, plan)) <= SMEM_BYTES:
            configs.append(config)
    return configs


def _scratch(dtypes: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """A ring of chunks of every operand in `dtypes`, the states before each group, what warpgroups exchange, sums."""
    config = plan.config

    def lines(*shape: int) -> Any:
        return plgpu.SMEM((*shape, CHANNELS), jnp.float32)

    def ring(name: str) -> Any:
        width = CHANNELS if name in WIDE else plan.states
        return plgpu.SMEM((config.stages, config.steps, width), dtypes[name])

    return {
        "arrived": plgpu.Barrier(num_arrivals=len(dtypes), num_barriers=config.stages),
        "buffers": [ring(name) for name in dtypes],
        "kept": lines(config.steps // config.group, plan.states),
        "met": plgpu.Barrier(num_arrivals=config.warpgroups),
        "parts": lines(2, config.warpgroups, config.group, 3),
        "sums": lines(config.warpgroups, config.steps // plan.together),
        "swept": plgpu.Barrier(num_arrivals=len(FORTH), num_barriers=config.stages),
    }


def refuses(call: Call) -> str | None:
    form = refuses_form(call, WIDE)
    if form is not None:
        return form
    states = sizes_of(call).states
    if states > MOST_STATES:
        return f"the states of a few steps stay in registers, for N up to {MOST_STATES}; N is {states}"
    return None if candidates(call) else "a ring of chunks does not fit shared memory"


def _sigmoid(v: Any) -> Any:
    return 1.0 / (1.0 + jnp.exp2(-LOG2E * v))


def _program(*args: Any, plan: Plan, names: tuple[str, ...]) -> None:
    refs = dict(zip(names, args, strict=True))
    config, chunks, layout = plan.config, plan.chunks, one_a_thread()
    steps, stages, groups, shared = config.steps, config.stages, config.steps // config.group, config.warpgroups > 1
    every = range(plan.own)
    back = [name for name in (*WIDE, "B", "C") if name in refs]
    scratch = _scratch({name: refs[name].dtype for name in back}, plan)

    def _scoped(buffers: Any, kept: Any, parts: Any, sums: Any, swept: Any, arrived: Any, met: Any) -> None:
        batch, block, me = (lax.axis_index(name) for name in ("batch", "block", "warpgroup"))
        channels, mine = pl.ds(block * CHANNELS, CHANNELS), me * plan.own
        tile_of = dict(zip(back, buffers, strict=True))

        def meet() -> None:
            """No warpgroup goes on before all are here, and each sees what the others wrote before."""
            if shared:
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)

        def fetch(sources: Sequence[str], barriers: Any, chunk: Any, slot: Any) -> None:
            times = pl.ds(chunk * steps, steps)

            @pl.when(me == 0)
            def _() -> None:
                for name in sources:
                    at = (batch, times, channels) if name in WIDE else (batch, times)
                    plgpu.copy_gmem_to_smem(refs[name].at[at], tile_of[name].at[slot], barriers.at[slot])

        def per_channel(ref: Any) -> Any:
            return load(ref, layout, optimized=False)

        def zero() -> Any:
            return plgpu.layout_cast(jnp.full((CHANNELS,), 0, jnp.float32), layout)

        rates = [per_channel(refs["A"].at[mine + n, channels]) for n in every]
        skip = per_channel(refs["D"].at[channels]) if "D" in refs else None
        bias = per_channel(refs["dt_bias"].at[channels]) if "dt_bias" in refs else None

        def states_of(name: str) -> list[Any]:
            if name not in refs:
                return [zero() for _ in every]
            return [per_channel(refs[name].at[batch, mine + n, channels]) for n in every]

        def now(name: str, slot: Any, t: Any) -> Any:
            return per_channel(tile_of[name].at[slot, t]).astype(jnp.float32)

        def shared_by_all(name: str, slot: Any, t: Any) -> list[Any]:
            return [tile_of[name][slot, t, mine + n] for n in every]

        def step_size(chunk: Any, slot: Any, t: Any) -> tuple[Any, Any, Any]:
            """What softplus is given, the step size, and 1 inside of time and 0 past its end (None: all is inside)."""
            raw = now("dt", slot, t)
            if bias is not None:
                raw = raw + bias
            delta, inside = softplus(raw) if plan.softplus else raw, None
            if plan.time % steps:  # past the end a step must leave the state as it is
                inside = jnp.where(chunk * steps + t < plan.time, 1.0, 0.0)
                delta = delta * inside
            return raw, delta, inside

        def flow_of(slot: Any, t: Any) -> tuple[Any, Any, Any]:
            """The cotangent of y before the gate, z, and sigmoid(z)."""
            out = now("d_out", slot, t)
            if "z" not in refs:
                return out, None, None
            z = now("z", slot, t)
            gate = _sigmoid(z)
            return out * (z * gate), z, gate

        def some_steps(chunk: Any, slot: Any, group: Any, states: Any) -> Any:
            for ahead in range(config.group):
                t = group * config.group + ahead
                _, delta, _ = step_size(chunk, slot, t)
                fed, b = delta * now("x", slot, t), shared_by_all("B", slot, t)
                states = [jnp.exp2(delta * rates[n]) * states[n] + fed * b[n] for n in every]
            return states

        # Forth: the state before each chunk, which this thread alone will read again.
        for chunk in range(min(stages, chunks - 1)):
            fetch(FORTH, swept, jnp.int32(chunk), jnp.int32(chunk % stages))

        def leave(chunk: Any, states: Any) -> None:
            for n in every:
                store_to_memory(refs["starts"].at[batch, chunk, mine + n, channels], states[n])

        def chunk_forth(chunk: Any, states: Any) -> Any:
            slot = lax.rem(chunk, stages)
            plgpu.barrier_wait(swept.at[slot])
            leave(chunk, states)
            states = lax.fori_loop(0, groups, functools.partial(some_steps, chunk, slot), states)
            plgpu.commit_smem()  # every thread has read its part
            meet()
            pl.when(chunk + stages < chunks - 1)(lambda: fetch(FORTH, swept, chunk + stages, slot))
            return states

        leave(chunks - 1, lax.fori_loop(0, chunks - 1, chunk_forth, states_of("initial_state")))

        # And back.
        for turn in range(min(stages, chunks)):
            fetch(back, arrived, jnp.int32(chunks - 1 - turn), jnp.int32(turn))

        def group_back(chunk_turn: Any, slot: Any, turn: Any, carry: Any) -> Any:
            flows, d_rates, d_skip, d_bias = carry
            chunk, group = chunks - 1 - chunk_turn, groups - 1 - turn
            side = lax.rem(chunk_turn * groups + turn, 2)
            states = [[per_channel(kept.at[group, mine + n]) for n in every]]
            decays, sizes = [], []
            for ahead in range(config.group):
                t = group * config.group + ahead
                _, delta, _ = step_size(chunk, slot, t)
                fed, b = delta * now("x", slot, t), shared_by_all("B", slot, t)
                decay = [jnp.exp2(delta * rates[n]) for n in every]
                states.append([decay[n] * states[-1][n] + fed * b[n] for n in every])
                decays.append(decay)
                sizes.append((delta, fed))
            lines: list[Any] = [None] * WARP
            for ahead in reversed(range(config.group)):
                before, after, decay, (delta, fed) = states[ahead], states[ahead + 1], decays[ahead], sizes[ahead]
                t = group * config.group + ahead
                dy, _, _ = flow_of(slot, t)
                b, c = shared_by_all("B", slot, t), shared_by_all("C", slot, t)
                dh = [flows[n] + dy * c[n] for n in every]
                flows = [dh[n] * decay[n] for n in every]
                into_decay = [flows[n] * before[n] for n in every]
                d_rates = [d_rates[n] + into_decay[n] * delta for n in every]
                totals = [[dh[n] * b[n] for n in every], [into_decay[n] * rates[n] for n in every]]
                if "z" in refs:
                    totals.append([after[n] * c[n] for n in every])
                for number, terms in enumerate(totals):
                    parts.at[side, me, ahead, number][...] = functools.reduce(operator.add, terms)
                first = ahead % plan.together * 2 * plan.own
                lines[first : first + plan.own] = [dh[n] * fed for n in every]
                lines[first + plan.own : first + 2 * plan.own] = [after[n] * dy for n in every]
                if first == 0:
                    sums.at[me, t // plan.together][...] = warp_sums(lines)
            meet()
            for turn in range(config.group // config.warpgroups):
                ahead = turn * config.warpgroups + me
                d_skip, d_bias = finish_step(chunk, slot, group * config.group + ahead, side, ahead, d_skip, d_bias)
            return flows, d_rates, d_skip, d_bias

        def finish_step(
            chunk: Any, slot: Any, t: Any, side: Any, ahead: Any, d_skip: Any, d_bias: Any
        ) -> tuple[Any, Any]:
            """What is left to do when a channel's sums over all of its states are there."""

            def total(number: int) -> Any:
                own = [per_channel(parts.at[side, wg, ahead, number]) for wg in range(config.warpgroups)]
                return functools.reduce(operator.add, own)

            into_input, into_size = total(0), total(1)
            x, (raw, delta, inside), (dy, z, gate) = now("x", slot, t), step_size(chunk, slot, t), flow_of(slot, t)
            d_raw = into_size * LN2 + into_input * x  # the rates carry a log2(e)
            if plan.softplus:
                d_raw = d_raw * _sigmoid(raw)
            if inside is not None:
                d_raw = d_raw * inside
            dx = into_input * delta
            if skip is not None:
                dx, d_skip = dx + dy * skip, d_skip + dy * x
            at = (batch, chunk * steps + t, channels)
            store_to_memory(refs["dx"].at[at], dx.astype(refs["dx"].dtype))
            store_to_memory(refs["ddt"].at[at], d_raw.astype(refs["ddt"].dtype))
            if z is not None:
                y = total(2) if skip is None else total(2) + skip * x
                dz = now("d_out", slot, t) * y * (gate * (1.0 + z * (1.0 - gate)))
                store_to_memory(refs["dz"].at[at], dz.astype(refs["dz"].dtype))
            return d_skip, d_bias if bias is None else d_bias + d_raw

        rows = plgpu.Layout.WG_STRIDED((4, WARP), vec_size=1)

        def sum_warps(chunk: Any, some: Any) -> None:
            """Four rows of the sums of B's and C's gradients over the warps, a number a thread."""
            at = pl.ds(some * 4, 4)
            own = [load(sums.at[me, at, pl.ds(w * WARP, WARP)], rows, optimized=False) for w in range(4)]
            whole = pl.ds((chunk * (steps // plan.together) + some * 4), 4)
            store_to_memory(refs["dBC"].at[batch, block, me, whole], (own[0] + own[1]) + (own[2] + own[3]))

        def chunk_back(turn: Any, carry: Any) -> Any:
            chunk, slot = chunks - 1 - turn, lax.rem(turn, stages)
            plgpu.barrier_wait(arrived.at[slot])

            def leave_group(group: Any, states: Any) -> None:
                for n in every:
                    kept.at[group, mine + n][...] = states[n]

            def group_forth(group: Any, states: Any) -> Any:
                leave_group(group, states)
                return some_steps(chunk, slot, group, states)

            first = [per_channel(refs["starts"].at[batch, chunk, mine + n, channels]) for n in every]
            leave_group(groups - 1, lax.fori_loop(0, groups - 1, group_forth, first))
            carry = lax.fori_loop(0, groups, functools.partial(group_back, turn, slot), carry)
            plgpu.commit_smem()  # every thread has read its part, and left its sums
            meet()
            pl.when(turn + stages < chunks)(lambda: fetch(back, arrived, chunk - stages, slot))
            lax.fori_loop(0, steps // plan.together // 4, lambda some, _: sum_warps(chunk, some), None)
            plgpu.commit_smem()  # and has read those of others
            return carry

        carry = (states_of("d_final"), [zero() for _ in every], zero(), zero())
        flows, d_rates, d_skip, d_bias = lax.fori_loop(0, chunks, chunk_back, carry)
        for n in every:
            store_to_memory(refs["dA"].at[batch, mine + n, channels], d_rates[n])
            if "d_initial" in refs:
                store_to_memory(refs["d_initial"].at[batch, mine + n, channels], flows[n])
        if skip is not None:
            store_to_memory(refs["dD"].at[batch, me, channels], d_skip)
        if bias is not None:
            store_to_memory(refs["d_bias"].at[batch, me, channels], d_bias)

    pl.run_scoped(_scoped, **scratch, collective_axes="warpgroup")


def selective_backward(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array | None, z: jax.Array | None,
    dt_bias: jax.Array | None, initial_state: jax.Array | None, d_out: jax.Array, d_final: jax.Array | None = None, *,
    config: ChunkConfig, dt_softplus: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The backward pass as one kernel over (batch, blocks of channels)."""
    batch, time, channels = x.shape
    states = A.shape[1]
    plan = Plan(config, time, config.own_states(states), dt_softplus)
    whole, blocks = plan.chunks * config.steps, channels // CHANNELS
    laid = Laid(late=max(0, config.steps - time), more=plan.states - states)
    operands = {
        "x": laid.over_time(x),
        "dt": laid.over_time(dt),
        "d_out": laid.over_time(d_out),
        "A": laid.rows(A) * LOG2E,
        "B": laid.of_states(B),
        "C": laid.of_states(C),
    }
    if z is not None:
        operands["z"] = laid.over_time(z)
    operands |= {k: v.astype(jnp.float32) for k, v in {"D": D, "dt_bias": dt_bias}.items() if v is not None}
    operands |= {
        k: laid.rows(v) for k, v in {"initial_state": initial_state, "d_final": d_final}.items() if v is not None
    }

    def struct(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return out_struct(shape, dtype, x)

    of_states, of_channels = (batch, plan.states, channels), (batch, config.warpgroups, channels)
    outs = {
        "dx": struct((batch, whole, channels), x.dtype),
        "ddt": struct((batch, whole, channels), dt.dtype),
        "dBC": struct((batch, blocks, config.warpgroups, whole // plan.together, WARP)),
        "dA": struct(of_states),
        "starts": struct((batch, plan.chunks, *of_states[1:])),
    }
    if z is not None:
        outs["dz"] = struct((batch, whole, channels), z.dtype)
    if D is not None:
        outs["dD"] = struct(of_channels)
    if dt_bias is not None:
        outs["d_bias"] = struct(of_channels)
    if initial_state is not None:
        outs["d_initial"] = struct(of_states)
    results = plgpu.kernel(
        named("selective_scan_backward", _program, plan=plan, names=(*operands, *outs)),
        out_type=list(outs.values()),
        grid=(batch, blocks),
        grid_names=("batch", "block"),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
    )(*operands.values())
    grads = dict(zip(outs, results, strict=True))
    # A row has, of a few steps, the sums for B and those for C, each of a warpgroup's states.
    dBC = grads["dBC"].sum(1).reshape(batch, config.warpgroups, whole, 2, plan.own)
    dB, dC = (jnp.moveaxis(dBC[..., which, :], 1, 2).reshape(batch, whole, plan.states)[:, :time] for which in (0, 1))

    def channel_sum(name: str, like: jax.Array | None) -> Any:
        return None if like is None else grads[name].sum((0, 1)).astype(like.dtype)

    return (
        grads["dx"][:, :time], grads["ddt"][:, :time], grads["dA"].sum(0)[:states].T.astype(A.dtype),
        dB[..., :states].astype(B.dtype), dC[..., :states].astype(C.dtype), channel_sum("dD", D),
        None if z is None else grads["dz"][:, :time], channel_sum("d_bias", dt_bias),
        None if initial_state is None else grads["d_initial"][:, :states].mT.astype(initial_state.dtype),
    )  # fmt: skip


GRAD_IMPLEMENTATION = Implementation(
    "hopper",
    selective_backward,
    platforms=("gpu",),
    refuses=refuses,
    kernel=True,
    config_type=ChunkConfig,
    candidates=candidates,
)
