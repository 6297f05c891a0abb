"""State space duality for Hopper, in Pallas (Mosaic GPU): what it takes, and what XLA prepares and cuts around it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.core.varying import out_struct, vary_alike
from capibara.kernels.ops.scan.ssd.decays import running_sums
from capibara.kernels.ops.scan.ssd.pallas_gpu_body import CHUNK, SLICE, VECTORS, Plan, launch
from capibara.kernels.ops.scan.ssd.rules import sizes_of
from capibara.kernels.pallas.hopper import LOG2E, SMEM_BYTES, refuses_chip

STATES = (64, 128)  # N: rows of whole products, whose accumulators fit beside the others


@dataclasses.dataclass(frozen=True)
class ChunksConfig:
    """How many chunks are on their way or in use at a time."""

    stages: int

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise rule_error("stages is 1 or more", self, "use stages=2")


def _smem(states: int, stages: int) -> int:
    ring = stages * 2 * CHUNK * (2 * states + 2 * SLICE + 4 * VECTORS)
    return ring + 2 * 2 * SLICE * (states + 2 * CHUNK) + 2048


def candidates(call: Call) -> Sequence[ChunksConfig]:
    states = sizes_of(call).states
    return [ChunksConfig(n) for n in (3, 2, 4) if _smem(states, n) <= SMEM_BYTES]


def refuses(call: Call) -> str | None:
    chip = refuses_chip(call.target.device_kind)
    if chip is not None:
        return chip
    n = sizes_of(call)
    if 0 in (n.batch, n.time):
        return "x is empty"
    kinds = {np.dtype(call.need(name).dtype).name for name in ("x", "B", "C")}
    if len(kinds) > 1 or not kinds <= {"bfloat16", "float16"}:
        return f"x, B and C are all bfloat16 or all float16, not {', '.join(sorted(kinds))}"
    if any(x is not None and x.dtype.itemsize > 4 for x in call.args):
        return "it sums in float32"
    if n.states not in STATES:
        return f"N is {' or '.join(map(str, STATES))}, not {n.states}"
    if n.width % SLICE:
        return f"P is a multiple of {SLICE}, not {n.width}"
    if n.heads // n.groups * (n.width // SLICE) % 2:
        return f"two warpgroups share B and C; a group of {n.heads // n.groups} heads has no pairs of {SLICE} columns"
    if call.params["chunk"] not in (None, CHUNK):
        return f"its chunks are {CHUNK} steps, not {call.params['chunk']}"
    return None


def by_chunk(v: jax.Array, chunks: int) -> jax.Array:
    """[batch, time, heads] as [batch, heads, chunks, steps] in float32; zeros past the end."""
    padded = jnp.pad(v.astype(jnp.float32), ((0, 0), (0, chunks * CHUNK - v.shape[1]), (0, 0)))
    return padded.mT.reshape(v.shape[0], v.shape[2], chunks, CHUNK)


def _vectors(log_decay: jax.Array, dt: jax.Array | None, chunks: int) -> jax.Array:
    """[batch, heads, chunks, 5, steps]: what the body names SUMS, POWERS, TO_END, STEPS, COLUMN_SUMS."""

    wholes, parts = running_sums(by_chunk(log_decay, chunks) * LOG2E, -1)
    sums, after = wholes + parts, (wholes[..., -1:] - wholes) + (parts[..., -1:] - parts)
    steps = jnp.ones_like(sums) if dt is None else by_chunk(dt, chunks)
    return jnp.stack([sums, jnp.exp2(sums), jnp.exp2(after) * steps, steps, sums], -2)


def mosaic_gpu(
    x: jax.Array, log_decay: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array | None = None,
    D: jax.Array | None = None, initial_state: jax.Array | None = None, *, config: ChunksConfig,
    return_final_state: bool, chunk: int | None = None,
) -> Any:  # fmt: skip
    """The forward pass as one kernel over (batch, pairs of 64 columns); see the body's text."""
    assert chunk in (None, CHUNK)  # `refuses` has seen to it
    batch, time, heads, width = x.shape
    groups, states = B.shape[2:]
    each = width // SLICE
    # TMA takes lengths in multiples of 8, and an axis of a single tile would not be clipped.
    length = max(CHUNK, math.ceil(time / 8) * 8)
    chunks = math.ceil(length / CHUNK)

    def over_time(v: jax.Array) -> jax.Array:
        return jnp.pad(v, ((0, 0), (0, length - time), *((0, 0),) * (v.ndim - 2))) if length > time else v

    operands = {
        "x": over_time(x).reshape(batch, length, heads * each, SLICE),
        "B": over_time(B),
        "C": over_time(C),
        "vectors": _vectors(log_decay, dt, chunks),
    }
    if D is not None:
        operands["D"] = D.astype(jnp.float32)
    if initial_state is not None:
        operands["initial_state"] = initial_state.astype(jnp.float32)
    operands = dict(zip(operands, vary_alike(tuple(operands.values())), strict=True))
    outs = {"y": out_struct(operands["x"].shape, x.dtype, x)}
    if return_final_state:
        outs["final"] = out_struct((batch, heads, states, width), jnp.float32, x)
    plan = Plan(
        batch=batch,
        chunks=chunks,
        slices=heads * each,
        slices_of_head=each,
        slices_of_group=heads // groups * each,
        states=states,
        stages=config.stages,
        has_steps=dt is not None,
    )
    y, *last = launch(operands, outs, plan)
    y = y[:, :time].reshape(x.shape)
    return (y, last[0]) if return_final_state else y


IMPLEMENTATION = Implementation(
    "hopper",
    mosaic_gpu,
    platforms=("gpu",),
    refuses=refuses,
    rank=lambda call: 30,  # on an H200 ten times as fast as chunks by einsum
    kernel=True,
    hints=("chunk",),
    config_type=ChunksConfig,
    default_config=lambda call: candidates(call)[0],
    candidates=candidates,
)
