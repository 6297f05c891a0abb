"""The page at the end of a run: what ran where, how fast, in what memory, predicted against measured, what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.train.report.facts import Life as Life
    from capibara.train.report.facts import read_lives as read_lives
    from capibara.train.report.summary import Summary as Summary
    from capibara.train.report.summary import summarise as summarise
    from capibara.train.report.write import Report as Report
    from capibara.train.report.write import write_report as write_report

__all__, __getattr__, __dir__ = exports(
    __name__,
    {"facts": "Life read_lives", "summary": "Summary summarise", "write": "Report write_report"},
)
