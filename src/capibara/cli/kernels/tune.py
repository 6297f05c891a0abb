"""`capibara kernels tune`: measure an op's candidates and keep the fastest that is right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capibara.cli import failures, operands, output
from capibara.cli.failures import Code
from capibara.cli.kernels.options import CaseNames, Imports, Json, cases_of, ops_of

if TYPE_CHECKING:
    from capibara.kernels.core.spec import Case
    from capibara.kernels.lab.tuning import Progress, TuneReport


def tune(
    op: Annotated[str, typer.Argument(metavar="OP", help="The op's name.")],
    case: CaseNames = None,
    implementations: Annotated[
        str, typer.Option(metavar="NAMES", help="Which to try, separated by commas; all but the reference.")
    ] = "",
    max_configs: Annotated[
        int | None, typer.Option(min=1, help="At most so many configs of each implementation.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A table (.json) or a folder of tables, instead of the user's own."),
    ] = None,
    modules: Imports = None,
    json: Json = False,
) -> None:
    """Check every candidate against the reference, time those that are right, and store the fastest."""
    from capibara.kernels.lab import bench, tuning

    (found,) = ops_of(op)
    chosen = cases_of(found, case, "tune")
    left: list[Case] = []
    if not case:
        chosen, left = bench.affordable(found, chosen)
    names = operands.names(implementations) or None
    for name in names or ():
        found.implementation(name)
    reports: list[TuneReport] = []
    with output.progress(quiet=json) as bar:
        for one in chosen:
            task = bar.add_task(one.name, total=None)

            def tell(step: Progress, task: object = task, label: str = one.name) -> None:
                text = f"{label}: {step.text}"
                bar.update(task, completed=step.done, total=step.total, description=text)  # type: ignore[arg-type]

            report = tuning.autotune(
                found,
                one,
                implementations=names,
                max_configs=max_configs,
                on_progress=tell,
                save=True if out is None else out,
            )
            bar.remove_task(task)
            reports.append(report)
            if not json:
                output.console().print(f"{one.name}: {report}", markup=False)
    failed = [one.name for one, report in zip(chosen, reports, strict=True) if report.best is None]
    problem = failures.error(Code.FAILED, f"No candidate runs and is right: {', '.join(failed)}.") if failed else {}
    if json:
        document = {
            "command": output.command_line(),
            "op": found.name,
            "reports": [report.as_dict() for report in reports],
            "left_out": [one.name for one in left],
        }
        output.show_json({**document, **problem})
    else:
        screen = output.console()
        for path in sorted({str(report.path) for report in reports if report.path is not None}):
            screen.print(f"Stored in {path}", markup=False, soft_wrap=True)
        if left:
            names_left = ", ".join(one.name for one in left)
            screen.print(f"Left out as too large for this CPU: {names_left} (ask by --case).", markup=False)
    if problem:
        raise typer.Exit(Code.FAILED)
