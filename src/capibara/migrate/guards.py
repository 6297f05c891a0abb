"""Code that runs only where a name is there: behind a try, a `hasattr`, a test of the version, `TYPE_CHECKING`.

What is guarded does not break, so that it is no error. In doubt something counts as a guard: an alarm that is false
costs more than one that is missing.
"""

from __future__ import annotations

import ast
import re
from typing import Literal

from capibara.migrate.module import Module

__all__ = ["Failing", "guard", "is_evaluated"]

Failing = Literal["import", "attribute", "call"]

_RAISED: dict[Failing, frozenset[str]] = {
    "import": frozenset({"ImportError", "ModuleNotFoundError"}),
    "attribute": frozenset({"AttributeError"}),
    "call": frozenset({"TypeError"}),
}
"""What it raises where the name is not there, or where the function does not take the argument."""
_ANYTHING = frozenset({"Exception", "BaseException", ""})
_A_FEW = 3
"""Statements of a try that is about one thing; one that catches everything around a whole program is no guard."""
_TELLING = re.compile(
    r"__version(_info)?__|(?i:jax\w*(version|available|installed|compat)|(version|has|have|available|legacy|old|new)\w*_jax)"
    r"|^_*(HAS|HAVE|USE_NEW|USE_OLD|IS_OLD|IS_NEW|SUPPORTS)_|VERSION"
)
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_FOLLOWED = 3


def guard(module: Module, node: ast.AST, failing: Failing) -> str | None:
    """Behind what a node stands, in words; None where it runs on every jax.

    Args:
        failing: What it is that fails without a guard.
    """
    inner: ast.AST = node
    above = module.parent(node)
    while above is not None:
        reason = _reason(module, above, inner, failing)
        if reason is not None:
            return reason
        inner, above = above, module.parent(above)
    return None


def _reason(module: Module, above: ast.AST, inner: ast.AST, failing: Failing) -> str | None:
    if isinstance(above, ast.Try | ast.TryStar):
        reason = _tried(above, inner, failing)
    elif isinstance(above, ast.ExceptHandler):
        # It runs on those releases alone where the body of the try fails.
        reason = next((f"except {name}" for name in _caught(above) if name in set().union(*_RAISED.values())), None)
    elif isinstance(above, ast.If | ast.IfExp | ast.While):
        reason = _asks(module, above.test) if inner is not above.test else None
    elif isinstance(above, ast.BoolOp):
        before = above.values[: above.values.index(inner)] if isinstance(inner, ast.expr) else []
        reason = next((found for value in before if (found := _asks(module, value))), None)
    elif isinstance(above, ast.With | ast.AsyncWith) and inner in above.body:
        calls = [_last(item.context_expr.func) for item in above.items if isinstance(item.context_expr, ast.Call)]
        reason = next((f"with {name}" for name in calls if name in ("suppress", "raises", "assertRaises")), None)
    else:
        reason = None
    if reason is None and isinstance(inner, ast.stmt):
        reason = _left_before(module, above, inner)
    return reason


def _tried(statement: ast.Try | ast.TryStar, inner: ast.AST, failing: Failing) -> str | None:
    if inner not in statement.body and inner not in statement.orelse:
        return None
    imports = any(isinstance(part, ast.Import | ast.ImportFrom) for part in statement.body)
    for handler in statement.handlers:
        for name in _caught(handler):
            caught = name in _RAISED[failing] or (imports and name in _RAISED["import"])
            raised_again = isinstance(handler.body[-1], ast.Raise)
            if name in _ANYTHING and not raised_again:
                caught = failing == "import" or len(statement.body) <= _A_FEW
            if caught:
                return f"a try with except {name}".rstrip()
    return None


def _caught(handler: ast.ExceptHandler) -> list[str]:
    if handler.type is None:
        return [""]
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return [_last(one) for one in types if _last(one)]


def _left_before(module: Module, above: ast.AST, inner: ast.stmt) -> str | None:
    """`if hasattr(jax, "new"): return jax.new` leaves the rest of its block to other releases."""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(above, block, None)
        if not isinstance(statements, list) or inner not in statements:
            continue
        for before in statements[: statements.index(inner)]:
            leaves = isinstance(before, ast.If) and isinstance(before.body[-1], _LEAVING)
            if leaves or isinstance(before, ast.Assert):
                reason = _asks(module, before.test)
                if reason is not None:
                    return reason
    return None


def _asks(module: Module, test: ast.expr, depth: int = 0) -> str | None:
    """Whether a condition asks which jax this is, or what it has."""
    for part in ast.walk(test):
        if isinstance(part, ast.Call):
            name = _last(part.func)
            # What is not known may be jax's: `hasattr(aval, "to_tangent_aval")` asks for the release too.
            of_jax = bool(part.args) and (module.resolve(part.args[0]) or "jax").partition(".")[0] == "jax"
            # A value of jax's tells its release too: hasattr(aval, "to_tangent_aval"). Options do not.
            asked = bool(part.args) and _last(part.args[0]) not in ("self", "args", "config", "cfg", "options")
            if name in ("find_spec", "signature") or (name == "hasattr" and asked) or (name == "getattr" and of_jax):
                return f"{name}(…)"
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.startswith("jax."):
            return f"a test of {part.value!r}"  # "jax.experimental.maps" in sys.modules
        elif isinstance(part, ast.Name | ast.Attribute):
            name = _last(part)
            if name == "TYPE_CHECKING":
                return name
            if _TELLING.search(name):
                return f"a test of {name}"
            if isinstance(part, ast.Name) and depth < _FOLLOWED:
                reason = _asked_before(module, part, depth)
                if reason is not None:
                    return reason
    return None


def _asked_before(module: Module, name: ast.Name, depth: int) -> str | None:
    """A name whose value was asked for: `old = not hasattr(jax, "new")`, or True and False by a try."""
    for binding in module.bindings_of(name):
        if binding.value is not None and (reason := _asks(module, binding.value, depth + 1)) is not None:
            return reason
        above = module.parent(binding.node)
        if isinstance(above, ast.ExceptHandler) and set(_caught(above)) & (_RAISED["import"] | _RAISED["attribute"]):
            return f"a test of {name.id}, which a try sets"
    return None


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_evaluated(module: Module, node: ast.AST) -> bool:
    """Whether Python evaluates an expression: it does not where annotations are deferred, nor for locals'."""
    inner: ast.AST = node
    above = module.parent(node)
    while above is not None:
        if _is_annotation(above, inner):
            if any(path == "__future__.annotations" for path in module.bindings.values()):
                return False
            return not (isinstance(above, ast.AnnAssign) and module.function_around(above) is not None)
        inner, above = above, module.parent(above)
    return True


def _is_annotation(above: ast.AST, inner: ast.AST) -> bool:
    if isinstance(above, ast.arg | ast.AnnAssign):
        return above.annotation is inner
    return isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef) and above.returns is inner
