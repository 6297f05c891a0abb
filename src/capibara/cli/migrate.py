"""`capibara migrate`: what of a program breaks on the jax of today, and the fixes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code
from capibara.errors import rule_error, unknown_name

if TYPE_CHECKING:
    from capibara.migrate.findings import Report
    from capibara.migrate.fixes import Fixed
    from capibara.migrate.run import Job
    from capibara.migrate.settings import Settings
    from capibara.migrate.verify import Verdict

_STDIN = "-"
_TARGETS = ("jax", "capibara")


def migrate(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH…", help="Files, folders, notebooks; - is standard input.", show_default=False),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Rewrite what is safe to rewrite, and show the diff.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show what --fix would change, and change nothing.")] = False,
    to: Annotated[
        str, typer.Option("--to", metavar="jax|capibara", help="What fixed code imports: plain jax, or capibara.jax.")
    ] = "jax",
    adapters: Annotated[
        bool,
        typer.Option(
            "--adapters/--no-adapters",
            help="With --to jax: import from capibara.jax what plain jax has no equal of.",
        ),
    ] = True,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:FUNCTION",
            help="Import FILE, which runs it, and compare the function's jaxpr before and after the fix.",
        ),
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(metavar="SHAPES", help="f32[8,128],i32[8]: the arguments that --verify traces with.")
    ] = None,
    select: Annotated[str | None, typer.Option(metavar="CODES", help="CAP2,CAP301: only these.")] = None,
    ignore: Annotated[str | None, typer.Option(metavar="CODES", help="Not these.")] = None,
    exclude: Annotated[str | None, typer.Option(metavar="PATTERNS", help="Files and folders not to read.")] = None,
    info: Annotated[
        bool, typer.Option("--info", help="Also print what is neither error nor warning, such as plain jax imports.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; one a processor by default.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0.")] = False,
) -> None:
    """What of a program breaks on the jax of today; exit code 1 when something does. Code is read and never run.

    Only --verify imports the code. Settings are read from [tool.capibara.migrate] of pyproject.toml; a comment
    `# noqa: CAP201` silences a line.

    For example: capibara migrate src; capibara migrate model.py --fix
    """
    if to not in _TARGETS:
        raise unknown_name("target of --to", to, _TARGETS)
    if json and sarif:
        raise rule_error("A report is JSON or SARIF", "--json and --sarif", "leave one of them out")
    if verify is not None:
        if paths or fix or diff or sarif:
            raise rule_error("--verify is of one function", "--verify with other work", "run it for itself")
        _verify(verify, shapes, to, adapters, json)
        return
    if shapes is not None:
        raise rule_error("--shapes is for --verify", f"--shapes {shapes}", "add --verify FILE:FUNCTION")
    if not paths:
        raise rule_error("PATH names what is to be checked", "none", "write capibara migrate .")
    if fix and diff:
        raise rule_error("--diff changes nothing", "--fix and --diff", "leave one of them out")

    def adjust(one: Settings) -> Settings:
        return replace(
            one,
            select=one.select if select is None else _listed(select),
            ignore=(*one.ignore, *_listed(ignore)),
            exclude=(*one.exclude, *_listed(exclude)),
        )

    if _STDIN in paths:
        if len(paths) > 1 or fix:
            raise rule_error("- is checked for itself", f"{' '.join(paths)}", "write capibara migrate - --diff")
        _standard_input(adjust, diff, to, adapters, json, sarif, info)
        return
    from capibara.migrate.run import check_jobs, jobs_of

    listed = jobs_of(paths, adjust)
    changed, unfixed = _fixed(listed, to, adapters, fix, quiet=json or sarif) if fix or diff else ({}, {})
    with output.progress(quiet=json or sarif) as bar:
        task = bar.add_task("files", total=len(listed))
        report = check_jobs(listed, processes=jobs, checked=lambda count: bar.update(task, completed=count))
    _show(report, changed, json, sarif, written=fix, info=info, unfixed=unfixed)
    if unfixed or not report.is_compatible:
        raise typer.Exit(Code.FAILED)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _standard_input(adjust: Any, diff: bool, to: Any, adapters: bool, json: bool, sarif: bool, info: bool) -> None:
    from capibara.migrate.fixes import fix_text
    from capibara.migrate.run import check_source
    from capibara.migrate.settings import settings_for
    from capibara.migrate.sources import Unreadable, decode_python

    settings = adjust(settings_for(Path.cwd()))
    try:
        text = decode_python(sys.stdin.buffer.read()).text
    except Unreadable as error:
        raise rule_error("Standard input is Python's text", error.message, error.fix or "pipe a Python file") from error
    report = check_source(text, "<stdin>", settings)
    changed = {}
    if diff and not report.failures:
        fixed = fix_text(text, "<stdin>", to, adapters=adapters, codes=settings.codes)
        if fixed.changed:
            changed["<stdin>"] = fixed
    _show(report, changed, json, sarif, written=False, info=info)
    if not report.is_compatible:
        raise typer.Exit(Code.FAILED)


def _fixed(
    jobs: Sequence[Job], to: Any, adapters: bool, write_them: bool, quiet: bool
) -> tuple[dict[str, Fixed], dict[str, str]]:
    """The files that change, and why others could not; what cannot be read is left to the report."""
    from capibara.migrate.fixes import FixFailed, fix_file, write
    from capibara.migrate.sources import Unreadable, read_bytes

    changed, unfixed = {}, {}
    with output.progress(quiet=quiet) as bar:
        for path, settings in bar.track(jobs, description="fixes"):
            try:
                if b"jax" not in read_bytes(path):
                    continue
                data, fixed = fix_file(path, settings, to, adapters=adapters)
                if fixed.changed and write_them:
                    write(path, data)
            except Unreadable:
                continue
            except FixFailed as error:
                unfixed[str(path)] = str(error)
            except OSError as error:  # the other files are written all the same
                unfixed[str(path)] = f"it cannot be written: {error.strerror or error}"
            else:
                if fixed.changed:
                    changed[str(path)] = fixed
    return changed, unfixed


def _show(
    report: Report,
    changed: dict[str, Fixed],
    json: bool,
    sarif: bool,
    *,
    written: bool,
    info: bool,
    unfixed: Mapping[str, str] | None = None,
) -> None:
    """JSON and SARIF have every finding; people see what is to be done, and the rest with --info."""
    from capibara.migrate.fixes import diff as difference
    from capibara.migrate.sarif import sarif as as_sarif

    unfixed = unfixed or {}
    for file, why in unfixed.items():
        typer.echo(f"capibara: {file}: not fixed: {why}", err=True)
    if sarif:
        output.show_json(as_sarif(report))
        return
    if json:
        document: dict[str, Any] = {
            "command": output.command_line(),
            "is_compatible": report.is_compatible,
            "files": len(report.files),
            "counts": report.counts(),
            "issues": [one.as_dict() for one in report.findings],
        }
        if changed:
            document["fixes"] = [
                {"file": file, "written": written, "diff": difference(one, file), "from_capibara": one.from_dropin}
                for file, one in changed.items()
            ]
        if unfixed:
            document["not_fixed"] = [{"file": file, "reason": why} for file, why in unfixed.items()]
        failed = "" if report.is_compatible else report.summary
        failed = failed or (f"not fixed: {', '.join(unfixed)}" if unfixed else "")
        problem = failures.error(Code.FAILED, failed) if failed else {}
        output.show_json({**document, **problem})
        return
    for file, one in changed.items():
        typer.echo(difference(one, file), nl=False)
    for file, one in changed.items():
        if one.from_dropin:
            names = ", ".join(one.from_dropin)
            typer.echo(f"{file}: {names}: plain jax has no equal; imported from capibara.jax", err=True)
    hidden = 0
    for finding in report.findings:
        if finding.severity == "info" and not info:
            hidden += 1
        else:
            typer.echo(str(finding))
    typer.echo(report.summary + (" (--info prints them)" if hidden else ""))
    if changed:
        typer.echo(f"{len(changed)} file{'s' if len(changed) > 1 else ''} {'fixed' if written else 'would change'}")


def _verify(what: str, shapes: str | None, to: Any, adapters: bool, json: bool) -> None:
    from capibara.migrate.verify import verify

    if shapes is None:
        raise rule_error("--verify traces with shapes", "none", "add --shapes 'f32[8,128]'")
    file, _, function = what.rpartition(":")
    if not file or not function.isidentifier():
        raise rule_error("--verify names a file and a function", repr(what), "write model.py:loss")
    typer.echo(f"capibara: --verify imports {file}, which runs it", err=True)
    verdict: Verdict = verify(Path(file), function, _operands(shapes), to, adapters=adapters)
    code = {"equal": Code.OK, "different": Code.FAILED, "not comparable": Code.ONLY_LOWERED}[verdict.verdict]
    if json:
        problem = {} if code is Code.OK else failures.error(code, f"{verdict.verdict}: {verdict.reason}")
        output.show_json({"command": output.command_line(), **verdict.as_dict(), **problem})
    else:
        typer.echo(str(verdict))
    if code is not Code.OK:
        raise typer.Exit(code)


def _operands(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """`f32[8,128],i32[8]` as types and shapes; the commas inside of brackets are of the shape."""
    import re

    from capibara.cli.operands import operand

    parts = re.split(r",(?![^\[]*\])", text)
    found = [operand(part.strip()) for part in parts]
    return [(str(one.dtype), one.shape) for one in found if one is not None]
