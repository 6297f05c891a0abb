"""CAP308: a jitted step that takes a state and gives the next one, and keeps both in memory."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from capibara.migrate.findings import Finding
from capibara.migrate.module import Module
from capibara.migrate.performance.values import jit_keyword, own_nodes, parameters, static_parameters
from capibara.migrate.traced import Function

__all__ = ["check_donation"]

_JITS = frozenset({"jax.jit", "jax.pmap", "jax.experimental.pjit.pjit"})
# What a training or decoding loop carries; of other names nobody knows whether the caller still needs them.
_STATE = re.compile(r"(^|_)(state|params|parameters|weights|opt_state|optimizer_state|variables|kv_cache|ema)$")


def check_donation(module: Module) -> Iterator[Finding]:
    """`def step(state, batch): …; return state` under jit without `donate_argnums` or `donate_argnames`."""
    for function in module.functions:
        node = function.node
        if (
            function.transform not in _JITS
            or not isinstance(node, ast.FunctionDef)
            or function.why.startswith("inside")
        ):
            continue
        if jit_keyword(function, "donate_argnums", "donate_argnames") or _has_options(function):
            continue
        carried = _carried(function, module)
        if carried:
            names = ", ".join(f"`{name}`" for name in carried)
            listed = ", ".join(f'"{name}"' for name in carried)
            message = f"`{function.name}` takes and returns {names} ({function.why}): the old and the new are in memory"
            fix = f"donate the old: donate_argnames=({listed}{',' if len(carried) == 1 else ''})"
            yield module.finding(_head(node), "CAP308", message, fix)


def _has_options(function: Function) -> bool:
    return function.call is not None and any(one.arg is None for one in function.call.keywords)


def _carried(function: Function, module: Module) -> list[str]:
    """Parameters that are a state by their name, are bound anew in the body, and are returned."""
    static = static_parameters(function)
    if static is None:
        return []
    nodes = list(own_nodes(function.node))
    rebound = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    returns = [one.value for one in nodes if isinstance(one, ast.Return) and one.value is not None]
    returned = [set(_returned(value)) for value in returns]
    if not returned:
        return []
    always = set.intersection(*returned)
    carried = []
    for one in parameters(function):
        name = one.arg
        if name in static or not _STATE.search(name):
            continue
        new = {name, f"new_{name}", f"{name}_new", f"next_{name}", f"updated_{name}"} & always
        if new and (new - {name} or name in rebound):
            carried.append(name)
    return carried


def _returned(value: ast.expr) -> Iterator[str]:
    """Names that are given back whole, at the top or in a tuple, or by `state.replace(…)` and `.apply_gradients(…)`."""
    match value:
        case ast.Name():
            yield value.id
        case ast.Tuple():
            for one in value.elts:
                yield from _returned(one)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="replace" | "apply_gradients" | "_replace")):
            yield f"new_{name}"


def _head(node: ast.FunctionDef) -> ast.AST:
    """The line with def, and not the whole function."""
    head = ast.copy_location(ast.Pass(), node)
    head.end_lineno, head.end_col_offset = node.lineno, node.col_offset + len("def ") + len(node.name)
    return head
