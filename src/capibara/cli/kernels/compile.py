"""`capibara kernels compile`: every TPU kernel through the TPU compiler, for a slice that is not attached."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
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
    slice_name: Annotated[str, typer.Option("--for", metavar="SLICE", help="A TPU slice: v4-32, v5e-16, ...")],
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
    """Compile the TPU kernels over their cases, beside jax's own and XLA's program; no TPU is needed.

    Without the TPU compiler they are lowered only: exit code 4.
    """
    from capibara.compile import tpu_compiler
    from capibara.compile.kernels import compile_kernels
    from capibara.compile.lattice import compile_lattice
    from capibara.hardware import slice_by_name
    from capibara.kernels.lab.bench import versions

    if models and (op is not None or case):
        raise rule_error(
            "--models draws the cases of every op", f"{op or '--case'}", "leave it out, or name a --family"
        )
    wanted = slice_by_name(slice_name)
    compiler = tpu_compiler()
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
    verb = "compile" if compiled else "lower for TPU"
    end = "" if compiled or failed else f" Nothing was compiled: exit code {Code.ONLY_LOWERED}."
    screen.print(f"{taken - failed} of {taken} kernel cases {verb}; {len(rows) - taken} are refused by design.{end}")


def _show_compiled(screen: Console, rows: list[KernelRow], named: str) -> None:
    from capibara.compile.kernels import body_bundles

    wide = screen.width >= output.WIDE
    first = ("VMEM", "HBM temp", "bundles a step")
    others = ("at least", "XLA's temp", "stock", "stock at least", "XLA") if wide else ()
    made = output.table(
        "op / case",
        "kernel",
        "result",
        *first,
        *others,
        title=f"Compiled for {named}: predicted, not run",
        right=(*first, *others),
    )
    for row in rows:
        ours = row.ours
        beside = (
            output.figure(row.matrix_cycles),
            output.size(None if row.xla is None else row.xla.hbm_temp_bytes),
            output.figure(body_bundles(row.stock)),
            output.figure(row.stock_matrix_cycles),
            output.figure(None if row.xla is None else row.xla.bundles),
        )
        output.add_row(
            made,
            f"{row.op} {row.case}",
            f"{row.implementation} {_config(row)}".rstrip(),
            _result(row),
            _vmem(ours),
            output.size(None if ours is None else ours.hbm_temp_bytes),
            output.figure(body_bundles(ours)),
            *(beside if wide else ()),
        )
    screen.print(made)
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
