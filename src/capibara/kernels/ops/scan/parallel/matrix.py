"""Segments in parallel where the carry is affine in itself by matrices.

Each segment is run from zero and, by the step's own derivative, from every direction that the carry can take: its
offset and its transition. The segments' first carries follow from them one after another, and then every segment runs
from the right one, all of them side by side. Sound it is where each segment ends in the next one's first carry: what a
product of transitions lost, or made infinite, shows there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from capibara.kernels.core.varying import vary_like
from capibara.kernels.ops.scan.parallel import diagonal
from capibara.kernels.ops.scan.parallel.sequential import Leaves
from capibara.kernels.ops.scan.parallel.step import Step
from capibara.kernels.ops.scan.recurrence.rules import drift


def run(
    step: Step, rounds: diagonal.Rounds, segments: int, checkpoints: bool, implementation: str | None,
    inexact: Sequence[int],
) -> tuple[Leaves, Leaves, Any]:  # fmt: skip
    """(final carry, outputs) as leaves, and whether they are sound. The leaves of `rounds` are found first.

    `inexact` are those of them that have to be looked over.
    """
    again: Any = jax.checkpoint if checkpoints else diagonal._once
    paths = diagonal.trajectories(step, rounds, step.init, step.xs, step.length, implementation, again)
    before = {i: diagonal.shifted(path, step.init[i], step.reverse) for i, path in paths.items()}
    left = tuple(i for i in range(step.size) if i not in paths)

    def one(state: Leaves, inputs: Any) -> tuple[Leaves, Leaves]:
        known, x = inputs
        carry = tuple(known[i] if i in known else state[left.index(i)] for i in range(step.size))
        new, ys = step(carry, x)
        return tuple(new[i] for i in left), ys

    inputs = (before, step.xs)
    if step.reverse:
        inputs = jax.tree.map(lambda x: jnp.flip(x, 0), inputs)
    # With checkpoints each step keeps its carry and computes the rest again.
    state, ys, met = _forward(again(one), tuple(step.init[i] for i in left), inputs, step.length, segments)
    if step.reverse:
        ys = jax.tree.map(lambda y: jnp.flip(y, 0), ys)
    ends = tuple(paths[i][0 if step.reverse else -1] if i in paths else state[left.index(i)] for i in range(step.size))
    if inexact:
        met &= diagonal.sound(step, inexact, paths, step.init, step.xs, step.length).all()
    return ends, ys, met


def _forward(one: Any, init: Leaves, inputs: Any, length: int, segments: int) -> tuple[Leaves, Leaves, Any]:
    each = length // segments
    whole = segments * each
    # Time within a segment in front, so that a loop over it takes all segments along.
    main = jax.tree.map(lambda x: jnp.swapaxes(x[:whole].reshape(segments, each, *x.shape[1:]), 0, 1), inputs)
    vector, leaves_of = ravel_pytree(init)
    zero = jax.tree.map(lambda x: vary_like(jnp.zeros_like(x), x), init)
    directions = jax.vmap(leaves_of)(vary_like(jnp.eye(vector.size, dtype=vector.dtype), vector))

    def along(state: Any, x: Any) -> tuple[Any, None]:
        offset, columns = state
        new, push = jax.linearize(lambda c: one(c, x)[0], offset)
        return (new, jax.vmap(push)(columns)), None

    def beside(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (segments, *x.shape)), tree)

    def sides(state: Any, x: Any) -> Any:
        return jax.vmap(along)(state, x)

    (offsets, columns), _ = jax.lax.scan(sides, beside((zero, directions)), main, length=each)
    offset_vectors = jax.vmap(lambda tree: ravel_pytree(tree)[0])(offsets)
    # Row j of a segment is where direction j goes.
    transitions = jax.vmap(jax.vmap(lambda tree: ravel_pytree(tree)[0]))(columns)

    def next_start(start: Any, of: Any) -> tuple[Any, Any]:
        transition, offset = of
        return jnp.dot(start, transition, precision="highest") + offset, start

    last, starts = jax.lax.scan(next_start, vector, (transitions, offset_vectors))
    ends, ys = jax.lax.scan(lambda state, x: jax.vmap(one)(state, x), jax.vmap(leaves_of)(starts), main, length=each)
    ys = jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1).reshape(whole, *y.shape[2:]), ys)
    state = jax.tree.map(lambda x: x[-1], ends)
    met = _meet(jnp.concatenate([starts[1:], last[None]]), jax.vmap(lambda tree: ravel_pytree(tree)[0])(ends), length)
    if whole < length:
        state, rest = jax.lax.scan(one, state, jax.tree.map(lambda x: x[whole:], inputs), length=length - whole)
        ys = jax.tree.map(lambda y, r: jnp.concatenate([y, r]), ys, rest)
    return state, ys, met


def _meet(linked: Any, computed: Any, length: int) -> Any:
    """Whether segments [segments, numbers] end where the next were started, to rounding of the largest of all.

    A sum of a transition's row has as many terms as there are numbers, and as many roundings a step.
    """
    linked, computed = jax.lax.stop_gradient((linked, computed))
    allowed = linked.shape[1] * drift(linked.dtype, length) * jnp.max(jnp.abs(computed), initial=0)
    return jnp.all(jnp.abs(computed - linked) <= allowed)  # false where anything is not finite
