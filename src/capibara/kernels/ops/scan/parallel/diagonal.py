"""All steps at once where every leaf is scale * leaf + offset: the coefficients, the recurrences, then the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.ops.scan.parallel import affine
from capibara.kernels.ops.scan.parallel.affine import Affine
from capibara.kernels.ops.scan.parallel.sequential import Leaves, in_segments
from capibara.kernels.ops.scan.parallel.step import Step, is_literal, needed
from capibara.kernels.ops.scan.recurrence.api import linear_recurrence

Rounds = Sequence[Sequence[int]]


def run(
    step: Step, rounds: Rounds, segments: int, checkpoints: bool, implementation: str | None, inexact: Sequence[int]
) -> tuple[Leaves, Leaves, Any]:
    """(final carry, outputs) as leaves, and whether they are sound. Inside a segment all steps run at once.

    Segments follow one another. `inexact` are the leaves that have to be looked over.
    """

    def segment(carry: Leaves, xs: Leaves, steps: int) -> tuple[Leaves, Leaves]:
        # In one piece, the trajectories are kept and only what is computed from them is computed again.
        again = jax.checkpoint if checkpoints and segments == 1 else _once
        paths = trajectories(step, rounds, carry, xs, steps, implementation, again)
        ends = tuple(paths[i][0 if step.reverse else -1] for i in range(step.size))
        made = outputs(step, paths, carry, xs, steps, again)
        return ends, (*made, sound(step, inexact, paths, carry, xs, steps)) if inexact else made

    if segments == 1:
        carry, ys = segment(step.init, step.xs, step.length)
    else:
        carry, ys = in_segments(segment, step.init, step.xs, step.length, segments, step.reverse, checkpoints)
    return (carry, ys[:-1], ys[-1]) if inexact else (carry, ys, True)


def sound(step: Step, leaves: Sequence[int], paths: dict[int, Any], carry: Leaves, xs: Leaves, steps: int) -> Any:
    """At every step, whether these leaves are finite, and also as the step itself makes them of the carry before."""
    known = tuple(paths)
    before = {i: shifted(paths[i], carry[i], step.reverse) for i in known}

    def new(before: dict[int, Any], x: Leaves) -> Leaves:
        env = {step.jaxpr.invars[i]: value for i, value in before.items()}
        env |= dict(zip(step.jaxpr.invars[step.size :], x, strict=True))
        return tuple(step.values([step.jaxpr.outvars[i] for i in leaves], env))

    made = jax.vmap(new, axis_size=steps)(*jax.lax.stop_gradient((before, xs)))
    found = jnp.ones((steps,), bool)
    for value in (*made, *(jax.lax.stop_gradient(paths[i]) for i in leaves)):
        found &= jnp.isfinite(value).reshape(steps, -1).all(1)
    return found


def _once(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def trajectories(
    step: Step, rounds: Rounds, carry: Leaves, xs: Leaves, steps: int, implementation: str | None, again: Any
) -> dict[int, Any]:
    """For each leaf of the rounds, its value after every step."""
    known: dict[int, Any] = {}
    shifted_once: dict[int, Any] = {}
    for found in rounds:
        used = sorted({i for leaf in found for i in step.depends[leaf] if i in known})
        for i in used:
            if i not in shifted_once:
                shifted_once[i] = shifted(known[i], carry[i], step.reverse)
        before = {i: shifted_once[i] for i in used}
        plain: dict[int, bool] = {}

        def coefficients(before: dict[int, Any], x: Leaves, found: Any = found, plain: Any = plain) -> dict[int, Any]:
            made = {i: affine.split(step, i, [before.get(j) for j in range(step.size)], x) for i in found}
            plain.update((i, not isinstance(one, Affine)) for i, one in made.items())
            return {i: (one.scale, one.offset) if isinstance(one, Affine) else one for i, one in made.items()}

        parts = jax.vmap(again(coefficients), axis_size=steps)(before, xs)
        for i in found:
            if plain[i]:
                known[i] = jnp.broadcast_to(parts[i], (steps, *carry[i].shape)).astype(carry[i].dtype)
            else:
                scale, offset = parts[i]
                known[i] = recurrence(scale, offset, carry[i], steps, step.reverse, implementation)
    return known


def takes(dtype: Any) -> bool:
    """Whether `linear_recurrence` keeps a leaf's digits: its state is float32, or complex64."""
    widest = 8 if jnp.issubdtype(dtype, jnp.complexfloating) else 4
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and dtype.itemsize <= widest


def recurrence(scale: Any, offset: Any, first: Any, steps: int, reverse: bool, implementation: str | None) -> Any:
    """h = scale * h + offset from `first`, after every step; no scale is 1, no offset 0, both have time in front."""
    shape, dtype = (steps, *first.shape), first.dtype

    def full(part: Any, otherwise: int) -> Any:
        if part is None:
            return jnp.full(shape, otherwise, dtype)
        return jnp.broadcast_to(part.reshape(steps, *(1,) * (len(shape) - part.ndim), *part.shape[1:]), shape)

    if scale is None and offset is None:
        return jnp.broadcast_to(first, shape)
    if takes(dtype):
        made = linear_recurrence(
            full(scale, 1), full(offset, 0), first, reverse=reverse, axis=0, implementation=implementation
        )
        return made.astype(dtype)
    # Whole numbers wrap around, which is exact in any order; float64 keeps its digits. The first step takes the carry.
    at = -1 if reverse else 0
    if scale is None and jnp.issubdtype(dtype, jnp.integer):
        return jax.lax.cumsum(full(offset, 0).at[at].add(first), axis=0, reverse=reverse)
    a, b = full(scale, 1), full(offset, 0)
    b = b.at[at].add(a[at] * first)
    return jax.lax.associative_scan(lambda u, v: (u[0] * v[0], v[0] * u[1] + v[1]), (a, b), reverse=reverse)[1]


def shifted(path: Any, first: Any, reverse: bool) -> Any:
    """Each step's old value from the values after every step."""
    pair = (path[1:], first[None]) if reverse else (first[None], path[:-1])
    return jnp.concatenate(pair)


def outputs(step: Step, paths: dict[int, Any], carry: Leaves, xs: Leaves, steps: int, again: Any) -> Leaves:
    """The step's outputs at every step, from the known carries."""
    jaxpr = step.jaxpr
    wanted = jaxpr.outvars[step.size :]
    inputs = set(jaxpr.invars) | set(jaxpr.constvars)
    new = {v: i for i, v in enumerate(jaxpr.outvars[: step.size]) if not is_literal(v) and v not in inputs}
    if all(not is_literal(v) and v in new for v in wanted):
        return tuple(paths[new[v]] for v in wanted)
    given = dict.fromkeys([*new, *jaxpr.constvars, *jaxpr.invars])
    used = {v for eqn in needed(jaxpr.eqns, wanted, given) for v in eqn.invars if not is_literal(v)}
    used |= {v for v in wanted if not is_literal(v)}
    old = {i: shifted(paths[i], carry[i], step.reverse) for i in range(step.size) if jaxpr.invars[i] in used}
    after = {v: paths[i] for v, i in new.items() if v in used}

    def made(old: dict[int, Any], after: list[Any], x: Leaves) -> Leaves:
        env = {jaxpr.invars[i]: value for i, value in old.items()}
        env |= dict(zip(jaxpr.invars[step.size :], x, strict=True))
        env |= dict(zip(after_names, after, strict=True))
        return tuple(step.values(wanted, env))

    after_names = list(after)
    return tuple(jax.vmap(again(made), axis_size=steps)(old, list(after.values()), xs))
