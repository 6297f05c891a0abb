"""CAP1xx: imports of plain jax, and the line that imports the same from capibara.jax."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from capibara.migrate.findings import Finding
from capibara.migrate.module import Module
from capibara.migrate.scopes import called_import
from capibara.migrate.settings import Settings

__all__ = ["check", "instead_of"]


def check(module: Module, settings: Settings) -> Iterator[Finding]:
    """Every form of importing jax."""
    for node in module.nodes(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_jax(alias.name):
                    message = f"{_written(alias)} is plain jax."
                    yield module.finding(alias, "CAP101", message, f"write {' and '.join(instead_of(alias))}")
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_jax(node.module or ""):
            star = node.names[0].name == "*"
            message = f"{_statement(node)} is plain jax."
            fix = f"write from capibara.{node.module} import {', '.join(map(_alias, node.names))}"
            yield module.finding(node, "CAP103" if star else "CAP102", message, fix)
    for call in module.calls:
        imported = called_import(call, module.resolve)
        if imported is not None and _is_jax(imported.module):
            message = f"{imported.by}({imported.module!r}) imports plain jax."
            fix = f'write importlib.import_module("capibara.{imported.module}")'
            yield module.finding(call, "CAP104", message, fix)


def _is_jax(module: str) -> bool:
    return module.partition(".")[0] == "jax"


def instead_of(alias: ast.alias) -> list[str]:
    """The statements that bind to capibara.jax what `import jax…` binds to jax.

    >>> import ast
    >>> from capibara.migrate.imports import instead_of
    >>> instead_of(ast.alias("jax.numpy", "jnp")), instead_of(ast.alias("jax.numpy"))
    (['import capibara.jax.numpy as jnp'], ['import capibara.jax as jax', 'import capibara.jax.numpy'])
    """
    if alias.asname:
        return [f"import capibara.{alias.name} as {alias.asname}"]
    # `import capibara.jax.numpy` alone binds the name capibara; jax.numpy is then an attribute of what jax is.
    whole = ["import capibara.jax as jax"]
    return whole if alias.name == "jax" else [*whole, f"import capibara.{alias.name}"]


def _alias(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _written(alias: ast.alias) -> str:
    return f"import {_alias(alias)}"


def _statement(node: ast.ImportFrom) -> str:
    names = ", ".join(map(_alias, node.names))
    return f"from {node.module} import {names if len(names) < 60 else '…'}"
