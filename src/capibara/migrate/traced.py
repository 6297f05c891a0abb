"""Which functions of a module jax traces, and by which transformation."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["BY_ARGUMENT", "STAGING", "Function", "functions"]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Resolve = Callable[[ast.AST], str | None]

BY_ARGUMENT: dict[str, tuple[int | str, ...]] = {
    **dict.fromkeys(
        (
            "jax.jit",
            "jax.pmap",
            "jax.vmap",
            "jax.grad",
            "jax.value_and_grad",
            "jax.jacfwd",
            "jax.jacrev",
            "jax.jacobian",
            "jax.hessian",
            "jax.jvp",
            "jax.vjp",
            "jax.linearize",
            "jax.checkpoint",
            "jax.remat",
            "jax.ad_checkpoint.checkpoint",
            "jax.custom_jvp",
            "jax.custom_vjp",
            "jax.make_jaxpr",
            "jax.eval_shape",
            "jax.xla_computation",
            "jax.shard_map",
            "jax.experimental.shard_map.shard_map",
            "jax.experimental.pjit.pjit",
            "jax.experimental.pallas.pallas_call",
            "jax.lax.scan",
            "jax.lax.map",
            "jax.lax.associative_scan",
            "equinox.filter_jit",
            "equinox.filter_vmap",
            "equinox.filter_pmap",
            "equinox.filter_grad",
            "equinox.filter_value_and_grad",
            "flax.linen.jit",
            "flax.nnx.jit",
            "flax.nnx.grad",
            "flax.nnx.value_and_grad",
        ),
        (0,),
    ),
    "jax.lax.while_loop": (0, 1, "cond_fun", "body_fun"),
    "jax.lax.fori_loop": (2, "body_fun"),
    "jax.lax.cond": (1, 2, "true_fun", "false_fun"),
    "jax.lax.switch": (1, "branches"),
}
"""A transformation -> which of its arguments are functions that it traces."""

STAGING = frozenset(
    path
    for path in BY_ARGUMENT
    if path.rpartition(".")[2] in ("jit", "pmap", "filter_jit", "filter_pmap", "pjit", "shard_map", "pallas_call")
    or path.startswith("jax.lax.")
    or path in ("jax.make_jaxpr", "jax.eval_shape", "jax.xla_computation")
)
"""Those whose functions see no values: what reads one on the host fails there, or runs once, while it is traced."""


@dataclass(frozen=True)
class Function:
    """One function of a module."""

    node: FunctionNode
    name: str
    transform: str | None = None
    """The transformation that traces it, such as "jax.jit"; None where none is seen to."""
    call: ast.Call | None = None
    """Of the transformation, with its options: `static_argnums` and the like."""
    why: str = ""
    """In words."""

    @property
    def traced(self) -> bool:
        return self.transform is not None

    @property
    def staged(self) -> bool:
        """Traced by what shows it no values."""
        return self.transform in STAGING


def functions(nodes: dict[type[ast.AST], list[ast.AST]], resolve: Resolve, parents: dict[ast.AST, ast.AST],
              defined: Callable[[ast.Name], ast.AST | None]) -> Iterator[Function]:  # fmt: skip
    """Every function, with the first thing that traces it.

    Args:
        defined: What a name is defined as, where it is a function of this module.
    """
    every: list[FunctionNode] = [
        node
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        for node in nodes.get(kind, ())
        if isinstance(node, FunctionNode)
    ]
    found: dict[ast.AST, tuple[str, ast.Call | None, str]] = {}
    for function in every:
        for decorator in getattr(function, "decorator_list", ()):
            transform, call = transformation(decorator, resolve)
            if transform is not None:
                found.setdefault(function, (transform, call, f"decorated with {transform}"))
    for node in nodes.get(ast.Call, ()):
        assert isinstance(node, ast.Call)
        transform, options = transformation(node, resolve, called=True)
        for argument in _functions_of(node, transform):
            function_node = defined(argument) if isinstance(argument, ast.Name) else argument
            if transform is not None and isinstance(function_node, FunctionNode):
                found.setdefault(function_node, (transform, options, f"given to {transform} in line {node.lineno}"))
    for function in every:
        reason = found.get(function) or _inherited(function, found, parents)
        name = getattr(function, "name", "<lambda>")
        yield Function(function, name, *reason) if reason else Function(function, name)


def transformation(node: ast.expr, resolve: Resolve, *, called: bool = False) -> tuple[str | None, ast.Call | None]:
    """What a decorator applies, or what a call does: `jax.jit`, `jax.jit(...)`, `partial(jax.jit, ...)`."""
    if not isinstance(node, ast.Call):
        path = resolve(node)
        return (path if path in BY_ARGUMENT else None), None
    path = resolve(node.func)
    if path in BY_ARGUMENT:
        return path, node
    if path == "functools.partial" and node.args and not called:
        inner = resolve(node.args[0])
        return (inner if inner in BY_ARGUMENT else None), node
    if called and isinstance(node.func, ast.Call):  # partial(jax.jit, ...)(f)
        return transformation(node.func, resolve)
    return None, None


def _functions_of(call: ast.Call, transform: str | None) -> Iterator[ast.AST]:
    for place in BY_ARGUMENT.get(transform or "", ()):
        if isinstance(place, int):
            argument: ast.expr | None = call.args[place] if place < len(call.args) else None
        else:
            argument = next((one.value for one in call.keywords if one.arg == place), None)
        if isinstance(argument, ast.List | ast.Tuple):
            yield from argument.elts
        elif argument is not None:
            yield argument


def _inherited(
    function: ast.AST, found: dict[ast.AST, tuple[str, ast.Call | None, str]], parents: dict[ast.AST, ast.AST]
) -> tuple[str, None, str] | None:
    """A function that is defined in one that is traced runs there."""
    above = parents.get(function)
    while above is not None:
        if above in found:
            return found[above][0], None, f"inside {getattr(above, 'name', 'a lambda')}, {found[above][2]}"
        above = parents.get(above)
    return None
