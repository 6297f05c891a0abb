"""A plan of serving as text on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from capibara.plan import words
from capibara.plan.report import add_row, plain_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from capibara.serve.prediction.result import ServingPlan, TrafficRow

__all__ = ["show", "show_slices"]

_PARTS = 4
_KINDS = {"on_demand": "on demand", "spot": "spot"}


def show(plan: ServingPlan, screen: Console) -> None:
    """The whole report of one slice."""
    for line in _headlines(plan):
        screen.print(line, markup=False, soft_wrap=not screen.is_terminal)
    if plan.rows:
        screen.print("\nBy users at a time, predicted", style="bold", markup=False)
        screen.print(_rows(plan))
    for note in plan.notes:
        screen.print(f"note: {note}", markup=False, soft_wrap=not screen.is_terminal)


def show_slices(plans: Sequence[ServingPlan], screen: Console) -> None:
    """A line a slice, to choose by."""
    first = plans[0]
    screen.print(f"{first.name}: {_asked(first)}. Predicted, not run.", markup=False, soft_wrap=not screen.is_terminal)
    table = plain_table(
        "on", "chips", "engines", "users", "p95 ms", "first ms", "out/s", "in/s", "USD/M out", "USD/M in"
    )
    for plan in plans:
        held = plan.held
        layout = f"{plan.engines} x {plan.tensor_parallel}"
        if held is None:
            best = "does not fit" if plan.best_ms is None else f"0 (best {plan.best_ms:.2f} ms)"
            add_row(table, plan.where.name, str(plan.where.chips), layout, best, *["-"] * 6)
            continue
        engine = held.engine
        add_row(
            table, plan.where.name, str(plan.where.chips), layout, f"{held.users:,}", f"{engine.p95_ms:.2f}",
            f"{engine.first_p95_ms:.1f}", words.count(held.tokens_out_per_second),
            words.count(held.tokens_in_per_second), *_dollars(held),
        )  # fmt: skip
    screen.print(table)
    for plan in plans:
        if plan.verdict:
            screen.print(f"{plan.where.name}: {plan.verdict}", markup=False, soft_wrap=not screen.is_terminal)


def _asked(plan: ServingPlan) -> str:
    think = f", {words.seconds(plan.think_s)} between an answer and the next request" if plan.think_s else ""
    kept = [
        f"p95 of {value:g} ms {what}"
        for value, what in ((plan.target_ms, "between tokens"), (plan.target_first_ms, "to the first token"))
        if value is not None
    ]
    return f"{plan.lengths}{think}" + (f", {' and '.join(kept)}" if kept else ", no target")


def _headlines(plan: ServingPlan) -> list[str]:
    where, memory = plan.where, plan.memory
    chips = f"{where.chips} chip{'' if where.chips == 1 else 's'}"
    engines = (
        "one engine"
        if plan.engines == 1
        else f"{plan.engines} engines of {plan.tensor_parallel} chip{'' if plan.tensor_parallel == 1 else 's'}"
    )
    lines = [f"{plan.name} served on {where.name} ({chips}, {engines}). Predicted, not run.", f"Users: {_asked(plan)}"]
    held = (
        f"{words.gib(memory.weights)} of weights, {words.gib(memory.loaded)} as they were loaded, "
        f"{words.gib(memory.working)} for a step"
    )
    if plan.cache is None:
        lines.append(f"DOES NOT FIT: {plan.misfit} A chip has {words.gib(memory.limit)}: {held}.")
        return lines
    lines.append(f"FITS: of {words.gib(memory.limit)} a chip {held}; {plan.cache}")
    assert plan.best_ms is not None
    assert plan.best_range_ms is not None
    low, high = plan.best_range_ms
    lines.append(f"One user alone: {plan.best_ms:.2f} ms a token ({low:.2f} to {high:.2f})")
    if plan.held is None:
        lines.append(f"IMPOSSIBLE: {plan.verdict}")
    else:
        lines += _answer(plan, plan.held)
    parts = ", ".join(f"{name} {share:.0%}" for name, share in plan.anatomy[:_PARTS])
    lines.append(f"A step of single tokens then: {parts}")
    return lines


def _answer(plan: ServingPlan, held: TrafficRow) -> list[str]:
    engine = held.engine
    at = "" if plan.target_ms is None else f" at {plan.target_ms:g} ms"
    users = f"{held.users:,} user{'' if held.users == 1 else 's'}{at}"
    lines = [
        f"HOLDS {users}: {engine.p95_ms:.2f} ms between tokens and {engine.first_p95_ms:.1f} ms to the first at the "
        f"95th percentile, {words.count(held.tokens_out_per_second)} tokens/s out, "
        f"{words.count(held.tokens_in_per_second)} in"
    ]
    for cost, price in zip(held.costs, plan.prices, strict=True):
        lines.append(
            f"Cost {_KINDS[cost.kind]}: {words.dollars(cost.usd_per_million_out)} a million tokens out, "
            f"{words.dollars(cost.usd_per_million_in)} in; {price}"
        )
    if not plan.prices:
        lines.append(f"Cost: no price is listed for {plan.where.chip.name}; write one into pricing.toml")
    return lines


def _dollars(row: TrafficRow) -> tuple[str, str]:
    if not row.costs:
        return words.MISSING, words.MISSING
    return f"{row.costs[0].usd_per_million_out:.3g}", f"{row.costs[0].usd_per_million_in:.3g}"


def _rows(plan: ServingPlan) -> Table:
    table = plain_table("users", "running", "p95 ms", "first ms", "out/s", "in/s", "USD/M out", "USD/M in", "")
    for row in plan.rows:
        engine = row.engine
        add_row(
            table, f"{row.users:,}", words.count(engine.running * plan.engines), f"{engine.p95_ms:.2f}",
            f"{engine.first_p95_ms:.1f}", words.count(row.tokens_out_per_second),
            words.count(row.tokens_in_per_second), *_dollars(row), "" if row.within else "over",
        )  # fmt: skip
    return table
