"""What `--fix` would change, found by reading: which expression becomes which, and where imports go.

Only what means the same on every supported jax is changed, and nothing that is guarded: it works as it is. A name that
plain jax has no equal of, and capibara.jax stands in for, is imported from there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from capibara.migrate.fates import SHORTER, Fate, fate, in_every_supported_release
from capibara.migrate.functions import KEYWORDS, gone_in_import, refused_arguments
from capibara.migrate.guards import guard
from capibara.migrate.module import Module
from capibara.migrate.scopes import called_import

__all__ = ["LOADED", "Edits", "ImportChange", "Imported", "Target", "edits"]

Target = Literal["jax", "capibara"]
Span = tuple[int, int, int, int]

_LOADED = """
    api_util core custom_batching custom_derivatives debug distributed dlpack dtypes errors experimental
    export ffi image interpreters interpreters.ad interpreters.batching interpreters.mlir
    interpreters.partial_eval interpreters.pxla interpreters.xla lax lax.linalg lib monitoring nn
    nn.initializers numpy numpy.fft numpy.linalg ops profiler random scipy sharding stages tree tree_util
    typing version
"""
LOADED = frozenset({"jax", *(f"jax.{name}" for name in _LOADED.split())})
"""Modules that `import jax` loads, on every supported jax: a dotted name reaches them."""


@dataclass(frozen=True)
class Imported:
    """What an import statement binds: `from module import name as asname`, or `import module as asname`."""

    module: str
    name: str | None = None
    asname: str | None = None


@dataclass(frozen=True)
class ImportChange:
    """Some of a statement's names are imported otherwise; by their place in it. None: they are not any more."""

    at: Span
    moves: tuple[tuple[int, tuple[Imported, ...]], ...]


@dataclass
class Edits:
    """Everything that changes in one module."""

    expressions: dict[Span, str] = field(default_factory=dict)
    """An expression -> what stands in its place."""
    keywords: dict[Span, str] = field(default_factory=dict)
    """A keyword argument -> its new name."""
    named: dict[Span, str] = field(default_factory=dict)
    """A positional argument -> the keyword that it gets."""
    imports: list[ImportChange] = field(default_factory=list)
    added: dict[str, None] = field(default_factory=dict)
    """Modules to import at the top, as `import module`."""
    from_dropin: dict[str, None] = field(default_factory=dict)
    """Names that capibara.jax alone stands in for, and that are taken from there now."""

    def __bool__(self) -> bool:
        return bool(self.expressions or self.keywords or self.named or self.imports)


@dataclass(frozen=True)
class _Form:
    """A function whose successor takes the same arguments by other names, or by name alone."""

    new: str
    places: tuple[str | None, ...]
    """The keyword of each positional argument of the old one; None where it stays by its place."""
    renamed: dict[str, str]
    refused: frozenset[str]
    """Keywords that mean nothing to the new one."""


_FORMS = {
    "jax.experimental.shard_map.shard_map": _Form(
        "jax.shard_map",
        (None, "mesh", "in_specs", "out_specs", "check_vma"),
        {"check_rep": "check_vma"},
        frozenset({"auto", "f"}),
    ),
}
_VALUES = {"jax.numpy.NINF": "(-{}.inf)", "jax.numpy.PZERO": "0.0", "jax.numpy.NZERO": "(-0.0)"}
"""Constants -> the expression that they are; {} is what the code calls their module."""


def edits(
    module: Module, target: Target = "jax", *, adapters: bool = True, codes: frozenset[str] | None = None
) -> Edits:
    """What is to be changed.

    Args:
        target: "jax" for a program of plain jax; "capibara" for one that imports capibara.jax in its place.
        adapters: Whether names that capibara.jax alone has are imported from it, where the target is plain jax.
        codes: Findings that are wanted; all of them unless given. What is not wanted is left as it is.
    """
    return _Planner(module, target, adapters, codes).plan()


class _Planner:
    def __init__(self, module: Module, target: Target, adapters: bool, codes: frozenset[str] | None) -> None:
        self.module = module
        self.target = target
        self.adapters = adapters and target == "jax"
        self.codes = codes
        self.edits = Edits()
        self._forms = {path: form for path, form in _FORMS.items() if self._takes(path, form)}

    def plan(self) -> Edits:
        for node in self.module.nodes(ast.Attribute, ast.Name, ast.Call):
            self._expression(node)
        for node in self.module.nodes(ast.Import, ast.ImportFrom):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
        for call in self.module.calls:
            self._dynamic(call)
            self._arguments(call)
        return self.edits

    def _wanted(self, node: ast.AST, code: str) -> bool:
        """Whether the finding that this fix is of is wanted, and not silenced."""
        line, _, end_line, _ = self.module.span(node)
        silenced = self.module.noqa(line, code) or self.module.noqa(end_line, code)
        return (self.codes is None or code in self.codes) and not silenced

    # Names.

    def _instead(self, path: str, one: Fate) -> str | None:
        return self._forms[path].new if path in self._forms else one.instead

    def _expression(self, node: ast.AST) -> None:
        """The longest part of a dotted name that went somewhere is written as where it went."""
        above = self.module.parent(node)
        if isinstance(above, ast.Attribute) and self._gone(above) is not None:
            return  # the longer one says more
        one = self._gone(node)
        if one is None or not self._wanted(node, one.code) or self._is_said_at_import(node, one):
            return
        text = self._text(node, one)
        if text is not None:
            self.edits.expressions[self.module.span(node)] = text

    def _gone(self, node: ast.AST) -> Fate | None:
        """What became of an expression that jax no longer has under this name, unless it is guarded."""
        if not isinstance(node, ast.Attribute | ast.Name | ast.Call):
            return None
        if not isinstance(node, ast.Call) and not isinstance(node.ctx, ast.Load):
            return None
        path = self.module.origin(node)
        if path is None or not path.startswith("jax.") or path in self.module.patched:
            return None
        one = fate(path)
        if one is None or (self._instead(path, one) is None and (one.removed is None or not one.served)):
            return None
        return None if guard(self.module, node, "attribute") else one

    def _is_said_at_import(self, node: ast.AST, one: Fate) -> bool:
        """A name that was imported as such is changed where it is imported."""
        if isinstance(node, ast.Name):
            return self.module.scope(node).lookup(node.id) is not None
        base = node
        while isinstance(base, ast.Attribute):
            base = base.value
        if not isinstance(base, ast.Name) or base is node:
            return False
        imported = self.module.origin(base)
        if imported is None or fate(imported, as_module=imported != "jax") is None:
            return False
        # An attribute of a module that is gone: it stays where the module that is imported instead has it too.
        return self._fits(imported, one) or self._module_of(imported)[1] == "capibara"

    def _text(self, node: ast.AST, one: Fate) -> str | None:
        if one.path in _VALUES:
            return self._value(node, one)
        instead = self._instead(one.path, one)
        if instead is not None:
            return self._spelled(node, instead)
        if self.adapters and self._free(node, "capibara"):
            self.edits.added["capibara.jax"] = None
            self.edits.from_dropin[one.path] = None
            return f"capibara.{one.path}"
        return None

    def _value(self, node: ast.AST, one: Fate) -> str | None:
        form = _VALUES[one.path]
        module = self._spelled(node, "jax.numpy.inf") if "{}" in form else ""
        return None if module is None else form.format(module.rpartition(".")[0])

    def _spelled(self, node: ast.AST, path: str) -> str | None:
        """How a path is written at a node, by what is imported or will be; None where its first name is taken."""
        module, _, name = path.rpartition(".")
        if isinstance(node, ast.Name) and module in self.module.stars:
            return name
        best = ""
        for bound, stands_for in self.module.bindings.items():
            if (module == stands_for or module.startswith(f"{stands_for}.")) and len(stands_for) > len(best):
                home = self.module.scope(node).lookup(bound)
                at_top = home is self.module.scope(self.module.tree) and self._is_bound_at(node, bound)
                if at_top and (module == stands_for or module in LOADED):
                    best, spelled = stands_for, bound
        if best:
            return f"{spelled}{path.removeprefix(best)}"
        first = path.partition(".")[0]
        if not self._free(node, first):
            return None
        self.edits.added[module] = None
        return path

    def _is_bound_at(self, node: ast.AST, name: str) -> bool:
        """Whether a name of the module is sure to be bound where a node runs."""
        base = node
        while isinstance(base, ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name) and base.id == name:
            return True  # the program itself counts on it
        later = self.module.function_around(node) is not None
        for binding in self.module.scope(self.module.tree).bindings[name]:
            above = self.module.parent(binding.node)
            if isinstance(above, ast.Try) and binding.node in above.body:
                above = self.module.parent(above)
            if above is self.module.tree and (later or self.module.span(binding.node)[0] < self.module.span(node)[0]):
                return True
        return False

    def _free(self, node: ast.AST, name: str) -> bool:
        """Whether a name is not bound at a node, or to the package of this name."""
        home = self.module.scope(node).lookup(name)
        if home is None:
            return True
        return home is self.module.scope(self.module.tree) and self.module.bindings.get(name) == name

    # Modules that are gone and imported under a name.

    def _fits(self, imported: str, one: Fate) -> bool:
        """Whether the module that stands in has the same name for it."""
        stand_in, where = self._module_of(imported)
        if stand_in is None or where != "jax":
            return False
        same = f"{stand_in}{one.path.removeprefix(imported)}"
        return in_every_supported_release(same) and self._instead(one.path, one) in (None, same)

    def _module_of(self, imported: str) -> tuple[str | None, str]:
        """What is imported in a module's place, and of which package; (None, "") where all of it is elsewhere."""
        one = fate(imported, as_module=True)
        if one is None:
            return imported, "jax"
        fitting, dropin_only = one.instead is not None, False
        used = False
        for path in self._uses(imported):
            used = True
            if path == imported:  # the module itself, handed on
                dropin_only |= one.instead is None
                continue
            inner = fate(path)
            moved = inner is not None and self._instead(path, inner) is not None
            stays = one.instead is not None and in_every_supported_release(
                f"{one.instead}{path.removeprefix(imported)}"
            )
            if not moved and not stays:
                dropin_only = True
        if dropin_only:
            return (imported, "capibara") if one.served else (imported, "")
        if fitting:
            return one.instead, "jax"
        return (None, "") if used or not one.served else (imported, "capibara")

    def _uses(self, imported: str) -> Iterator[str]:
        """Where a module is used under a name of its own: the first attribute of it, or the bare name."""
        for node in self.module.nodes(ast.Name):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and self.module.origin(node) == imported:
                above = self.module.parent(node)
                if isinstance(above, ast.Attribute):
                    yield f"{imported}.{above.attr}"
                else:
                    yield imported

    def _is_needed(self, imported: str, bound: str) -> bool:
        """Whether a use of an imported module is not written otherwise: silenced, in a string, where jax is another."""
        for node in self.module.nodes(ast.Name):
            if isinstance(node, ast.Name) and self.module.origin(node) == imported:
                above: ast.AST | None = node
                while isinstance(above, ast.Name | ast.Attribute):
                    if self.module.span(above) in self.edits.expressions:
                        break
                    above = self.module.parent(above)
                else:
                    return True
        texts = [one.value for one in self.module.nodes(ast.Constant) if isinstance(one, ast.Constant)]
        return any(isinstance(text, str) and bound in text and _names(text, bound) for text in texts)

    # Imports.

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        gone = dict(gone_in_import(node))
        if guard(self.module, node, "import"):
            gone = {}
        moves: list[tuple[int, tuple[Imported, ...]]] = []
        for number, alias in enumerate(node.names):
            one = gone.get(alias)
            if one is not None and not self._wanted(alias, one.code):
                one = None
            if isinstance(node, ast.Import):
                moved = self._imported_module(node, alias, one)
            else:
                moved = self._imported_name(node, alias, one)
            if moved is not None:
                moves.append((number, moved))
        if moves:
            self.edits.imports.append(ImportChange(self.module.span(node), tuple(moves)))

    def _imported_name(self, node: ast.ImportFrom, alias: ast.alias, one: Fate | None) -> tuple[Imported, ...] | None:
        module = node.module or ""
        if node.level or module.partition(".")[0] != "jax":
            return None
        path = f"{module}.{alias.name}"
        bound = alias.asname or alias.name
        if one is not None and alias.name == "*":
            return self._at_home((Imported(one.instead, "*"),)) if one.is_module and one.instead else None
        if one is not None:
            own = fate(path, as_module=False)
            is_module = own is not None and (own.is_module or fate(path, as_module=True) is own)
            if own is not None and is_module:
                return self._moved_module(path, bound)
            instead = self._instead(path, own) if own is not None else None
            if instead is not None:
                return self._at_home((_from(instead, bound),))
            if own is not None and own.removed is not None and own.served and self.adapters:
                self.edits.from_dropin[path] = None
                return (Imported(f"capibara.{module}", alias.name, alias.asname),)
        if self.target == "capibara" and self._wanted(node, "CAP103" if alias.name == "*" else "CAP102"):
            return (Imported(f"capibara.{module}", alias.name, alias.asname),)
        return None

    def _moved_module(self, path: str, bound: str) -> tuple[Imported, ...] | None:
        module, where = self._module_of(path)
        if module is None:
            one = fate(path, as_module=True)
            if self._is_needed(path, bound):  # a use that stays as it is, so that the import may not go
                module, where = path, "capibara" if one is not None and one.served else ""
            else:
                return ()
        if where == "jax":
            return self._at_home((_from(module, bound),))
        if where == "capibara" and (self.adapters or self.target == "capibara"):
            self.edits.from_dropin[path] = None
            return (_from(f"capibara.{module}", bound),)
        return None

    def _imported_module(self, node: ast.Import, alias: ast.alias, one: Fate | None) -> tuple[Imported, ...] | None:
        if alias.name.partition(".")[0] != "jax":
            return None
        if one is not None and one.removed is not None:
            if alias.asname:
                moved = self._moved_module(alias.name, alias.asname) if one.path == alias.name else None
                if moved is not None:
                    return tuple(_as_import(each) for each in moved)
            elif fate(alias.name) is None or self._all_moved(alias.name):  # jax.config is there, and is no module
                return () if self._bound_before(node, "jax") else self._at_home((Imported("jax"),))
        if self.target == "capibara" and self._wanted(alias, "CAP101"):
            if alias.asname:
                return (Imported(f"capibara.{alias.name}", asname=alias.asname),)
            whole = Imported("capibara.jax", asname="jax")
            return (whole,) if alias.name == "jax" else (whole, Imported(f"capibara.{alias.name}"))
        return None

    def _bound_before(self, node: ast.Import, name: str) -> bool:
        """Whether an import at the top of the module, before this one, binds the name already."""
        return any(
            isinstance(one, ast.Import)
            and one.lineno < node.lineno
            and any((alias.asname or alias.name.partition(".")[0]) == name for alias in one.names)
            for one in self.module.tree.body
        )

    def _all_moved(self, module: str) -> bool:
        """Whether every use of a module by its whole dotted name is one that is written otherwise now."""
        for node in self.module.nodes(ast.Attribute):
            path = self.module.origin(node)
            if path is not None and path.startswith(f"{module}."):
                rewritten = self.module.span(node) in self.edits.expressions
                below = any(
                    self.module.span(inner) in self.edits.expressions
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Attribute)
                )
                if not rewritten and not below:
                    return False
        return True

    def _at_home(self, imported: tuple[Imported, ...]) -> tuple[Imported, ...]:
        """The same from capibara.jax, where that is the target."""
        if self.target == "jax":
            return imported
        found = []
        for one in imported:
            if one.module.partition(".")[0] != "jax":
                found.append(one)
            elif one.name is None and one.asname is None:
                found.append(Imported("capibara.jax", asname="jax"))
            else:
                found.append(Imported(f"capibara.{one.module}", one.name, one.asname))
        return tuple(found)

    def _dynamic(self, call: ast.Call) -> None:
        """The module's name in a call of importlib; `__import__` gives the first package, which is another one then."""
        imported = called_import(call, self.module.resolve)
        if imported is None or imported.by == "__import__" or imported.module.partition(".")[0] != "jax":
            return
        module = imported.module
        one = fate(module, as_module=True)
        if one is not None and one.removed is not None and one.instead is not None and self._wanted(call, one.code):
            module = module if guard(self.module, call, "import") else one.instead
        if self.target == "capibara" and self._wanted(call, "CAP104"):
            module = f"capibara.{module}"
        if module != imported.module:
            self.edits.expressions[self.module.span(imported.text)] = f'"{module}"'

    # Calls.

    def _takes(self, path: str, form: _Form) -> bool:
        """Whether every use of a function is a call that its successor takes too."""
        for node in self.module.nodes(ast.Name, ast.Attribute):
            if self.module.origin(node) != path or not isinstance(getattr(node, "ctx", None), ast.Load):
                continue
            call = self.module.parent(node)
            if not isinstance(call, ast.Call):
                return False
            if call.func is not node and not self._is_partial(call, node):
                return False
            places = call.args if call.func is node else call.args[1:]
            if len(places) > len(form.places) or any(isinstance(one, ast.Starred) for one in places):
                return False
            if any(one.arg is None or one.arg in form.refused for one in call.keywords):
                return False
        return True

    def _is_partial(self, call: ast.Call, node: ast.AST) -> bool:
        partial = self.module.origin(call.func) == "functools.partial" and call.args[:1] == [node]
        # By its place, a partial's argument would be taken for the function.
        return partial and len(call.args) == 1

    def _arguments(self, call: ast.Call) -> None:
        path = self.module.origin(call.func)
        first = 0
        if path == "functools.partial" and call.args:
            path, first = self.module.origin(call.args[0]), 1
        form = self._forms.get(path or "")
        if form is not None and not guard(self.module, call, "call"):
            for place, argument in zip(form.places, call.args[first:], strict=False):
                if place is not None:
                    self.edits.named[self.module.span(argument)] = place
            for keyword in call.keywords:
                if keyword.arg in form.renamed:
                    self.edits.keywords[self.module.span(keyword)] = form.renamed[keyword.arg]
            return
        for one in refused_arguments(self.module, call):
            if guard(self.module, call, "call") or not self._wanted(
                one.node, "CAP206" if one.keyword_only else "CAP205"
            ):
                continue
            new = one.name if one.keyword_only else KEYWORDS.get(one.path, {}).get(one.name)
            if new is None or any(keyword.arg == new for keyword in call.keywords):
                continue
            if one.by_place is None:
                self.edits.keywords[self.module.span(one.node)] = new
            else:
                self.edits.named[self.module.span(one.node)] = new


def _names(text: str, name: str) -> bool:
    """Whether a string is an expression that uses the name: an annotation, or an entry of `__all__`."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


_LONGER = {short: long for long, short in SHORTER.items()}


def _from(path: str, bound: str) -> Imported:
    """The import that binds a name to what is at this path."""
    path = _LONGER.get(path, path)  # `from jax.tree import map` would hide Python's own
    module, _, name = path.rpartition(".")
    if not module:  # a package at the top
        return Imported(path, asname=None if bound == path else bound)
    return Imported(module, name, None if bound == name else bound)


def _as_import(imported: Imported) -> Imported:
    """`from a import b as c` as `import a.b as c`: what `import a.b as c` was stays of that form."""
    if imported.name is None:
        return imported
    return Imported(f"{imported.module}.{imported.name}", asname=imported.asname or imported.name)
