"""A report as SARIF 2.1.0, which code hosts and editors read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from capibara._version import __version__
from capibara.migrate.codes import CODES
from capibara.migrate.findings import Finding, Report

__all__ = ["sarif"]

_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(report: Report) -> dict[str, Any]:
    """The document: one run, a rule a code, a result a finding."""
    codes = list(CODES)
    rules = [
        {
            "id": one.code,
            "name": one.name,
            "shortDescription": {"text": one.summary},
            "help": {"text": f"{one.summary}; see {one.anchor}"},
            "defaultConfiguration": {"level": _LEVELS[one.severity]},
        }
        for one in CODES.values()
    ]
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "capibara migrate", "version": __version__, "rules": rules}},
                "columnKind": "unicodeCodePoints",
                "results": [_result(one, codes.index(one.code)) for one in report.findings],
            }
        ],
    }


def _result(one: Finding, rule: int) -> dict[str, Any]:
    fix = f" Fix: {one.fix}" if one.fix else ""
    cell = "" if one.cell is None else f"Cell {one.cell}, line {one.line}: "
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(one.file)}}
    if one.cell is None:  # a notebook's lines are those of its cells, not of the file
        place["region"] = {
            "startLine": one.line,
            "startColumn": one.column,
            "endLine": one.end_line,
            "endColumn": max(one.end_column, one.column if one.end_line == one.line else 1),
        }
    return {
        "ruleId": one.code,
        "ruleIndex": rule,
        "level": _LEVELS[one.severity],
        "message": {"text": f"{cell}{one.message}{fix}"},
        "locations": [{"physicalLocation": place}],
    }


def _uri(file: str) -> str:
    path = Path(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
