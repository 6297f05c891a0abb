"""`capibara train`: a preset, a TOML file or a Hugging Face folder, trained."""

from __future__ import annotations

import os
import sys
import time
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code
from capibara.cli.simulated import simulate_devices
from capibara.errors import rule_error

if TYPE_CHECKING:
    from capibara.compile.events import CompileCounts

SUMMARY = "summary.json"
"""What --json prints, in the run's folder."""


def train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A preset (dev, small, llama-1b), FILE.toml, or a model folder.")
    ],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key: train.steps=100.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder; runs/CONFIG by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Train in so many processes of this machine.")] = 1,
    devices: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Simulate so many devices of a CPU, over all processes.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a model: metrics.jsonl, checkpoints and report.html in its folder; exit code 42 when preempted and saved.

    For example: capibara train dev; capibara train small --set train.steps=500 --set data.path='books/*.txt'
    """
    folder = out or Path("runs") / Path(config).stem
    if processes > 1:
        if devices is not None and devices % processes:
            raise rule_error("--devices divides over --processes", f"{devices} over {processes}", "change one of them")
        _in_processes(processes, config, settings or [], folder, resume, devices, json)
        return
    from capibara.processes import PROCESS_COUNT, join_from_environment
    from capibara.train.supervisor import RESTARTS

    simulate_devices(devices, int(os.environ.get(PROCESS_COUNT, "1")))
    join_from_environment()
    # Started again by the supervisor: from what is there.
    resume = resume or int(os.environ.get(RESTARTS, "0")) > 0
    from capibara.compile.events import count_compilations
    from capibara.compile.persistent import persistent_cache
    from capibara.memory.autopsy import autopsy_of
    from capibara.plan.search.plans import DoesNotFit
    from capibara.processes import process_index
    from capibara.train.config import load_run
    from capibara.train.loop import Preempted
    from capibara.train.report import write_report
    from capibara.train.run import train as run

    started, worked = time.perf_counter(), time.thread_time()
    loud = process_index() == 0

    def tell(text: str) -> None:
        if loud:
            typer.echo(f"[{time.perf_counter() - started:7.1f} s] {text}", err=True)

    begun: dict[str, Any] | None = None

    def first_step(step: int, row: Any) -> None:
        nonlocal begun
        if begun is None:
            begun = _begun(time.perf_counter() - started - row["seconds"], time.thread_time() - worked, counts)
            tell(
                f"first step begun after {begun['seconds']:.1f} s: {begun['compiled']} programs compiled, "
                f"{begun['from_disk']} from disk"
            )

    persistent_cache()
    try:
        with count_compilations() as counts:
            told = load_run(config, settings or ())
            trained = run(told, folder, resume=resume, tell=tell, on_step=first_step)
    except Preempted as preempted:
        _preempted(str(preempted), json, loud)
        raise typer.Exit(Code.PREEMPTED) from preempted
    except DoesNotFit as refusal:
        text = " ".join(str(refusal).split())
        if json:
            output.show_json(failures.error(Code.DOES_NOT_FIT, text))
        else:
            typer.echo(f"capibara: {text}", err=True)
        raise typer.Exit(Code.DOES_NOT_FIT) from refusal
    except (RuntimeError, ValueError) as error:
        found = autopsy_of(error)
        if found is None:
            raise
        if loud:
            _out_of_memory(found, folder, json)
        raise typer.Exit(Code.DOES_NOT_FIT) from error
    if not loud:
        return
    tell("writing the report")
    report = write_report(folder, elsewhere=told.log.elsewhere or None)
    speed = report.summary.speed
    summary: dict[str, Any] = {
        "folder": str(folder),
        "step": trained.result.step,
        "loss": trained.result.metrics.get("loss"),
        "eval_loss": trained.result.eval_loss,
        "tokens_per_second": None if speed is None else speed.tokens_per_second,
        "mfu": None if speed is None else speed.mfu,
        "report": str(report.html),
        "first_step": begun,
        "compiled": counts.compiled,
        "from_disk": counts.from_disk,
    }
    (folder / SUMMARY).write_text(dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if json:
        output.show_json(summary)
    else:
        output.show_page(report.page)


def _out_of_memory(found: Any, folder: Path, json: bool) -> None:
    if json:
        fix = found.nearest_change
        output.show_json(failures.error(Code.DOES_NOT_FIT, str(found), kind="out_of_memory", got=found.error, fix=fix))
    else:
        typer.echo(f"capibara: {found}\nAll of it: {folder / 'autopsy.json'}", err=True)


def _begun(seconds: float, cpu_seconds: float, counts: CompileCounts) -> dict[str, Any]:
    """What the first step waited for: tracing is done at every start, compiling where the cache has nothing. Others on
    the machine stretch `seconds`, and not `cpu_seconds`, this thread's own."""
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "trace_seconds": counts.trace_seconds,
        "compile_seconds": counts.compile_seconds,
        "compiled": counts.compiled,
        "from_disk": counts.from_disk,
    }


def _preempted(text: str, json: bool, loud: bool) -> None:
    if not loud:
        return
    if json:
        output.show_json(failures.error(Code.PREEMPTED, text, fix="start it again with --resume"))
    else:
        typer.echo(f"capibara: {text}; go on with --resume", err=True)


def _in_processes(
    count: int, config: str, settings: list[str], folder: Path, resume: bool, devices: int | None, json: bool
) -> None:
    """The same command in several processes of this machine, restarted together from their last checkpoint."""
    from capibara.train.supervisor import Supervisor

    words = ["train", config, "--out", str(folder)]
    words += [word for setting in settings for word in ("--set", setting)]
    words += ["--resume"] if resume else []
    words += [] if devices is None else ["--devices", str(devices)]
    # Under --json standard output is one document, which process 0 leaves in the run's folder.
    shown = sys.stderr if json else sys.stdout
    code = Supervisor(
        [sys.executable, "-m", "capibara", *words],
        count,
        output=shown,
        restart_words=[] if resume else ["--resume"],
    ).run()
    if json:
        if code:
            output.show_json(failures.error(Code(code) if code in set(Code) else Code.FAILED, f"exit code {code}"))
        else:
            sys.stdout.write((folder / SUMMARY).read_text(encoding="utf-8"))
    if code:
        raise typer.Exit(code)
