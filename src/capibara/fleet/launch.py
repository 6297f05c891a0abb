"""The same command on many workers: which engine places it, and what each engine is told.

`processes` and `ray` run it from here, under the supervisor: lines with their worker's number, all stopped and started
again when one dies, the exit code passed on. `sky` and `jobset` write a file for the engine that runs it elsewhere.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from capibara.errors import rule_error, unknown_name
from capibara.fleet.yaml_text import yaml_text
from capibara.processes import COORDINATOR, PROCESS_COUNT, PROCESS_ID
from capibara.train.supervisor import RESTARTS, Supervisor

__all__ = ["ENGINES", "Launched", "launch"]

# The options of each engine, beside the command.
_OPTIONS = {
    "processes": ("processes", "max_restarts", "grace_seconds", "environment"),
    "ray": (
        "processes", "max_restarts", "grace_seconds", "environment", "address", "workdir", "cpus", "gpus", "tpus",
    ),
    "sky": ("processes", "max_restarts", "environment", "on", "name", "setup", "spot", "bucket", "out"),
    "jobset": (
        "processes", "max_restarts", "grace_seconds", "environment", "on", "name", "image", "slices", "spot", "bucket",
        "out",
    ),
}  # fmt: skip
ENGINES = tuple(_OPTIONS)
_NEXT = {"sky": "sky jobs launch {file}", "jobset": "kubectl apply -f {file}"}


@dataclass(frozen=True)
class Launched:
    """What came of it: an exit code, or a file and the command that takes it."""

    engine: str
    processes: int
    exit_code: int = 0
    starts: int | None = None
    """How often the program was started."""
    file: Path | None = None
    next: str | None = None
    """The command to run now."""


def launch(
    engine: str, command: Sequence[str], *, output: TextIO | None = None, errors: TextIO | None = None, **options: Any
) -> Launched:
    """Run a command on many workers, or write the file by which another engine does.

    Args:
      engine: one of `ENGINES`.
      command: in words; "capibara" is the one of the interpreter that runs the worker.
      output: where the workers' standard output goes, by default to this process's own.
      errors: the same for their standard error.
      **options: those of the engine, and None for what is left to it; another engine's are refused.
    """
    if engine not in _OPTIONS:
        raise unknown_name("engine", engine, ENGINES)
    if isinstance(command, str) or not command:
        raise rule_error("A command is a list of words", repr(command), "write it after --: -- capibara train dev")
    chosen = {name: value for name, value in options.items() if value is not None}
    for name in chosen:
        if name not in _OPTIONS[engine]:
            takers = [other for other, names in _OPTIONS.items() if name in names]
            if not takers:
                raise unknown_name("option", name, _OPTIONS[engine])
            raise rule_error(
                f"{_flag(name)} is for --engine {' and '.join(takers)}", f"it and --engine {engine}", "leave it out"
            )
    _check(chosen)
    if engine == "sky":
        return _write_sky(command, **chosen)
    if engine == "jobset":
        return _write_jobset(command, **chosen)
    return _supervise(engine, command, output, errors, **chosen)


def _flag(option: str) -> str:
    return {"environment": "--env", "grace_seconds": "--grace"}.get(option, f"--{option.replace('_', '-')}")


def _check(options: Mapping[str, Any]) -> None:
    for name, low in (("processes", 1), ("slices", 1), ("max_restarts", 0), ("grace_seconds", 0)):
        value = options.get(name, low)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise rule_error(f"{_flag(name)} is a whole number from {low} up", repr(value), f"use {low} or more")
    for name in ("cpus", "gpus", "tpus"):
        if options.get(name, 0) < 0:
            raise rule_error(f"{_flag(name)} is a number from 0 up", repr(options[name]), "use 0 or more")
    for name in options.get("environment", {}):
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise rule_error("A variable's name is of letters, digits and _", repr(name), "write --env NAME=VALUE")
        if name in (PROCESS_ID, PROCESS_COUNT, COORDINATOR, RESTARTS):
            raise rule_error(f"{name} is set by the engine", f"--env {name}=...", "leave it out")


def _supervise(
    engine: str,
    command: Sequence[str],
    output: TextIO | None,
    errors: TextIO | None,
    *,
    processes: int = 1,
    max_restarts: int = 3,
    grace_seconds: int = 300,
    environment: Mapping[str, str] | None = None,
    address: str | None = None,
    workdir: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    tpus: float = 0,
) -> Launched:
    arguments: dict[str, Any] = {
        "max_restarts": max_restarts,
        "grace_seconds": grace_seconds,
        # Another program may not know the word; it sees CAPIBARA_RESTARTS.
        "restart_words": ["--resume"] if list(command[:2]) == ["capibara", "train"] else [],
        "environment": environment,
        "output": output,
        "errors": errors,
    }
    if engine == "processes":
        words = [sys.executable, "-m", *command] if command[0] == "capibara" else list(command)
        return _ran(engine, Supervisor(words, processes, **arguments))
    from capibara.fleet.ray import cluster

    shares = {"CPU": cpus, "GPU": gpus, "TPU": tpus}
    if not any(shares.values()):
        raise rule_error("A worker has a share of something", "0 CPU, 0 GPU, 0 TPU", "leave --cpus out")
    with cluster(processes, shares, address=address, folder=workdir) as place:
        return _ran(engine, Supervisor(command, processes, **arguments, place=place))


def _ran(engine: str, supervisor: Supervisor) -> Launched:
    code = supervisor.run()
    return Launched(engine, supervisor.processes, code, supervisor.starts)


def _write_sky(command: Sequence[str], *, on: str | None = None, out: str | None = None, **options: Any) -> Launched:
    from capibara.fleet.sky import sky_machines, sky_task

    where = _needed("on", on, "v4-64 or H100:8")
    task = sky_task(command, where, **options)
    return _written("sky", task, task["name"], out, sky_machines(where, options.get("processes")).hosts)


def _write_jobset(
    command: Sequence[str], *, on: str | None = None, image: str | None = None, out: str | None = None, **options: Any
) -> Launched:
    from capibara.fleet.jobset import jobset_manifest

    image = _needed("image", image, "europe-docker.pkg.dev/PROJECT/REPOSITORY/IMAGE")
    manifest = jobset_manifest(command, _needed("on", on, "v4-64"), image=image, **options)
    (workers,) = manifest["spec"]["replicatedJobs"]
    processes = workers["replicas"] * workers["template"]["spec"]["completions"]
    return _written("jobset", manifest, manifest["metadata"]["name"], out, processes)


def _needed(name: str, value: str | None, example: str) -> str:
    if value is None:
        raise rule_error(f"This engine needs {_flag(name)}", "none", f"write {_flag(name)} {example}")
    return value


def _written(engine: str, document: Mapping[str, Any], name: str, out: str | None, processes: int) -> Launched:
    """The file, whole or not at all. One of other content that is there already stays."""
    file, text = Path(out or f"{name}.{engine}.yaml"), yaml_text(document)
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise rule_error(
            "A file is not written over",
            f"{file}, which has something else in it",
            "move it away, or name another --out",
        )
    part = file.with_name(f"{file.name}.part-{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise rule_error("--out is a file that can be written", f"{file}: {error.strerror}", "name another") from error
    return Launched(engine, processes, file=file, next=_NEXT[engine].format(file=file))
