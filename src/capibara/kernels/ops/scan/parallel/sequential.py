"""One step after another, in segments of which only the first carry is kept for the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Leaves = tuple[Any, ...]
Segment = Callable[[Leaves, Leaves, int], tuple[Leaves, Leaves]]


def in_segments(
    run: Segment, init: Leaves, xs: Leaves, length: int, segments: int, reverse: bool, checkpoints: bool
) -> tuple[Leaves, Leaves]:
    """`run(carry, xs, steps)` over equal segments, one after another, and over what is left at the end."""
    each = -(-length // segments)
    whole = length // each
    left = length - whole * each

    def kept(steps: int, inside_a_loop: bool) -> Callable[[Leaves, Leaves], tuple[Leaves, Leaves]]:
        # A loop's body is not merged with its recomputation, and need not be kept from it.
        def one(carry: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
            return run(carry, x, steps)

        return jax.checkpoint(one, prevent_cse=not inside_a_loop) if checkpoints else one

    if whole == 1 and not left:
        return kept(length, False)(init, xs)
    main = tuple(x[: whole * each].reshape(whole, each, *x.shape[1:]) for x in xs)
    rest = tuple(x[whole * each :] for x in xs)
    ys_rest: Leaves = ()
    carry = init
    if left and reverse:
        carry, ys_rest = kept(left, False)(carry, rest)
    carry, ys = jax.lax.scan(kept(each, True), carry, main, length=whole, reverse=reverse)
    ys = tuple(y.reshape(whole * each, *y.shape[2:]) for y in ys)
    if left and not reverse:
        carry, ys_rest = kept(left, False)(carry, rest)
    if left:
        ys = tuple(jnp.concatenate(pair) for pair in zip(ys, ys_rest, strict=True))
    return carry, ys


def in_one_loop(step: Any, checkpoints: bool) -> tuple[Leaves, Leaves]:
    """The plain loop. With checkpoints each step keeps its carry for the backward pass, and computes the rest again."""

    def one(carry: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
        return step(carry, x)

    body = jax.checkpoint(one, prevent_cse=False) if checkpoints else one
    return jax.lax.scan(body, step.init, step.xs, length=step.length, reverse=step.reverse)


def default_segments(length: int) -> int:
    """The square root of the steps: as many segments as steps in each."""
    return math.isqrt(length - 1) + 1


def run(step: Any, segments: int, checkpoints: bool) -> tuple[Leaves, Leaves]:
    """A scan of a `Step`, by jax's own loop."""

    def segment(carry: Leaves, xs: Leaves, steps: int) -> tuple[Leaves, Leaves]:
        return jax.lax.scan(step, carry, xs, length=steps, reverse=step.reverse)

    if not checkpoints:
        return segment(step.init, step.xs, step.length)
    return in_segments(segment, step.init, step.xs, step.length, segments, step.reverse, True)
