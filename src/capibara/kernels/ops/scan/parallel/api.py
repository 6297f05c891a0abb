"""`parallel_scan`: `lax.scan` for any step, in parallel over time where the step is affine in the carry."""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from capibara.errors import rule_error, say_once, unknown_name
from capibara.kernels.core import dispatch
from capibara.kernels.core.context import current_target
from capibara.kernels.core.operands import no_array
from capibara.kernels.ops.scan.parallel import checked, diagonal, matrix, plan, sequential
from capibara.kernels.ops.scan.parallel.plan import PATHS, ScanPlan
from capibara.kernels.ops.scan.parallel.step import Step, trace
from capibara.kernels.ops.scan.recurrence.api import LINEAR_RECURRENCE
from capibara.kernels.ops.scan.recurrence.layout import read_flag

logger = logging.getLogger("capibara.kernels")


Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def parallel_scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    num_segments: int | None = None,
    use_checkpointing: bool = True,
    *,
    length: int | None = None,
    reverse: bool = False,
    path: str | None = None,
    implementation: str | None = None,
) -> tuple[Carry, Y]:
    """(final carry, ys), as `jax.lax.scan(f, init, xs, length, reverse)` gives them, for any step `f`.

    The step is traced and read. There are three paths, and `explain_scan` tells which one a scan takes and why:

    - "diagonal": every leaf of the carry becomes scale * leaf + offset, element by element, where scale and offset
      hang on x, on closed-over arrays and on leaves that were found before. All steps run at once, by
      `linear_recurrence`. Whole-number leaves, such as a counter, are exact. On a CPU a step without matrix products
      runs in one loop all the same, which is faster there; `path="diagonal"` or `num_segments` has them at once.
    - "matrix": the carry is affine in itself by matrix products. Segments run side by side; taken when a cost rule
      finds it faster, or when `num_segments` is given.
    - "sequential": anything else, by `lax.scan`.

    On the parallel paths products and sums of several steps are put together, which is what the step gives for finite
    numbers alone: a reset, `jnp.where(restart, x, carry + x)`, is a scale of zero there, and zero times NaN is NaN. So
    a step that is not one product and one sum is looked over when it has run; where a carry is not finite, or segments
    do not meet, `lax.scan` runs as well, and its results and derivative are taken. `explain_scan` says so.

    Sums are made in another order than one by one, so a float32 carry agrees to rounding. A bfloat16 carry on the
    diagonal path has a float32 state, which `lax.scan` rounds at every step: the two differ by about the square root of
    the number of steps that the carry remembers, in units of bfloat16's rounding. The parallel paths have the
    memory of all steps, or of a segment's. For forward-mode derivatives ask for implementation="reference", or for
    path="sequential".

    Args:
      num_segments: pieces of time. On the diagonal path they follow one another, each of them in parallel inside, and
        None is one piece. On the matrix path they run side by side. On the sequential path they are what a checkpoint
        is kept for, and None is the square root of the steps. More than there are steps means one step each.
      use_checkpointing: compute again, in the backward pass, what is between the checkpoints: memory for
        `num_segments` carries and for one segment. In the diagonal path's one piece, and on the matrix path, the
        carries of all steps are kept and what the step computes from them is not.
      length: the number of steps, where xs does not say it.
      reverse: from the last step to the first.
      path: take this one; a step that it cannot run is an error.
      implementation: which implementation of `linear_recurrence` the diagonal path runs on; an error where none of
        the carry's leaves runs on it, such as whole numbers and float64.

    >>> import jax.numpy as jnp
    >>> def step(h, x):
    ...     h = 0.5 * h + x
    ...     return h, 2 * h
    >>> final, ys = parallel_scan(step, jnp.zeros(()), jnp.array([1.0, 2.0, 3.0]))
    >>> float(final), ys.tolist()
    (4.25, [2.0, 5.0, 8.5])
    >>> print(explain_scan(step, jnp.zeros(()), jnp.zeros(3)).path)
    diagonal
    """
    _check(f, init, xs, num_segments, path)
    use_checkpointing = read_flag("use_checkpointing", use_checkpointing)
    reverse = read_flag("reverse", reverse)
    if implementation is not None:
        LINEAR_RECURRENCE.implementation(implementation)  # an unknown name is an error, whatever runs
    step = trace(f, init, xs, length, reverse)
    if step is None:
        return jax.lax.scan(f, init, xs, length=0, reverse=reverse)
    made = plan.make(step, _clamped(num_segments, step.length), use_checkpointing, path, implementation is not None)
    if implementation is not None:
        _check_runs(step, made, implementation)
    dispatch.note(made)
    leaves = [leaf for part in _run(step, made, implementation) for leaf in part]
    leaves = [_typed(leaf, weak) for leaf, weak in zip(leaves, step.weak, strict=True)]
    carry, ys = leaves[: step.size], leaves[step.size :]
    return jax.tree.unflatten(step.carry_tree, carry), jax.tree.unflatten(step.ys_tree, ys)


def explain_scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    num_segments: int | None = None,
    use_checkpointing: bool = True,
    *,
    length: int | None = None,
    reverse: bool = False,
    path: str | None = None,
    implementation: str | None = None,
) -> ScanPlan:
    """What `parallel_scan` of the same arguments would run, and why; nothing is computed.

    `init` and `xs` are arrays or `jax.ShapeDtypeStruct`s. `str()` of the answer is the words; its fields and
    `as_dict()` are the data: path, why, segments, the primitive and the line that kept the scan sequential, and the
    `linear_recurrence` calls with the implementation that dispatch would take; and `checked`, whether the run is looked
    over and made again one by one where a carry is not finite.

    >>> import jax.numpy as jnp
    >>> plan = explain_scan(lambda h, x: (jnp.tanh(h + x), h), jnp.zeros(4), jnp.zeros((9, 4)))
    >>> plan.path, plan.primitive, plan.segments
    ('sequential', 'tanh', 3)
    """
    _check(f, init, xs, num_segments, path)
    options: dict[str, Any] = {"length": length, "reverse": reverse, "path": path, "implementation": implementation}

    def scan(init: Any, xs: Any) -> Any:
        return parallel_scan(f, init, xs, num_segments, use_checkpointing, **options)

    with dispatch.recording() as found:
        jax.eval_shape(scan, init, xs)
    decisions: list[Any] = list(found)
    noted = [one for one in decisions if isinstance(one, ScanPlan)]
    if not noted:
        why = "there are no steps"
        return ScanPlan("sequential", why, 0, 1, use_checkpointing, current_target().platform)
    # Scans inside the step are noted too, before the scan itself.
    made = noted[-1]
    after = decisions[max(i for i, one in enumerate(decisions) if one is made) + 1 :]
    # Leaves and segments of one shape make the same call.
    distinct = {str(one): one for one in after}
    return dataclasses.replace(made, recurrences=tuple(distinct.values()) if made.rounds and not made.one_loop else ())


def _check_runs(step: Step, made: ScanPlan, implementation: str) -> None:
    given = f"implementation={implementation!r} for a {made.path} scan"
    found = [leaf for round_ in made.rounds for leaf in round_]
    if not found:
        told = f"{given}: {made.why}"
    elif not any(diagonal.takes(step.init[leaf].dtype) for leaf in found):
        told = f"{given} of {', '.join(sorted({str(step.init[leaf].dtype) for leaf in found}))}, which run without it"
    else:
        return
    rule = "implementation names one of linear_recurrence, which the diagonal path runs on"
    raise rule_error(rule, told, "leave it out")


def _check(f: Any, init: Any, xs: Any, num_segments: Any, path: str | None) -> None:
    if not callable(f):
        raise rule_error("The step is a function of (carry, x)", repr(f), "pass a function")
    for name, tree in (("init", init), ("xs", xs)):
        for where, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
                continue
            try:
                jax.typeof(leaf)
            except TypeError as error:
                leaf_name = f"{name}{jax.tree_util.keystr(where)}"
                raise no_array("parallel_scan takes trees of arrays", leaf_name, leaf) from error
    try:
        wrong = num_segments is not None and (isinstance(num_segments, bool) or operator.index(num_segments) < 1)
    except TypeError:  # also of what is traced
        wrong = True
    if wrong:
        fix = "pass 1 or more that is not traced, or None"
        raise rule_error("num_segments is a whole number above zero", repr(num_segments), fix)
    if path is not None and path not in PATHS:
        raise unknown_name("path of parallel_scan", path, PATHS)


def _clamped(num_segments: int | None, length: int) -> int | None:
    if num_segments is None or num_segments <= length:
        return None if num_segments is None else int(num_segments)
    text = "parallel_scan: num_segments=%d of %d steps is %d segments of one step"
    say_once(logger, (int(num_segments), length), text, num_segments, length, length)
    return length


def _typed(x: Any, weak: bool) -> Any:
    """`x`, weakly typed where lax.scan's is: what it meets next decides the type of what they make together."""
    if jax.typeof(x).weak_type == weak:
        return x
    from jax._src.lax.lax import _convert_element_type  # there is no public way to write a weak type

    return _convert_element_type(x, x.dtype, weak)


def _run(step: Step, made: ScanPlan, implementation: str | None) -> Any:
    if made.one_loop:
        return sequential.in_one_loop(step, made.use_checkpointing)
    if made.path == "sequential":
        return sequential.run(step, made.segments, made.use_checkpointing)
    path = diagonal.run if made.path == "diagonal" else matrix.run

    def parallel(step: Step) -> Any:
        return path(step, made.rounds, made.segments, made.use_checkpointing, implementation, made.inexact)

    def one_by_one(step: Step) -> Any:
        return sequential.run(step, sequential.default_segments(step.length), made.use_checkpointing)

    if not made.checked:
        return parallel(step)[:2]
    # Forward mode is what the recurrence's reference is asked for.
    return checked.run(step, parallel, one_by_one, forward_mode=implementation == "reference")
