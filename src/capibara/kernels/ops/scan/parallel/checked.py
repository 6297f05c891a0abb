"""A parallel scan that is looked over, and run again one step after another where it is not what `lax.scan` gives.

Products of scales, transitions and choices are put together over many steps on the parallel paths. That is the same as
the step for finite numbers, and not for others: a reset does not clear a NaN that it multiplies by zero, and a product
of large scales is infinite where the carry is zero. So the parallel run says whether it is sound (all carries finite,
and segments that meet); where it is not, `lax.scan` runs as well and its results, and its derivative, are taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from capibara.kernels.ops.scan.parallel.sequential import Leaves
from capibara.kernels.ops.scan.parallel.step import Step

Results = tuple[Leaves, Leaves]


def run(
    step: Step, parallel: Callable[[Step], tuple[Leaves, Leaves, Any]], one_by_one: Callable[[Step], Results],
    forward_mode: bool,
) -> Results:  # fmt: skip
    """(final carry, outputs) as leaves, of `parallel` where it finds itself sound and else of `one_by_one`.

    In `forward_mode` the parallel run is made twice, and JAX differentiates all of it in any mode; otherwise once, and
    in reverse mode.
    """
    given = [jnp.asarray(x) if not isinstance(x, jax.Array) else x for x in (*step.consts, *step.init, *step.xs)]
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in given]
    smooth = tuple(x for x, kind in zip(given, floats, strict=True) if kind)
    rest = tuple(x for x, kind in zip(given, floats, strict=True) if not kind)

    def of(smooth: Leaves, rest: Leaves) -> Step:
        first, second = iter(smooth), iter(rest)
        leaves = [next(first) if kind else next(second) for kind in floats]
        ends = (len(step.consts), len(step.consts) + step.size)
        consts, init, xs = leaves[: ends[0]], leaves[ends[0] : ends[1]], leaves[ends[1] :]
        return dataclasses.replace(step, consts=tuple(consts), init=tuple(init), xs=tuple(xs))

    def fast(smooth: Leaves, rest: Leaves) -> tuple[Leaves, tuple[Leaves, Any]]:
        carry, ys, sound = parallel(of(smooth, rest))
        made, others = _apart((*carry, *ys))
        return made, (others, everywhere(jax.lax.stop_gradient(sound)))

    def slow(smooth: Leaves, rest: Leaves) -> tuple[Leaves, Leaves]:
        carry, ys = one_by_one(of(smooth, rest))
        return _apart((*carry, *ys))

    def twice(smooth: Leaves, rest: Leaves) -> tuple[Leaves, Leaves]:
        _, (_, sound) = fast(*jax.lax.stop_gradient((smooth, rest)))

        def again(smooth: Leaves, rest: Leaves) -> tuple[Leaves, Leaves]:
            made, (others, _) = fast(smooth, rest)
            return made, others

        return jax.lax.cond(sound, again, slow, smooth, rest)

    @jax.custom_vjp
    def once(smooth: Leaves, rest: Leaves) -> tuple[Leaves, Leaves]:
        made, (others, sound) = fast(smooth, rest)
        return jax.lax.cond(sound, lambda: (made, others), lambda: slow(smooth, rest))

    def forward(smooth: Leaves, rest: Leaves) -> Any:
        made, pull, (others, sound) = jax.vjp(lambda given: fast(given, rest), smooth, has_aux=True)
        results = jax.lax.cond(sound, lambda: (made, others), lambda: slow(smooth, rest))
        return results, (pull, sound, smooth, rest)

    def backward(kept: Any, cotangents: Any) -> Any:
        pull, sound, smooth, rest = kept
        flows, _ = cotangents

        def slowly() -> Any:
            _, pull_slow, _ = jax.vjp(lambda given: slow(given, rest), smooth, has_aux=True)
            return pull_slow(flows)[0]

        # Not the sum of both: zero times what the parallel run has kept, which is not finite, is not zero.
        return jax.lax.cond(sound, lambda: pull(flows)[0], slowly), None

    once.defvjp(forward, backward)
    made, others = (twice if forward_mode else once)(smooth, rest)
    return _together(step, made, others)


def _apart(leaves: Sequence[Any]) -> tuple[Leaves, Leaves]:
    kinds = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    return (
        tuple(x for x, kind in zip(leaves, kinds, strict=True) if kind),
        tuple(x for x, kind in zip(leaves, kinds, strict=True) if not kind),
    )


def _together(step: Step, made: Leaves, others: Leaves) -> Results:
    first, second = iter(made), iter(others)
    kinds = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in step.jaxpr.outvars]
    leaves = tuple(next(first) if kind else next(second) for kind in kinds)
    return leaves[: step.size], leaves[step.size :]


def everywhere(flags: Any) -> Any:
    """Whether all are true, on every device and for every element that vmap maps over: one branch for all of them."""
    true = _all(flags)
    axes = tuple(sorted(jax.typeof(true).manual_axis_type.varying))
    # A branch may sum over the mesh, which all devices must then take.
    return jax.lax.pmin(true.astype(jnp.int32), axes) == 1 if axes else true


@custom_vmap
def _all(flags: Any) -> Any:
    return jnp.all(flags)


@_all.def_vmap
def _all_of_a_batch(axis_size: int, in_batched: Any, flags: Any) -> tuple[Any, bool]:
    return _all(flags), False
