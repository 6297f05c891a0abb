"""The report as a page of a terminal, eighty columns wide; plain text where nobody sees colours."""

from __future__ import annotations

import io
from collections.abc import Sequence

from capibara.train.report.curves import loss_dots
from capibara.train.report.sections import Section, headline
from capibara.train.report.summary import Summary

__all__ = ["COLUMNS", "page"]

COLUMNS = 80
_LABEL = 12


def page(
    summary: Summary,
    parts: Sequence[Section],
    sample: tuple[str, str] | None,
    html: str,
    *,
    color: bool = False,
    unicode: bool = True,
) -> str:
    """The whole page. `sample` is a prompt and what the model wrote after it."""
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    screen = Console(
        file=out, width=COLUMNS, highlight=False, force_terminal=color, no_color=not color, legacy_windows=False
    )
    screen.print(Text(headline(summary), style="bold"))
    for part in parts:
        screen.print()
        screen.print(Text(part.title, style="bold cyan"))
        if part.title == "Loss":
            for line in loss_dots(summary, unicode=unicode):
                screen.print(Text(f"  {line}", style="green"), no_wrap=True, overflow="crop")
        table = Table(box=box.SIMPLE, show_header=False, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(width=_LABEL, style="dim")
        table.add_column(overflow="fold", width=COLUMNS - _LABEL - 6)
        for label, text in part.lines:
            table.add_row(Text(f"  {label}"), Text(text))
        screen.print(table)
    if sample is not None:
        prompt, text = sample
        screen.print()
        screen.print(Text("Text that it writes, the prompt first", style="bold cyan"))
        screen.print(Padding(Text.assemble(_printable(prompt), (_printable(text), "green")), (0, 0, 0, 2)))
    if html:
        screen.print()
        screen.print(Text(f"The page with pictures: {html}"), soft_wrap=True)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join(lines) + "\n"


def _printable(text: str) -> str:
    """Without what a terminal would obey: a model that has learned little writes such bytes."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)
