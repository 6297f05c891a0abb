"""The report of a run, from its folder: report.html, and the page for the terminal."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from capibara.train.report import html, terminal
from capibara.train.report.elsewhere import Elsewhere, planned_elsewhere
from capibara.train.report.sections import sections
from capibara.train.report.summary import Summary, summarise

__all__ = ["Report", "write_report"]


@dataclass(frozen=True)
class Report:
    """A run in figures and as pages."""

    summary: Summary
    elsewhere: Elsewhere | None
    html: Path

    @property
    def text(self) -> str:
        """The terminal's page without colours."""
        return self.page()

    def page(self, *, color: bool = False, unicode: bool = True) -> str:
        """The terminal's page; without `unicode` the curve is drawn in ASCII."""
        parts = sections(self.summary, self.elsewhere)
        return terminal.page(self.summary, parts, self.sample, str(self.html), color=color, unicode=unicode)

    @property
    def sample(self) -> tuple[str, str] | None:
        """A prompt and what the model wrote after it, of the last process that ended well."""
        for life in reversed(self.summary.lives):
            if "sample" in life.ended:
                prompt, text = life.ended["sample"]
                return prompt, text
        return None


def write_report(folder: str | Path, *, elsewhere: str | None = "v4-32") -> Report:
    """The report of a run's folder, written into it as report.html: also of a run that crashed, or is still going.

    Args:
      elsewhere: a slice that the run's tokens are planned for and priced on; None plans nothing.
    """
    summary = summarise(folder)
    planned = None if elsewhere is None else planned_elsewhere(summary.preset, summary.tokens, elsewhere)
    report = Report(summary, planned, summary.folder / "report.html")
    draft = report.html.with_suffix(".draft")
    draft.write_text(html.page(summary, sections(summary, planned), report.sample), encoding="utf-8")
    os.replace(draft, report.html)
    return report
