"""Whether leaves of the carry are, together, affine in themselves: what a transition by matrices needs.

Only yes or no is asked here, and what stands in the way; the matrices are the step's own derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from capibara.kernels.ops.scan.parallel.affine import OWN_DERIVATIVE, SAME, VIEWS, General, refuse
from capibara.kernels.ops.scan.parallel.step import CALLS, Step, is_literal, needed

# Linear in the first operand alone, the others (indices, a bound) being free of the carry.
_IN_THE_FIRST = (
    *VIEWS, *SAME, "neg", "slice", "dynamic_slice", "gather", "reduce_sum", "cumsum", "real", "imag", "div",
)  # fmt: skip
_IN_ALL = ("add", "add_any", "sub", "concatenate")
_IN_ONE_OF_TWO = ("mul", "dot_general", "conv_general_dilated")
_FREE, _LINEAR = "free", "linear"


def blocker(step: Step, leaves: Sequence[int]) -> General | None:
    """The first equation that keeps the new values of `leaves` from being affine in their old ones; None if none."""
    for leaf in leaves:
        dtype = step.init[leaf].dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            return General("carry", step.carry_names[leaf], f"a leaf of {dtype} has no exact matrix form")
        if dtype.itemsize < 4:
            return General("carry", step.carry_names[leaf], f"products of {dtype} matrices would round at every step")
    kinds: list[Any] = [_LINEAR if i in leaves else _FREE for i in range(step.size)]
    env = dict.fromkeys(step.jaxpr.constvars, _FREE)
    env |= step.inputs(kinds, [_FREE] * len(step.xs))
    for kind in _interpret(step.jaxpr, env, [step.jaxpr.outvars[i] for i in leaves]):
        if isinstance(kind, General):
            return kind
    return None


def _interpret(jaxpr: Any, env: dict[Any, Any], wanted: Sequence[Any]) -> list[Any]:
    def kind(variable: Any) -> Any:
        return _FREE if is_literal(variable) else env[variable]

    for eqn in needed(jaxpr.eqns, wanted, env):
        kinds = [kind(v) for v in eqn.invars]
        stuck = next((k for k in kinds if isinstance(k, General)), None)
        if stuck is None and all(k == _FREE for k in kinds):
            made: list[Any] = [_FREE] * len(eqn.outvars)
        elif eqn.primitive.name in CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            body = getattr(inner, "jaxpr", inner)
            inside = {**dict.fromkeys(body.constvars, _FREE), **dict(zip(body.invars, kinds, strict=True))}
            made = _interpret(body, inside, body.outvars)
        else:
            made = [stuck or _kind(eqn, kinds)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, made, strict=True))
    return [kind(v) for v in wanted]


def _kind(eqn: Any, kinds: list[Any]) -> Any:
    name = eqn.primitive.name
    linear = [k == _LINEAR for k in kinds]
    good = (
        name in _IN_ALL
        or (name in _IN_ONE_OF_TWO and sum(linear) == 1)
        or (name in _IN_THE_FIRST and not any(linear[1:]))
        or (name == "select_n" and not linear[0])
        or (name == "dynamic_update_slice" and not any(linear[2:]))
        or (name == "pad")
        or (name == "convert_element_type" and _widens(eqn))
    )
    return _LINEAR if good else refuse(eqn, _why(name))


def _why(name: str) -> str:
    if name in _IN_ONE_OF_TWO:
        return "it multiplies the carry by itself"
    return {
        "div": "it divides by the carry",
        "select_n": "which value it takes hangs on the carry",
        "convert_element_type": "it rounds at every step",
    }.get(name, "" if name in OWN_DERIVATIVE else "it is not affine in the carry")


def _widens(eqn: Any) -> bool:
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return bool(jnp.issubdtype(new, jnp.floating) and jnp.promote_types(old, new) == new)
