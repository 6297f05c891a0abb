"""`capibara profile`: what a program does while it runs, and whether that has become slower."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code
from capibara.errors import CapibaraError, rule_error

if TYPE_CHECKING:
    from capibara.observe.profiler.compare import Change, Comparison
    from capibara.observe.profiler.result import Profile


class ScriptFailed(CapibaraError):
    """The program that was to be profiled did not end well."""


def profile(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Argument(metavar="SCRIPT.py", help="The Python program to run.", show_default=False)
    ] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="BASE.json", help="Exit with 1 if an operation is slower; repeats as the base did."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="FRACTION", help="How much slower is too slow: 0.25 on a CPU, 0.05 elsewhere."),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Run it once to warm up and N times more, for a base: 8, 3 at least."),
    ] = 0,
    counting: Annotated[
        bool, typer.Option("--counting", help="Count programs and trace nothing: no times of operations.")
    ] = False,
    trace_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the trace, for XProf and Perfetto.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many operations are shown.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a Python program in this process and profile all that jax runs in it.

    What comes after the script or the module are its own arguments; those that look like options stand after --.
    """
    script, arguments = _program(target, module, list(context.args))
    if counting and (against is not None or repeats):
        raise rule_error(
            "--against and --repeats are for times of operations", "--counting with it", "leave --counting out"
        )
    base = None if against is None else _base(against, repeats)  # before the program runs: a bad file is known at once
    if not counting:
        _without_command_buffers()
    wanted = repeats if base is None else base.repeats
    if wanted:
        found = _repeated(script, module, arguments, wanted, trace_dir, quiet=json)
    else:
        found = _run(script, module, arguments, "counting" if counting else "tracing", trace_dir, quiet=json)
    compared = None
    if base is not None:
        from capibara.observe.profiler.compare import TOLERANCE, compare

        compared = compare(base, found, tolerance)
        if compared.pace > 1 + TOLERANCE["cpu"]:
            # A machine that is so much busier does not slow all operations alike: those on all cores, and others.
            typer.echo(
                f"capibara: operations took {compared.pace:.2f} times as long as in the base as a whole; the machine "
                f"is busier than then, so all repeats are taken once more",
                err=True,
            )
            found = _repeated(script, module, arguments, wanted, trace_dir, quiet=True)
            compared = compare(base, found, tolerance)
    _show(found, compared, top, json)
    if compared is not None and compared.slower:
        raise typer.Exit(Code.FAILED)


_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer"


def _without_command_buffers() -> None:
    """Let a GPU's rows name their instruction, unless the user says how programs are to be launched.

    In a command buffer (a CUDA graph) a kernel of a vendor's library has a name of its own, which changes with sizes:
    nobody could say whose it is, nor find it again in another profile. XLA reads its flags when jax starts.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    has_gpu = any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"))
    if has_gpu and _COMMAND_BUFFERS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_COMMAND_BUFFERS}=".strip()


def _base(file: Path, repeats: int) -> Profile:
    from capibara.observe.profiler.compare import check_base
    from capibara.observe.profiler.result import read_profile

    base = read_profile(file)
    check_base(base)
    if repeats not in (0, base.repeats):
        raise rule_error(
            "Profiles are compared that were taken alike",
            f"--repeats {repeats} against a base of {base.repeats}",
            "leave --repeats out: it is the base's",
        )
    return base


def _repeated(
    script: str | None, module: str | None, arguments: list[str], repeats: int, trace_dir: Path | None, *, quiet: bool
) -> Profile:
    """A base and what is held against it are made here, both in this way. Of a first run in a process nobody can tell
    what the program takes: it is slower than those after it."""
    from capibara.observe.profiler.compare import FEWEST_REPEATS, repeated

    if repeats < FEWEST_REPEATS:
        raise rule_error(f"There are {FEWEST_REPEATS} repeats or more", f"--repeats {repeats}", "write --repeats 8")
    _run(script, module, arguments, "tracing", None, quiet=quiet)
    profiles = []
    for number in range(1, repeats + 1):
        kept = trace_dir if number == repeats else None
        try:
            profiles.append(_run(script, module, arguments, "tracing", kept, quiet=True))
        except ScriptFailed as problem:
            raise ScriptFailed(
                f"{problem}. It ran well the first time and is run again in one process, repeat {number} of {repeats}: "
                f"what it leaves behind must not be in its way"
            ) from problem
    return repeated(profiles)


def _program(target: str | None, module: str | None, rest: list[str]) -> tuple[str | None, list[str]]:
    if module is not None:
        if not _importable(module):
            raise rule_error("-m names a module that Python can import", repr(module), "check its name")
        return None, ([target] if target is not None else []) + rest
    if target is None:
        raise rule_error("A program is named", "none", "write capibara profile SCRIPT.py, or -m MODULE")
    file = Path(target)
    if file.suffix != ".py":
        raise rule_error(
            "The program is a Python file or -m MODULE: it runs in this process, where jax can be listened to",
            repr(target),
            "name a file that ends in .py; of a command, the script that it starts",
        )
    if not file.is_file():
        raise rule_error("The program is in a Python file", f"{target!r}, which is not there", "name a file that is")
    return target, rest


def _importable(module: str) -> bool:
    sys.path.insert(0, "")  # as python -m looks for it
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is not there
        return False
    finally:
        sys.path.remove("")


def _run(
    script: str | None, module: str | None, arguments: list[str], mode: str, trace_dir: Path | None, *, quiet: bool
) -> Profile:
    """The program, as `python SCRIPT.py` or `python -m MODULE` runs it; under --json its output goes to stderr."""
    from capibara.observe.profiler.session import profile as recorded

    name = script or f"-m {module}"
    before = list(sys.argv), list(sys.path)
    sys.argv[:] = [script or str(module), *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent) if script else "")
    redirected: Any = contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext()
    try:
        with recorded(name, mode, trace_dir) as recording, redirected:
            try:
                if script is not None:
                    runpy.run_path(script, run_name="__main__")
                else:
                    runpy.run_module(str(module), run_name="__main__", alter_sys=True)
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    raise ScriptFailed(f"{name} ended with {ended.code!r}; there is no profile of it") from ended
    except ScriptFailed:
        raise
    except Exception as problem:
        raise ScriptFailed(f"{name} failed: {type(problem).__name__}: {problem}") from problem
    finally:
        sys.argv[:], sys.path[:] = before
    if recording.profile is None:
        raise ScriptFailed(f"{name} ran inside of another profiler")
    if trace_dir is None:  # the files go with the recording
        return dataclasses.replace(recording.profile, trace_file=None, xplane_file=None)
    return recording.profile


def _show(found: Profile, compared: Comparison | None, top: int, json: bool) -> None:
    from capibara.observe.bottleneck import analyze_performance_bottlenecks

    changes = () if compared is None else compared.slower
    in_the_way = analyze_performance_bottlenecks(found).bottlenecks
    if json:
        told = None
        if compared is not None:
            told = {
                "slower": [
                    {"program": one.program, "op": one.op, "before_seconds": one.before, "after_seconds": one.after,
                     "slower_by": one.slower_by}
                    for one in changes
                ],
                "repeats": found.repeats, "judged": compared.judged, "pace": compared.pace, "new": list(compared.new),
            }  # fmt: skip
        problem = failures.error(Code.FAILED, _sentence(changes), kind="slower") if changes else {}
        document = {
            "command": output.command_line(), "profile": found.as_dict(), "against": told,
            "bottlenecks": [dataclasses.asdict(one) for one in in_the_way],
        }  # fmt: skip
        output.show_json({**document, **problem})
        return
    screen = output.console()
    metrics = found.metrics()
    screen.print(
        f"{found.name}: {found.runs} runs of {len(found.programs)} programs on {found.device_kind}, "
        f"{output.figure(found.wall_seconds, 's')} ({output.figure(found.compile_seconds, 's')} compiling)",
        markup=False,
    )
    screen.print(
        f"{output.rate(metrics['tflops'] * 1e12)} a chip, {output.percent(metrics['compute_efficiency'])} of its peak; "
        f"memory {output.size(found.peak_memory_bytes)} at the peak, {output.percent(metrics['memory_efficiency'])} of "
        f"its bandwidth"
        + ("" if found.communication_seconds is None else f"; exchanges {metrics['comm_overhead_ms']:.3g} ms"),
        markup=False,
    )
    made = output.table(
        "op", "kind", "count", "ms", "share", "bound", "of roofline", right=("count", "ms", "share", "of roofline")
    )
    whole = sum(op.seconds or 0.0 for op in found.ops)
    for op in found.ops[:top]:
        output.add_row(
            made,
            op.source or op.op,
            op.kind,
            f"{op.count:.0f}",
            output.MISSING if op.seconds is None else f"{op.seconds * 1e3:.3f}",
            output.percent(None if not whole or op.seconds is None else op.seconds / whole),
            op.bound,
            output.percent(op.roofline),
        )
    screen.print(made)
    if len(found.ops) > top:
        screen.print(f"... and {len(found.ops) - top} more", markup=False)
    for one in in_the_way:
        screen.print(f"in the way ({one.kind}): {one.description} {one.suggestion}", markup=False)
    for note in found.notes:
        screen.print(f"note: {note}", markup=False)
    if found.trace_file is not None:
        screen.print(f"trace: {found.trace_file}", markup=False, soft_wrap=True)
    if compared is None:
        return
    if compared.pace != 1:
        screen.print(
            f"operations took {compared.pace:.2f} times as long as in the base as a whole, which is put down to the "
            f"machine",
            markup=False,
        )
    if compared.new:
        screen.print(f"not in the base: {', '.join(compared.new)}", markup=False)
    said = f"none of {compared.judged} operations is slower than in the base"
    screen.print(_sentence(changes) if changes else said, markup=False)


def _sentence(changes: Sequence[Change]) -> str:
    return "; ".join(
        f"{one.op} of {one.program} is slower by {100 * one.slower_by:.0f} % "
        f"({one.before * 1e3:.3g} -> {one.after * 1e3:.3g} ms a run)"
        for one in changes
    )
