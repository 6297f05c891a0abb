"""CAP2xx: names that a supported jax does not have, and arguments that a function no longer takes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from capibara.jax_releases import RELEASES, Parameter, find, parse
from capibara.migrate.conditions import compared_as_text
from capibara.migrate.fates import Fate, fate, in_every_supported_release
from capibara.migrate.findings import Finding
from capibara.migrate.guards import Failing, guard, is_evaluated
from capibara.migrate.module import Module
from capibara.migrate.scopes import called_import
from capibara.migrate.settings import Settings

__all__ = ["Refused", "check", "gone_in_import", "gone_prefix", "refused_arguments"]


def check(module: Module, settings: Settings) -> Iterator[Finding]:
    """Names in imports, in attributes and by star; then the arguments of calls."""
    for node in module.nodes(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias, one in gone_in_import(node):
                yield _name(module, alias, one, "import", node)
    for node in module.nodes(ast.Attribute, ast.Name, ast.Call):
        if isinstance(node, ast.Call):
            imported = called_import(node, module.resolve)
            if imported is not None:
                gone = _first_gone_module(imported.module)
                if gone is not None:
                    yield _name(module, node, gone, "import")
                continue
        found = gone_prefix(module, node)
        if found is not None:
            yield _name(module, *_nearer(module, node, found), "attribute")
    yield from _unserved(module)
    yield from _private(module)
    yield from _unknown(module)
    yield from _calls(module)
    yield from _versions(module)


def _unserved(module: Module) -> Iterator[Finding]:
    """What breaks even where its module is there: nothing stands in for `capibara.jax.experimental.maps.xmap`.

    That of a module of plain jax which is gone is said of the name too: mending the import does not mend it.
    """
    for node in module.nodes(ast.ImportFrom):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("capibara.jax"):
            for alias in node.names:
                one = fate(f"{node.module}.{alias.name}".removeprefix("capibara."))
                if one is not None and _is_lost(one):
                    yield _name(module, alias, one, "import", node)
    for node in module.nodes(ast.Attribute):
        path = module.resolve(node)
        if path is None or not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        one = fate(path) if path.startswith("jax.") and path not in module.patched else None
        if one is not None and _is_lost(one):
            above = fate(path.rpartition(".")[0])
            if module.origin(node) != path or (above is not None and above.removed is not None and above.is_module):
                yield _name(module, node, one, "attribute")


def _is_lost(one: Fate) -> bool:
    return one.removed is not None and one.instead is None and not one.served


def _named_of_jax(module: Module) -> Iterator[tuple[ast.AST, str, ast.AST, Failing]]:
    """Every name of plain jax that is imported or taken: at what, its path, the statement and what fails."""
    for node in module.nodes(ast.Import, ast.ImportFrom, ast.Attribute, ast.Call):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, node, "import") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                yield from ((alias, f"{node.module}.{alias.name}", node, "import") for alias in node.names)
        elif isinstance(node, ast.Call):
            imported = called_import(node, module.resolve)
            if imported is not None:
                yield node, imported.module, node, "import"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            path = module.origin(node)
            if path is not None and path not in module.patched:
                yield node, path, node, "attribute"


def _private(module: Module) -> Iterator[Finding]:
    """Where a private name comes in: `jax._src` in imports, and attributes of jax that are spelled out."""
    said: set[ast.AST] = set()
    for _, path, statement, failing in _named_of_jax(module):
        parts = path.split(".")
        first = next((number for number, part in enumerate(parts) if _is_private(part)), None)
        # An attribute of what is private already is said where that was taken or imported.
        inner = failing == "attribute" and first != len(parts) - 1
        if parts[0] != "jax" or first is None or inner or statement in said:
            continue
        if failing == "attribute" and isinstance(statement, ast.Attribute) and _was_imported(module, statement, path):
            continue
        said.add(statement)
        behind = guard(module, statement, failing)
        message = f"{path} is private to jax: any release may move or remove it."
        fix = "use a public name, or test for it and have another way"
        yield module.finding(statement, "CAP210", message, fix, "info" if behind else None)


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.endswith("__")


def _was_imported(module: Module, node: ast.Attribute, path: str) -> bool:
    """Whether `import jax._src.core` made the module what `jax._src` is taken of."""
    return any(
        alias.name.startswith(f"{path}.") or alias.name == path
        for one in module.nodes(ast.Import)
        if isinstance(one, ast.Import)
        for alias in one.names
        if alias.asname is None
    )


_INCOMPLETE = ("jax.experimental", "jax.example_libraries", "jax.tools", "jax.extend.mlir", "jax.lib")
"""Modules that show what they import for their own use, or what jaxlib alone defines: the table has not all of it."""


def _unknown(module: Module) -> Iterator[Finding]:
    """Names of public modules that no release has: older than the table, misspelled, or newer than it."""
    for node, path, statement, failing in _named_of_jax(module):
        above, _, name = path.rpartition(".")
        if not above.startswith("jax") or name.startswith("_") or name == "*" or isinstance(statement, ast.Import):
            continue
        owner = find(above)
        if owner is None or owner.kind != "module" or not in_every_supported_release(above):
            continue
        if find(path) is not None or fate(path) is not None or fate(path, as_module=True) is not None:
            continue
        behind = guard(module, statement, failing)
        unsure = f"{above}.".startswith(tuple(f"{one}." for one in _INCOMPLETE))
        message = f"{path} is no public name of any jax from {RELEASES[0]} to {RELEASES[-1]}."
        fix = "see what the older jax said to use, or how it is spelled"
        if behind is not None:
            yield module.finding(node, "CAP208", f"{message} It is guarded by {behind}.", fix)
        elif module.path.endswith(".pyi") or not is_evaluated(module, node):
            yield module.finding(node, "CAP209", f"{message} Here it is not evaluated.", fix)
        else:
            yield module.finding(node, "CAP211", message, fix, "warning" if unsure else None)


def _versions(module: Module) -> Iterator[Finding]:
    for node, wrong in compared_as_text(module):
        message = 'jax.__version__ is compared as text, letter by letter: "0.10.0" comes before "0.4.9".'
        if wrong:
            message += f" On jax {wrong} that is not what was meant."
        fix = "compare jax.__version_info__ with a tuple of numbers"
        yield module.finding(node, "CAP212", message, fix, None if wrong else "info")


def _name(module: Module, node: ast.AST, one: Fate, failing: Failing, statement: ast.AST | None = None) -> Finding:
    behind = guard(module, statement or node, failing)
    if one.removed is None:
        return module.finding(node, "CAP207", one.message, one.fix, "info" if behind else None)
    if behind is not None:
        return module.finding(node, "CAP208", f"{one.message} It is guarded by {behind}.", one.fix)
    if module.path.endswith(".pyi") or not is_evaluated(module, node):
        return module.finding(node, "CAP209", f"{one.message} Here it is not evaluated.", one.fix)
    return module.finding(node, one.code, one.message, one.fix)


def gone_in_import(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[ast.alias, Fate]]:
    """What an import statement names that is gone or warns, one by one."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            gone = _first_gone_module(alias.name)
            if gone is not None:
                yield alias, gone
        return
    module = node.module or ""
    if node.level or module.partition(".")[0] != "jax":
        return
    gone = _first_gone_module(module)
    for alias in node.names:
        # The name's own row says more than its module's: where it went.
        own = None if alias.name == "*" else fate(f"{module}.{alias.name}")
        if gone is not None and gone.removed is not None and (own is None or own.removed is None):
            own = gone
        if own is not None or gone is not None:
            yield alias, own or gone  # type: ignore[misc]


def _first_gone_module(module: str) -> Fate | None:
    """The first of a dotted module's parts that is gone, or the last that warns."""
    parts = module.split(".")
    if parts[0] != "jax":
        return None
    warns = None
    for end in range(2, len(parts) + 1):
        one = fate(".".join(parts[:end]), as_module=True)
        if one is not None and one.removed is not None:
            return one
        warns = one or warns
    return warns


def gone_prefix(module: Module, node: ast.AST) -> Fate | None:
    """What became of the name that an expression is, unless what it is an attribute of is gone already.

    `xla_bridge.get_backend` breaks where xla_bridge is imported, and is said there.
    """
    if isinstance(node, ast.Attribute):
        if not isinstance(node.ctx, ast.Load):
            return None
    elif isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load) or module.scope(node).lookup(node.id) is not None:
            return None  # said where it was imported; what is left came by star
    elif not isinstance(node, ast.Call):
        return None
    path = module.origin(node)
    if path is None or not path.startswith("jax.") or path in module.patched:
        return None
    parts = path.split(".")
    for end in range(2, len(parts)):
        above = fate(".".join(parts[:end]))
        if above is not None and above.removed is not None:
            return None
    return fate(path)


def _nearer(module: Module, node: ast.AST, one: Fate) -> tuple[ast.AST, Fate]:
    """Of a module that is gone, the name in it that is used, where it is known what became of that."""
    above = module.parent(node)
    inner = fate(f"{one.path}.{above.attr}") if one.is_module and isinstance(above, ast.Attribute) else None
    return (node, one) if inner is None or above is None else (above, inner)


# Arguments.


class Refused:
    """An argument that the newest jax does not take."""

    def __init__(
        self, node: ast.AST, path: str, name: str, since: str, keyword_only: bool, by_place: int | None
    ) -> None:
        self.node = node
        self.path = path
        self.name = name
        self.since = since
        self.keyword_only = keyword_only
        """It is still there, and taken by its name alone."""
        self.by_place = by_place
        """Its place in the call; None for a keyword."""


def _calls(module: Module) -> Iterator[Finding]:
    for call in module.calls:
        for one in refused_arguments(module, call):
            behind = guard(module, call, "call")
            if one.keyword_only:
                code, fix = "CAP206", f"write {one.name}=…"
                message = f"{one.path} takes {one.name} by its name alone since jax {one.since}."
            else:
                code, fix = "CAP205", _keyword_fix(one)
                message = f"{one.path} takes no {one.name} since jax {one.since}."
            if behind is not None:
                yield module.finding(one.node, "CAP208", f"{message} It is guarded by {behind}.", fix)
            else:
                yield module.finding(one.node, code, message, fix)


KEYWORDS: dict[str, dict[str, str]] = {
    "jax.numpy.clip": {"a": "arr", "a_min": "min", "a_max": "max"},
    "jax.numpy.reshape": {"newshape": "shape"},
    "jax.shard_map": {"check_rep": "check_vma"},
}
"""Function -> its keywords that have another name by now and mean the same."""
OLDER: dict[str, dict[str, tuple[str, str]]] = {
    "jax.scipy.linalg.solve": {"sym_pos": ("0.4.30 or earlier", 'write assume_a="pos" where it was true')},
}
"""Function -> its keywords that went before the first release of the table -> since when, and what to write."""


def _keyword_fix(one: Refused) -> str:
    renamed = KEYWORDS.get(one.path, {}).get(one.name)
    if one.name in OLDER.get(one.path, {}):
        return OLDER[one.path][one.name][1]
    return f"write {renamed}=…" if renamed else f"leave {one.name} out"


def refused_arguments(module: Module, call: ast.Call) -> Iterator[Refused]:
    """Arguments that some release of the table took and the newest does not.

    What no release took is not judged: a signature that is not what it seems would make a false alarm.
    """
    path, arguments, places = module.resolve(call.func), call.keywords, call.args
    if path == "functools.partial" and call.args:
        path, places = module.resolve(call.args[0]), call.args[1:]
    if path is None or not path.startswith("jax."):
        return
    for keyword in arguments:
        if keyword.arg in OLDER.get(path, {}):
            yield Refused(keyword, path, keyword.arg, OLDER[path][keyword.arg][0], keyword_only=False, by_place=None)
    history = find(path)
    if history is None or history.removed is not None or len(history.signatures) < 2:
        return
    versions = [(since, parse(text)) for since, text in history.signatures]
    newest = versions[-1][1]
    by_name = {one.name for one in newest if one.kind in ("either", "keyword")}
    more_names = any(one.kind == "**" for one in newest)
    for keyword in arguments:
        if keyword.arg is None or keyword.arg in by_name or more_names:
            continue
        since = _since(versions, keyword.arg)
        if since is not None:
            yield Refused(keyword, path, keyword.arg, since, keyword_only=False, by_place=None)
    if any(isinstance(one, ast.Starred) for one in places) or any(one.kind == "*" for one in newest):
        return
    most = len(_by_place(newest))
    for place, argument in enumerate(places[most:], start=most):
        for number in range(len(versions) - 1, 0, -1):
            before = _by_place(versions[number - 1][1])
            if place < len(before):
                name, since = before[place].name, versions[number][0]
                yield Refused(argument, path, name, since, keyword_only=name in by_name, by_place=place)
                break


def _by_place(parameters: tuple[Parameter, ...]) -> list[Parameter]:
    return [one for one in parameters if one.kind in ("positional", "either")]


def _since(versions: list[tuple[str, tuple[Parameter, ...]]], name: str) -> str | None:
    """The release that stopped to take a keyword; None where none took it."""
    for number in range(len(versions) - 1, 0, -1):
        if any(one.name == name and one.kind in ("either", "keyword") for one in versions[number - 1][1]):
            return versions[number][0]
    return None
