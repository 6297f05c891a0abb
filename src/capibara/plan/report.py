"""A plan as tables on a terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from capibara.plan import words
from capibara.plan.result import Candidate, Change, Plan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from capibara.plan.money import Bill

__all__ = ["as_text", "headlines", "show"]

_WIDTH = 150
_WIDE = 110
"""Columns from which a table has room for everything."""
_NARROW = 80
_LARGEST = 5


def as_text(plan: Plan) -> str:
    """The report without colours."""
    from rich.console import Console

    stream = io.StringIO()
    show(plan, Console(file=stream, width=_WIDTH, highlight=False, no_color=True))
    return stream.getvalue().rstrip()


def show(plan: Plan, screen: Console) -> None:
    """The whole report on a console."""
    for line in headlines(plan):
        screen.print(line, markup=False, soft_wrap=not screen.is_terminal)
    for change in plan.changes:
        cost = (
            ""
            if change.usd_per_billion_tokens is None
            else (f", {words.dollars(change.usd_per_billion_tokens)} a billion tokens")
        )
        screen.print(
            f"  would fit: {_change(change)}: {words.gib(change.bytes)} a chip, "
            f"{words.seconds(change.seconds)} a step{cost}",
            markup=False,
            soft_wrap=not screen.is_terminal,
        )
    if plan.best is None:
        _notes(plan, screen)
        return
    for title, table in (
        ("Best layouts" if plan.fits else "Nearest to fitting", _layouts(plan, screen.width < _WIDE)),
        (f"Largest buffers at the peak{_at(plan.best)}", _buffers(plan.best)),
        ("Exchanges of a step, of one chip", _links(plan.best, screen.width)),
    ):
        # A title of the table's own would be folded to its width.
        screen.print(f"\n{title}", style="bold", markup=False, soft_wrap=not screen.is_terminal)
        screen.print(table)
    for one in plan.candidates:
        if one.compiled is not None:
            screen.print(f"{one.layout.name}: {compiled_line(one)}", markup=False, soft_wrap=not screen.is_terminal)
    _notes(plan, screen)


def _change(change: Change) -> str:
    """In words; a larger slice names itself."""
    return change.what if change.what.startswith(change.on) else f"{change.what} on {change.on}"


def headlines(plan: Plan) -> list[str]:
    """The answers, one a line."""
    best = plan.best
    lines = [f"{plan.name or 'program'} on {_where(plan)}. Predicted, not run ({plan.evidence})."]
    if best is None:
        if plan.closest:
            return [*lines, f"DOES NOT FIT: at best {plan.closest}", *_nothing_helps(plan)]
        reasons = "; ".join(list(dict.fromkeys(why for _, why in plan.refused))[:3])
        return [*lines, f"DOES NOT FIT: no layout could be made. {reasons}"]
    estimate, memory = best.estimate, best.estimate.memory
    verdict, had_it = ("FITS", "") if plan.fits else ("DOES NOT FIT", ", had it the memory")
    source = ", by the TPU compiler" if best.level == "tpu" else f", most at {memory.peak_at}" if memory.peak_at else ""
    lines.append(
        f"{verdict}: {words.gib(best.bytes)} a chip of {words.gib(memory.limit)} usable (arguments "
        f"{words.gib(memory.arguments)}, beside them {words.gib(memory.temporaries)}{source}){_margin(best)}"
    )
    speed = (
        ""
        if plan.tokens_per_second is None
        else f", {words.count(plan.tokens_per_second)} tokens/s, "
        f"{words.count(plan.tokens_per_second / plan.where.chips)} a chip"
    )
    lines.append(
        f"Step{had_it}: {words.seconds(estimate.seconds)} "
        f"({words.seconds(estimate.low)} to {words.seconds(estimate.high)}), "
        f"bound by {estimate.bound}{speed}, MFU {words.percent(estimate.mfu)}"
    )
    lines.extend(bill_line(one) for one in plan.bills)
    if plan.fits and not plan.bills:
        lines.append(f"Cost: no price is listed for {plan.where.chip.name}; write one into pricing.toml")
    if not plan.fits:
        lines += _nothing_helps(plan)
    return lines


def _nothing_helps(plan: Plan) -> list[str]:
    return [] if plan.changes else ["No change that was tried makes it fit."]


def _at(best: Candidate) -> str:
    """Where in the program the peak is; nothing for a program without a step that holds anything."""
    return f" ({best.estimate.memory.peak_at})" if best.estimate.memory.peak_at else ""


def _margin(best: Candidate) -> str:
    """What the model's own uncertainty means for the verdict."""
    memory = best.estimate.memory
    if best.level == "tpu" or not memory.margin:
        return ""
    most = f"; the model may be {words.percent(memory.margin)} low, {words.gib(memory.total * (1 + memory.margin))}"
    if best.fits or memory.total > memory.limit:
        return most
    return f"{most}, so it may or may not fit: --level tpu settles it"


def bill_line(bill: Bill) -> str:
    per_billion = (
        ""
        if bill.usd_per_billion_tokens is None
        else f", {words.dollars(bill.usd_per_billion_tokens)} a billion tokens "
        f"({words.dollars(bill.low)} to {words.dollars(bill.high)})"
    )
    price = bill.price
    line = (
        f"{price.kind.replace('_', ' ').capitalize()}: {words.dollars(bill.usd_per_hour)} an hour{per_billion}; "
        f"{price.usd:.4g} USD a chip-hour, {price.region}, read {price.date}"
    )
    if bill.spot is None:
        return line
    run = bill.spot
    return (
        f"{line}; a checkpoint ({words.seconds(run.checkpoint_seconds)}) every {words.seconds(run.interval_seconds)} "
        f"keeps {words.percent(run.efficiency)} of the time, {words.percent(run.lost)} is lost work and restarts "
        f"(assumed: {run.assumptions.preemptions_per_host_hour:g} preemptions a host-hour, one in "
        f"{words.seconds(run.mean_seconds_between)} for the slice)"
    )


def compiled_line(candidate: Candidate) -> str:
    compiled = candidate.compiled
    if compiled is None:
        return "not compiled"
    if compiled.error is not None:
        return f"{compiled.evidence}: {compiled.error}"
    predicted, total = candidate.estimate.memory, compiled.total_bytes
    if compiled.level == "tpu":
        found = f"{words.gib(total)} a chip" + ("" if not total else _against(predicted.total, total))
    else:
        # Another machine's temporaries say nothing of the prediction; arguments are the same bytes everywhere.
        arguments = compiled.arguments
        off = "" if not arguments else _against(predicted.arguments, arguments)
        found = f"arguments {words.gib(arguments)} a chip{off}, with temporaries {words.gib(total)}"
    sent = ", ".join(
        f"{times} {kind} along {' and '.join(axes) or 'some axes'}, {words.size(count)} in all"
        for kind, axes, times, count in compiled.exchanges
    )
    return f"{compiled.evidence}: {found}; {sent or 'no exchanges'}; {words.seconds(compiled.seconds)} to compile"


def _against(predicted: float, found: float) -> str:
    return f", predicted {words.gib(predicted)} ({100 * (predicted / found - 1):+.1f} %)"


def _where(plan: Plan) -> str:
    if plan.where.chip.platform == "gpu":
        return f"{plan.where.name} ({plan.where.chips} GPU{'s' if plan.where.chips > 1 else ''} of one host)"
    return str(plan.where)


def _layouts(plan: Plan, narrow: bool) -> Table:
    """The candidates; on a narrow screen without what would leave no room for the layout's name."""
    columns = ["layout", "a chip", "step", "range", "bound", "MFU", "links", "evidence"]
    shown = [name for name in columns if not narrow or name not in ("range", "links")]
    made = _table(*shown)
    for one in plan.candidates:
        estimate = one.estimate
        cells = {
            "layout": one.layout.name,
            "a chip": words.gib(one.bytes),
            "step": words.seconds(estimate.seconds),
            "range": f"{words.seconds(estimate.low)} to {words.seconds(estimate.high)}",
            "bound": estimate.bound,
            "MFU": words.percent(estimate.mfu),
            "links": words.seconds(estimate.link_seconds),
            "evidence": one.level,
        }
        _row(made, *(cells[name] for name in shown))
    return made


def _buffers(best: Candidate) -> Table:
    made = _table("buffer", "a chip")
    for name, count in best.estimate.memory.largest[:_LARGEST]:
        _row(made, name, words.size(count))
    return made


def _links(best: Candidate, width: int) -> Table:
    """The exchanges; on a narrow screen without what would cut the others' words."""
    columns = ["kind", "axes", "link", "times", "sent", "time", "why"]
    left_out = () if width >= _WIDE else ("link", "times") if width >= _NARROW else ("link", "times", "why")
    shown = [name for name in columns if name not in left_out]
    made = _table(*shown)
    for use in sorted(best.estimate.links, key=lambda one: -one.bytes):
        cells = {
            "kind": use.kind,
            "axes": ",".join(use.axes),
            "link": use.link,
            "times": words.count(use.count),
            "sent": words.size(use.bytes),
            "time": words.seconds(use.seconds),
            "why": use.why,
        }
        _row(made, *(cells[name] for name in shown))
    if not best.estimate.links:
        _row(made, "none", *[""] * (len(shown) - 1))
    return made


def _notes(plan: Plan, screen: Console) -> None:
    for note in plan.notes:
        screen.print(f"note: {note}", markup=False, soft_wrap=not screen.is_terminal)


_LEFT = ("layout", "bound", "buffer", "kind", "axes", "link", "why", "evidence")


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        left = column in _LEFT
        # A figure is not cut from its unit.
        made.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    return made


def _row(table: Table, *cells: Any) -> None:
    from rich.text import Text

    # Brackets in a shape or a reason are not rich's markup.
    table.add_row(*(Text(str(cell)) for cell in cells))
