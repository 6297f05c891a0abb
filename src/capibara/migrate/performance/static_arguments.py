"""CAP309: a list, a dict or an array where a static argument is taken: jit looks programs up by its hash."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from capibara.migrate.findings import Finding
from capibara.migrate.module import Module
from capibara.migrate.performance.values import literal, parameters, static_parameters
from capibara.migrate.traced import Function

__all__ = ["check_static_arguments"]

_JITS = frozenset({"jax.jit", "jax.pmap", "jax.experimental.pjit.pjit"})
_ARRAYS = frozenset(
    f"{package}.{name}"
    for package in ("jax.numpy", "numpy")
    for name in ("array", "asarray", "zeros", "ones", "arange", "linspace", "full", "eye")
)


def check_static_arguments(module: Module) -> Iterator[Finding]:
    """Calls of functions that this module jits, and the defaults of their static parameters."""
    static: dict[ast.AST, tuple[Function, set[str]]] = {}
    for function in module.functions:
        if function.transform in _JITS and not function.why.startswith("inside"):
            names = static_parameters(function)
            if names:
                static[function.node] = function, names
                yield from _defaults(function, names, module)
    for call in module.calls:
        target = _called(call, module)
        if target in static:
            function, names = static[target]
            yield from _arguments(call, function, names, module)
        elif isinstance(call.func, ast.Call) and module.resolve(call.func.func) in _JITS:
            yield from _direct(call, call.func, module)


def _called(call: ast.Call, module: Module) -> ast.AST | None:
    """The function of this module that a call runs, by its own name or by `g = jax.jit(f)`."""
    if not isinstance(call.func, ast.Name):
        return None
    bound = module.bindings_of(call.func)
    if len(bound) != 1:
        return None
    value = bound[0].value
    if value is None:
        # The decorated function itself; by a plain name of a function that is jitted elsewhere, it is not jitted.
        return bound[0].node if getattr(bound[0].node, "decorator_list", ()) else None
    if isinstance(value, ast.Call) and module.resolve(value.func) in _JITS and value.args:
        jitted = value.args[0]
        if isinstance(jitted, ast.Name) and len(module.bindings_of(jitted)) == 1:
            return module.bindings_of(jitted)[0].node
        return jitted
    return None


def _arguments(call: ast.Call, function: Function, static: set[str], module: Module) -> Iterator[Finding]:
    positional = [one.arg for one in (*function.node.args.posonlyargs, *function.node.args.args)]
    if not any(isinstance(one, ast.Starred) for one in call.args):
        for name, value in zip(positional, call.args, strict=False):
            if name in static:
                yield from _unhashable(value, f"`{name}` of `{function.name}`", module)
    for one in call.keywords:
        if one.arg in static:
            yield from _unhashable(one.value, f"`{one.arg}` of `{function.name}`", module)


def _defaults(function: Function, static: set[str], module: Module) -> Iterator[Finding]:
    arguments = function.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = dict(zip((one.arg for one in positional[::-1]), arguments.defaults[::-1], strict=False))
    defaults |= {
        one.arg: value
        for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value is not None
    }
    for one in parameters(function):
        if one.arg in static and one.arg in defaults:
            yield from _unhashable(defaults[one.arg], f"`{one.arg}` of `{function.name}`", module)


def _direct(call: ast.Call, jit: ast.Call, module: Module) -> Iterator[Finding]:
    """`jax.jit(f, static_argnums=1)(x, [1, 2])` of a function from elsewhere."""
    for keyword in jit.keywords:
        if keyword.arg != "static_argnums":
            continue
        numbers = literal(keyword.value)
        for number in numbers if isinstance(numbers, tuple | list) else (numbers,):
            if isinstance(number, int) and 0 <= number < len(call.args):
                yield from _unhashable(call.args[number], f"argument {number}", module)


def _unhashable(value: ast.expr, what: str, module: Module) -> Iterator[Finding]:
    if isinstance(value, ast.List | ast.ListComp):
        kind, fix = "a list", "pass a tuple"
    elif isinstance(value, ast.Dict | ast.DictComp):
        kind, fix = "a dict", "pass a frozen dataclass, or a tuple of its items"
    elif isinstance(value, ast.Set | ast.SetComp):
        kind, fix = "a set", "pass a frozenset"
    elif isinstance(value, ast.Call) and module.resolve(value.func) in _ARRAYS:
        kind, fix = "an array", "leave it out of static_argnums, or pass a tuple of numbers"
    else:
        return
    message = f"{what} is static, and {kind} has no hash: jit raises a ValueError"
    yield module.finding(value, "CAP309", message, fix)
