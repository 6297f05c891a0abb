"""CAP305: a function that is made and jitted anew, and so compiled anew, in every iteration or in every call.

jax keeps programs by the function: `jax.jit(f)` of the same f finds what was compiled before, and a lambda, a partial
or a function that was defined just now is another one each time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from capibara.migrate.findings import Finding
from capibara.migrate.module import Module
from capibara.migrate.performance.values import own_nodes

__all__ = ["check_compilations"]

_JITS = frozenset({"jax.jit", "jax.pmap", "equinox.filter_jit", "flax.nnx.jit", "jax.experimental.pjit.pjit"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_ONCE = ("lru_cache", "cache", "cached_property", "fixture", "cell")
_ONCE_NAMES = ("__init__", "main", "_main", "setUp", "setUpClass", "setup", "__post_init__")


def check_compilations(module: Module) -> Iterator[Finding]:
    """`jax.jit(lambda …)(x)` and a jitted function that is defined and called, in a loop or in a function."""
    for call in module.calls:
        jitted = call.func
        if not (isinstance(jitted, ast.Call) and module.resolve(jitted.func) in _JITS and jitted.args):
            continue
        if not _in_trace(call, module):
            yield from _at(call, jitted.args[0], module)
    for node in module.nodes(ast.FunctionDef):
        assert isinstance(node, ast.FunctionDef)
        loop = _loop_around(node, module)
        if loop is not None and _is_jitted(node, module) and _called_in(loop, node.name):
            yield _in_loop(module, node, f"`{node.name}` is jitted and called")
    for node in module.nodes(ast.Assign):
        assert isinstance(node, ast.Assign)
        value, target = node.value, node.targets[0]
        if isinstance(value, ast.Call) and module.resolve(value.func) in _JITS and isinstance(target, ast.Name):
            loop = _loop_around(node, module)
            if loop is not None and value.args and _fresh(value.args[0], loop, module) and _called_in(loop, target.id):
                yield _in_loop(module, value, f"`{target.id}` is jitted and called")


def _at(call: ast.Call, jitted: ast.expr, module: Module) -> Iterator[Finding]:
    loop = _loop_around(call, module)
    if loop is not None and _fresh(jitted, loop, module):
        yield _in_loop(module, call, "a function that is made here is jitted and called")
        return
    around = module.function_around(call)
    if around is None or not isinstance(around.node, ast.FunctionDef) or _runs_once(around.node, module):
        return
    if _fresh(jitted, around.node, module):
        message = f"a function that is made here is jitted: it is compiled again in every call of `{around.name}`"
        fix = "jit it once, at the top of the module, with what it needs as arguments"
        yield module.finding(call.func, "CAP305", message, fix, "info")


def _in_loop(module: Module, node: ast.AST, what: str) -> Finding:
    message = f"{what} in a loop: it is compiled again in every iteration"
    return module.finding(node, "CAP305", message, "jit it once, before the loop, with what changes as arguments")


def _loop_around(node: ast.AST, module: Module) -> ast.AST | None:
    """The loop whose body a node is in, in the same function."""
    below, above = node, module.parent(node)
    while above is not None and not isinstance(above, (*_FUNCTIONS, ast.ClassDef)):
        if isinstance(above, _LOOPS) and below in above.body:
            return above
        below, above = above, module.parent(above)
    return None


def _in_trace(node: ast.AST, module: Module) -> bool:
    """Inside of a program that is traced as a whole a jit is part of it."""
    above = module.function_around(node)
    return above is not None and above.traced


def _fresh(function: ast.expr, where: ast.AST, module: Module) -> bool:
    """Whether it is another function each time `where` runs."""
    if isinstance(function, ast.Lambda):
        return True
    if isinstance(function, ast.Call):  # partial(f, x), grad(lambda …), vmap(f)
        inner = function.args[0] if function.args else None
        path = module.resolve(function.func) or ""
        if path == "functools.partial":
            return True
        return path.startswith("jax.") and inner is not None and _fresh(inner, where, module)
    if isinstance(function, ast.Name):
        bound = module.bindings_of(function)
        return bool(bound) and all(
            isinstance(one.node, _FUNCTIONS) and _within(one.node, where, module) for one in bound
        )
    return False


def _within(node: ast.AST, where: ast.AST, module: Module) -> bool:
    above = module.parent(node)
    while above is not None and above is not where:
        above = module.parent(above)
    return above is where


def _is_jitted(node: ast.FunctionDef, module: Module) -> bool:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        path = module.resolve(called)
        if path == "functools.partial" and isinstance(decorator, ast.Call) and decorator.args:
            path = module.resolve(decorator.args[0])
        if path in _JITS:
            return True
    return False


def _called_in(loop: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in own_nodes(loop)
    )


def _runs_once(node: ast.FunctionDef, module: Module) -> bool:
    """A test, a program's main, what is cached: compiled once anyway."""
    if node.name in _ONCE_NAMES or node.name.startswith("test"):
        return True
    names = {ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}
    return bool(names & set(_ONCE))
