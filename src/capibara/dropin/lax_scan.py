"""What `lax.associative_scan` calls inside an optimisation context: jax's own function first, then its arguments.

The combination of a linear recurrence, ((a1, b1), (a2, b2)) -> (a1 a2, a2 b1 + b2), is recognised by tracing it, and
runs by kernel dispatch. Anything else is jax's own call, and why is logged once and told by `why_not`; a mistake is
jax's own call too, so that every error is the one jax raises.
"""

from __future__ import annotations

import collections
import inspect
import logging
from collections.abc import Callable
from typing import Any

import jax

from capibara.errors import say_once
from capibara.kernels.ops.scan.parallel.diagonal import takes
from capibara.kernels.ops.scan.parallel.step import CALLS, is_literal
from capibara.kernels.ops.scan.recurrence.api import linear_recurrence

logger = logging.getLogger("capibara.kernels")

Polynomial = collections.Counter[tuple[str, ...]]


def associative_scan(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """jax.lax.associative_scan by kernel dispatch where it is a linear recurrence; its state is float32.

    It differentiates in reverse mode. `jvp`, `jacfwd` and `linear_transpose` of it want a call outside of the context.
    """
    found = _recognised(args, kwargs)
    if isinstance(found, str):
        if found:
            say_once(logger, found, "lax.associative_scan is jax's own here: %s", found)
        return original(*args, **kwargs)
    given, decays = found
    leaves, tree = jax.tree.flatten(given["elems"])
    axis, reverse = given["axis"] % leaves[0].ndim, bool(given["reverse"])
    a, b = leaves[decays], leaves[1 - decays]
    made = [jax.lax.cumprod(a, axis, reverse), linear_recurrence(a, b, axis=axis, reverse=reverse)]
    return jax.tree.unflatten(tree, made if decays == 0 else made[::-1])


def why_not(*args: Any, **kwargs: Any) -> str | None:
    """Why this call of `lax.associative_scan` is jax's own also inside a context; None when it is dispatched.

    Empty for a call that jax refuses in its own words.

    >>> pair = (jnp.ones((4, 2)), jnp.ones((4, 2)))
    >>> why_not(lambda u, v: (u[0] * v[0], v[0] * u[1] + v[1]), pair)
    >>> why_not(jnp.add, pair[0])
    'its elements are 1 arrays; a linear recurrence has two'
    """
    found = _recognised(args, kwargs)
    return found if isinstance(found, str) else None


def _recognised(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | tuple[dict[str, Any], int]:
    """The call's arguments and which leaf holds the decays, or why it is not a linear recurrence."""
    try:
        bound = inspect.signature(jax.lax.associative_scan).bind(*args, **kwargs)
    except TypeError:
        return ""
    bound.apply_defaults()
    given = bound.arguments
    leaves = jax.tree.leaves(given["elems"])
    if len(leaves) != 2:
        return f"its elements are {len(leaves)} arrays; a linear recurrence has two"
    if not all(isinstance(x, jax.Array) for x in leaves) or not callable(given["fn"]):
        return "its elements are not arrays of jax"
    a, b = leaves
    if a.shape != b.shape or a.dtype != b.dtype:
        return "its two arrays have different shapes or types"
    if not takes(a.dtype):
        return f"its arrays are {a.dtype}; the recurrence has a float32 state"
    axis = given["axis"]
    # jax takes an axis from the end only forwards.
    if not isinstance(axis, int) or not (0 if given["reverse"] else -a.ndim) <= axis < a.ndim:
        return ""
    if a.shape[axis] < 2:
        return "it has less than two steps"
    found = _decays(given["fn"], given["elems"])
    return (given, found) if isinstance(found, int) else found


def _decays(fn: Callable[..., Any], elems: Any) -> int | str:
    """Which of the two leaves is multiplied up, if `fn` is the combination of a linear recurrence."""
    traced = jax.make_jaxpr(fn)(elems, elems)
    trees: list[Any] = [jax.tree.structure(x) for x in (elems, jax.eval_shape(fn, elems, elems))]
    if trees[0] != trees[1]:
        return ""
    names = [Polynomial({(name,): 1}) for name in ("x1", "y1", "x2", "y2")]
    try:
        made = _polynomials(traced.jaxpr, names)
    except _OtherError as stopped:
        return f"its combination has {stopped}, which a linear recurrence has not"
    if made == [{("x1", "x2"): 1}, {("x2", "y1"): 1, ("y2",): 1}]:
        return 0
    if made == [{("x1", "y2"): 1, ("x2",): 1}, {("y1", "y2"): 1}]:
        return 1
    return "its combination is not that of a linear recurrence, (a1 a2, a2 b1 + b2)"


class _OtherError(Exception):
    """An operation that is neither a sum nor a product."""


def _polynomials(jaxpr: Any, args: list[Polynomial]) -> list[Polynomial]:
    """The outputs as sums of products of the arguments, with how often each product occurs."""
    env: dict[Any, Polynomial] = dict(zip(jaxpr.invars, args, strict=True))

    def value(variable: Any) -> Polynomial:
        if is_literal(variable) or variable not in env:
            raise _OtherError("a constant")
        return env[variable]

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        parts = [value(v) for v in eqn.invars]
        if name in ("add", "add_any"):
            made = [Polynomial({key: parts[0][key] + parts[1][key] for key in {*parts[0], *parts[1]}})]
        elif name == "mul":
            product = Polynomial()
            for left, times in parts[0].items():
                for right, again in parts[1].items():
                    product[tuple(sorted((*left, *right)))] += times * again
            made = [product]
        elif name in CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            made = _polynomials(getattr(inner, "jaxpr", inner), parts)
        else:
            raise _OtherError(name)
        env.update(zip(eqn.outvars, made, strict=True))
    return [value(v) for v in jaxpr.outvars]
