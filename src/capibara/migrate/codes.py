"""Every code that the checker gives, in one table: the command's help, the documents and SARIF read it."""

from __future__ import annotations

from dataclasses import dataclass

from capibara.errors import rule_error
from capibara.migrate.findings import Severity

__all__ = ["CODES", "DOCS", "FindingCode", "selected"]

DOCS = "docs/migration.md"


@dataclass(frozen=True)
class FindingCode:
    """One kind of finding."""

    code: str
    name: str
    severity: Severity
    """Unless the finding says another: what is guarded, or not evaluated, is not an error."""
    summary: str

    @property
    def anchor(self) -> str:
        """Where the documents show it, before and after."""
        return f"{DOCS}#{self.code.lower()}-{self.name}"


_ALL = (
    # 1: imports of plain jax, which capibara.jax replaces
    FindingCode("CAP101", "jax-import", "info", "`import jax…`: capibara.jax has the same names"),
    FindingCode("CAP102", "jax-from-import", "info", "`from jax… import …`: capibara.jax has the same names"),
    FindingCode("CAP103", "jax-star-import", "info", "`from jax… import *`: capibara.jax has the same names"),
    FindingCode("CAP104", "jax-dynamic-import", "info", "a jax module that is imported by its name in a string"),
    # 2: names and calls that jax no longer takes
    FindingCode("CAP201", "removed-name", "error", "a name that a supported jax does not have"),
    FindingCode("CAP202", "moved-name", "error", "a name that lives in another module of jax by now"),
    FindingCode("CAP203", "renamed", "error", "a function or class that has another name by now"),
    FindingCode("CAP204", "removed-module", "error", "a module that a supported jax does not have"),
    FindingCode("CAP205", "removed-parameter", "error", "a keyword that the function no longer takes"),
    FindingCode("CAP206", "keyword-only", "error", "an argument by position that is taken by keyword alone"),
    FindingCode("CAP207", "deprecated-name", "warning", "a name that jax warns of, and will remove"),
    FindingCode("CAP208", "guarded-name", "info", "a removed name behind a test or a try: it does not break"),
    FindingCode("CAP209", "unevaluated-name", "warning", "a removed name in an annotation that is not evaluated"),
    FindingCode("CAP210", "private-name", "warning", "a private name of jax, which any release may move or remove"),
    FindingCode("CAP211", "unknown-name", "error", "a public name that no jax of the table has"),
    FindingCode("CAP212", "version-as-text", "warning", "jax's version compared as text, letter by letter"),
    # 3: performance
    FindingCode("CAP301", "loop-over-array", "warning", "a Python loop over a traced array, which is unrolled"),
    FindingCode("CAP302", "host-transfer", "warning", "a traced value that is fetched to the host in traced code"),
    FindingCode("CAP303", "print-in-trace", "warning", "a traced value that is printed or logged in traced code"),
    FindingCode("CAP304", "float64", "warning", "64-bit arrays: silently 32 bits, or slow"),
    FindingCode("CAP305", "jit-again", "warning", "a function that is compiled again in every iteration or call"),
    FindingCode("CAP306", "key-reuse", "warning", "a PRNG key that is drawn from twice"),
    FindingCode("CAP307", "unaligned-matrix", "info", "a matrix whose sides are no multiples of 128"),
    FindingCode("CAP308", "missing-donation", "info", "a jitted step that keeps its old state in memory"),
    FindingCode("CAP309", "unhashable-static", "warning", "a list, dict or array as a static argument"),
    # 9: what could not be read
    FindingCode("CAP901", "syntax", "error", "a file or a cell that does not parse"),
    FindingCode("CAP902", "encoding", "error", "a file that is not text in the encoding it declares"),
    FindingCode("CAP903", "unreadable", "error", "a file that cannot be opened, or is too large or too deep"),
    FindingCode("CAP904", "notebook", "error", "a notebook whose JSON is not a notebook's"),
)

CODES: dict[str, FindingCode] = {one.code: one for one in _ALL}
"""Code -> what it stands for."""


def selected(patterns: tuple[str, ...], what: str = "select") -> frozenset[str]:
    """The codes that begin with one of these: "CAP2" is all of them that do.

    >>> from capibara.migrate.codes import selected
    >>> sorted(selected(("CAP101", "CAP90")))[:2]
    ['CAP101', 'CAP901']
    """
    chosen: set[str] = set()
    for pattern in patterns:
        matching = {code for code in CODES if code.startswith(pattern.strip().upper())} if pattern.strip() else set()
        if not matching:
            raise rule_error(
                f"{what} names codes of the checker, or how they begin", repr(pattern), "use e.g. CAP2 or CAP201"
            )
        chosen |= matching
    return frozenset(chosen)
