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

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.ops.scan.selective.pallas_gpu import CHANNELS, softplus
from capibara.kernels.ops.scan.selective.pallas_gpu_grad_plan import WIDE, Plan
from capibara.kernels.ops.scan.selective.pallas_gpu_lanes import WARP, one_a_thread, warp_sums
from capibara.kernels.pallas.hopper import LOG2E, load, store_to_memory

LN2 = math.log(2)


def _sigmoid(v: Any) -> Any:
    return 1.0 / (1.0 + jnp.exp2(-LOG2E * v))


def program(*given: Any, plan: Plan, names: tuple[str, ...]) -> None:
    refs = dict(zip(names, given, strict=True))
    config, chunks, layout = plan.config, plan.chunks, one_a_thread()
    steps, stages, groups, shared = config.steps, config.stages, config.steps // config.group, config.warpgroups > 1
    every = range(plan.own)
    wide = [name for name in WIDE if name in refs]
    forth, back = ("x", "dt", "B"), (*wide, "B", "C")

    @functools.partial(
        pl.run_scoped,
        buffers=[
            plgpu.SMEM((stages, steps, CHANNELS if name in wide else plan.states), refs[name].dtype) for name in back
        ],
        kept=plgpu.SMEM((groups, plan.states, CHANNELS), jnp.float32),
        parts=plgpu.SMEM((2, config.warpgroups, config.group, 3, CHANNELS), jnp.float32),
        sums=plgpu.SMEM((config.warpgroups, steps // plan.together, CHANNELS), jnp.float32),
        swept=plgpu.Barrier(num_arrivals=len(forth), num_barriers=stages),
        arrived=plgpu.Barrier(num_arrivals=len(back), num_barriers=stages),
        met=plgpu.Barrier(num_arrivals=config.warpgroups),
        collective_axes="warpgroup",
    )
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
                    at = (batch, times, channels) if name in wide else (batch, times)
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
            given = now("dt", slot, t)
            if bias is not None:
                given = given + bias
            delta, inside = softplus(given) if plan.softplus else given, None
            if plan.time % steps:  # past the end a step must leave the state as it is
                inside = jnp.where(chunk * steps + t < plan.time, 1.0, 0.0)
                delta = delta * inside
            return given, delta, inside

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
            fetch(forth, swept, jnp.int32(chunk), jnp.int32(chunk % stages))

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
            pl.when(chunk + stages < chunks - 1)(lambda: fetch(forth, swept, chunk + stages, slot))
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
                    parts.at[side, me, ahead, number][...] = functools.reduce(lambda one, other: one + other, terms)
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
                return functools.reduce(lambda one, other: one + other, own)

            into_input, into_size = total(0), total(1)
            x, (given, delta, inside), (dy, z, gate) = now("x", slot, t), step_size(chunk, slot, t), flow_of(slot, t)
            d_given = into_size * LN2 + into_input * x  # the rates carry a log2(e)
            if plan.softplus:
                d_given = d_given * _sigmoid(given)
            if inside is not None:
                d_given = d_given * inside
            dx = into_input * delta
            if skip is not None:
                dx, d_skip = dx + dy * skip, d_skip + dy * x
            at = (batch, chunk * steps + t, channels)
            store_to_memory(refs["dx"].at[at], dx.astype(refs["dx"].dtype))
            store_to_memory(refs["ddt"].at[at], d_given.astype(refs["ddt"].dtype))
            if z is not None:
                y = total(2) if skip is None else total(2) + skip * x
                dz = now("d_out", slot, t) * y * (gate * (1.0 + z * (1.0 - gate)))
                store_to_memory(refs["dz"].at[at], dz.astype(refs["dz"].dtype))
            return d_skip, d_bias if bias is None else d_bias + d_given

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
