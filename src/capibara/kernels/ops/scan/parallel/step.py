"""The step of a scan, traced once: what inspection reads and every path runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.source_info_util as source
import jax.numpy as jnp

from capibara.errors import rule_error

# Equations that call others, which inspection looks into.
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One scan, with its step as equations. `consts` are the arrays that the step closes over."""

    jaxpr: Any
    consts: tuple[Any, ...]
    init: tuple[Any, ...]
    xs: tuple[Any, ...]
    length: int
    reverse: bool
    carry_tree: Any
    ys_tree: Any
    carry_names: tuple[str, ...]
    weak: tuple[bool, ...]
    """Which leaves of the final carry and of the outputs are weakly typed, as what is made of Python numbers is."""

    @property
    def size(self) -> int:
        """How many leaves the carry has."""
        return len(self.init)

    @functools.cached_property
    def depends(self) -> tuple[frozenset[int], ...]:
        """For each leaf of the carry, the leaves whose old values its new one is computed from."""
        seeds = [*(frozenset({i}) for i in range(self.size)), *(frozenset[int]() for _ in self.xs)]
        return tuple(_depends(self.jaxpr, seeds)[: self.size])

    def inputs(self, carry: Sequence[Any], x: Sequence[Any]) -> dict[Any, Any]:
        return dict(zip(self.jaxpr.invars, (*carry, *x), strict=True))

    def __call__(self, carry: Sequence[Any], x: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The new carry and the step's outputs, all as leaves."""
        outs = self.values(self.jaxpr.outvars, self.inputs(carry, x))
        return tuple(outs[: self.size]), tuple(outs[self.size :])

    def values(self, wanted: Sequence[Any], given: Mapping[Any, Any]) -> list[Any]:
        """The variables `wanted`, from those `given`; only the equations between them are computed."""
        env = {**dict(zip(self.jaxpr.constvars, self.consts, strict=True)), **given}
        for eqn in needed(self.jaxpr.eqns, wanted, env):
            outs = compute(eqn, [read(env, v) for v in eqn.invars])
            # What was given stays: a trajectory that is known already is not computed again.
            env.update((v, out) for v, out in zip(eqn.outvars, outs, strict=True) if v not in given)
        return [read(env, v) for v in wanted]


def trace(f: Callable[..., Any], init: Any, xs: Any, length: int | None, reverse: bool) -> Step | None:
    """The scan's step as equations. None where there is no step to look at: a length of zero.

    A carry of the wrong type, or leaves of different lengths, are errors here.
    """
    steps = _length(xs, length)
    # jax's own rules, errors and promotion of weak types; nothing is computed.
    try:
        final, ys = jax.eval_shape(lambda c, x: jax.lax.scan(f, c, x, length=steps, reverse=reverse), init, xs)
    except TypeError as error:
        if not str(error).startswith("scan body"):
            raise
        told = " ".join(line for line in str(error).splitlines() if line).rstrip(".")
        rule = "The step returns (carry, y), the carry with the type that it was given"
        raise rule_error(rule, told, "return the new carry with the first one's tree, shapes and types") from error
    if steps == 0:
        return None
    init = jax.tree.map(_as_type, init, final)
    slices = jax.eval_shape(lambda xs: jax.tree.map(lambda x: x[0], xs), xs)
    leaves, carry_tree = jax.tree.flatten(init)
    x_leaves, x_tree = jax.tree.flatten(slices)
    trees: list[Any] = []

    def flat(carry: Sequence[Any], x: Sequence[Any]) -> Any:
        new, ys = f(jax.tree.unflatten(carry_tree, carry), jax.tree.unflatten(x_tree, x))
        ys_leaves, ys_tree = jax.tree.flatten(ys)
        trees.append(ys_tree)
        return (*(jnp.asarray(leaf) for leaf in jax.tree.leaves(new)), *ys_leaves)

    closed = jax.make_jaxpr(flat)(leaves, x_leaves)
    names = tuple(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(init)[0])
    return Step(
        closed.jaxpr, tuple(closed.consts), tuple(leaves), tuple(map(jnp.asarray, jax.tree.leaves(xs))), steps,
        reverse, carry_tree, trees[-1], names, tuple(leaf.weak_type for leaf in jax.tree.leaves((final, ys))),
    )  # fmt: skip


def _as_type(x: Any, like: Any) -> Any:
    """The first carry in the type that the scan carries; a Python number that stays weakly typed is left so."""
    x = jnp.asarray(x) if not isinstance(x, jax.Array) else x
    if x.dtype == like.dtype and (like.weak_type or not jax.typeof(x).weak_type):
        return x
    return jax.lax.convert_element_type(x, like.dtype)


def _length(xs: Any, length: int | None) -> int:
    found: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(xs)[0]:
        shape = jnp.shape(leaf)
        name = f"xs{jax.tree_util.keystr(path)}"
        if not shape:
            raise rule_error("Every leaf of xs has time as its first axis", f"{name} without axes", "stack the steps")
        found.setdefault(shape[0], name)
    if len(found) > 1:
        told = ", ".join(f"{name} of {steps}" for steps, name in found.items())
        raise rule_error("All leaves of xs have as many steps", told, "cut or pad them to one length")
    if length is None:
        if not found:
            raise rule_error("A scan knows its number of steps", "neither xs nor length", "pass xs, or length=")
        return next(iter(found))
    if isinstance(length, bool) or not hasattr(length, "__index__"):
        raise rule_error("length is a whole number", repr(length), "pass the number of steps")
    steps = int(length)
    if steps < 0:
        raise rule_error("length is zero or more", repr(length), "pass the number of steps")
    if found and steps not in found:
        raise rule_error("length is xs' own", f"length={steps} and {next(iter(found))} steps in xs", "leave length out")
    return steps


def is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")


def read(env: Mapping[Any, Any], variable: Any) -> Any:
    return variable.val if is_literal(variable) else env[variable]


def needed(eqns: Sequence[Any], wanted: Iterable[Any], given: Mapping[Any, Any]) -> list[Any]:
    """The equations that `wanted` hangs on, looking no further than what is given; and those with side effects."""
    open_ends = {v for v in wanted if not is_literal(v) and v not in given}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in open_ends for v in eqn.outvars):
            kept.append(eqn)
            open_ends.update(v for v in eqn.invars if not is_literal(v) and v not in given)
    return kept[::-1]


def _depends(jaxpr: Any, seeds: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """What each output is computed from, given what each input is; looking into calls, not into loops."""
    nothing = frozenset[int]()
    env = dict(zip(jaxpr.invars, seeds, strict=True))
    for eqn in jaxpr.eqns:
        used = [nothing if is_literal(v) else env.get(v, nothing) for v in eqn.invars]
        if eqn.primitive.name in CALLS and any(used):
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            env.update(zip(eqn.outvars, _depends(getattr(inner, "jaxpr", inner), used), strict=True))
        else:
            env.update(dict.fromkeys(eqn.outvars, nothing.union(*used)))
    return [nothing if is_literal(v) else env.get(v, nothing) for v in jaxpr.outvars]


def compute(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """One equation on values, in the settings and under the source line that it was traced with."""
    names = source.current_name_stack() + eqn.source_info.name_stack
    with source.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def where(eqn: Any) -> str:
    """The user's line that made an equation."""
    return str(source.summarize(eqn.source_info))
