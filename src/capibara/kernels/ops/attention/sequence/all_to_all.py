"""Sequence-parallel attention by trading length for heads: each device attends a share of the heads over all lengths.

Before, a device has all heads of its part of the sequence; one all-to-all later it has its part of the heads for the
whole sequence, and the plain op runs. A second one brings the output back.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.ops.attention.api import ATTENTION
from capibara.kernels.ops.attention.masking import FAR, Window, span
from capibara.kernels.ops.attention.sequence.order import unzigzag, zigzag


@dataclasses.dataclass(frozen=True)
class HeadExchange:
    """All that is known of the call before it is traced."""

    axis: str
    devices: int
    order: str
    causal: bool
    window: Window
    scale: float | None
    softcap: float | None
    implementation: str | None
    return_lse: bool


def check_heads(heads: int, devices: int, axis: str) -> None:
    if heads % devices:
        raise rule_error(
            f"method='all_to_all' gives each device of the mesh axis {axis!r} an equal share of the query heads",
            f"{heads} heads on a device for {devices} devices",
            f"use method='ring', or a number of heads that is a multiple of {devices}",
        )


def repeat_key_heads(x: jax.Array, devices: int) -> jax.Array:
    """Key heads repeated as often as it takes to share them out evenly; head h stays next to its copies.

    The query's heads are a multiple of both numbers, so each device's query heads still find theirs by h // groups.
    """
    copies = math.lcm(x.shape[1], devices) // x.shape[1]
    return x if copies == 1 else jnp.repeat(x, copies, axis=1)


def head_exchange_attention(
    call: HeadExchange, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """(out, lse or None) of one device's part of the sequence, inside shard_map."""
    below, above = span(call.causal, 0, call.window)
    # Without a rule on positions, any order of the sequence is right.
    reordered = call.order == "zigzag" and (below, above) != (-FAR, FAR)

    def gather(x: jax.Array) -> jax.Array:
        whole = jax.lax.all_to_all(x, call.axis, split_axis=1, concat_axis=2, tiled=True)
        return unzigzag(whole, call.devices, 2) if reordered else whole

    def scatter(x: jax.Array) -> jax.Array:
        x = zigzag(x, call.devices, 2) if reordered else x
        return jax.lax.all_to_all(x, call.axis, split_axis=2, concat_axis=1, tiled=True)

    ids = None
    if segments is not None:
        ids = jax.lax.all_gather(segments, call.axis, axis=1, tiled=True)
        ids = unzigzag(ids, call.devices, 1) if reordered else ids
    k, v = (repeat_key_heads(x, call.devices) for x in (k, v))
    operands = (*map(gather, (q, k, v)), None, None, ids, ids)
    names = ("causal", "window", "scale", "softcap", "return_lse")
    given = {name: getattr(call, name) for name in names}
    changed = {name: value for name, value in given.items() if value != ATTENTION.params[name]}
    made = run(ATTENTION, operands, changed, implementation=call.implementation)
    return (scatter(made[0]), scatter(made[1])) if call.return_lse else (scatter(made), None)
