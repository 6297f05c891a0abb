"""`python -m capibara.compile.worker`: compiles jobs one after the other in a process of its own.

libtpu reads its flags once and writes its dumps a process, so the pool gives every worker a dump directory
and the worker tells its jobs apart by the files that are new. A job is a line of JSON,

    {"target": "module:function", "kwargs": {...}, "slice": "v4-32"}

where function(**kwargs) returns (fn, args): on the command line for one job, on standard input for many. The
answer is one line of JSON on standard output, a `CompileReport` as a dict. Without a slice the job is lowered
only. A job with "mesh" ({"data": 4, "model": 8}) gets `mesh=` as a keyword, to shard its arguments over.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from capibara.compile.environment import compiler_environment
from capibara.compile.failures import thrown_by_compilers, useful_lines
from capibara.compile.report import CompileReport
from capibara.hardware.topology import place

__all__ = ["job_name", "main", "run_job"]


def job_name(job: Mapping[str, Any]) -> str:
    """The job's own name, or its target with its keywords."""
    if job.get("name"):
        return str(job["name"])
    keywords = ", ".join(f"{key}={value}" for key, value in dict(job.get("kwargs") or {}).items())
    return f"{job.get('target', '?')}({keywords})"


def run_job(job: Mapping[str, Any], dump_dir: Path | None = None) -> CompileReport:
    """Runs one job in this process."""
    from capibara.compile.aot import compile_for, lower_only

    name, slice_name, static = job_name(job), job.get("slice"), job.get("vmem_static_bytes")
    try:
        if slice_name is not None:
            place(slice_name)
        fn, args = _build(job)
    except thrown_by_compilers() as error:
        text = f"{type(error).__name__}: {error}"
        return CompileReport(
            name=name,
            ok=False,
            evidence="not lowered: the job's target could not be built",
            slice_name=slice_name,
            error_kind="target",
            error=useful_lines(text),
        )
    if slice_name is None:
        return lower_only(fn, args, name=name, vmem_static_bytes=static)
    return compile_for(fn, args, slice_name, name=name, dump_dir=dump_dir, vmem_static_bytes=static)


def _build(job: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
    module, colon, function = str(job.get("target", "")).partition(":")
    if not (module and colon and function):
        raise ValueError(f"A job's target is 'module:function'. Got {job.get('target')!r}.")
    build: Any = importlib.import_module(module)
    for part in function.split("."):
        build = getattr(build, part)
    kwargs = dict(job.get("kwargs") or {})
    if axes := job.get("mesh"):
        from capibara.compile.aot import topology_mesh

        kwargs["mesh"] = topology_mesh(job.get("slice"), axes)
    built = build(**kwargs)
    if not (isinstance(built, tuple) and len(built) == 2 and callable(built[0])):
        raise TypeError(f"{job['target']} must return (fn, args). Got {type(built).__name__}.")
    return built


def _clear(dump_dir: Path, keep: str | None) -> None:
    """Empties the dump directory for the next job, moving the files to `keep` when a job wants them."""
    for path in sorted(dump_dir.iterdir()):
        if keep is not None:
            target = Path(keep)
            target.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target / path.name)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def _protocol() -> Iterator[TextIO]:
    """Standard output for answers alone: whatever else the process writes there goes to standard error."""
    sys.stdout.flush()
    private = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(private), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(private, 1)
        os.close(private)


def _serve(lines: Iterator[str], dump_dir: Path, answers: TextIO) -> None:
    for line in lines:
        if not line.strip():
            continue
        job = json.loads(line)
        report = run_job(job, dump_dir)
        _clear(dump_dir, job.get("keep_dump"))
        answers.write(json.dumps(report.as_dict()) + "\n")
        answers.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. `--dump-dir DIR` says that the environment is set up already, by the pool."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with contextlib.ExitStack() as stack:
        if arguments[:1] == ["--dump-dir"]:
            dump_dir = Path(arguments[1])
            arguments = arguments[2:]
        else:
            dump_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="capibara-dump-")))
            os.environ.update(compiler_environment(dump_dir))
        answers = stack.enter_context(_protocol())
        _serve(iter(arguments) if arguments else iter(sys.stdin.readline, ""), dump_dir, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
