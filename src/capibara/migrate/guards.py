"""Code that runs only where a name is there: behind a try, a `hasattr`, a test of the version, `TYPE_CHECKING`.

What is guarded does not break, so that it is no error. A condition on jax whose value is not known counts as a guard;
one that the newest jax is let through by does not, and neither does one that is about something else.
"""

from __future__ import annotations

import ast
from typing import Literal

from capibara.migrate.conditions import asks, caught, fails, last_name, names_jax, of_jax, truth
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
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_LEAVING_CALLS = ("skip", "skipTest", "exit")
_SKIPPING = ("skipif", "skipIf", "skipUnless")


def guard(module: Module, node: ast.AST, failing: Failing) -> str | None:
    """Behind what a node stands, in words; None where it runs on the newest jax.

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
    reason = None
    if isinstance(above, ast.Try | ast.TryStar):
        reason = _tried(module, above, inner, failing)
    elif isinstance(above, ast.ExceptHandler):
        reason = _handled(module, above)
    elif isinstance(above, ast.If | ast.IfExp | ast.While) and inner is not above.test:
        body = above.body if isinstance(above.body, list) else [above.body]
        reason = _stops(module, above.test, runs_where=inner in body)
    elif isinstance(above, ast.BoolOp) and isinstance(inner, ast.expr):
        before = above.values[: above.values.index(inner)]
        runs_where = isinstance(above.op, ast.And)
        reason = next((found for one in before if (found := _stops(module, one, runs_where=runs_where))), None)
    elif isinstance(above, ast.With | ast.AsyncWith) and inner in above.body:
        reason = next((f for item in above.items if (f := _suppressed(item.context_expr, failing))), None)
    elif isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and inner in above.body:
        reason = _skipped(module, above)
    if reason is None and isinstance(inner, ast.stmt):
        reason = _left_before(module, above, inner)
    return reason


def _stops(module: Module, test: ast.expr, *, runs_where: bool) -> str | None:
    """Why what runs where a condition has this value does not run on the newest jax; None where it does."""
    reason = asks(module, test)
    return reason if reason is not None and truth(module, test) is not runs_where else None


def _tried(module: Module, statement: ast.Try | ast.TryStar, inner: ast.AST, failing: Failing) -> str | None:
    if inner not in statement.body and inner not in statement.orelse:
        return None
    before = statement.body[: statement.body.index(inner)] if inner in statement.body else statement.body
    imports = [part for part in before if isinstance(part, ast.Import | ast.ImportFrom)]
    expected = _RAISED[failing]
    if fails(module, imports):  # it does not come as far as this
        expected |= _RAISED["import"]
    about_one_thing = len(statement.body) <= _A_FEW or all(
        isinstance(part, ast.Import | ast.ImportFrom | ast.Assign) for part in statement.body
    )
    for handler in statement.handlers:
        if _raises_again(handler):
            continue
        for name in caught(handler):
            if name in expected or (name in _ANYTHING and about_one_thing):
                return f"a try with except {name}".rstrip()
    return None


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """Whether it breaks all the same, with another message; a test that is skipped does not."""
    last = handler.body[-1]
    if not isinstance(last, ast.Raise):
        return False
    raised = last.exc.func if isinstance(last.exc, ast.Call) else last.exc
    return raised is None or "Skip" not in last_name(raised)


def _handled(module: Module, handler: ast.ExceptHandler) -> str | None:
    """What a handler does where the body of its try does not work on some releases; the newest is not one of them."""
    tried = module.parent(handler)
    if not isinstance(tried, ast.Try | ast.TryStar) or fails(module, tried.body):
        return None
    for name in caught(handler):
        if name in _RAISED["import"]:
            about_jax = names_jax(module, tried.body)
        elif name in _RAISED["attribute"] | _RAISED["call"]:
            about_jax = any(of_jax(module, node) for part in tried.body for node in ast.walk(part))
        else:
            continue
        if about_jax:
            return f"except {name}"
    return None


def _suppressed(context: ast.expr, failing: Failing) -> str | None:
    """`with suppress(AttributeError):` of what is raised here."""
    if not isinstance(context, ast.Call) or last_name(context.func) not in ("suppress", "raises", "assertRaises"):
        return None
    types = [one for given in context.args for one in (given.elts if isinstance(given, ast.Tuple) else [given])]
    expected = _RAISED[failing] | _ANYTHING
    return f"with {last_name(context.func)}" if any(last_name(one) in expected for one in types) else None


def _skipped(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str | None:
    """`@pytest.mark.skipif(not hasattr(jax, …))` above a test."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and decorator.args and last_name(decorator.func) in _SKIPPING:
            runs_where = last_name(decorator.func) == "skipUnless"
            reason = _stops(module, decorator.args[0], runs_where=runs_where)
            if reason is not None:
                return reason
    return None


def _left_before(module: Module, above: ast.AST, inner: ast.stmt) -> str | None:
    """`if hasattr(jax, "new"): return jax.new` leaves the rest of its block to other releases."""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(above, block, None)
        if not isinstance(statements, list) or inner not in statements:
            continue
        for before in statements[: statements.index(inner)]:
            if isinstance(before, ast.Assert):
                runs_where, raises = True, True
            elif isinstance(before, ast.If) and _leaves(before.body[-1]):
                runs_where, raises = False, isinstance(before.body[-1], ast.Raise)
            else:
                continue
            reason = _stops(module, before.test, runs_where=runs_where)
            # `if jax.__version_info__ < …: raise` says what the program needs, and is no way around what is gone.
            if reason is not None and not (raises and truth(module, before.test) is None):
                return reason
    return None


def _leaves(last: ast.stmt) -> bool:
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return last_name(last.value.func) in _LEAVING_CALLS
    return isinstance(last, _LEAVING)


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
