"""Which values of a step are affine in one leaf of the carry, element by element, and with which coefficients.

The step's equations are interpreted on three kinds of values: plain arrays, which do not hang on the carry; `Affine`,
scale * leaf + offset; and `General`, anything else, with the equation that made it so. Run on shapes it is the
inspection, run on arrays it gives the coefficients: there is one set of rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.kernels.ops.scan.parallel.step import CALLS, Step, compute, needed, read, where


@dataclasses.dataclass(frozen=True)
class View:
    """A move of elements, compared by what it does."""

    key: str
    fn: Callable[[Any], Any] = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Affine:
    """scale * leaf + offset. No scale is 1, no offset is 0; a scale without axes holds for every element.

    `views` are the moves of elements (reshape, transpose, ...) between the leaf and this value; scale and offset have
    made them already. `exact` says that the step itself is this one product and this one sum. Where it is not, the two
    agree for finite numbers alone: a choice of something else than the leaf is a scale of zero here, and zero times NaN
    is NaN; and products and sums that were put together do not overflow where those of the step do.
    """

    scale: Any
    offset: Any
    views: tuple[View, ...] = ()
    exact: bool = True


@dataclasses.dataclass(frozen=True)
class General:
    """Not affine: the operation that made it so, and the line of the step that called it."""

    operation: str
    line: str
    reason: str


# Operations that move elements and compute nothing.
VIEWS = ("reshape", "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "rev")
SAME = ("copy", "copy_p", "pvary", "pcast", "sharding_constraint", "name")
OWN_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "stop_gradient", "custom_lin")


def split(step: Step, leaf: int, carry: Sequence[Any], x: Sequence[Any]) -> Any:
    """The new value of a leaf: a plain array, `Affine` in its old value, or `General`.

    `carry` holds the other leaves: an array where its trajectory is known, else a `General`; at `leaf`, anything.
    """
    seeds = list(carry)
    seeds[leaf] = Affine(None, None)
    env = {**dict(zip(step.jaxpr.constvars, step.consts, strict=True)), **step.inputs(seeds, x)}
    return _interpret(step.jaxpr, env, [step.jaxpr.outvars[leaf]])[0]


def moves(made: Affine, shape: tuple[int, ...]) -> bool:
    """Whether the views leave any element of a leaf of this shape at another place."""
    if not made.views:
        return False
    places = np.arange(int(np.prod(shape))).reshape(shape)
    seen: Any = places
    with jax.ensure_compile_time_eval():
        for view in made.views:
            seen = view.fn(jnp.asarray(seen))
    return not (seen.shape == shape and np.array_equal(np.asarray(seen), places))


def _interpret(jaxpr: Any, env: dict[Any, Any], wanted: Sequence[Any]) -> list[Any]:
    for eqn in needed(jaxpr.eqns, wanted, env):
        args = [read(env, v) for v in eqn.invars]
        env.update(zip(eqn.outvars, _equation(eqn, args), strict=True))
    return [read(env, v) for v in wanted]


def _equation(eqn: Any, args: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in CALLS and any(isinstance(a, Affine | General) for a in args):
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        consts = getattr(inner, "consts", ())
        body = getattr(inner, "jaxpr", inner)
        env = {**dict(zip(body.constvars, consts, strict=True)), **dict(zip(body.invars, args, strict=True))}
        return _interpret(body, env, body.outvars)
    for arg in args:
        if isinstance(arg, General):
            return [arg] * len(eqn.outvars)
    if not any(isinstance(a, Affine) for a in args):
        return compute(eqn, args)
    rule = _RULES.get(name)
    made = refuse(eqn) if rule is None else rule(eqn, args)
    if isinstance(made, General):
        return [made] * len(eqn.outvars)
    return [made]


def refuse(eqn: Any, reason: str = "") -> General:
    name = eqn.primitive.name
    if not reason and name in OWN_DERIVATIVE:
        reason = "it has a derivative of its own, which an affine formula would not keep"
    return General(name, where(eqn), reason or "it is not affine, element by element, in the carry")


def _full(x: Any, aval: Any) -> Any:
    return jnp.broadcast_to(jnp.asarray(x, aval.dtype), aval.shape)


def _scale(a: Affine, aval: Any) -> Any:
    return jnp.ones((), aval.dtype) if a.scale is None else a.scale


def _plus(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def _add(eqn: Any, args: list[Any]) -> Any:
    a, b = args
    aval = eqn.outvars[0].aval
    if isinstance(a, Affine) and isinstance(b, Affine):
        if a.views != b.views:
            return refuse(eqn, "it adds the carry to itself with its elements moved")
        return Affine(_scale(a, aval) + _scale(b, aval), _plus(a.offset, b.offset), a.views, exact=False)
    if not isinstance(a, Affine):
        a, b = b, a
    return Affine(a.scale, _plus(a.offset, _full(b, aval)), a.views, a.exact and a.offset is None)


def _negative(a: Any, aval: Any) -> Any:
    if not isinstance(a, Affine):
        return -jnp.asarray(a)
    return Affine(-_scale(a, aval), None if a.offset is None else -a.offset, a.views, a.exact)


def _sub(eqn: Any, args: list[Any]) -> Any:
    return _add(eqn, [args[0], _negative(args[1], eqn.outvars[0].aval)])


def _times(a: Affine, by: Callable[[Any], Any], aval: Any) -> Affine:
    return Affine(by(_scale(a, aval)), None if a.offset is None else by(a.offset), a.views, exact=False)


def _mul(eqn: Any, args: list[Any]) -> Any:
    a, b = args
    if isinstance(a, Affine) and isinstance(b, Affine):
        return refuse(eqn, "it multiplies the carry by itself")
    if not isinstance(a, Affine):
        a, b = b, a
    aval = eqn.outvars[0].aval
    factor = jnp.asarray(b, aval.dtype)
    if a.scale is None:
        offset = None if a.offset is None else a.offset * factor
        return Affine(factor, offset, a.views, a.exact and offset is None)
    return _times(a, lambda part: part * factor, aval)


def _div(eqn: Any, args: list[Any]) -> Any:
    a, b = args
    aval = eqn.outvars[0].aval
    if isinstance(b, Affine):
        return refuse(eqn, "it divides by the carry")
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return refuse(eqn, "it divides whole numbers, which rounds")
    return _times(a, lambda part: part / b, aval)


def _convert(eqn: Any, args: list[Any]) -> Any:
    (a,) = args
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    if old != new and not (floats and jnp.promote_types(old, new) == new):
        return refuse(eqn, f"{old} to {new} rounds at every step")
    scale, offset = (None if part is None else part.astype(new) for part in (a.scale, a.offset))
    return Affine(scale, offset, a.views, a.exact)


def _same(eqn: Any, args: list[Any]) -> Any:
    return args[0]


def _view(eqn: Any, args: list[Any]) -> Any:
    if any(isinstance(a, Affine) for a in args[1:]):
        return refuse(eqn)
    key = f"{eqn.primitive.name} {eqn.params}"
    move = View(key, lambda x: compute(eqn, [x, *args[1:]])[0])
    (a, *_), aval = args, eqn.invars[0].aval
    scale = a.scale if a.scale is None or jnp.ndim(a.scale) == 0 else move.fn(_full(a.scale, aval))
    return Affine(scale, None if a.offset is None else move.fn(a.offset), (*a.views, move), a.exact)


def _select(eqn: Any, args: list[Any]) -> Any:
    which, *cases = args
    if isinstance(which, Affine):
        return refuse(eqn, "which value it takes hangs on the carry")
    aval = eqn.outvars[0].aval
    views = {case.views for case in cases if isinstance(case, Affine)}
    if len(views) > 1:
        return refuse(eqn, "its choices have the carry's elements at different places")
    (moved,) = views
    parts = [case if isinstance(case, Affine) else Affine(jnp.zeros((), aval.dtype), case, moved) for case in cases]
    scale = jax.lax.select_n(which, *(_full(_scale(part, aval), aval) for part in parts))
    offset = jax.lax.select_n(which, *(_full(0 if part.offset is None else part.offset, aval) for part in parts))
    exact = all(isinstance(case, Affine) and case.exact for case in cases)
    return Affine(scale, offset, moved, exact)


_RULES: dict[str, Callable[[Any, list[Any]], Any]] = {
    "add": _add, "add_any": _add, "sub": _sub, "mul": _mul, "div": _div, "select_n": _select,
    "neg": lambda eqn, args: _negative(args[0], eqn.outvars[0].aval),
    "convert_element_type": _convert, **dict.fromkeys(SAME, _same), **dict.fromkeys(VIEWS, _view),
}  # fmt: skip
