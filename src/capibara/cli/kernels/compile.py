"""`capibara kernels compile`: every kernel through its chip's own compiler, for chips that are not attached."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code
from capibara.cli.kernels import lattice
from capibara.cli.kernels.options import CaseNames, Imports, Json, OpName, ops_of
from capibara.errors import rule_error

if TYPE_CHECKING:
    from rich.console import Console

    from capibara.compile.availability import ChipCompiler
    from capibara.compile.kernels import KernelRow
    from capibara.compile.lattice import LatticeRow
    from capibara.compile.report import CompileReport


def compile_(
    slice_name: Annotated[str, typer.Option("--for", metavar="SLICE", help="A TPU slice or a GPU: v4-32, h200, ...")],
    op: OpName = None,
    case: CaseNames = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Compilers side by side; one a core.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one program.")] = 600.0,
    models: Annotated[
        bool, typer.Option("--models", help="What dispatch takes at drawn shapes of published models, instead.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="With --models: how many draws.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="With --models: other seeds draw other models and sizes.")] = 0,
    family: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="With --models: only this family; may be repeated.")
    ] = None,
    modules: Imports = None,
    json: Json = False,
) -> None:
    """Compile the kernels of a chip over their cases, beside jax's own and XLA's program; no chip is needed.

    Without the chip's compiler they are lowered only: exit code 4.
    """
    from capibara.compile import chip_compiler
    from capibara.compile.kernels import compile_kernels
    from capibara.compile.lattice import compile_lattice
    from capibara.hardware.topology import place
    from capibara.kernels.lab.bench import versions

    if models and (op is not None or case):
        raise rule_error(
            "--models draws the cases of every op", f"{op or '--case'}", "leave it out, or name a --family"
        )
    wanted = place(slice_name)
    compiler = chip_compiler(wanted.chip.platform)
    with output.progress(quiet=json) as bar:
        task = bar.add_task("starting compilers", total=None)

        def tell(done: int, total: int, report: CompileReport) -> None:
            bar.update(task, completed=done, total=total, description=report.name)

        drawn: list[LatticeRow] = []
        listed: list[KernelRow] = []
        if models:
            drawn = compile_lattice(
                wanted.name, rows=rows, seed=seed, families=family, workers=workers, timeout_s=timeout, on_result=tell
            )
        else:
            listed = compile_kernels(
                ops_of(op), wanted.name, cases=case, workers=workers, timeout_s=timeout, on_result=tell
            )
    made: Sequence[KernelRow | LatticeRow] = drawn if models else listed
    problem = _problem(made, compiler)
    if json:
        document = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": output.command_line(),
            "versions": versions(),
            "slice": wanted.name,
            "chip": wanted.chip.name,
            "compiler": str(compiler),
            "compiled": compiler.available,
            "rows": [row.as_dict() for row in made],
        }
        output.show_json({**document, **problem})
    elif models:
        lattice.show_compiled(output.console(), drawn, str(wanted), str(compiler))
    else:
        _show(output.console(), listed, str(wanted), str(compiler), compiler.available)
    if problem:
        raise typer.Exit(problem["error"]["exit_code"])


def _problem(rows: Sequence[KernelRow | LatticeRow], compiler: ChipCompiler) -> dict[str, Any]:
    failed = [row.name for row in rows if not row.ok]
    if failed:
        verb = "compile" if compiler.available else "lower"
        return failures.error(Code.FAILED, f"Do not {verb}: {', '.join(failed)}.")
    if not compiler.available:
        return failures.error(Code.ONLY_LOWERED, f"Lowered, not compiled. {compiler.reason}", fix=compiler.install)
    return {}


def _show(screen: Console, rows: list[KernelRow], named: str, compiler: str, compiled: bool) -> None:
    screen.print(compiler, markup=False, soft_wrap=True)
    if compiled:
        _show_compiled(screen, rows, named)
    else:
        _show_lowered(screen, rows, named)
    for row in rows:
        for label, report in (("", row.ours), ("stock ", row.stock), ("XLA ", row.xla)):
            if report is not None and not report.ok:
                text = f"{row.op} {row.case} {label or row.implementation}: {report.error_kind}: {report.error}"
                screen.print(text, markup=False)
    failed = sum(not row.ok for row in rows)
    taken = sum(row.ours is not None for row in rows)
    verb = "compile" if compiled else "lower"
    end = "" if compiled or failed else f" Nothing was compiled: exit code {Code.ONLY_LOWERED}."
    screen.print(f"{taken - failed} of {taken} kernel cases {verb}; {len(rows) - taken} are refused by design.{end}")


def _show_compiled(screen: Console, rows: list[KernelRow], named: str) -> None:
    from capibara.compile.kernels import body_bundles

    columns: dict[str, Callable[[KernelRow], str]] = {
        "VMEM": lambda row: _vmem(row.ours),
        "HBM temp": lambda row: output.size(None if row.ours is None else row.ours.hbm_temp_bytes),
        "bundles a step": lambda row: output.figure(body_bundles(row.ours)),
    }
    if screen.width >= output.WIDE:
        columns |= {
            "at least": lambda row: output.figure(row.matrix_cycles),
            "XLA's temp": lambda row: output.size(None if row.xla is None else row.xla.hbm_temp_bytes),
            "stock": lambda row: output.figure(body_bundles(row.stock)),
            "stock at least": lambda row: output.figure(row.stock_matrix_cycles),
            "XLA": lambda row: output.figure(None if row.xla is None else row.xla.bundles),
        }
    # A GPU's compiler tells of memory alone.
    told = {
        name: cells for name, of in columns.items() if set(cells := [of(row) for row in rows]) - {output.MISSING, ""}
    }
    made = output.table(
        "op / case", "kernel", "result", *told, title=f"Compiled for {named}: predicted, not run", right=tuple(told)
    )
    for number, row in enumerate(rows):
        kernel = f"{row.implementation} {_config(row)}".rstrip()
        output.add_row(made, f"{row.op} {row.case}", kernel, _result(row), *(cells[number] for cells in told.values()))
    screen.print(made)
    if "bundles a step" not in told:
        return
    screen.print(
        "bundles: length of a kernel body's schedule, one bundle a cycle of one core. A Pallas body is one grid step "
        "with every branch of it (a step clears or writes back only at its ends), XLA's figure adds up its fusions; a "
        "loop inside a body counts once, so a figure can lie under the next one. at least: cycles the matrix units "
        "need for a step.",
        markup=False,
    )


def _show_lowered(screen: Console, rows: list[KernelRow], named: str) -> None:
    made = output.table(
        "op / case", "kernel", "result", "grid steps", "matrix cycles a step", "XLA", "stock",
        title=f"Lowered for {named}, not compiled", right=("grid steps", "matrix cycles a step"),
    )  # fmt: skip
    for row in rows:
        output.add_row(
            made,
            f"{row.op} {row.case}",
            f"{row.implementation} {_config(row)}".rstrip(),
            _result(row),
            output.figure(row.steps),
            output.figure(row.matrix_cycles),
            *(output.MISSING if r is None else ("lowers" if r.ok else "fails") for r in (row.xla, row.stock)),
        )
    screen.print(made)


def _config(row: KernelRow) -> str:
    """A config in as few characters as tell it: the values of its fields."""
    return "" if row.config is None else "x".join(str(value) for value in dataclasses.astuple(row.config))


def _result(row: KernelRow) -> str:
    if row.ours is None:
        return f"- {row.note}"
    if not row.ours.ok:
        return f"FAILS: {row.ours.error_kind}"
    return "ok" if row.ours.compiled else "lowers"


def _vmem(report: CompileReport | None) -> str:
    if report is None or report.vmem_bytes is None:
        return output.MISSING
    limit = "" if report.vmem_limit_bytes is None else f" of {output.size(report.vmem_limit_bytes)}"
    return f"{output.size(report.vmem_bytes)}{limit}"
