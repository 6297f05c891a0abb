"""A plan as tables on a terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from capibara.plan import words
from capibara.plan.compiled import CHIP_LEVELS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from capibara.plan.money import Bill
    from capibara.plan.result import Candidate, Change, Plan

__all__ = ["add_row", "as_text", "bill_line", "compiled_line", "headlines", "plain_table", "refusals", "show"]

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
            else (f", {words.dollars(change.usd_per_billion_tokens)} a billion {plan.unit}")
        )
        screen.print(
            f"  would fit: {_change(change)}: predicted {words.gib(change.bytes)} a chip{_at_worst(change)}, "
            f"{words.seconds(change.seconds)} a step{cost}",
            markup=False,
            soft_wrap=not screen.is_terminal,
        )
    if plan.best is None:
        _notes(plan, screen)
        return
    for title, table in (
        ("Best layouts" if plan.fits else "Nearest to fitting", _layouts(plan, screen.width < _WIDE)),
        (f"Largest buffers at the peak, predicted{_at(plan.best)}", _buffers(plan.best)),
        ("Exchanges of a step, of one chip", _links(plan.best, screen.width)),
    ):
        # A title of the table's own would be folded to its width.
        screen.print(f"\n{title}", style="bold", markup=False, soft_wrap=not screen.is_terminal)
        screen.print(table)
    for one in plan.candidates:
        if one.compiled is not None:
            screen.print(f"{one.layout.name}: {compiled_line(one)}", markup=False, soft_wrap=not screen.is_terminal)
    _notes(plan, screen)


def _at_worst(change: Change) -> str:
    worst = change.bytes_at_worst
    if worst is None or worst <= change.bytes:
        return ""
    return f" ({words.gib(worst)} where the compiler needs {worst / change.bytes:.2f} times as much, as it did above)"


def _change(change: Change) -> str:
    """In words; a larger slice names itself."""
    return change.what if change.what.startswith(change.on) else f"{change.what} on {change.on}"


def headlines(plan: Plan) -> list[str]:
    """The answers, one a line."""
    best = plan.best
    evidence = f"refused by {_compiler(best)}" if best is not None and best.refused else plan.evidence
    lines = [f"{plan.name or 'program'} on {_where(plan)}. Predicted, not run ({evidence})."]
    lines += [] if plan.work is None else [f"Job: {plan.work}"]
    lines += [] if plan.complete else [_cut_short(plan)]
    if best is None:
        if plan.closest:
            return [*lines, f"DOES NOT FIT: at best {plan.closest}", *_nothing_helps(plan)]
        reasons = "; ".join(list(dict.fromkeys(why for _, why in plan.refused))[:3])
        return [*lines, f"DOES NOT FIT: no layout could be made. {reasons}"]
    estimate = best.estimate
    had_it = "" if plan.fits else ", had it the memory"
    lines.append(_verdict(plan, best))
    lines += refusals(plan)
    speed = (
        ""
        if plan.tokens_per_second is None
        else f", {words.count(plan.tokens_per_second)} {plan.unit}/s, "
        f"{words.count(plan.tokens_per_second / plan.where.chips)} a chip"
    )
    lines.append(
        f"Step{had_it}: {words.seconds(estimate.seconds)} "
        f"({words.seconds(estimate.low)} to {words.seconds(estimate.high)}), "
        f"bound by {estimate.bound}{speed}, MFU {words.percent(estimate.mfu)}"
    )
    lines.extend(bill_line(one, plan.unit) for one in plan.bills)
    if plan.fits and not plan.bills:
        lines.append(f"Cost: no price is listed for {plan.where.chip.name}; write one into pricing.toml")
    if not plan.fits:
        lines += _nothing_helps(plan)
    return lines


def _nothing_helps(plan: Plan) -> list[str]:
    if plan.changes:
        return []
    many = "" if plan.complete else " in the time there was"
    return [f"No change that was tried{many} makes it fit."]


def _at(best: Candidate) -> str:
    """Where in the program the peak is; nothing for a program without a step that holds anything."""
    return f" ({best.estimate.memory.peak_at})" if best.estimate.memory.peak_at else ""


def _cut_short(plan: Plan) -> str:
    limit = "" if plan.time_limit is None else f" of {words.seconds(plan.time_limit)}"
    many = "" if plan.evaluations is None else f" after {plan.evaluations} layout{'s' * (plan.evaluations != 1)}"
    rest = "the best so far follows" if plan.fits else "none of them fits so far, and not every change was tried"
    return f"STOPPED at the time limit{limit}{many}: {rest}; --time-limit SECONDS gives it more"


def _verdict(plan: Plan, best: Candidate) -> str:
    """Whether it fits, by whose figures."""
    memory = best.estimate.memory
    verdict = plan.verdict.upper()
    if not plan.fits and plan.refused_by_compiler:
        many = len(plan.refused_by_compiler)
        more = ""
        if plan.unasked:
            were = "was" if plan.unasked == 1 else "were"
            more = f"; {plan.unasked} more that may fit by the model {were} not tried: --mesh names one"
        each = "the one layout" if many == 1 else f"each of the {many} layouts"
        least = f"{words.gib(best.bytes)} a chip of {words.gib(memory.limit)} usable, for {best.layout.name}"
        if best.by_compiler is None:
            return f"{verdict}: {_compiler(best)} refused {each} that it was asked about{more}"
        return (
            f"{verdict}: {_compiler(best)} refused {each} that it was asked about; the least that it wants is {least} "
            f"(predicted {words.gib(memory.total)}){more}"
        )
    size = f"{verdict}: {words.gib(best.bytes)} a chip of {words.gib(memory.limit)} usable"
    if best.by_compiler is not None and best.compiled is not None:
        made = best.compiled
        beside = (made.outputs or 0.0) - (made.aliased or 0.0)
        own = f", outputs beside them {words.gib(beside)}" if beside > 0 else ""
        return (
            f"{size}, the peak by {_compiler(best)} (its arguments {words.gib(made.arguments)}, temporaries "
            f"{words.gib(made.temporaries)}{own}){_against(memory.total, best.by_compiler)}"
        )
    source = f", most at {memory.peak_at}" if memory.peak_at else ""
    return (
        f"{size}, predicted (arguments {words.gib(memory.arguments)}, beside them {words.gib(memory.temporaries)}"
        f"{source}){_margin(plan, best)}"
    )


def refusals(plan: Plan) -> list[str]:
    """What a compiler refused, a line each."""
    return [f"Refused by {_compiler(one)}: {one.layout.name}: {_refusal(one)}" for one in plan.refused_by_compiler]


def _refusal(one: Candidate) -> str:
    """What a compiler said against a layout, with its own bytes."""
    memory = one.estimate.memory
    if one.by_compiler is not None:
        off = _against(memory.total, one.by_compiler)
        return f"{words.gib(one.by_compiler)} a chip of {words.gib(memory.limit)} usable{off}"
    said = "" if one.compiled is None or one.compiled.error is None else one.compiled.error
    return said.strip().splitlines()[0] if said.strip() else "it gave no reason"


def _compiler(one: Candidate) -> str:
    return "XLA for the CPU" if one.compiled is None else CHIP_LEVELS.get(one.compiled.level, "XLA for the CPU")


def _margin(plan: Plan, best: Candidate) -> str:
    """What the model's own uncertainty means for the verdict."""
    memory = best.estimate.memory
    if not memory.margin:
        return ""
    more = f" and the compiler may keep {words.gib(memory.unsure)} more, as the notes say" if memory.unsure else ""
    most = f"; the model may be {words.percent(memory.margin)} low{more}, {words.gib(memory.most)}"
    return f"{most}, so it may or may not fit: {_what_settles(plan)}" if best.may_fit else most


def _what_settles(plan: Plan) -> str:
    own = plan.where.chip.platform
    if plan.asked_level != own:
        return f"--level {own} settles it"
    return f"{CHIP_LEVELS[own]} was asked and gave no answer"


def bill_line(bill: Bill, unit: str = "tokens") -> str:
    per_billion = (
        ""
        if bill.usd_per_billion_tokens is None
        else f", {words.dollars(bill.usd_per_billion_tokens)} a billion {unit} "
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
    if compiled.level in CHIP_LEVELS:
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
    made = plain_table(*shown)
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
            "evidence": f"{one.level}: refused" if one.refused else one.level,
        }
        add_row(made, *(cells[name] for name in shown))
    return made


def _buffers(best: Candidate) -> Table:
    made = plain_table("buffer", "a chip")
    for name, count in best.estimate.memory.largest[:_LARGEST]:
        add_row(made, name, words.size(count))
    return made


def _links(best: Candidate, width: int) -> Table:
    """The exchanges; on a narrow screen without what would cut the others' words."""
    columns = ["kind", "axes", "link", "times", "sent", "time", "why"]
    left_out = () if width >= _WIDE else ("link", "times") if width >= _NARROW else ("link", "times", "why")
    shown = [name for name in columns if name not in left_out]
    made = plain_table(*shown)
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
        add_row(made, *(cells[name] for name in shown))
    if not best.estimate.links:
        add_row(made, "none", *[""] * (len(shown) - 1))
    return made


def _notes(plan: Plan, screen: Console) -> None:
    for note in plan.notes:
        screen.print(f"note: {note}", markup=False, soft_wrap=not screen.is_terminal)


_LEFT = ("layout", "bound", "buffer", "kind", "axes", "link", "why", "evidence")


def plain_table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        left = column in _LEFT
        # A figure is not cut from its unit.
        made.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    return made


def add_row(table: Table, *cells: Any) -> None:
    from rich.text import Text

    # Brackets in a shape or a reason are not rich's markup.
    table.add_row(*(Text(str(cell)) for cell in cells))
