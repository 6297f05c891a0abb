"""A user's own op: a function that joins the registry with a reference, a cost and dispatch.

The function's signature says what is an array and what is a parameter: arguments without a default, and those
whose default is None, are operands; the others are parameters, which are static and hash.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core import op as ops
from capibara.kernels.core.context import PLATFORMS
from capibara.kernels.core.counting import products
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Call, Case, Cost, Gradient, Implementation, Partition

OWN = "user"
"""The name of the decorated function among the op's implementations."""
_RESERVED = ("implementation", "config")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class UserOp:
    """A registered op that is called like the function it was made of.

    `implementation=` forces one by name, as for every op.
    """

    def __init__(self, fn: Callable[..., Any], op: Op, signature: inspect.Signature) -> None:
        functools.update_wrapper(self, fn)
        self.op = op
        self.signature = signature

    def __call__(self, *args: Any, implementation: str | None = None, config: Any = None, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arrays = tuple(self._operand(name, bound.arguments[name]) for name in self.op.operands)
        params = {name: self._parameter(name, bound.arguments[name]) for name in self.op.params}
        changed = {name: value for name, value in params.items() if value != self.op.params[name]}
        return run(self.op, arrays, changed, implementation=implementation, config=config)

    def __repr__(self) -> str:
        return repr(self.op)

    def implement(
        self,
        name: str,
        *,
        platforms: Sequence[str] = PLATFORMS,
        refuses: Callable[[Call], str | None] = lambda call: None,
        ahead_of: Collection[str] | Callable[[Call], Collection[str]] = (OWN,),
        kernel: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator that adds another implementation, which by default goes before the decorated function."""

        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.op.implement(
                Implementation(name, fn, platforms=tuple(platforms), refuses=refuses, ahead_of=ahead_of, kernel=kernel)
            )
            return fn

        return add

    def unregister(self) -> None:
        """Take the op out of the registry; the object can be called on."""
        ops.unregister(self.op.name)

    def _operand(self, name: str, x: Any) -> Any:
        if x is None or isinstance(x, jax.Array):
            return x
        try:
            return jnp.asarray(x)
        except (TypeError, ValueError) as error:
            raise rule_error(
                f"The operands of {self.op.name} are arrays",
                f"{name} of type {type(x).__name__}",
                "pass the arrays of a tree one by one",
            ) from error

    def _parameter(self, name: str, value: Any) -> Hashable:
        try:
            hash(value)
        except TypeError as error:
            raise rule_error(
                f"The parameters of {self.op.name} are static and hash: {name}",
                f"a {type(value).__name__}",
                f"pass a plain value, or name {name} in operands= to make it an array",
            ) from error
        return value


def register_tpu_op(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    reference: Callable[..., Any] | None = None,
    cost: Callable[[Call], Cost | tuple[float, float]] | None = None,
    operands: Sequence[str] | None = None,
    platforms: Sequence[str] = PLATFORMS,
    refuses: Callable[[Call], str | None] | None = None,
    kernel: bool = False,
    gradient: Gradient | None = None,
    batch: Callable[..., Any] | None = None,
    partition: Partition | None = None,
    tolerance: Callable[[Call], float] | None = None,
    check: Callable[[Call], None] | None = None,
    cases: Iterable[Case] = (),
    family: str = OWN,
) -> Any:
    """Make a function an op, as `@register_tpu_op` or `@register_tpu_op(name=..., reference=...)`.

    Args:
      name: in the registry; by default the function's own.
      reference: the specification in plain JAX, with the same signature. By default the function itself.
        Where the function refuses a call, the reference takes it.
      cost: `Call` -> `Cost`, or (flops, bytes), of which the flops are products where the reference has any; by
        default what XLA counts in the reference.
      operands: the arguments that are arrays, when the signature does not say it.
      platforms, refuses: where the function runs, and why not a given call.
      kernel: the function is opaque to JAX (a Pallas kernel or a custom call): the reference is then
        differentiated, and has to be given; `gradient`, `batch` and `partition` are rules of its own.
      tolerance, check, cases: what the shared checks hold the op to, and on which shapes.

    >>> @register_tpu_op(name="double_it")
    ... def double(x, *, times=2):
    ...     return x * times
    >>> float(double(jnp.float32(4), times=3))
    12.0
    >>> double.unregister()
    """
    given: dict[str, Any] = {
        "family": family,
        "gradient": gradient,
        "batch": batch,
        "partition": partition,
        "cases": cases,
        "tolerance": tolerance,
        "check": check,
        "cost": None if cost is None else _cost(cost),
    }
    rules = {rule: value for rule, value in given.items() if value is not None}
    runs = {"platforms": tuple(platforms), "kernel": kernel} | ({} if refuses is None else {"refuses": refuses})

    def decorate(fn: Callable[..., Any]) -> UserOp:
        return _registered(fn, name, reference, operands, rules, runs)

    return decorate if fn is None else decorate(fn)


def _registered(
    fn: Callable[..., Any],
    name: str | None,
    reference: Callable[..., Any] | None,
    operands: Sequence[str] | None,
    rules: dict[str, Any],
    runs: dict[str, Any],
) -> UserOp:
    if not callable(fn):
        raise rule_error("register_tpu_op decorates a function", repr(fn), "pass names as name=")
    called = name or fn.__name__
    if runs["kernel"] and reference is None:
        raise rule_error(
            "A kernel is opaque to JAX, so a reference in plain JAX stands in for its checks and gradient",
            f"{called} with kernel=True and no reference",
            "pass reference=",
        )
    signature = inspect.signature(fn)
    arrays, params = _roles(called, signature, operands)
    made = Op(called, reference=reference or fn, operands=arrays, params=params, **rules)
    made.implement(Implementation(OWN, fn, **runs))
    if reference is not None:
        made.implement(Implementation("reference", reference))
    public = UserOp(fn, made, signature)
    made.public = public
    ops.register(made)
    return public


def _roles(
    name: str, signature: inspect.Signature, operands: Sequence[str] | None
) -> tuple[tuple[str, ...], Mapping[str, Hashable]]:
    """Which arguments are arrays, and the others with their defaults."""
    arguments = signature.parameters
    for one in arguments.values():
        if one.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise rule_error(f"The arguments of an op are named: {name}", f"*{one.name}", "write them out")
        if one.name in _RESERVED:
            raise rule_error(f"{' and '.join(_RESERVED)} are dispatch's own arguments", one.name, "rename it")
    if operands is None:
        required = inspect.Parameter.empty
        arrays = tuple(a.name for a in arguments.values() if a.kind in _POSITIONAL and a.default in (required, None))
    else:
        arrays = tuple(operands)
        for one_name in arrays:
            if one_name not in arguments:
                raise unknown_name(f"argument of {name}", one_name, arguments)
    if not arrays:
        raise rule_error(f"An op has one operand or more: {name}", str(signature), "take an array first")
    leading = tuple(list(arguments)[: len(arrays)])
    if leading != arrays:
        raise rule_error(f"The operands of {name} come first, in order", f"{arrays} of {signature}", "move them")
    params = {a.name: a for a in arguments.values() if a.name not in arrays}
    for one in params.values():
        if one.default is inspect.Parameter.empty or one.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise rule_error(
                f"A parameter of {name} has a default and can be passed by name",
                str(one),
                "give it a default",
            )
    return arrays, {a.name: a.default for a in params.values()}


def _cost(given: Callable[[Call], Cost | tuple[float, float]]) -> Callable[[Call], Cost]:
    def cost(call: Call) -> Cost:
        told = given(call)
        if isinstance(told, Cost):
            return told
        flops, moved = map(float, told)
        if any(products(ops.traced_reference(call).jaxpr)):
            return Cost(matrix_flops=flops, bytes=moved)
        return Cost(vector_flops=flops, bytes=moved)

    return cost


def unregister(which: str | UserOp) -> None:
    """Take a user's op out of the registry, by name or by the object."""
    ops.unregister(which if isinstance(which, str) else which.op.name)
