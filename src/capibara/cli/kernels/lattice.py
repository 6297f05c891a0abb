"""`--models` of `capibara kernels bench` and `compile`: every op at the shapes of published models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code

if TYPE_CHECKING:
    from rich.console import Console

    from capibara.compile.lattice import LatticeRow
    from capibara.kernels.lab.lattice.report import Line

# Of an accelerator's host: tracing holds Python's lock, so that processes compile faster than threads.
WORKERS = 6
# A host without an accelerator runs small shapes, to see that all of it runs; its ratios say nothing of a GPU.
HOST_SHRINK = 64


def bench_models(
    minutes: float, seed: int, families: Sequence[str] | None, skip: int, results: Path | None, commit: str | None,
    json: bool,
) -> None:  # fmt: skip
    # This process asks for the device, to know what it is, before the workers do: it is to leave them its memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from capibara import hardware
    from capibara.kernels.lab.lattice import report, run

    first = hardware.default()
    on_host = first.platform == "cpu"
    settings = run.Settings(
        minutes, seed, tuple(families) if families else None, HOST_SHRINK if on_host else 1,
        workers=0 if on_host else min(WORKERS, max(1, (os.cpu_count() or 1) // 2)), skip=skip,
    )  # fmt: skip
    kept = report.Results(results, first.device_kind, output.command_line(), seed, commit)

    def on_row(row: dict[str, Any]) -> None:
        kept.add(row)
        if not json:
            typer.echo(told(row))

    drawn = run.run(settings, on_row)
    lines = report.summary(kept.rows)
    wrong = [
        f"{row['family']} {row['what']}"
        for row in kept.rows
        if "failed" in row or not row["right"].get("dispatch", False)
    ]
    problem = failures.error(Code.FAILED, f"Failed or wrong: {', '.join(wrong)}.") if wrong else {}
    if json:
        output.show_json(
            {
                "device": first.device_kind, "run": kept.document["runs"][-1], "drawn": drawn, "rows": kept.rows,
                "summary": [line.as_dict() for line in lines], **problem,
            }
        )  # fmt: skip
    else:
        screen = output.console()
        show(screen, lines)
        screen.print(f"{drawn} draws; a run with --skip {skip + drawn} goes on after them.", markup=False)
        if on_host:
            screen.print("No accelerator: small shapes, whose times say nothing of one.", markup=False)
    if problem:
        raise typer.Exit(Code.FAILED)


def told(row: dict[str, Any]) -> str:
    """A row in a line."""
    if "failed" in row:
        return f"{row['family']}: {row.get('what', '')} FAILED: {row['failed']}"
    times = ", ".join(f"{name} {min(us):.1f}" for name, us in row["microseconds"].items())
    ratios = " ".join(
        f"{row[key]:.2f}x {word}"
        for key, word in (("against_best_peer", "the best peer"), ("against_own_best", "our best"))
        if row[key] is not None
    )
    chosen = "+".join(dict.fromkeys(d["implementation"] for d in row["decisions"]))
    apart = ", held back" if row["held_back"] else ""
    wrong = ", ".join(f"{name} is off: {row['notes'].get(name, '')}" for name, ok in row["right"].items() if not ok)
    return (
        f"{row['family']}: {row['what']} {row['direction']} ({row['model']}{apart}): {ratios}; {chosen}; µs: {times}"
        f"{'; ' + wrong if wrong else ''}"
    )


def show(screen: Console, lines: Sequence[Line]) -> None:
    """The families, and the quarter of the models that nothing is fitted on after them."""
    columns = ("rows", "vs best peer", "worst", "below 0.97", "vs own best", "worst own", "failed")
    for kept in (False, True):
        title = "held back: models that nothing was fitted on" if kept else "models that ranks may be fitted on"
        table = output.table("family", *columns, title=title, right=columns, whole=columns)
        for line in lines:
            if line.held_back == kept:
                figures = (line.mean, line.worst), (line.own, line.own_worst)
                first, second = ([output.MISSING if f is None else f"{f:.2f}" for f in pair] for pair in figures)
                output.add_row(
                    table, line.family, str(line.rows), *first, str(line.short), *second, str(line.failed or "")
                )
        screen.print(table)


def show_compiled(screen: Console, rows: Sequence[LatticeRow], named: str, compiler: str) -> None:
    """A line a draw: what dispatch took, whether the TPU compiler takes it, and its predicted time."""
    screen.print(compiler, markup=False, soft_wrap=True)
    right = ("HBM temp", "predicted")
    table = output.table(
        "call", "model", "dispatch took", "result", *right, title=f"Drawn for {named}: predicted, not run", right=right
    )
    for row in rows:
        report = row.report
        output.add_row(
            table,
            f"{row.family}: {row.what}, {row.direction}",
            f"{row.model}{' (held back)' if row.held_back else ''}",
            "+".join(dict.fromkeys(implementation for _, implementation in row.decisions)) or output.MISSING,
            ("ok" if report.compiled else "lowers") if report.ok else f"FAILS: {report.error_kind}",
            output.size(report.hbm_temp_bytes),
            output.figure(row.seconds * 1e6, "µs"),
        )
    screen.print(table)
    for row in rows:
        if not row.ok:
            screen.print(f"{row.name}: {row.report.error_kind}: {row.report.error}", markup=False)
    for kept, title in ((False, "of models that ranks may be fitted on"), (True, "held back")):
        chosen = [row for row in rows if row.held_back == kept]
        screen.print(f"{sum(row.ok for row in chosen)} of {len(chosen)} draws {title} are taken.", markup=False)
