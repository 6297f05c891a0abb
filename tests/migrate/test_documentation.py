"""The page of the checker and its table of codes say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from capibara.migrate.codes import CODES, DOCS

_PAGE = (Path(__file__).parents[2] / DOCS).read_text(encoding="utf-8")


@pytest.mark.quick
def test_every_code_has_its_row_and_its_example_before_and_after() -> None:
    rows = re.findall(r"^\| \[(CAP\d+)\]\(#([\w-]+)\) \| ([\w-]+) \| (\w+) \| (.+) \|$", _PAGE, re.MULTILINE)
    table = [(one.code, one.anchor.rpartition("#")[2], one.name, one.severity, one.summary) for one in CODES.values()]
    assert rows == table
    sections = re.findall(r"^### (CAP\d+ [\w-]+)\n(.*?)(?=^### |\Z)", _PAGE, re.MULTILINE | re.DOTALL)
    assert [head for head, _ in sections] == [f"{one.code} {one.name}" for one in CODES.values()]
    assert all(text.count("```text") == 2 and "Before:" in text and "After:" in text for _, text in sections)
