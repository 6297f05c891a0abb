"""How commands print: one console, JSON as it is, figures in three digits."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

# What is piped into a file or a log has no width of its own; tables are not folded to 80 columns there.
PIPED_WIDTH = 180
WIDE = 120  # columns of a screen that has room for all figures of a table
MISSING = "-"


def console(*, error: bool = False) -> Console:
    """A console on the stream as it is now: tests and shells exchange it."""
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    own_width = stream.isatty() or "COLUMNS" in os.environ  # rich asks the terminal, and that variable first
    return Console(file=stream, width=None if own_width else PIPED_WIDTH, highlight=False, soft_wrap=False)


def command_line() -> str:
    """What was typed, for results that are kept."""
    return " ".join(["capibara", *sys.argv[1:]])


def show_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False, default=str))


def show_json_line(document: Any) -> None:
    """On one line, for whoever reads a program's output as it comes."""
    typer.echo(json.dumps(document, ensure_ascii=False, allow_nan=False, default=str))


def show_page(page: Callable[..., str]) -> None:
    """A page that is drawn with or without colours, and in ASCII where the stream has no more."""
    try:
        "⠿┊".encode(sys.stdout.encoding or "ascii")
        unicode = True
    except UnicodeEncodeError:
        unicode = False
    sys.stdout.write(page(color=sys.stdout.isatty() and "NO_COLOR" not in os.environ, unicode=unicode))


def table(*columns: str, title: str | None = None, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """A table whose columns fold where the screen is narrow, but for those that are to stay `whole`."""
    from rich import box
    from rich.table import Table

    # Two blanks between columns, of which 80 characters have few to spare.
    made = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in columns:
        side: Any = "right" if column in right else "left"
        made.add_column(column, justify=side, overflow="fold", no_wrap=column in whole)
    return made


def add_row(table: Table, *cells: str) -> None:
    """A row of plain text: brackets in a shape or a reason are not rich's markup."""
    from rich.text import Text

    table.add_row(*(Text(cell) for cell in cells))


@contextmanager
def progress(quiet: bool = False) -> Iterator[Progress]:
    """A bar on standard error that goes away; nothing at all where nobody is watching."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    screen = console(error=True)
    columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=screen, transient=True, disable=quiet or not screen.is_terminal) as bar:
        yield bar


def figure(value: float | None, unit: str = "") -> str:
    """Three digits and a unit; `-` for what is not known."""
    if value is None:
        return MISSING
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def error(value: float, tolerance: float, *, ok: bool, wide: bool) -> str:
    """An error beside what is allowed; on a narrow screen, as a part of it."""
    if ok and not wide:
        return percent(value / tolerance) if tolerance else "exact"
    return f"{value:.1e} / {tolerance:.1e}" + ("" if ok else " WRONG")


def error_column(wide: bool) -> str:
    return "error / tolerance" if wide else "error"


ERROR_MEANS = "error: in parts of what its tolerance allows"
"""For a narrow screen, below the table."""


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.3g} %"


def size(count: float | None) -> str:
    """Bytes in the largest binary unit that leaves a number above one."""
    if count is None:
        return MISSING
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def rate(flops: float | None) -> str:
    """Flops a second in the unit that fits."""
    if flops is None:
        return MISSING
    for unit, scale in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if flops >= scale:
            return figure(flops / scale, unit)
    return figure(flops / 1e6, "MFLOP/s")
