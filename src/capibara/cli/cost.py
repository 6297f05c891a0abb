"""`capibara cost`: what chips cost, and the cheapest slice and layout for a job."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code
from capibara.errors import rule_error

if TYPE_CHECKING:
    from capibara.fleet.spending import Choice
    from capibara.prices.table import PriceTable

_SHOWN = 8


def cost(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A job, as `capibara plan` takes it; without one, prices are shown.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="SLICES", help="v4-8,v4-16: slices to weigh; the smallest allowed by default."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the job; a preset has its own.")] = None,
    tokens: Annotated[float | None, typer.Option(min=1, help="Tokens of the job, in place of steps.")] = None,
    limit: Annotated[
        float, typer.Option("--max-cost-per-hour", metavar="USD", help="No slice costs more an hour.")
    ] = 100.0,
    deadline: Annotated[float | None, typer.Option(metavar="HOURS", help="Hours in which it is to be done.")] = None,
    model: Annotated[
        str, typer.Option("--cost-model", metavar="NAME", help="tpu_v4_pricing (every kind), tpu_v4_spot, ...")
    ] = "tpu_v4_pricing",
    goal: Annotated[str, typer.Option("--target", help="cost_efficiency or deadline (the earliest end).")] = (
        "cost_efficiency"
    ),
    train: Annotated[bool, typer.Option("--train", help="FUNCTION is loss(params, batch).")] = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step, over all chips.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens of a row.")] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="Of the search for layouts, on each slice.")
    ] = 20.0,
    region: Annotated[str | None, typer.Option(help="Whose prices; the chip's first in the table by default.")] = None,
    pricing: Annotated[Path | None, typer.Option(metavar="TOML", help="Prices laid over the shipped table.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The cheapest slice, layout and way to pay for a job; exit code 3 when nothing keeps to limit and deadline.

    For example: capibara cost llama-1b --steps 10000 --max-cost-per-hour 60 --deadline 48; capibara cost
    """
    from capibara.prices.table import price_table

    table = price_table(pricing)
    if target is None:
        for name, value in (("--steps", steps), ("--tokens", tokens), ("--deadline", deadline), ("--on", on)):
            if value is not None:
                raise rule_error(f"{name} is for a job", "no TARGET", "name a job, such as llama-1b")
        _prices(table, json)
        return
    from capibara.fleet.spending import TpuCostOptimizer
    from capibara.plan.target import Recipe

    recipe = Recipe(target, train, batch=batch, sequence=sequence)
    optimizer = TpuCostOptimizer(limit, model, goal, pricing=table, region=region)
    if steps is None and tokens is None:
        steps = _preset_steps(recipe)
    # What a user's file prints while it is loaded and traced is not the report, and would break --json.
    with contextlib.redirect_stdout(sys.stderr):
        choice = optimizer.choose(
            recipe,
            deadline,
            steps=steps,
            tokens=tokens,
            on=None if on is None else on.split(","),
            time_limit=time_limit,
        )
    _show(choice, json)
    if choice.best is None:
        raise typer.Exit(Code.DOES_NOT_FIT)


def _preset_steps(recipe: Any) -> int:
    from capibara.models.preset import load_preset, preset_names

    if recipe.target in preset_names() or recipe.target.endswith(".toml"):
        return load_preset(recipe.target).train.steps
    raise rule_error("A job has a length", "neither --steps nor --tokens", "add --steps 1000")


def _prices(table: PriceTable, json: bool) -> None:
    from capibara.prices.table import KINDS

    if json:
        rows = [{"chip": row.chip, "region": row.region, "kind": row.kind, "usd": row.usd, "date": row.date,
                 "source": row.source} for row in table.rows]  # fmt: skip
        output.show_json({"command": output.command_line(), "files": list(table.files), "prices": rows})
        return
    made = output.table(
        "chip", "region", *(kind.replace("_", " ") for kind in KINDS), "date",
        title="US dollars a chip-hour", right=tuple(kind.replace("_", " ") for kind in KINDS), whole=("chip", "date"),
    )  # fmt: skip
    places = dict.fromkeys((row.chip, row.region) for row in table.rows)
    for chip, region in places:
        of_place = {row.kind: row for row in table.rows if (row.chip, row.region) == (chip, region)}
        dates = {row.date for row in of_place.values()}
        cells = [f"{of_place[kind].usd:.4g}" if kind in of_place else output.MISSING for kind in KINDS]
        output.add_row(made, chip, region, *cells, ", ".join(sorted(dates)))
    screen = output.console()
    screen.print(made)
    screen.print(f"from {', '.join(table.files)}; - is not known", markup=False, soft_wrap=True)


def _show(choice: Choice, json: bool) -> None:
    if json:
        nothing = "Nothing keeps to the limit and the deadline."
        problem = {} if choice.best is not None else failures.error(Code.DOES_NOT_FIT, f"{nothing} {choice}")
        output.show_json({"command": output.command_line(), **choice.as_dict(), **problem})
        return
    screen = output.console()
    if choice.best is None:
        screen.print(f"Nothing runs {choice.job.name} within the limit and the deadline:", markup=False)
    else:
        made = output.table(
            "slice", "paid", "layout", "hours", "USD an hour", "USD",
            title=f"{choice.job.name}, {choice.job.steps:,} steps (predicted)",
            right=("hours", "USD an hour", "USD"), whole=("slice",),
        )  # fmt: skip
        for offer in choice.offers[:_SHOWN]:
            output.add_row(
                made, offer.placement.where.name, offer.kind.replace("_", " "), offer.placement.layout,
                output.figure(offer.hours), f"{offer.usd_per_hour:.2f}", f"{offer.dollars:,.2f}",
            )  # fmt: skip
        screen.print(made)
        if any(offer.kind.startswith("committed") for offer in choice.offers[:_SHOWN]):
            note = "committed prices are by the hour of this job, as if the rest of the commitment were used too"
            screen.print(f"note: {note}", markup=False, soft_wrap=True)
    for what, why in choice.refused[:_SHOWN]:
        screen.print(f"not {what}: {why}", markup=False, soft_wrap=True)
