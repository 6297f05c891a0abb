"""What one release of jax gives by its public modules, read from its files: nothing of that jax is imported.

griffe resolves what a name stands for and its parameters; which names a module has when it has run is read from its
statements in their order, because jax deletes names, hides some from type checkers or shows them to these alone, and
keeps deprecated ones in a table that the module's `__getattr__` reads:

    _deprecations = {"trapz": ("... is deprecated; use jax.numpy.trapezoid", _deprecated_trapz), "gone": ("...", None)}

There a name whose object is None raises, so that the release does not have it.
"""

from __future__ import annotations

import ast
import platform
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import griffe

__all__ = ["Name", "surface"]

NOT_PUBLIC = re.compile(r"\.(_\w*|tests|examples|\w+_test|test_\w+_lib|collect_profile)(\.|$)")
"""In the path of a module: internal, or no part of what is imported by others."""

_REPLACEMENT = re.compile(r"\b(?:[Uu]sed?|[Uu]sing|[Ss]ee|with|to|by)\s+(?:the\s+)?[`']?(jax(?:\.\w+)+)")


@dataclass(frozen=True)
class Name:
    """One public name of one release."""

    kind: str
    """"module", "function", "class" or "attribute"."""
    exported: bool
    """Whether its module means it to be used: it defines it, lists it in `__all__` or imports it as what it is."""
    target: str = ""
    """The full path of what it stands for, where it is imported."""
    parameters: str | None = None
    """As `x, axis=, *, where=`: names in their order, `=` after those that may be left out; None where unknown."""
    deprecated: bool = False
    """Whether using it warns."""
    replacement: str = ""
    """The name that the warning tells to use."""
    raises: bool = False
    """Whether it is a function that does nothing but raise."""


@dataclass
class _Binding:
    exported: bool
    value: ast.expr | None = None
    """What a deprecated name stands for, or what is assigned."""
    message: str | None = None


@dataclass
class _Namespace:
    """What a module's names are when it has run."""

    names: dict[str, _Binding] = field(default_factory=dict)
    removed: dict[str, str] = field(default_factory=dict)
    """Names that raise, and what is said."""
    listed: list[str] | None = None
    """`__all__`."""
    raises: bool = False
    warning: str | None = None
    """What importing the module warns of."""
    same_as: str | None = None
    """The module that it puts into `sys.modules` in its own place."""


def surface(folder: Path) -> tuple[dict[str, Name], dict[str, str]]:
    """The public names of the jax that is unpacked in a folder, by path, and what is said of those that raise."""
    loader = griffe.GriffeLoader(search_paths=[folder], allow_inspection=False)
    package = loader.load("jax", submodules=True)
    assert isinstance(package, griffe.Module)
    loader.resolve_aliases(implicit=True, external=False)
    _none_left_out(folder, package)
    reader = _Reader(package)
    found: dict[str, Name] = {}
    raising: dict[str, str] = {}
    stand_ins: dict[str, str] = {}
    for path, module in sorted(_modules(package)):
        space = reader.namespace(path)
        if space.raises:
            raising[path] = _replacement(space.warning or "")
            continue
        found[path] = Name(
            "module",
            exported=True,
            deprecated=space.warning is not None,
            replacement=_replacement(space.warning or ""),
        )
        if space.same_as is not None:
            stand_ins[path] = reader.target(module, space.same_as)
            continue
        for name, binding in space.names.items():
            if not name.startswith("_") and f"{path}.{name}" not in found:
                described = reader.describe(module, name, binding, space)
                if described is not None:
                    found[f"{path}.{name}"] = described
        raising |= {f"{path}.{name}": _replacement(text) for name, text in space.removed.items()}
    for path, other in stand_ins.items():
        # It meant those names alone that it had before it was replaced, and a release that had them says so.
        inside = {name: row for name, row in found.items() if name.rpartition(".")[0] == other}
        found |= {
            f"{path}{name.removeprefix(other)}": replace(row, exported=False, target=row.target or name)
            for name, row in inside.items()
        }
    return dict(sorted(found.items())), {path: text for path, text in sorted(raising.items()) if path not in found}


def _none_left_out(folder: Path, package: griffe.Module) -> None:
    """griffe goes on without a file that does not parse, as one in the syntax of a later Python."""
    loaded: set[Path] = set()
    waiting = [package]
    while waiting:
        module = waiting.pop()
        loaded |= {module.filepath} if isinstance(module.filepath, Path) else set()
        waiting += [inner for inner in module.modules.values() if not inner.is_alias]
    for path in sorted(set(folder.joinpath("jax").rglob("*.py")) - loaded):
        try:
            ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            raise RuntimeError(
                f"{path.relative_to(folder)} does not parse under Python {platform.python_version()}: {error}. "
                "Fix: run this with the newest Python that the newest jax is for."
            ) from error


def _modules(module: griffe.Module) -> Iterator[tuple[str, griffe.Module]]:
    if NOT_PUBLIC.search(module.path):
        return
    if isinstance(module.filepath, Path):  # else a folder without __init__.py, whose files may yet be imported
        yield module.path, module
    for inner in module.modules.values():
        if not inner.is_alias:
            yield from _modules(inner)


def _replacement(text: str) -> str:
    found = _REPLACEMENT.search(text)
    return found.group(1) if found else ""


class _Reader:
    def __init__(self, package: griffe.Module) -> None:
        self._package = package
        self._spaces: dict[str, _Namespace] = {}

    def object(self, path: str) -> griffe.Object | griffe.Alias | None:
        if path == "jax":
            return self._package
        try:
            return self._package[path.removeprefix("jax.")] if path.startswith("jax.") else None
        except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
            return None

    def namespace(self, path: str) -> _Namespace:
        if path not in self._spaces:
            space = self._spaces[path] = _Namespace()
            module = self.object(path)
            if module is not None and not module.is_alias and isinstance(module.filepath, Path):
                tree = ast.parse(module.filepath.read_text(encoding="utf-8"))
                package = path if module.filepath.name == "__init__.py" else path.rpartition(".")[0]
                _Run(self, path, package, space).run(tree.body)
        return self._spaces[path]

    def describe(self, module: griffe.Module, name: str, binding: _Binding, space: _Namespace) -> Name | None:
        """What a name is; None for what a module has from elsewhere for its own use, as numpy."""
        exported = binding.exported if space.listed is None else name in space.listed
        warning = binding.message
        source = self._imported(module, binding.value) if binding.value is not None else None
        seen = source or self._member(module, name)
        if seen is None:
            return Name("attribute", exported, deprecated=warning is not None, replacement=_replacement(warning or ""))
        target, found = self._final(seen)
        if not exported and not target.startswith(("jax.", "jaxlib.")) and target != "jax":
            return None
        raises = False
        if found is None:
            kind, parameters = "attribute", None
        else:
            kind, parameters = found.kind.value, _parameters(found)
            if isinstance(found, griffe.Function):
                said, raises = _body(found)
                warning = said if warning is None else warning
        own = f"{module.path}.{name}"
        return Name(
            "attribute" if kind == "type alias" else kind,
            exported,
            "" if target == own else target,
            parameters,
            deprecated=warning is not None,
            replacement=_replacement(warning or ""),
            raises=raises,
        )

    def target(self, module: griffe.Module, name: str) -> str:
        """The path of what a module has imported under a name."""
        return self._final(module.members[name])[0]

    def _member(self, module: griffe.Module, name: str) -> griffe.Object | griffe.Alias | str | None:
        if name in module.members:
            return module.members[name]
        return None

    def _imported(self, module: griffe.Module, value: ast.expr) -> griffe.Object | griffe.Alias | str | None:
        """What `name` or `module.name` in a module stands for."""
        text = ast.unparse(value)
        if not re.fullmatch(r"\w+(\.\w+)*", text):
            return None
        first, *rest = text.split(".")
        if first not in module.members:
            return None
        base = module.members[first]
        path = ".".join([base.target_path if isinstance(base, griffe.Alias) else base.path, *rest])
        return self.object(path) or path

    def _final(self, seen: griffe.Object | griffe.Alias | str) -> tuple[str, griffe.Object | None]:
        """Where the object is defined, following imports as far as they lead into jax."""
        known: set[str] = set()
        while not isinstance(seen, griffe.Object):
            path = seen if isinstance(seen, str) else seen.target_path
            if path in known:
                return path, None
            known.add(path)
            inner = self.object(path)
            if inner is None:
                return path, None
            seen = inner
        # `name = module.name` is the same object by another name.
        if isinstance(seen, griffe.Attribute) and seen.value is not None and isinstance(seen.module, griffe.Module):
            text = str(seen.value)
            if re.fullmatch(r"\w+(\.\w+)*", text) and text not in ("None", "True", "False"):
                other = self._imported(seen.module, ast.parse(text, mode="eval").body)
                if other is not None and (isinstance(other, str) or other.path != seen.path):
                    target = other if isinstance(other, str) else other.path
                    if target not in known and (isinstance(other, str) or not _cyclic(other)):
                        path, found = self._final(other)
                        return (path, found) if path.startswith(("jax.", "jaxlib.")) else (seen.path, seen)
        return seen.path, seen


def _cyclic(found: griffe.Object | griffe.Alias) -> bool:
    try:
        return found.is_alias and found.final_target is None
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return True


class _Run:
    """Reads a module's statements in their order."""

    def __init__(self, reader: _Reader, path: str, package: str, space: _Namespace) -> None:
        self._reader = reader
        self._path = path
        self._package = package
        self._space = space
        self._texts: dict[str, str] = {}
        """Texts that are assigned to a name, as a warning's often is."""
        self._tables: dict[str, ast.Dict] = {}

    def run(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _bind(self, name: str, exported: bool, value: ast.expr | None = None, message: str | None = None) -> None:
        self._space.names[name] = _Binding(exported, value, message)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == "__getattr__":
                self._lazy_modules(node)
            self._bind(node.name, exported=True)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self._bind(name, exported=alias.asname is not None and alias.asname == alias.name.rpartition(".")[2])
        elif isinstance(node, ast.ImportFrom):
            self._import_from(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            self._assign(node)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    deprecated = self._space.names.pop(target.id, None)
                    if deprecated is not None and deprecated.message is not None:
                        self._space.names[target.id] = deprecated  # the table gives it
        elif isinstance(node, ast.If):
            self._branches(node)
        elif isinstance(node, ast.Try):
            self.run(node.body)
            for handler in node.handlers:
                # What is bound where an import fails is None or a message, and never a name not there otherwise.
                if not any(isinstance(inner, ast.Raise | ast.Pass) for inner in handler.body):
                    self.run(handler.body)
            self.run(node.orelse)
            self.run(node.finalbody)
        elif isinstance(node, ast.With):
            self.run(node.body)
        elif isinstance(node, ast.Raise):
            self._space.raises = True
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._call(node.value)

    def _branches(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if "__main__" in test:
            return
        if "TYPE_CHECKING" in test:
            self.run(node.body if test.startswith("not ") else node.orelse)
        elif "is_accelerated" in test:  # raises for those who ask for it
            self.run(node.orelse)
        elif not isinstance(node.body[-1], ast.Raise):
            self.run(node.body)
            self.run(node.orelse)

    def _import_from(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self._package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name != "*":
                self._bind(alias.asname or alias.name, exported=alias.asname == alias.name)
            elif base.startswith("jax"):
                inner = self._reader.namespace(base)
                for name, binding in inner.names.items():
                    public = name in inner.listed if inner.listed is not None else not name.startswith("_")
                    if public:
                        self._bind(name, exported=binding.exported or inner.listed is not None)

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Tuple):
                names = [inner.id for inner in target.elts if isinstance(inner, ast.Name)]
                if "__getattr__" in names and isinstance(node.value, ast.Call):
                    self._attached(node.value)
                    continue
                for name in names:
                    self._bind(name, exported=True)
            elif isinstance(target, ast.Name):
                self._assign_name(target.id, node)
            elif ast.unparse(target).endswith(f"sys.modules['{self._path}']") and isinstance(node.value, ast.Name):
                self._space.same_as = node.value.id

    def _assign_name(self, name: str, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        value = node.value
        if isinstance(node, ast.AnnAssign) and value is None:
            return
        if name == "__all__" and value is not None:
            self._space.listed = [*(self._space.listed or []), *_texts(value)]
        elif name == "__getattr__" and isinstance(value, ast.Call) and "deprecation_getattr" in ast.unparse(value.func):
            self._deprecations(value.args[1])
        elif isinstance(value, ast.Dict):
            self._tables[name] = value
            self._bind(name, exported=True)
        else:
            text = _text(value, self._texts)
            if text is not None:
                self._texts[name] = text
            self._bind(name, exported=True)
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("SimpleNamespace"):
                for word in value.keywords:
                    if word.arg is not None:
                        self._bind(f"{name}.{word.arg}", exported=True, value=word.value)

    def _deprecations(self, table: ast.expr) -> None:
        found = self._tables.get(ast.unparse(table)) if isinstance(table, ast.Name) else table
        if not isinstance(found, ast.Dict):
            raise ValueError(f"{self._path}: no table of deprecated names {ast.unparse(table)} to read")
        for key, value in zip(found.keys, found.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(value, ast.Tuple):
                raise ValueError(f"{self._path}: a row of deprecated names is not a text and a pair")
            text = _text(value.elts[0], self._texts) or ""
            if isinstance(value.elts[1], ast.Constant) and value.elts[1].value is None:
                # An attribute of the module goes before its __getattr__.
                if str(key.value) not in self._space.names:
                    self._space.removed[str(key.value)] = text
            else:
                self._bind(str(key.value), exported=True, value=value.elts[1], message=text)

    def _attached(self, call: ast.Call) -> None:
        """Submodules that load when they are first used: `_lazy.attach(__name__, [...])`."""
        for argument in call.args:
            if isinstance(argument, ast.List):
                for name in _texts(argument):
                    self._bind(name, exported=True)

    def _lazy_modules(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        """A `__getattr__` that imports the submodules that it names."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Set):
                for name in _texts(inner):
                    self._bind(name, exported=True)

    def _call(self, call: ast.Call) -> None:
        text = _warning(call, self._texts)
        if text is not None:
            self._space.warning = text


def _texts(value: ast.expr) -> list[str]:
    return [node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _text(value: ast.expr | None, known: dict[str, str]) -> str | None:
    """A text that is written out, or added up of such."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.Name):
        return known.get(value.id)
    if isinstance(value, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in value.values)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        left, right = _text(value.left, known), _text(value.right, known)
        return None if left is None or right is None else left + right
    return None


def _warning(call: ast.Call, known: dict[str, str]) -> str | None:
    """The text of `warnings.warn(text, DeprecationWarning)` or of jax's own `deprecations.warn(key, text)`."""
    function = ast.unparse(call.func)
    if function.endswith("deprecations.warn") and len(call.args) > 1:
        return _text(call.args[1], known) or ""
    if not function.endswith("warn") or not call.args:
        return None
    text = _text(call.args[0], known) or ""
    kinds = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "category")]
    if any("DeprecationWarning" in ast.unparse(kind) for kind in kinds) or re.search(
        "deprecated|will be removed", text
    ):
        return text
    return None


def _body(function: griffe.Function) -> tuple[str | None, bool]:
    """What every call of it warns of, and whether it does nothing but raise."""
    source = function.source
    if "warn(" not in source and "raise " not in source:
        return None, False
    try:
        (node,) = ast.parse(textwrap.dedent(source)).body
    except (SyntaxError, ValueError):  # the lines that griffe gives of it are no whole statement
        return None, False
    text = lambda inner: isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)  # noqa: E731
    body = [inner for inner in getattr(node, "body", ()) if not text(inner) and not isinstance(inner, ast.Delete)]
    calls = [inner.value for inner in body if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call)]
    warned = [said for call in calls if (said := _warning(call, {})) is not None]
    return next(iter(warned), None), bool(body) and isinstance(body[0], ast.Raise)


_OTHER_PARAMETERS = re.compile(r"transformation|ufunc|_up_and_broadcast|\bproperty\b")
"""Decorators whose result is called otherwise than the function that is written under them."""

_ENUMS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}


def _parameters(found: griffe.Object) -> str | None:
    if isinstance(found, griffe.Function):
        wrapped = any(_OTHER_PARAMETERS.search(str(decorator.value)) for decorator in found.decorators)
        return None if wrapped else _written(found.parameters)
    if isinstance(found, griffe.Class):
        return _constructor(found)
    return None


def _constructor(found: griffe.Class) -> str | None:
    """What a class is called with; None where a class outside of jax says it, as an enumeration's."""
    try:
        line = [found, *found.mro()]
    except (ValueError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None
    if any(str(base).rpartition(".")[2] in _ENUMS for cls in line for base in cls.bases):
        return None
    for cls in line:
        for name in ("__init__", "__new__"):
            method = cls.members.get(name)
            if isinstance(method, griffe.Function):
                return _written(list(method.parameters)[1:])
        if any(not str(base).startswith(("object", "Generic", "Protocol", "abc")) for base in cls.bases):
            resolved = {base.path for base in cls.resolved_bases}
            if not resolved:
                return None
    return None


def _written(parameters: Iterable[griffe.Parameter]) -> str:
    """`x, /, axis=, *, where=, **options`."""
    kinds = griffe.ParameterKind
    words: list[str] = []
    rows: Sequence[griffe.Parameter] = list(parameters)
    starred = False
    for position, one in enumerate(rows):
        if one.kind is kinds.var_positional:
            words.append(f"*{one.name}")
            starred = True
        elif one.kind is kinds.var_keyword:
            words.append(f"**{one.name}")
        else:
            if one.kind is kinds.keyword_only and not starred:
                words.append("*")
                starred = True
            words.append(one.name if one.required else f"{one.name}=")
            last = position + 1 == len(rows) or rows[position + 1].kind is not kinds.positional_only
            if one.kind is kinds.positional_only and last:
                words.append("/")
    return ", ".join(words)
