"""The recurrence in plain JAX for XLA: steps unrolled so that it fuses them, and time in segments for an accelerator.

On a CPU one loop over time has all the parallelism there is, and reads each number once. An accelerator needs more of
it than the channels give: there time is cut into short segments. A first pass reads a and b and gives each segment's
product of decays and its state from a start at zero; the states between segments are a recurrence of the same kind
over far fewer steps; and a second pass computes every step from the right start.

A product of decays may overflow, or vanish, where no state does: 1.5 to the thousandth is infinite, and times a state
of zero not a number. So the second pass is asked whether each segment ends where the next one was started; where one
does not, to rounding, or is not finite, all steps are computed again in one loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.errors import rule_error
from capibara.kernels.core.spec import Call, Implementation
from capibara.kernels.ops.scan.recurrence.reference import shifted, start_of, state_type
from capibara.kernels.ops.scan.recurrence.rules import drift


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """How many steps are unrolled, and whether they are one loop's or those of segments side by side."""

    steps: int
    parallel: bool

    def __post_init__(self) -> None:
        if self.steps < 1 or (self.parallel and self.steps < 2):
            raise rule_error(
                "steps is 1 or more, and 2 or more for segments side by side", self, "use steps=16, parallel=True"
            )


def default_config(call: Call) -> ChunkConfig:
    return candidates(call)[0]


def candidates(call: Call) -> Sequence[ChunkConfig]:
    one_loop = [ChunkConfig(steps, parallel=False) for steps in (8, 4, 16, 1)]
    if call.target.platform == "cpu":
        return one_loop
    return [*(ChunkConfig(steps, parallel=True) for steps in (8, 4, 16)), *one_loop]


def _chain(a: jax.Array, b: jax.Array, state: jax.Array, axis: int, reverse: bool) -> list[jax.Array]:
    """The states of a few unrolled steps, in order of time."""
    order = range(a.shape[axis])
    made = []
    for step in reversed(order) if reverse else order:
        decay, added = (lax.index_in_dim(x, step, axis, keepdims=False).astype(state.dtype) for x in (a, b))
        state = decay * state + added
        made.append(state)
    return made[::-1] if reverse else made


def _loop(a: jax.Array, b: jax.Array, start: jax.Array, steps: int, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """One loop over time, `steps` of it unrolled in each turn; results are written where they belong."""
    length = b.shape[1]
    turns, left = divmod(length, steps)

    def advance(state: jax.Array, h: jax.Array, at: Any, count: int) -> tuple[jax.Array, jax.Array]:
        decays, terms = (lax.dynamic_slice_in_dim(x, at, count, axis=1) for x in (a, b))
        states = _chain(decays, terms, state, 1, reverse)
        h = lax.dynamic_update_slice_in_dim(h, jnp.stack(states, 1).astype(h.dtype), at, axis=1)
        return states[0 if reverse else -1], h

    def turn(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = (turns - 1 - number if reverse else number) * steps
        return advance(*carry, at, steps)

    carry = (start, jnp.zeros_like(b))
    # What does not fill a turn lies at the end of time.
    if left and reverse:
        carry = advance(*carry, turns * steps, left)
    if turns:
        carry = lax.fori_loop(0, turns, turn, carry)
    if left and not reverse:
        carry = advance(*carry, turns * steps, left)
    state, h = carry
    return h, state


def segments(
    a: jax.Array, b: jax.Array, start: jax.Array, steps: int, reverse: bool
) -> tuple[jax.Array, jax.Array, Any]:
    """Two passes over segments of `steps`, and whether they met; see the module's text."""
    batch, length, channels = b.shape
    if length <= steps:
        states = _chain(a, b, start, 1, reverse)
        return jnp.stack(states, 1).astype(b.dtype), states[0 if reverse else -1], True
    count = -(-length // steps)
    padding = ((0, 0), (0, count * steps - length), (0, 0))
    if padding[1][1]:
        # A step that changes nothing: it keeps the state, whichever way time runs.
        a, b = jnp.pad(a, padding, constant_values=1), jnp.pad(b, padding)
    a, b = (x.reshape(batch, count, steps, channels) for x in (a, b))
    from_zero = _chain(a, b, jnp.zeros((), start.dtype), 2, reverse)[0 if reverse else -1]
    product = a[:, :, 0].astype(start.dtype)
    for step in range(1, steps):
        product = product * a[:, :, step].astype(start.dtype)
    # Whether the links met among themselves is not asked: every one of them is the end of a segment here.
    ends, final, _ = segments(product, from_zero, start, steps, reverse)
    states = _chain(a, b, shifted(ends, start, reverse), 2, reverse)
    largest = functools.reduce(jnp.maximum, map(jnp.abs, states))
    met = segments_meet(ends, states[0 if reverse else -1], largest, length)
    h = jnp.stack(states, 2).astype(b.dtype).reshape(batch, count * steps, channels)
    return h[:, :length], final, met


def segments_meet(linked: jax.Array, computed: jax.Array, largest: jax.Array, length: int) -> jax.Array:
    """Whether segments [batch, segments, channels] end where the next were started, to rounding of the largest state.

    If they do, every step follows from the one before: a number that is not finite would be so at its segment's end.
    """
    allowed = drift(computed.dtype, length) * jnp.max(largest, 1, keepdims=True)
    return jnp.all(jnp.abs(computed - linked) <= allowed)  # false where anything is not finite


def _checked_segments(
    a: jax.Array, b: jax.Array, start: jax.Array, steps: int, reverse: bool
) -> tuple[jax.Array, jax.Array]:
    h, final, met = segments(a, b, start, steps, reverse)
    if met is True:
        return h, final
    return lax.cond(met, lambda: (h, final), lambda: _loop(a, b, start, steps, reverse))


def xla(
    a: jax.Array, b: jax.Array, initial: jax.Array | None = None, *, config: ChunkConfig, reverse: bool,
    return_final: bool,
) -> Any:  # fmt: skip
    """The forward pass; see the module's text."""
    start = start_of(initial, b, state_type(b))
    if not b.size:
        return (jnp.zeros_like(b), start) if return_final else jnp.zeros_like(b)
    scan = _checked_segments if config.parallel else _loop
    h, final = scan(a, b, start, config.steps, reverse)
    return (h, final) if return_final else h


def xla_grad(
    a: jax.Array, h: jax.Array, initial: jax.Array | None, d_h: jax.Array, d_final: jax.Array | None = None,
    *, config: ChunkConfig, reverse: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The backward pass: the same recurrence the other way, with a seen from one step before, and a product."""
    wide = state_type(h)
    start, ending = start_of(initial, h, wide), start_of(d_final, h, wide)
    if not h.size:
        return jnp.zeros_like(a), jnp.zeros_like(h), None if initial is None else ending.astype(initial.dtype)
    # What follows the last step is passed on as it is.
    decay = shifted(a, jnp.ones_like(ending), not reverse)
    total, last = xla(decay, d_h.astype(wide), ending, config=config, reverse=not reverse, return_final=True)
    da = (total * shifted(h, start, reverse).astype(wide)).astype(a.dtype)
    first = a[:, -1 if reverse else 0].astype(wide)
    return da, total.astype(h.dtype), None if initial is None else (first * last).astype(initial.dtype)


# JAX's own derivative would keep every state in float32, so the op's gradient stands in.
IMPLEMENTATION = Implementation(
    "xla", xla, own_gradient=True, needs_local_types=True,
    config_type=ChunkConfig, default_config=default_config, candidates=candidates,
)  # fmt: skip
GRAD_IMPLEMENTATION = Implementation(
    "xla", xla_grad, own_gradient=True, needs_local_types=True,
    config_type=ChunkConfig, default_config=default_config, candidates=candidates,
)  # fmt: skip
