"""Which imported thing a name stands for: the scopes of a module and what is bound in them.

Nothing is run and no order of statements is followed: a name that is bound to two things in one scope stands for
neither. That is why what is said here is right where it says something.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["Binding", "CalledImport", "Scope", "Scopes", "called_import"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_UNSCOPED = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
_BUILTINS = frozenset(dir(builtins))
_DEEPEST = 16  # of names that stand for names


@dataclass(frozen=True)
class Binding:
    """One statement that binds a name."""

    node: ast.AST
    """The statement, or the part of it that binds."""
    path: str | None = None
    """Of an import: what it stands for."""
    value: ast.expr | None = None
    """Of a plain assignment."""

    @property
    def is_none(self) -> bool:
        return isinstance(self.value, ast.Constant) and self.value.value is None


@dataclass
class Scope:
    """A module, a class, a function or a comprehension, and what is bound in it."""

    node: ast.AST
    outer: Scope | None = None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    """Modules that everything is imported from."""
    elsewhere: dict[str, Scope] = field(default_factory=dict)
    """Names that `global` and `nonlocal` give to another scope."""

    def bind(self, name: str, binding: Binding) -> None:
        self.elsewhere.get(name, self).bindings.setdefault(name, []).append(binding)

    def lookup(self, name: str) -> Scope | None:
        """The scope that a name used here is bound in; None where it is bound nowhere."""
        scope: Scope | None = self.elsewhere.get(name, self)
        while scope is not None:
            if name in scope.bindings and (scope is self or not isinstance(scope.node, ast.ClassDef)):
                return scope
            scope = scope.outer
        return None


class Scopes:
    """All scopes of a tree, the parent of each node, and what names stand for."""

    def __init__(self, tree: ast.Module, star_has: Callable[[str, str], bool]) -> None:
        self.module = Scope(tree)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: dict[type[ast.AST], list[ast.AST]] = {}
        """Every node by its type, in the order of the text."""
        self._of: dict[ast.AST, Scope] = {}
        self._star_has = star_has
        self._paths: dict[tuple[ast.AST, str], str | None] = {}
        self._globals: list[tuple[Scope, ast.Global | ast.Nonlocal]] = []
        self._pending: list[tuple[Scope, str, Binding]] = []
        # A stack of our own: a sum of a thousand terms is nested as deep as Python goes.
        stack: list[tuple[ast.AST, Scope]] = [(tree, self.module)]
        while stack:
            node, scope = stack.pop()
            self._of[node] = scope
            self.nodes.setdefault(type(node), []).append(node)
            children = list(self._visit(node, scope))
            for child, _ in children:
                self.parents[child] = node
            stack.extend(reversed(children))
        for scope, statement in self._globals:
            if isinstance(statement, ast.Global):
                scope.elsewhere.update(dict.fromkeys(statement.names, self.module))
        # A nonlocal name is bound in a function outside of it, which is known when what is bound there is.
        nonlocals = [
            (scope, name) for scope, one in self._globals if isinstance(one, ast.Nonlocal) for name in one.names
        ]
        declared = {(scope.node, name) for scope, name in nonlocals}
        for scope, name, binding in self._pending:
            if (scope.node, name) not in declared:
                scope.bind(name, binding)
        for scope, name in nonlocals:
            scope.elsewhere[name] = (scope.outer and scope.outer.lookup(name)) or self.module
        for scope, name, binding in self._pending:
            if (scope.node, name) in declared:
                scope.bind(name, binding)

    def scope_of(self, node: ast.AST) -> Scope:
        """Where a node is evaluated."""
        return self._of[node]

    def _bind(self, scope: Scope, name: str, binding: Binding) -> None:
        self._pending.append((scope, name, binding))

    # What a node binds, and its children with the scope of each.

    def _visit(self, node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
        if isinstance(node, _FUNCTIONS):
            yield from self._visit_function(node, scope)
            return
        if isinstance(node, ast.ClassDef):
            self._bind(scope, node.name, Binding(node))
            inner = Scope(node, scope)
            for child in (*node.decorator_list, *node.bases, *node.keywords):
                yield child, scope
            for child in (*getattr(node, "type_params", ()), *node.body):
                yield child, inner
            return
        if isinstance(node, _COMPREHENSIONS):
            inner = Scope(node, scope)
            for number, generator in enumerate(node.generators):
                self._of[generator] = inner
                self.parents[generator] = node
                for child in (generator.target, generator.iter, *generator.ifs):
                    self.parents[child] = generator
                    yield child, scope if number == 0 and child is generator.iter else inner
            for child in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                yield child, inner
            return
        self._record(node, scope)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, _UNSCOPED):
                yield child, scope

    def _visit_function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope
    ) -> Iterator[tuple[ast.AST, Scope]]:
        inner = Scope(node, scope)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
        for argument in every:
            inner.bindings.setdefault(argument.arg, []).append(Binding(argument))
        yield node.args, scope  # annotations and defaults are evaluated outside
        if isinstance(node, ast.Lambda):
            yield node.body, inner
            return
        self._bind(scope, node.name, Binding(node))
        for child in (*node.decorator_list, node.returns):
            if child is not None:
                yield child, scope
        for inside in (*getattr(node, "type_params", ()), *node.body):
            yield inside, inner

    def _record(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name if alias.asname else alias.name.partition(".")[0]
                self._bind(scope, alias.asname or path, Binding(node, path=path))
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                if alias.name == "*":
                    scope.stars.append(module)
                else:
                    separator = "" if module.endswith(".") else "."
                    path = f"{module}{separator}{alias.name}"
                    self._bind(scope, alias.asname or alias.name, Binding(node, path=path))
        elif isinstance(node, ast.Global | ast.Nonlocal):
            self._globals.append((scope, node))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self._bind(scope, node.targets[0].id, Binding(node, value=node.value))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.value is not None:
                self._bind(scope, node.target.id, Binding(node, value=node.value))
        elif isinstance(node, ast.NamedExpr) and isinstance(node.target, ast.Name):
            while isinstance(scope.node, _COMPREHENSIONS) and scope.outer is not None:
                scope = scope.outer
            self._bind(scope, node.target.id, Binding(node, value=node.value))
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            if not self._is_plain_target(node):
                self._bind(scope, node.id, Binding(node))
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            self._bind(scope, node.name, Binding(node))
        elif isinstance(node, ast.MatchMapping) and node.rest:
            self._bind(scope, node.rest, Binding(node))

    def _is_plain_target(self, node: ast.Name) -> bool:
        """Whether the statement above has bound it, with its value."""
        above = self.parents[node]
        if isinstance(above, ast.Assign):
            return len(above.targets) == 1
        return isinstance(above, ast.AnnAssign | ast.NamedExpr)

    # What names stand for.

    def path_of_name(self, name: str) -> str | None:
        """What a name stands for at the top of the module."""
        return self._path_of_name(name, self.module, 0)

    def path(self, node: ast.AST, depth: int = 0) -> str | None:
        """The dotted name of what an expression stands for, as it was imported."""
        attributes = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            base = self._path_of_name(node.id, self._of[node], depth)
        elif isinstance(node, ast.Call):
            base = self._path_of_call(node, depth)
        else:
            base = None
        return None if base is None else ".".join([base, *reversed(attributes)])

    def _path_of_call(self, node: ast.Call, depth: int) -> str | None:
        imported = called_import(node, lambda inner: self.path(inner, depth + 1))
        if imported is not None:
            # __import__ gives the package at the top, as the statement does.
            return imported.module if imported.by != "__import__" else imported.module.partition(".")[0]
        skipping = isinstance(node.func, ast.Attribute | ast.Name) and _last(node.func) == "importorskip"
        if skipping and node.args and self.path(node.func, depth + 1) == "pytest.importorskip":
            # It skips where the module is not there, so that it is no import that breaks.
            skipped = node.args[0]
            return skipped.value if isinstance(skipped, ast.Constant) and isinstance(skipped.value, str) else None
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 2 and not node.keywords:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier():
                base = self.path(node.args[0], depth + 1)
                return None if base is None else f"{base}.{name.value}"
        return None

    def _path_of_name(self, name: str, scope: Scope, depth: int) -> str | None:
        if depth > _DEEPEST:
            return None
        home = scope.lookup(name)
        if home is None:
            return self._path_by_star(name)
        # Kept, and None while it is looked for: `x = x.a()` ten times over asks for x a million times otherwise.
        key = (home.node, name)
        if key not in self._paths:
            self._paths[key] = None
            self._paths[key] = self._path_by_bindings(home, name, depth)
        return self._paths[key]

    def _path_by_bindings(self, home: Scope, name: str, depth: int) -> str | None:
        bindings = [one for one in home.bindings[name] if not one.is_none]
        paths = {self._path_of_binding(one, depth) for one in bindings}
        if len(paths) > 1:
            paths = {self._path_of_binding(one, depth) for one in self._first_choices(bindings)}
        return paths.pop() if len(paths) == 1 else None

    def _first_choices(self, bindings: list[Binding]) -> list[Binding]:
        """Without what only stands in for a module that is not installed: `except ImportError: import numpy as jnp`."""
        if not any(isinstance(one.node, ast.Import) for one in bindings):
            return bindings
        return [one for one in bindings if not isinstance(self.parents.get(one.node), ast.ExceptHandler)]

    def _path_of_binding(self, binding: Binding, depth: int) -> str | None:
        if binding.value is not None:
            return self.path(binding.value, depth + 1)
        return binding.path

    def _path_by_star(self, name: str) -> str | None:
        stars = self.module.stars
        having = [star for star in stars if self._star_has(star, name)]
        # A module that is not jax's may have any name, so that the last word may be another's.
        others = [star for star in stars if not _is_jax(star)]
        if len(having) == 1 and not (others and name in _BUILTINS) and not (others and stars[-1] in others):
            return f"{having[0]}.{name}"
        return None


def _last(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id


def _is_jax(path: str) -> bool:
    return path.removeprefix("capibara.").partition(".")[0] == "jax"


@dataclass(frozen=True)
class CalledImport:
    """A call that imports a module by its name in a string."""

    by: str
    module: str
    text: ast.Constant


def called_import(node: ast.Call, path: Callable[[ast.AST], str | None]) -> CalledImport | None:
    """`importlib.import_module("…")` and `__import__("…")` of an absolute name; None for every other call."""
    if not node.args or not isinstance(node.args[0], ast.Constant) or not isinstance(node.args[0].value, str):
        return None
    if isinstance(node.func, ast.Name) and node.func.id == "__import__":
        by = "__import__"
    elif isinstance(node.func, ast.Attribute | ast.Name) and path(node.func) == "importlib.import_module":
        by = "importlib.import_module"
    else:
        return None
    module = node.args[0].value
    return None if module.startswith(".") else CalledImport(by, module, node.args[0])
