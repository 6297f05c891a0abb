"""The gradient of state space duality for Hopper, in Pallas (Mosaic GPU): three kernels, and what XLA does around them.

Two sweeps over time keep, in x's type, the state that each chunk of 64 steps starts from and the gradient of the state
that it leaves. With these every chunk is by itself, and one kernel makes all gradients of it: what the heads of a group
share is summed inside. Where batch, groups and chunks are few, a group's heads go in several parts, whose sums XLA
adds in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.scan.ssd import pallas_gpu_grad_body as body
from capibara.kernels.ops.scan.ssd import pallas_gpu_states as sweep
from capibara.kernels.ops.scan.ssd.decays import running_sums
from capibara.kernels.ops.scan.ssd.pallas_gpu import by_chunk
from capibara.kernels.ops.scan.ssd.pallas_gpu import refuses as refuses_forward
from capibara.kernels.ops.scan.ssd.pallas_gpu_body import CHUNK, SLICE
from capibara.kernels.ops.scan.ssd.rules import Sizes, sizes_of
from capibara.kernels.ops.scan.ssd.spans import over_spans
from capibara.kernels.pallas.hopper import LOG2E, SMEM_BYTES, multiprocessors

f32 = jnp.float32
SWEEP_STAGES = 3  # chunks on their way or in use


@dataclasses.dataclass(frozen=True)
class GradConfig:
    """How many slices of a chunk are on their way or in use at a time, and in how many parts a group's heads go."""

    stages: int
    parts: int

    def __post_init__(self) -> None:
        if self.stages < 1 or self.parts < 1:
            raise rule_error("stages and parts are 1 or more", self, "use stages=2, parts=1")


def candidates(call: Call) -> Sequence[GradConfig]:
    n = sizes_of(call)
    fewest = parts_of_a_group(n, multiprocessors(call.target.device_kind))
    slices = n.heads // n.groups * (n.width // SLICE)
    parts = [fewest, 2 * fewest] if slices % (2 * fewest) == 0 else [fewest]
    # Two stages first: on an H200 three took 6 % longer.
    return [GradConfig(s, p) for p in parts for s in (2, 3) if body.smem_bytes(n.states, s) <= SMEM_BYTES]


def refuses(call: Call) -> str | None:
    if any(call.need(name).dtype == jnp.float16 for name in ("x", "B", "C")):
        return "products of gradients, which it rounds to x's type, leave float16's range"
    return refuses_forward(call)


def parts_of_a_group(n: Sizes, programs: int) -> int:
    """In how many parts a group's slices go: the fewest that make so many programs, or as many as there are slices.

    >>> parts_of_a_group(Sizes(8, 4096, 32, 64, 1, 128), 132), parts_of_a_group(Sizes(1, 4096, 32, 64, 1, 128), 132)
    (1, 4)
    """
    slices = n.heads // n.groups * (n.width // SLICE)
    alone = n.batch * n.groups * math.ceil(n.time / CHUNK)
    fitting = (parts for parts in range(1, slices + 1) if slices % parts == 0 and parts * alone >= programs)
    return next(fitting, slices)


def mosaic_gpu_grad(
    x: jax.Array, log_decay: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array | None, D: jax.Array | None,
    initial_state: jax.Array | None, d_out: jax.Array, d_final: jax.Array | None = None, *, config: GradConfig,
    chunk: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The cotangents of the seven operands; None for an absent one. See the module's text."""
    assert chunk in (None, CHUNK)  # `refuses` has seen to it
    n = Sizes(*x.shape, *B.shape[2:])
    each = n.width // SLICE
    slices, in_parts = n.heads * each, config.parts
    if slices // n.groups % in_parts:
        raise rule_error(f"parts divides the {slices // n.groups} slices of a group", config, "use parts=1")
    # TMA takes lengths in multiples of 8, and an axis of a single tile would not be clipped.
    length = max(CHUNK, math.ceil(n.time / 8) * 8)
    chunks = math.ceil(length / CHUNK)

    def over_time(v: jax.Array) -> jax.Array:
        return jnp.pad(v, ((0, 0), (0, length - n.time), (0, 0), (0, 0))) if length > n.time else v

    def in_slices(v: jax.Array) -> jax.Array:
        return over_time(v).reshape(n.batch, length, slices, SLICE)

    wholes, parts = running_sums(by_chunk(log_decay, chunks) * LOG2E, -1)
    powers = jnp.exp2(wholes + parts)
    after = jnp.exp2((wholes[..., -1:] - wholes) + (parts[..., -1:] - parts))
    steps = jnp.ones_like(powers) if dt is None else by_chunk(dt, chunks)
    to_end, decay = after * steps, powers[..., -1:]
    skip = jnp.zeros(n.heads, f32) if D is None else D.astype(f32)
    skips = jnp.broadcast_to(skip[:, None, None], powers.shape)
    vectors = jnp.stack([wholes, parts, wholes, parts, powers, after, steps, skips], -2)
    given = (in_slices(x), in_slices(d_out.astype(x.dtype)), over_time(B), over_time(C), vectors, to_end)
    sliced_x, flow, b, c, vectors, to_end = vary_alike(given)

    def borders(
        left: jax.Array, right: jax.Array, weights: jax.Array, first: jax.Array | None, *, backward: bool, last: bool
    ) -> list[jax.Array]:
        """The states around every chunk, [batch, slices, chunks, N, 64], and the one after all of them."""
        operands = {
            "left": left, "right": right, "vectors": jnp.stack([weights, jnp.broadcast_to(decay, weights.shape)], -2)
        }  # fmt: skip
        if first is not None:
            operands["first"] = first.astype(f32)
        operands = dict(zip(operands, vary_alike(tuple(operands.values())), strict=True))
        outs = {"borders": out_struct((n.batch, slices, chunks, n.states, SLICE), x.dtype, sliced_x)}
        if last:
            outs["last"] = out_struct((n.batch, n.heads, n.states, n.width), f32, sliced_x)
        of_group = slices // n.groups
        plan = sweep.SweepPlan(n.batch, chunks, slices, each, of_group, n.states, SWEEP_STAGES, backward)
        return sweep.launch(operands, outs, plan)

    starts, *_ = borders(b, sliced_x, to_end, initial_state, backward=False, last=False)
    has_start = initial_state is not None
    flows, *d_initial = borders(c, flow, vectors[..., body.POWERS, :], d_final, backward=True, last=has_start)

    all_parts = n.groups * in_parts
    operands = {
        "x": sliced_x, "d_out": flow, "B": b, "C": c, "vectors": vectors, "starts": starts, "flows": flows
    }  # fmt: skip
    # Sums that are added once more stay in float32.
    shared = out_struct((n.batch, chunks * CHUNK, all_parts, n.states), x.dtype if in_parts == 1 else f32, sliced_x)
    outs = {
        "dx": out_struct(sliced_x.shape, x.dtype, sliced_x),
        "dB": shared,
        "dC": shared,
        "sums": out_struct((n.batch, slices, chunks, body.SUMS, CHUNK), f32, sliced_x),
        "through": out_struct((n.batch, slices, chunks, n.states), f32, sliced_x),
    }
    plan = body.GradPlan(
        n.batch, chunks, all_parts, slices // all_parts, each, in_parts, n.states, config.stages, dt is not None,
        D is not None,
    )  # fmt: skip
    dx, d_b, d_c, sums, through = body.launch(operands, outs, plan)

    sums = sums.reshape(n.batch, n.heads, each, *sums.shape[2:]).sum(2)
    through = through.reshape(n.batch, n.heads, each, chunks, n.states).sum((2, 4)) * decay[..., 0]

    def by_time(v: jax.Array, like: jax.Array) -> jax.Array:
        """[batch, heads, chunks, steps] as an operand is."""
        return v.reshape(n.batch, n.heads, -1).mT[:, : n.time].astype(like.dtype)

    def of_groups(v: jax.Array, like: jax.Array) -> jax.Array:
        return v[:, : n.time].reshape(*like.shape[:3], in_parts, n.states).sum(3).astype(like.dtype)

    def line(which: int) -> jax.Array:
        return sums[..., which, :]

    d_log_decay = over_spans(line(body.PAIRS), powers * line(body.ONWARD), to_end * line(body.OUTWARD), through)
    return (
        dx[:, : n.time].reshape(x.shape),
        by_time(d_log_decay, log_decay),
        of_groups(d_b, B),
        of_groups(d_c, C),
        None if dt is None else by_time(line(body.LEAVING) + after * line(body.OUTWARD), dt),
        None if D is None else line(body.SKIPS).sum((0, 2, 3)).astype(D.dtype),
        None if initial_state is None else d_initial[0].astype(initial_state.dtype),
    )


IMPLEMENTATION = Implementation(
    "hopper",
    mosaic_gpu_grad,
    platforms=("gpu",),
    refuses=refuses,
    rank=lambda call: 30,  # on an H200 six to eight times as fast as the chunked form differentiated
    kernel=True,
    hints=("chunk",),
    config_type=GradConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
