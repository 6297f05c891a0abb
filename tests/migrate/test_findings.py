"""Findings as lines, and the report of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from capibara.migrate.codes import CODES, selected
from capibara.migrate.findings import Finding, Report, in_order

ONE = Finding("a.py", 3, 5, 3, 9, "CAP202", "jax.tree_map is gone.", "use jax.tree.map", "error")


@pytest.mark.quick
def test_a_finding_is_a_line() -> None:
    assert str(ONE) == "a.py:3:5: CAP202 error: jax.tree_map is gone. Fix: use jax.tree.map"
    assert str(replace(ONE, fix="", cell=2)) == "a.py:cell 2:3:5: CAP202 error: jax.tree_map is gone."


def test_the_report_counts_and_judges() -> None:
    info = replace(ONE, severity="info")
    unread = replace(ONE, code="CAP901")
    assert Report((info,), ("a.py",)).is_compatible
    assert not Report((ONE,), ("a.py",)).is_compatible
    report = Report((ONE, info, unread), ("a.py", "b.py"))
    assert report.issues == report.findings
    assert report.failures == (unread,)
    assert report.counts() == {"error": 2, "warning": 0, "info": 1}
    assert str(report).splitlines()[-1] == "not compatible: 2 files, 2 errors, 0 warnings, 1 info"


def test_order_is_that_of_the_text_and_each_comes_once() -> None:
    later, cell = replace(ONE, line=4), replace(ONE, cell=1, line=9)
    assert in_order([cell, later, ONE, later]) == (ONE, later, cell)


@pytest.mark.quick
def test_codes_are_chosen_by_how_they_begin() -> None:
    assert selected(("CAP2",)) == {code for code in CODES if code.startswith("CAP2")}
    assert CODES["CAP201"].anchor == "docs/migration.md#cap201-removed-name"
    for wrong in ("E501", "", "CAP999"):
        with pytest.raises(ValueError, match=r"use e\.g\. CAP2"):
            selected((wrong,))
