"""What `capibara.jax.utils.check_migration_compatibility` does: a path, a folder or a text, checked."""

from __future__ import annotations

from pathlib import Path

from capibara.errors import rule_error
from capibara.migrate.findings import Report
from capibara.migrate.run import check_paths, check_source
from capibara.migrate.settings import Settings
from capibara.migrate.sources import SUFFIXES

__all__ = ["check_migration_compatibility"]

_TEXT = "<source_code>"


def check_migration_compatibility(
    source_code: str | Path,
    check_imports: bool = True,
    check_functions: bool = True,
    check_performance: bool = True,
) -> Report:
    """What of a program breaks on the jax of today, or could be faster; it is read and not run.

    Args:
        source_code: A file, a folder, or the text of a module. One line that ends in .py is a path.
        check_imports: Whether imports of plain jax are listed, with the line that imports capibara.jax.
        check_functions: Whether names and arguments are looked for that jax no longer has.
        check_performance: Whether code that is slow under jax is looked for.

    Returns:
        `.is_compatible` (nothing breaks, and all was read) and `.issues`, each with file, line, code, message, fix and
        severity.

    Examples:
        >>> from capibara.jax.utils import check_migration_compatibility
        >>> report = check_migration_compatibility("import jax\\ny = jax.tree_map(f, x)\\n")
        >>> report.is_compatible, [issue.code for issue in report.issues if issue.severity == "error"]
        (False, ['CAP203'])
    """
    unwanted = [
        family
        for family, wanted in (("CAP1", check_imports), ("CAP2", check_functions), ("CAP3", check_performance))
        if not wanted
    ]
    if isinstance(source_code, Path) or _is_path(source_code):
        # In this process: it may have started jax, and is a program of the caller's.
        return check_paths([source_code], adjust=lambda one: one.without(*unwanted), processes=1)
    if not isinstance(source_code, str):
        raise rule_error("source_code is a path or the text of a module", repr(source_code), "pass a str or a Path")
    return check_source(source_code, _TEXT, Settings().without(*unwanted))


def _is_path(text: object) -> bool:
    if not isinstance(text, str) or "\n" in text.strip() or not text.strip():
        return False
    try:
        there = Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or with a null byte
        there = False
    return there or text.strip().endswith(SUFFIXES)
