"""A module that is parsed: its tree, what its names stand for, its traced functions, its noqa comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from functools import cached_property

from capibara.migrate.codes import CODES
from capibara.migrate.findings import Finding, Severity
from capibara.migrate.scopes import Binding, Scope, Scopes
from capibara.migrate.traced import Function, functions

__all__ = ["Module"]

_NOQA = re.compile(r"#\s*noqa(?P<codes>\s*:\s*(?P<list>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)
_OURS = "capibara.jax"


class Module:
    """One file, as the rules read it. `Module.parse` makes it."""

    def __init__(self, source: str, path: str, tree: ast.Module) -> None:
        self.source = source
        self.path = path
        """As findings name it."""
        self.tree = tree
        self.lines = source.splitlines()
        self._scopes = Scopes(tree, _star_has)

    @classmethod
    def parse(cls, source: str, path: str = "<text>") -> Module:
        """Raises what `ast.parse` does: `SyntaxError`, and `ValueError`, `RecursionError` or `MemoryError`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings: not ours to say
            return cls(source, path, ast.parse(source, path))

    # Names.

    def origin(self, node: ast.AST) -> str | None:
        """The dotted name of what an expression stands for, as it was imported; None where that is not known."""
        return self._scopes.path(node)

    def resolve(self, node: ast.AST) -> str | None:
        """The same, with capibara.jax as what it stands in for: both are "jax.numpy.dot".

        >>> from capibara.migrate.module import Module
        >>> module = Module.parse("import jax.numpy as jnp; f = jnp.dot; y = f(x, x)")
        >>> module.resolve(module.calls[0].func)
        'jax.numpy.dot'
        """
        path = self.origin(node)
        if path is not None and (path == _OURS or path.startswith(f"{_OURS}.")):
            return path.removeprefix("capibara.")
        return path

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._scopes.parents.get(node)

    def scope(self, node: ast.AST) -> Scope:
        """Where a node is evaluated: what is bound there, and outside of it."""
        return self._scopes.scope_of(node)

    def bindings_of(self, node: ast.Name) -> list[Binding]:
        """Every statement that binds this name in the scope that it is from."""
        home = self.scope(node).lookup(node.id)
        return [] if home is None else home.bindings[node.id]

    @property
    def bindings(self) -> dict[str, str]:
        """Of the module itself: a name -> what it stands for, where that is known."""
        found = {}
        for name in self._scopes.module.bindings:
            path = self._scopes.path_of_name(name)
            if path is not None:
                found[name] = path
        return found

    @property
    def stars(self) -> list[str]:
        """Modules that everything is imported from."""
        return self._scopes.module.stars

    @cached_property
    def patched(self) -> frozenset[str]:
        """Names that the module itself gives to others': `jax.tree_map = …`, `setattr(jax, "tree_map", …)`."""
        stores = [node for node in self.nodes(ast.Attribute) if isinstance(getattr(node, "ctx", None), ast.Store)]
        paths = {path for node in stores if (path := self.origin(node)) is not None}
        for call in self.calls:
            if isinstance(call.func, ast.Name) and call.func.id == "setattr" and len(call.args) == 3:
                owner, name = self.origin(call.args[0]), call.args[1]
                if owner is not None and isinstance(name, ast.Constant) and isinstance(name.value, str):
                    paths.add(f"{owner}.{name.value}")
        return frozenset(paths)

    def nodes(self, *kinds: type[ast.AST]) -> list[ast.AST]:
        """Every node of these kinds."""
        return [node for kind in kinds for node in self._scopes.nodes.get(kind, ())]

    @property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes(ast.Call) if isinstance(node, ast.Call)]

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """Every function and lambda, and what traces it."""
        return tuple(functions(self._scopes.nodes, self.resolve, self._scopes.parents, self._defined))

    @cached_property
    def _function_of(self) -> dict[ast.AST, Function]:
        return {one.node: one for one in self.functions}

    def function_around(self, node: ast.AST) -> Function | None:
        """The innermost function that a node runs in; None at the top of the module and in a class's body."""
        scope: Scope | None = self.scope(node)
        while scope is not None and not isinstance(scope.node, ast.Module | ast.ClassDef):
            if scope.node in self._function_of:
                return self._function_of[scope.node]
            scope = scope.outer
        return None

    def function_named(self, node: ast.Name) -> Function | None:
        """The function of this module that a name stands for."""
        defined = self._defined(node)
        return None if defined is None else self._function_of.get(defined)

    def _defined(self, node: ast.Name) -> ast.AST | None:
        bindings = self.bindings_of(node)
        if len(bindings) != 1:
            return None
        return bindings[0].value if bindings[0].value is not None else bindings[0].node

    # Findings.

    def finding(
        self,
        node: ast.AST,
        code: str,
        message: str,
        fix: str = "",
        severity: Severity | None = None,
    ) -> Finding:
        """At a node, with the code's own severity unless another is given."""
        line, column, end_line, end_column = self.span(node)
        place = (line, column + 1, end_line, end_column + 1)
        return Finding(self.path, *place, code, message, fix, severity or CODES[code].severity)

    def span(self, node: ast.AST) -> tuple[int, int, int, int]:
        """First line and column, last line and column; lines from 1, columns from 0, in characters."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        end_line = getattr(node, "end_lineno", None) or line
        end_column = getattr(node, "end_col_offset", None) or column
        return line, self._characters(line, column), end_line, self._characters(end_line, end_column)

    def _characters(self, line: int, offset: int) -> int:
        """ast counts bytes; editors count characters."""
        text = self._physical[line - 1] if line <= len(self._physical) else ""
        return offset if text.isascii() else len(text.encode()[:offset].decode(errors="ignore"))

    @cached_property
    def _physical(self) -> list[str]:
        # As the parser counts lines: a form feed or a Unicode separator ends none.
        return self.source.replace("\r\n", "\n").replace("\r", "\n").split("\n")

    @cached_property
    def _silenced(self) -> dict[int, frozenset[str] | None]:
        """Line -> the codes that its comment silences; None for all of them."""
        if "noqa" not in self.source.lower():
            return {}
        found: dict[int, frozenset[str] | None] = {}
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            match = _NOQA.search(token.string) if token.type == tokenize.COMMENT else None
            if match is not None:
                listed = match["list"]
                codes = None if listed is None else frozenset(re.split(r"[,\s]+", listed.upper()))
                found[token.start[0]] = codes
        return found

    def noqa(self, line: int, code: str) -> bool:
        """Whether a comment on this line silences the code: `# noqa`, `# noqa: CAP201`, `# noqa: CAP2`."""
        if line not in self._silenced:
            return False
        codes = self._silenced[line]
        return codes is None or any(code.startswith(one) for one in codes)


def _star_has(module: str, name: str) -> bool:
    """Whether `from module import *` gives the name: the table of jax's public names knows."""
    from capibara.migrate.fates import is_public  # the table is read where a star asks for it

    return is_public(module.removeprefix("capibara."), name)
