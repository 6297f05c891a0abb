"""The gradient of the selective scan for Hopper: one kernel of Pallas (Mosaic GPU), and the sums that it leaves to XLA.

`pallas_gpu_grad_body` says how a program goes about it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from capibara.kernels.core.spec import Implementation
from capibara.kernels.core.varying import out_struct
from capibara.kernels.ops.scan.selective.pallas_gpu import CHANNELS, COMPILER_PARAMS, Laid
from capibara.kernels.ops.scan.selective.pallas_gpu_grad_body import program
from capibara.kernels.ops.scan.selective.pallas_gpu_grad_plan import ChunkConfig, Plan, candidates, refuses
from capibara.kernels.ops.scan.selective.pallas_gpu_lanes import WARP
from capibara.kernels.pallas.hopper import LOG2E


def _compiler_params() -> Any:
    # A program of so many operations: inferring their layouts, which are all one, takes JAX 0.12 twenty seconds.
    return dataclasses.replace(COMPILER_PARAMS, lowering_semantics=plgpu.LoweringSemantics.Lane)


def mosaic_gpu_grad(
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

    def made(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return out_struct(shape, dtype, x)

    of_states, of_channels = (batch, plan.states, channels), (batch, config.warpgroups, channels)
    outs = {
        "dx": made((batch, whole, channels), x.dtype),
        "ddt": made((batch, whole, channels), dt.dtype),
        "dBC": made((batch, blocks, config.warpgroups, whole // plan.together, WARP)),
        "dA": made(of_states),
        "starts": made((batch, plan.chunks, *of_states[1:])),
    }
    if z is not None:
        outs["dz"] = made((batch, whole, channels), z.dtype)
    if D is not None:
        outs["dD"] = made(of_channels)
    if dt_bias is not None:
        outs["d_bias"] = made(of_channels)
    if initial_state is not None:
        outs["d_initial"] = made(of_states)
    results = plgpu.kernel(
        functools.partial(program, plan=plan, names=(*operands, *outs)),
        out_type=list(outs.values()),
        grid=(batch, blocks),
        grid_names=("batch", "block"),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        compiler_params=_compiler_params(),
    )(*operands.values())
    got = dict(zip(outs, results, strict=True))
    # A row has, of a few steps, the sums for B and those for C, each of a warpgroup's states.
    dBC = got["dBC"].sum(1).reshape(batch, config.warpgroups, whole, 2, plan.own)
    dB, dC = (jnp.moveaxis(dBC[..., which, :], 1, 2).reshape(batch, whole, plan.states)[:, :time] for which in (0, 1))

    def channel_sum(name: str, like: jax.Array | None) -> Any:
        return None if like is None else got[name].sum((0, 1)).astype(like.dtype)

    return (
        got["dx"][:, :time], got["ddt"][:, :time], got["dA"].sum(0)[:states].T.astype(A.dtype),
        dB[..., :states].astype(B.dtype), dC[..., :states].astype(C.dtype), channel_sum("dD", D),
        None if z is None else got["dz"][:, :time], channel_sum("d_bias", dt_bias),
        None if initial_state is None else got["d_initial"][:, :states].mT.astype(initial_state.dtype),
    )  # fmt: skip


GRAD_IMPLEMENTATION = Implementation(
    "hopper",
    mosaic_gpu_grad,
    platforms=("gpu",),
    refuses=refuses,
    rank=lambda call: 30,  # on an H200 at 8x4096x2048, N 16: 2.6 ms forward and backward, with XLA's forms 51
    kernel=True,
    config_type=ChunkConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
