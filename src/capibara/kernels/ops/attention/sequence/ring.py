"""Ring attention: queries stay, keys and values travel round the devices of a mesh axis.

Each step gives an output over the keys at hand with its log-sum-exp; these combine exactly. The backward pass is a
second ring: the softmax of any block follows from the whole log-sum-exp, so nothing of the forward ring is kept but
its result, and the gradients of keys and values travel along with them. Both send for the next block before they
compute with the present one, and neither product depends on what is on its way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.attention.api import ATTENTION, ATTENTION_GRAD
from capibara.kernels.ops.attention.sequence.order import length_axis
from capibara.kernels.ops.attention.sequence.schedule import Piece, Schedule, Step

# A run of more equal steps than this is a loop: the program's size then does not grow with the number of devices.
MOST_UNROLLED = 4

Block = tuple[jax.Array, jax.Array, jax.Array | None]  # keys, values, the keys' segments


@dataclasses.dataclass(frozen=True)
class Ring:
    """All that is known of a ring before it is traced."""

    axis: str
    schedule: Schedule
    scale: float | None
    softcap: float | None
    implementation: str | None
    return_lse: bool

    def params(self, piece: Piece) -> dict[str, Any]:
        given = {**piece.rules, "scale": self.scale, "softcap": self.softcap}
        return {name: value for name, value in given.items() if value != ATTENTION_GRAD.params[name]}

    def move(self, x: Any, hop: int) -> Any:
        """Every device's `x` to the device `hop` further on."""
        devices = self.schedule.devices
        if hop % devices == 0:
            return x
        route = [(d, (d + hop) % devices) for d in range(devices)]
        return jax.tree.map(lambda part: jax.lax.ppermute(part, self.axis, route), x)


Body = Callable[[Step, Any, int, Block, Any], Any]  # (step, shift, hop after it, block, carry) -> carry


def _travel(ring: Ring, block: Block, carry: Any, first: int, body: Body) -> Any:
    """Call `body` at every step from the `first` on with the block that is there then."""
    plan = ring.schedule
    index = first
    while index < len(plan.steps):
        step, hop, count = plan.steps[index], plan.hop(index), plan.run_from(index)
        if count > MOST_UNROLLED:
            # The last step of the run is left out: what comes after it is another hop.
            def looped(turn: Any, state: Any, step: Step = step, hop: int = hop) -> Any:
                here, carry = state
                following = ring.move(here, hop)
                return following, body(step, (step.shift + turn * hop) % plan.devices, hop, here, carry)

            block, carry = jax.lax.fori_loop(0, count - 1, looped, (block, carry))
            index += count - 1
            step, hop = plan.steps[index], plan.hop(index)
        following = ring.move(block, hop)
        carry = body(step, step.shift, hop, block, carry)
        block, index = following, index + 1
    return carry


def _by_case(ring: Ring, step: Step, shift: Any, compute: Callable[[Piece | None, Any], Any], carry: Any) -> Any:
    """The near or the far piece of a step, whichever this device has; the other one is not computed."""
    if step.near == step.far or (isinstance(shift, int) and shift == 0):
        return compute(step.near, carry)
    near = jax.lax.axis_index(ring.axis) >= shift
    return jax.lax.cond(near, lambda c: compute(step.near, c), lambda c: compute(step.far, c), carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, q: Any, k: Any, v: Any, segments: Any) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of one device's queries, inside shard_map; every array is this device's shard, in the ring's order."""
    return _forward(ring, q, k, v, segments)


def _forward(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any) -> tuple[jax.Array, jax.Array]:
    wide = jnp.promote_types(jnp.float32, q.dtype)

    def partial(piece: Piece, block: Block) -> tuple[jax.Array, jax.Array]:
        keys, values, key_segments = _cut(block, piece.columns)
        queries, query_segments = _cut((q, segments), piece.rows)
        operands = (queries, keys, values, None, None, query_segments, key_segments)
        params = {**ring.params(piece), "return_lse": True}
        out, lse = run(ATTENTION, operands, params, implementation=ring.implementation)
        return out.astype(wide), lse

    def body(step: Step, shift: Any, hop: int, block: Block, carry: Any) -> Any:
        def compute(piece: Piece | None, so_far: Any) -> Any:
            if piece is None:
                return so_far
            part = partial(piece, block)
            if piece.rows == (0, q.shape[2]):
                return _combine(so_far, part)
            first, end = piece.rows
            joined = _combine(_cut(so_far, piece.rows), part)
            return jax.tree.map(lambda x, new: x.at[:, :, first:end].set(new), so_far, joined)

        return _by_case(ring, step, shift, compute, carry)

    own = ring.schedule.steps[0]
    assert own.near is not None  # a query sees its own key
    block: Block = (k, v, segments)
    following = ring.move(block, ring.schedule.hop(0))
    out, lse = _travel(ring, following, partial(own.near, block), 1, body)
    return out.astype(q.dtype), lse


def _combine(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Attention over two sets of keys from attention over each: means weighted by exp(lse)."""
    (out, lse), (other_out, other_lse) = left, right
    highest = jnp.maximum(lse, other_lse)
    base = jnp.where(jnp.isneginf(highest), 0, highest)
    weight, other_weight = jnp.exp(lse - base), jnp.exp(other_lse - base)
    total = weight + other_weight
    safe = jnp.where(total > 0, total, 1)
    mean = out * (weight / safe)[..., None] + other_out * (other_weight / safe)[..., None]
    return mean, jnp.where(total > 0, base + jnp.log(safe), -jnp.inf)


def _forward_rule(ring: Ring, q: Any, k: Any, v: Any, segments: Any) -> Any:
    out, lse = _forward(ring, q, k, v, segments)
    return (out, lse), (q, k, v, segments, out, lse)


def _backward_rule(ring: Ring, residuals: Any, cotangents: Any) -> Any:
    d_out, d_lse = cotangents
    # In a program that has both rings, the compiler would find that the keys take the same hops twice, and would keep
    # every block of the first ring for the second. So the second turns the other way; the barrier is for the single
    # hop of two devices or a short window, which is the same either way (XLA's CPU compiler does not heed it).
    residuals, d_out = jax.lax.optimization_barrier((residuals, d_out))
    ring = dataclasses.replace(ring, schedule=ring.schedule.backward)
    return *_backward(ring, *residuals, d_out, d_lse if ring.return_lse else None), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward(
    ring: Ring, q: Any, k: Any, v: Any, segments: Any, out: Any, lse: Any, d_out: Any, d_lse: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv): sums are in float32 or wider, also while they travel."""
    wide = jnp.promote_types(jnp.float32, q.dtype)

    def body(step: Step, shift: Any, hop: int, block: Block, carry: Any) -> Any:
        dq, dk, dv = carry

        def compute(piece: Piece | None, dq: jax.Array) -> Any:
            nothing = vary_like(jnp.zeros_like(dk), dk), vary_like(jnp.zeros_like(dv), dv)
            if piece is None:
                return dq, *nothing
            keys, values, key_segments = _cut(block, piece.columns)
            queries, query_segments, *result = _cut((q, segments, out, lse, d_out, d_lse), piece.rows)
            operands = (queries, keys, values, None, None, query_segments, key_segments, None, None, *result)
            made = run(ATTENTION_GRAD, operands, ring.params(piece), prefer=ring.implementation)
            dq_part, dk_part, dv_part = (x.astype(wide) for x in made[:3])
            (r0, r1), (c0, c1) = piece.rows, piece.columns
            dq = dq + dq_part if dq_part.shape == dq.shape else dq.at[:, :, r0:r1].add(dq_part)
            if dk_part.shape == dk.shape:
                return dq, dk_part, dv_part
            return dq, nothing[0].at[:, :, c0:c1].set(dk_part), nothing[1].at[:, :, c0:c1].set(dv_part)

        # The sums that arrive are no operand of the products, which need not wait for them.
        dq, dk_part, dv_part = _by_case(ring, step, shift, compute, dq)
        return dq, *ring.move((dk + dk_part, dv + dv_part), hop)

    start = tuple(vary_like(jnp.zeros(x.shape, wide), x) for x in (q, k, v))
    dq, dk, dv = _travel(ring, (k, v, segments), start, 0, body)
    dk, dv = ring.move((dk, dv), -ring.schedule.steps[-1].shift)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _refuse(ring: Ring, *operands: Any) -> Any:
    raise rule_error(
        "Ring attention is differentiated once",
        "a derivative of its gradient",
        "use method='all_to_all', or attention() on a whole sequence",
    )


_backward.defvjp(_refuse, _refuse)
ring_attention.defvjp(_forward_rule, _backward_rule)


def _cut(arrays: Any, part: tuple[int, int]) -> Any:
    """A part of the length of [batch, heads, length, ...] arrays and of segments [batch, length]."""

    def cut(x: jax.Array) -> jax.Array:
        return jax.lax.slice_in_dim(x, *part, axis=length_axis(x))

    return jax.tree.map(cut, arrays)
