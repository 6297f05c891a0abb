"""A mixture of experts over a mesh: each device sorts its own tokens, and with experts over an axis rows travel there.

What is sorted is one device's: to sort the tokens of all would be an exchange of everything. Three things may be split,
each over mesh axes of its own:

- the tokens. Where every device has all experts, nothing is exchanged.
- the experts, over one axis that splits the tokens too. Each device sends every other a buffer of one size (a
  collective's shapes are fixed): the rows, and beside them which expert each is for. What arrives is sorted by expert,
  goes through the experts that live there as grouped products, and returns the same way.
- the experts' hidden width: each device computes a part of every expert, and the parts of the tokens are summed.

Exact by default: a buffer has room for everything a device could send to one other, tokens_here · min(top_k,
experts_there) rows. So a device holds, and moves twice, devices · tokens_here · min(top_k, experts_there) · width
numbers, whatever the balance; at worst that is every choice of the whole batch. `pair_capacity_factor` makes buffers
of that many even shares, for a price: choices past a pair's room are dropped, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from capibara.axes import mesh_axes_of
from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.operands import as_array
from capibara.kernels.ops.layers.moe.arrange import by_group, in_buffers
from capibara.kernels.ops.layers.moe.dispatch import capacity, combine, dispatch, take_rows
from capibara.kernels.ops.layers.moe.layer import (
    MoeMetrics,
    Params,
    checked_params,
    metrics_of,
    router_logits,
    run_experts,
    with_jitter,
)
from capibara.kernels.ops.layers.router.api import Routing, route

EXPERT_WEIGHTS = ("gate", "up", "down")


def expert_parallel_moe(
    params: Params,
    x: Float[Array, "*tokens width"],
    *,
    mesh: Mesh,
    axis_name: str = "expert",
    token_axis_names: Sequence[str] = (),
    top_k: int,
    activation: str = "silu",
    gate: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    pair_capacity_factor: float | None = None,
    jitter: float = 0.0,
    key: jax.Array | None = None,
) -> tuple[Float[Array, "*tokens width"], MoeMetrics]:
    """`moe_layer` with the experts over the axis of a mesh: the same values and gradients, but for the order of sums.

    Called on whole arrays, under jit (outside of it every step is a program of its own over the mesh). The tokens, all
    of x's leading axes as one, are split over `token_axis_names` and then `axis_name`, and the metrics are of all
    tokens. See the module's text for what travels and what it costs.

    Args:
      params, x, top_k, activation, gate, normalize, scale, jitter, key: see `moe_layer`.
      mesh: the devices.
      axis_name: the mesh axis that has the experts, an equal number on each of its devices.
      token_axis_names: further mesh axes that split the tokens; each of their devices' groups has all experts once.
      pair_capacity_factor: None drops nothing. A number gives what one device sends to one other that many even
        shares of room; the first tokens are kept. It is a limit for a pair of devices, not for an expert.
    """
    x = as_array("expert_parallel_moe", "x", x)
    split = (*token_axis_names, axis_name)
    for name in split:
        if name not in mesh.shape:
            raise unknown_name("axis of the mesh", name, mesh.shape)
    if len(set(split)) < len(split):
        raise rule_error(
            "The tokens are split over each axis once: token_axis_names, and then the experts' axis",
            f"token_axis_names={tuple(token_axis_names)} and axis_name={axis_name!r}",
            f"leave {axis_name!r} and repeated names out of token_axis_names",
        )
    params = checked_params(params, x)
    experts, devices = params["router"].shape[-1], mesh.shape[axis_name]
    if experts % devices:
        raise rule_error(
            f"The experts are split evenly over the {devices} devices of the mesh axis {axis_name!r}",
            f"{experts} experts",
            "choose a multiple, or a smaller axis",
        )
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    parts = math.prod(mesh.shape[name] for name in split)
    if rows.shape[0] % parts:
        raise rule_error(
            f"The tokens are split evenly over the {parts} devices of {' and '.join(split)}",
            f"{rows.shape[0]} tokens",
            "pad the batch",
        )
    y, metrics = moe_over_mesh(
        params, rows, mesh=mesh, tokens=P(split), expert_axis=axis_name, top_k=top_k, activation=activation, gate=gate,
        normalize=normalize, scale=scale, pair_capacity_factor=pair_capacity_factor, jitter=jitter, key=key,
    )  # fmt: skip
    return y.reshape(x.shape), metrics


def moe_over_mesh(
    params: Params,
    x: Float[Array, "*tokens width"],
    *,
    mesh: Mesh | AbstractMesh,
    tokens: P,
    expert_axis: str | None = None,
    hidden_axes: Sequence[str] = (),
    top_k: int,
    activation: str = "silu",
    gate: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    pair_capacity_factor: float | None = None,
    jitter: float = 0.0,
    key: jax.Array | None = None,
) -> tuple[Float[Array, "*tokens width"], MoeMetrics]:
    """`moe_layer` on a mesh, under jit: the same values and gradients, but for the order of sums.

    The caller says what lies where, and that it divides; `expert_parallel_moe` checks it first.

    Args:
      params, x, top_k, activation, gate, normalize, scale, jitter, key: see `moe_layer`.
      mesh: the devices. On axes that are not named here they hold copies.
      tokens: how x's leading axes are split.
      expert_axis: the axis that has the experts, one of `tokens`; None where every device has all of them.
      hidden_axes: those that split the experts' hidden width, none of `tokens`.
      pair_capacity_factor: see `expert_parallel_moe`.
    """
    params = checked_params(params, x)
    asked = with_jitter(x, jitter, key)
    # Converted before they travel: what a device gathers, and the sums of gradients, are in x's type.
    weights = {name: params[name].astype(x.dtype) for name in EXPERT_WEIGHTS}
    token_axes = tuple(axis for entry in tokens for axis in mesh_axes_of(entry))
    hidden_axes = tuple(hidden_axes)

    def local(weights: Any, router: Any, bias: Any, x: Any, asked: Any) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        logits = router_logits(router, asked)
        routing = route(
            logits.reshape(rows.shape[0], -1), top_k=top_k, gate=gate, normalize=normalize, scale=scale, bias=bias,
            return_counts=True,
        )  # fmt: skip
        assert routing.counts is not None
        counts = lax.psum(routing.counts, token_axes) if token_axes else routing.counts
        if hidden_axes:
            # Each of these devices has its own share of the gradients, which are summed here, on the way back.
            rows, mixing = (lax.pcast(v, hidden_axes, to="varying") for v in (rows, routing.weights))
            routing = routing._replace(weights=mixing)
        dropped = jnp.int32(0)
        if expert_axis is None:
            sent, sizes, permutation = dispatch(rows, routing, logits.shape[-1])
            y = combine(run_experts(weights, sent, sizes, activation), routing, permutation)
        else:
            y, dropped = exchange_through_experts(
                weights, rows, routing, expert_axis, activation=activation, pair_capacity_factor=pair_capacity_factor
            )
            dropped = lax.psum(dropped, token_axes)
        if hidden_axes:
            y = lax.psum(y, hidden_axes)
        return y.reshape(x.shape), logits, counts, dropped

    across = hidden_axes or None
    of_weights = {
        "gate": P(expert_axis, None, across),
        "up": P(expert_axis, None, across),
        "down": P(expert_axis, across, None),
    }
    y, logits, counts, dropped = jax.shard_map(
        local, mesh=mesh, in_specs=(of_weights, P(), P(), tokens, tokens), out_specs=(tokens, tokens, P(), P())
    )(weights, params["router"], params.get("bias"), x, asked)
    return y, metrics_of(logits, counts, gate, dropped)


def exchange_through_experts(
    weights: Params,
    x: Float[Array, "tokens width"],
    routing: Routing,
    axis_name: str,
    *,
    activation: str = "silu",
    pair_capacity_factor: float | None = None,
) -> tuple[Float[Array, "tokens width"], Int[Array, ""]]:
    """(y, dropped) of this device's tokens, inside shard_map: what experts over an axis are made of.

    Args:
      weights: this device's experts, "gate", "up", "down"; experts are numbered along the axis.
      x: this device's tokens.
      routing: theirs, with experts numbered over all devices.
      axis_name: the mesh axis that has the experts.
      activation, pair_capacity_factor: see `expert_parallel_moe`.
    """
    devices = lax.axis_size(axis_name)
    here = weights["gate"].shape[0]
    tokens, top_k = routing.indices.shape
    # Unlike an expert, a device may be chosen several times by one token.
    room = tokens * min(top_k, here)
    if pair_capacity_factor is not None:
        room = capacity(tokens, top_k, devices, pair_capacity_factor, most=room)
    permutation, sizes = in_buffers(routing.indices // here, devices, room)
    within = lax.rem(routing.indices, jnp.int32(here)).reshape(-1)
    expert = within.at[permutation.source].get(mode="fill", fill_value=here)  # `here` marks an empty row
    sent = take_rows(x, permutation)

    arrived, arrived_expert = (_exchange(v, axis_name, devices) for v in (sent, expert))
    sorting, group_sizes = by_group(arrived_expert[:, None], here)
    made = run_experts(weights, take_rows(arrived, sorting), group_sizes, activation, padded_rows=True)
    # The way back: the row that each arrival was sorted to.
    unsorted = take_rows(made, sorting._replace(source=sorting.slot[:, 0], slot=sorting.source[:, None]))
    returned = _exchange(unsorted, axis_name, devices)
    return combine(returned, routing, permutation), jnp.int32(tokens * top_k) - sizes.sum()


def _exchange(x: jax.Array, axis_name: str, devices: int) -> jax.Array:
    """Buffer d of this device's to device d; what device d sent here comes to place d."""
    return lax.all_to_all(x.reshape(devices, x.shape[0] // devices, *x.shape[1:]), axis_name, 0, 0).reshape(x.shape)
