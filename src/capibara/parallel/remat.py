"""Recomputation for a function that was written without it: every outermost scan forgets what its body computed.

A model that scans over its layers keeps, for the backward pass, what each layer computed. Wrapping the body of the scan
in `jax.checkpoint` keeps less and computes it again. This is done on the traced function, so the model's own code stays
as it is, and its values and gradients are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from capibara.errors import unknown_name
from capibara.program.jaxprs import scan_parts

__all__ = [
    "LAYER_INPUT",
    "OFFLOAD",
    "POLICIES",
    "checkpoint_scans",
    "keeps_everything",
    "keeps_products",
    "outermost_scans",
]

POLICIES = ("none", "dots", "full")
"""What a scan's body keeps: everything, its matrix products without batch dimensions, or only the carry."""

OFFLOAD = "offload"
"""As "full", with what enters a layer in the host's memory until the backward pass wants it: what the body names
`LAYER_INPUT` (`jax.ad_checkpoint.checkpoint_name`), or all that it carries where it names nothing so. A CPU has one
memory, and keeps it there. A planner does not try it."""
LAYER_INPUT = "layer_input"

# Calls that only group equations: a scan inside of them is still an outermost one. Custom gradients and functions that
# are already checkpointed are left alone, since what they keep is their author's choice.
_TRANSPARENT = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}

_POLICY: ContextVar[str] = ContextVar("capibara_remat_policy", default="none")

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint_scans(fn: Callable[P, R], policy: str) -> Callable[P, R]:
    """`fn` with the body of every outermost scan under `jax.checkpoint` with this policy (one of `POLICIES`).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0].sum()
        >>> w, x = jnp.ones((3, 2, 2)), jnp.ones((4, 2))
        >>> slim = checkpoint_scans(loss, "full")
        >>> bool(jnp.allclose(jax.grad(loss)(w, x), jax.grad(slim)(w, x)))
        True
    """
    if policy not in (*POLICIES, OFFLOAD):
        raise unknown_name("remat policy", policy, (*POLICIES, OFFLOAD))
    if policy == "none":
        return fn

    def rewritten(*args: Any) -> Any:
        before = _POLICY.set(policy)
        try:
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        finally:
            _POLICY.reset(before)
        flat = core.jaxpr_as_fun(_rewritten(closed, policy))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), flat)

    return cast("Callable[P, R]", rewritten)


def keeps_products() -> bool:
    """Whether what is traced here keeps its matrix products, and computes the rest again: those inside of a kernel are
    none that it would keep."""
    return _POLICY.get() == "dots"


def keeps_everything() -> bool:
    """Whether nothing of what is traced here is computed again: what a layer is given is then not kept for that."""
    return _POLICY.get() == "none"


def outermost_scans(fn: Callable[..., Any], *args: Any) -> int:
    """How many scans `checkpoint_scans` would wrap."""
    return _count(jax.make_jaxpr(fn)(*args).jaxpr)


def _count(jaxpr: Any) -> int:
    found = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "scan":
            found += 1
        elif name in _TRANSPARENT:
            found += _count(equation.params[_TRANSPARENT[name]].jaxpr)
    return found


def _rewritten(closed: Any, policy: str) -> Any:
    equations = [_one(equation, policy) for equation in closed.jaxpr.eqns]
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=equations))


def _one(equation: Any, policy: str) -> Any:
    name = equation.primitive.name
    if name == "scan":
        before, count = scan_parts(equation.params)
        unroll, length = equation.params["unroll"], equation.params["length"]
        body = _forgetful(
            equation.params["jaxpr"], policy, range(before, before + count), looped=unroll == 1 and length > 1
        )
        return equation.replace(params={**equation.params, "jaxpr": body})
    if name in _TRANSPARENT:
        key = _TRANSPARENT[name]
        inner = equation.params[key]
        if _count(inner.jaxpr):
            return equation.replace(params={**equation.params, key: _rewritten(inner, policy)})
    return equation


def _forgetful(body: Any, policy: str, carried: range, looped: bool) -> Any:
    keep: Any = {
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "full": jax.checkpoint_policies.nothing_saveable,
        OFFLOAD: jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[policy]
    run = core.jaxpr_as_fun(body)
    if policy == OFFLOAD and not _names_its_input(body.jaxpr):
        unnamed = run

        def run(*args: Any) -> Any:
            return unnamed(*(checkpoint_name(x, LAYER_INPUT) if n in carried else x for n, x in enumerate(args)))

    # A loop keeps the compiler from merging the second computation with the first; where layers are written out one
    # after another it would merge them, and keep everything.
    slim = jax.checkpoint(run, policy=keep, prevent_cse=not looped)
    return jax.make_jaxpr(slim)(*body.in_avals)


def _names_its_input(jaxpr: Any) -> bool:
    return any(e.primitive.name == "name" and e.params.get("name") == LAYER_INPUT for e in jaxpr.eqns)
