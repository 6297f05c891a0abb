"""CAP301: a Python loop over an array that is traced. Each iteration is a copy of the body in the program."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from capibara.migrate.findings import Finding
from capibara.migrate.module import Module
from capibara.migrate.performance.values import TracedValues, own_nodes, staged_functions

__all__ = ["check_loops"]

_FIX = "use jax.lax.scan or jax.lax.fori_loop, or jax.vmap where the iterations do not need each other"


def check_loops(module: Module) -> Iterator[Finding]:
    """`for row in x` and `for i in range(x.shape[0])` with `[i]`, where x is traced."""
    for values in staged_functions(module):
        # A kernel's loops are meant to be unrolled, over blocks whose shape is chosen.
        if values.function.transform == "jax.experimental.pallas.pallas_call":
            continue
        for node in own_nodes(values.function.node):
            if isinstance(node, ast.For | ast.comprehension):
                inside = [node] if isinstance(node, ast.For) else [module.parent(node) or node]
                what = _looped_over(node.iter, node.target, inside[0], module, values)
                if what is not None:
                    message = f"a Python loop over {what} in traced code ({values.function.why}): it is unrolled"
                    yield module.finding(node.iter, "CAP301", message, _FIX)


def _looped_over(
    iterated: ast.expr, target: ast.expr, loop: ast.AST, module: Module, values: TracedValues
) -> str | None:
    if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name):
        if iterated.func.id == "enumerate" and len(iterated.args) >= 1:
            return _looped_over(iterated.args[0], target, loop, module, values)
        if iterated.func.id == "zip":
            every = (_looped_over(one, target, loop, module, values) for one in iterated.args)
            return next((one for one in every if one is not None), None)
        if iterated.func.id == "range" and iterated.args:
            length = iterated.args[min(1, len(iterated.args) - 1)]
            measured = _measured_array(length, values)
            if measured is not None and _indexed_by(target, loop, values):
                return f"the {'rows' if _is_first_axis(length) else 'elements'} of `{ast.unparse(measured)}`"
            return None
    return f"`{ast.unparse(iterated)}`" if values.is_array(iterated) else None


def _measured_array(length: ast.expr, values: TracedValues) -> ast.expr | None:
    """x of `x.shape[0]`, `len(x)` and `x.size`, where it is a traced array."""
    match length:
        case ast.Subscript(value=ast.Attribute(value=array, attr="shape")):
            pass
        case ast.Attribute(value=array, attr="size"):
            pass
        case ast.Call(func=ast.Name(id="len"), args=[array]):
            pass
        case _:
            return None
    return array if values.is_array(array) else None


def _is_first_axis(length: ast.expr) -> bool:
    return not isinstance(length, ast.Subscript) or (isinstance(length.slice, ast.Constant) and length.slice.value == 0)


def _indexed_by(target: ast.expr, loop: ast.AST, values: TracedValues) -> bool:
    """Whether the body takes elements of a traced array by the loop's number."""
    if not isinstance(target, ast.Name):
        return False
    for node in ast.walk(loop):
        if isinstance(node, ast.Subscript) and any(
            isinstance(one, ast.Name) and one.id == target.id for one in ast.walk(node.slice)
        ):
            base = node.value
            if isinstance(base, ast.Attribute) and base.attr == "at":
                base = base.value
            if values.is_traced(base):
                return True
    return False
