"""What the checker says: a finding a place, and the report of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["SEVERITIES", "Finding", "Report", "Severity"]

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""The worst first. An error breaks, or is wrong, on a jax that capibara supports."""


@dataclass(frozen=True)
class Finding:
    """One place, and what is to be known of it; printed, it is a line as linters write them."""

    file: str
    line: int
    """From 1; inside of its cell in a notebook."""
    column: int
    """From 1, in characters."""
    end_line: int
    end_column: int
    code: str
    """As `capibara.migrate.codes` lists them."""
    message: str
    fix: str
    """What to write instead; empty where there is nothing to do."""
    severity: Severity
    cell: int | None = None
    """Of a notebook, counted from 1 over all its cells."""

    @property
    def place(self) -> str:
        """As editors take it: file:line:column, with the cell of a notebook between."""
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.file}:{cell}{self.line}:{self.column}"

    def __str__(self) -> str:
        fix = f"{'' if self.message.endswith('.') else '.'} Fix: {self.fix}" if self.fix else ""
        return f"{self.place}: {self.code} {self.severity}: {self.message}{fix}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """By file and place, each once."""
    return tuple(sorted(set(findings), key=lambda one: (one.file, one.cell or 0, one.line, one.column, one.code)))


@dataclass(frozen=True)
class Report:
    """All that was found in the files of a run."""

    findings: tuple[Finding, ...]
    files: tuple[str, ...]
    """Those that were read, and those that could not be."""

    @property
    def issues(self) -> tuple[Finding, ...]:
        """The findings, by the name that the documents give them."""
        return self.findings

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What could not be read: nothing is known of it."""
        return tuple(one for one in self.findings if one.code.startswith("CAP9"))

    @property
    def is_compatible(self) -> bool:
        """Nothing breaks on a jax that capibara supports, and all of it was read."""
        return not any(one.severity == "error" for one in self.findings) and not self.failures

    def counts(self) -> dict[str, int]:
        """How many there are of each severity."""
        counted = Counter(one.severity for one in self.findings)
        return {severity: counted[severity] for severity in SEVERITIES}

    @property
    def summary(self) -> str:
        """The verdict and how much was found, in a line."""
        numbers = ", ".join(_counted(count, severity) for severity, count in self.counts().items())
        state = "compatible" if self.is_compatible else "not compatible"
        return f"{state}: {_counted(len(self.files), 'file')}, {numbers}"

    def __str__(self) -> str:
        return "\n".join([*map(str, self.findings), self.summary])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 or what == 'info' else 's'}"
