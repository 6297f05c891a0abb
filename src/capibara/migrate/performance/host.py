"""CAP302 and CAP303: values that are fetched to the host, or printed, in code that jax traces."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from capibara.migrate.findings import Finding
from capibara.migrate.module import Module
from capibara.migrate.performance.values import TracedValues, own_nodes, staged_functions

__all__ = ["check_host"]

_METHODS = {
    "item": "keep the array, and fetch what the function returns",
    "tolist": "keep the array, and fetch what the function returns",
    "block_until_ready": "wait for what the function returns, outside of it",
    "copy_to_host_async": "call it on what the function returns",
}
_CONVERSIONS = {
    "float": "x.astype(jnp.float32)",
    "int": "x.astype(jnp.int32)",
    "bool": "x.astype(bool), with jnp.where or jax.lax.cond in place of if",
    "complex": "x.astype(jnp.complex64)",
}
_LOGGERS = ("logging.", "absl.logging.", "loguru.logger.")
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log", "warn")


def check_host(module: Module) -> Iterator[Finding]:
    """`x.item()`, `float(x)`, `np.asarray(x)`, `jax.device_get(x)`; `print(x)` and logging of x."""
    for values in staged_functions(module):
        for node in own_nodes(values.function.node):
            if isinstance(node, ast.Call):
                yield from _transfer(node, module, values)
                yield from _printing(node, module, values)


def _transfer(node: ast.Call, module: Module, values: TracedValues) -> Iterator[Finding]:
    why = values.function.why
    path = module.resolve(node.func)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS and values.is_traced(node.func.value):
        message = f"`.{node.func.attr}()` of a traced value ({why}): it needs the value on the host"
        yield module.finding(node, "CAP302", message, _METHODS[node.func.attr])
    elif isinstance(node.func, ast.Name) and node.func.id in _CONVERSIONS and path is None:
        # An element of a tree may be a number that was static all along: only what is surely an array.
        if len(node.args) == 1 and values.is_array(node.args[0]) and not module.bindings_of(node.func):
            message = f"`{node.func.id}()` of a traced array ({why}): it needs the value on the host"
            fix = f"use {_CONVERSIONS[node.func.id]}".replace("x.", f"{ast.unparse(node.args[0])}.", 1)
            yield module.finding(node, "CAP302", message, fix)
    elif path in ("numpy.asarray", "numpy.array") and node.args and values.is_array(node.args[0]):
        message = f"`np.{path.rpartition('.')[2]}` of a traced array ({why}): it needs the value on the host"
        yield module.finding(node, "CAP302", message, "use jnp.asarray, and fetch what the function returns")
    elif path in ("jax.device_get", "jax.block_until_ready") and node.args and values.is_traced(node.args[0]):
        message = f"`{path}` in traced code ({why}): there is no value to wait for"
        yield module.finding(node, "CAP302", message, "call it on what the function returns")


def _printing(node: ast.Call, module: Module, values: TracedValues) -> Iterator[Finding]:
    path = module.resolve(node.func)
    is_print = isinstance(node.func, ast.Name) and node.func.id == "print" and not module.bindings_of(node.func)
    is_log = path is not None and path.startswith(_LOGGERS) and path.rpartition(".")[2] in _LEVELS
    if isinstance(node.func, ast.Attribute) and _is_logger(node.func.value, module) and node.func.attr in _LEVELS:
        is_log, path = True, ast.unparse(node.func)
    if not (is_print or is_log):
        return
    inputs = [*node.args, *(one.value for one in node.keywords)]
    if any(map(values.is_traced, (part for one in inputs for part in _shown(one)))):
        what = "print" if is_print else path
        message = f"`{what}` of a traced value ({values.function.why}): it prints a tracer, once, while tracing"
        yield module.finding(node, "CAP303", message, 'use jax.debug.print("{x}", x=x)')


def _is_logger(node: ast.expr, module: Module) -> bool:
    """`log` of `log = logging.getLogger(__name__)`."""
    bindings = module.bindings_of(node) if isinstance(node, ast.Name) else []
    made = bindings[0].value if len(bindings) == 1 else None
    return isinstance(made, ast.Call) and module.resolve(made.func) == "logging.getLogger"


def _shown(node: ast.expr) -> Iterator[ast.expr]:
    """What a text shows: the parts of an f-string, the arguments of `format` and of `%`."""
    match node:
        case ast.JoinedStr():
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    yield part.value
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="format")):
            yield from node.args
            yield from (one.value for one in node.keywords)
        case ast.BinOp(left=ast.Constant(), op=ast.Mod()):
            yield node.right
        case _:
            yield node
