"""sequence_parallel_attention: the public function; it checks, and puts a ring or a head exchange on the mesh."""

from __future__ import annotations

import functools
from typing import Any, Literal, cast, overload

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Integer

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.context import current_interpret
from capibara.kernels.core.varying import vary_alike
from capibara.kernels.ops.attention import inputs
from capibara.kernels.ops.attention.api import ATTENTION
from capibara.kernels.ops.attention.sequence import order as orders
from capibara.kernels.ops.attention.sequence.all_to_all import (
    HeadExchange,
    check_heads,
    head_exchange_attention,
    repeat_key_heads,
)
from capibara.kernels.ops.attention.sequence.placement import Axes, Placement, placement
from capibara.kernels.ops.attention.sequence.ring import Ring, ring_attention
from capibara.kernels.ops.attention.sequence.schedule import check_length, schedule

METHODS = ("ring", "all_to_all")
Plan = Ring | HeadExchange


@overload
def sequence_parallel_attention(
    query: Array, key: Array, value: Array, *, axis_name: str, mesh: Any = None, batch_axis_name: Axes = None,
    head_axis_name: Axes = None, method: str = "ring", layout: str = "bthd", order: str = "contiguous",
    balance: bool | None = None, causal: bool | None = None, is_causal: bool | None = None,
    window: int | tuple[int | None, int | None] | None = None, segment_ids: Array | None = None,
    scale: float | None = None, softcap: float | None = None, return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> Array: ...  # fmt: skip


@overload
def sequence_parallel_attention(
    query: Array, key: Array, value: Array, *, axis_name: str, mesh: Any = None, batch_axis_name: Axes = None,
    head_axis_name: Axes = None, method: str = "ring", layout: str = "bthd", order: str = "contiguous",
    balance: bool | None = None, causal: bool | None = None, is_causal: bool | None = None,
    window: int | tuple[int | None, int | None] | None = None, segment_ids: Array | None = None,
    scale: float | None = None, softcap: float | None = None, return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def sequence_parallel_attention(
    query: Array, key: Array, value: Array, *, axis_name: str, mesh: Any = None, batch_axis_name: Axes = None,
    head_axis_name: Axes = None, method: str = "ring", layout: str = "bthd", order: str = "contiguous",
    balance: bool | None = None, causal: bool | None = None, is_causal: bool | None = None,
    window: int | tuple[int | None, int | None] | None = None, segment_ids: Array | None = None,
    scale: float | None = None, softcap: float | None = None, return_lse: bool, implementation: str | None = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def sequence_parallel_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv D"],
    *,
    axis_name: str,
    mesh: Any = None,
    batch_axis_name: Axes = None,
    head_axis_name: Axes = None,
    method: str = "ring",
    layout: str = "bthd",
    order: str = "contiguous",
    balance: bool | None = None,
    causal: bool | None = None,
    is_causal: bool | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    segment_ids: Integer[Array, "B _"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T H D"] | tuple[Float[Array, "B T H D"], Float[Array, "B _ _"]]:
    """Attention over a sequence that is split along a mesh axis; equal to `attention` on the whole of it.

    Called on global arrays, it splits them over `mesh`. Called inside a shard_map over `axis_name`, it takes one
    device's shards and gives back one device's shard. No device ever holds the whole sequence of all heads.

    method "ring": keys and values travel round the devices, n - 1 hops of one device's keys and values, while each
    computes with those it has. Blocks that `causal` or `window` rule out are not computed, and hops that no device
    needs are not made. The backward pass is a second ring, which keeps only queries, keys, values and the result, and
    sends the gradients of keys and values along in float32. It can be differentiated once.

    method "all_to_all": heads are traded for length, and back: each device attends its share of the heads over the
    whole sequence. The query's heads must divide over the axis. Key heads that do not are copied until they do, which
    moves so much more.

    Args:
      query, key, value: as for `attention`, of one length, which the axis' size divides.
      axis_name: the mesh axis that splits the sequence.
      mesh: by default the active one (`jax.set_mesh`). None inside a shard_map over `axis_name`.
      batch_axis_name, head_axis_name: mesh axes that split the batch and the heads; a name or a tuple of names. Over
        mesh axes that are not named here the arrays are whole.
      order: "zigzag" says that the arrays are in the order of `zigzag(x, n, axis)`: device i has chunks i and
        2n - 1 - i of 2n. The result is in the same order.
      balance: for the ring with contiguous order. Under a causal rule the last device has most to do; True trades
        halves of the shards on the way in and out, one extra trip of each, and all have the same to do. By default so
        for causal attention without a window if the length divides into 2n chunks; False leaves the work unbalanced.
        Under a window only the first devices have less to do, and nothing is traded. `ring_load` counts it.
      causal, is_causal, window, segment_ids, scale, softcap, return_lse: as for `attention`. Segment ids are split
        like the sequence; the log-sum-exp is [batch, heads, length].
      implementation: the op's implementation on each device, by name; in the ring's backward pass it is preferred.
    """
    causal = inputs.causal_flag(causal, is_causal)
    where = placement(mesh, axis_name, batch_axis_name, head_axis_name)
    q, k, v = inputs.heads_first(layout, query=query, key=key, value=value)
    segments, _ = inputs.segments(segment_ids, None, q.shape[2], q.shape[2])
    if method not in METHODS:
        raise unknown_name("method of sequence_parallel_attention", method, METHODS)
    if q.shape[2] != k.shape[2]:
        raise rule_error(
            "Sequence-parallel attention is over one sequence: as many queries as keys",
            f"{q.shape[2]} and {k.shape[2]}",
            "use attention(), which takes sharded arrays too",
        )
    sides = inputs.window_sides(window)
    numbers: dict[str, Any] = {
        "scale": None if scale is None else inputs.static_float("scale", scale),
        "softcap": None if softcap is None else inputs.static_float("softcap", softcap),
    }
    # The op's own check, on what the caller passed: its messages then show the caller's numbers.
    ATTENTION.call(q, k, v, None, None, segments, segments, causal=causal, window=sides, **numbers)
    _check_split(where, q)
    _check_emulation(implementation)
    length = q.shape[2] * (where.devices if where.mesh is None else 1)
    check_length(length, where.devices, order)
    static = {**numbers, "implementation": implementation, "return_lse": bool(return_lse)}
    if method == "ring":
        _check_ring(implementation)
        turns = schedule(length, where.devices, order, balance, causal, sides)
        plan: Plan = Ring(axis_name, turns, **static)
    else:
        _check_head_exchange(where, q, balance)
        plan = HeadExchange(axis_name, where.devices, order, causal, sides, **static)
    whole = functools.partial(_local, plan) if where.mesh is None else _over_mesh(where, plan)
    out, lse = cast("tuple[Array, Array]", whole(q, k, v, segments))
    out = out if layout == "bhtd" else out.swapaxes(1, 2)
    return (out, lse) if return_lse else out


def _check_split(where: Placement, q: jax.Array) -> None:
    parts = (("batch", q.shape[0], where.batch), ("number of heads", q.shape[1], where.heads))
    for what, size, names in parts:
        if size % where.size(names):
            raise rule_error(
                f"The {what} is split evenly over the mesh axes {names}, here {where.size(names)} parts",
                f"a {what} of {size}",
                f"make it a multiple of {where.size(names)}, or name other axes",
            )


def _check_emulation(implementation: str | None) -> None:
    kernel = implementation is None or ATTENTION.implementation(implementation).kernel
    if kernel and current_interpret().mode == "machine":
        raise rule_error(
            "The 'machine' emulation of TPU kernels runs on one device: in a shard_map its devices wait for each other",
            "sequence-parallel attention under capibara.kernels.interpret('machine')",
            "use interpret('hlo'), or implementation='xla'",
        )


def _check_ring(implementation: str | None) -> None:
    if implementation == "reference":
        raise rule_error(
            "The ring's backward pass takes the softmax of a block from the whole log-sum-exp, which the "
            "specification of the gradient does not read",
            "implementation='reference'",
            "use implementation='xla', or method='all_to_all'",
        )


def _check_head_exchange(where: Placement, q: jax.Array, balance: bool | None) -> None:
    if balance is not None:
        raise rule_error(
            "balance is for method='ring': with 'all_to_all' every device has the same to do",
            f"balance={balance}",
            "leave it at None",
        )
    check_heads(q.shape[1] // where.size(where.heads), where.devices, where.axis)


def _local(plan: Plan, q: Any, k: Any, v: Any, segments: Any) -> tuple[jax.Array, jax.Array | None]:
    """One device's part, inside shard_map."""
    q, k, v, segments = vary_alike((q, k, v, segments))
    if isinstance(plan, HeadExchange):
        return head_exchange_attention(plan, q, k, v, segments)
    ring = plan.schedule
    if ring.exchanged:
        into, back = orders.to_zigzag, orders.from_zigzag
        if ring.order == "contiguous":
            into, back = back, into
        q, k, v, segments = into((q, k, v, segments), plan.axis, ring.devices)
    made = ring_attention(plan, q, k, v, segments)
    out, lse = back(made, plan.axis, ring.devices) if ring.exchanged else made
    return out, lse if plan.return_lse else None


@functools.lru_cache(maxsize=256)
def _over_mesh(where: Placement, plan: Plan) -> Any:
    """The jitted function of global arrays; kept, so that calls outside of jit trace once."""
    mesh = where.mesh
    assert mesh is not None
    four, ids = where.spec(heads=True, length_at=2), where.spec(heads=False, length_at=1)

    def on_global(q: Any, k: Any, v: Any, segments: Any) -> Any:
        # Key heads that do not divide over the head axis are copied until they do.
        k, v = (repeat_key_heads(x, where.size(where.heads)) for x in (k, v))
        specs = (four, four, four, None if segments is None else ids)
        arrays = (q, k, v, segments)
        if where.explicit:
            shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
            arrays = jax.tree.map(jax.sharding.reshard, arrays, shardings)
        return jax.shard_map(
            functools.partial(_local, plan),
            mesh=mesh,
            in_specs=specs,
            out_specs=(four, four if plan.return_lse else None),
            # Kernels that are replayed as XLA operations do not say over which axes their values vary.
            check_vma=current_interpret().mode != "hlo",
        )(*arrays)

    return jax.jit(on_global)
