"""`capibara train`: a preset, a TOML file or a Hugging Face folder, trained."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from capibara.cli import failures, output
from capibara.cli.failures import Code


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
    devices: Annotated[int | None, typer.Option(min=1, metavar="N", help="Simulate so many devices of a CPU.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a model: metrics.jsonl, checkpoints and report.html in its folder; exit code 42 when preempted and saved.

    For example: capibara train dev; capibara train small --set train.steps=500 --set data.path='books/*.txt'
    """
    folder = out or Path("runs") / Path(config).stem
    if processes > 1:
        _in_processes(processes, devices)
        return
    _simulate(devices)
    from capibara.train.processes import join_from_environment

    join_from_environment()
    from capibara.plan.search.plans import DoesNotFit
    from capibara.train.config import load_run
    from capibara.train.loop import Preempted
    from capibara.train.processes import process_index
    from capibara.train.report import write_report
    from capibara.train.run import train as run

    started = time.perf_counter()
    loud = process_index() == 0

    def tell(text: str) -> None:
        if loud:
            typer.echo(f"[{time.perf_counter() - started:7.1f} s] {text}", err=True)

    try:
        trained = run(load_run(config, settings or ()), folder, resume=resume, tell=tell)
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
    if not loud:
        return
    tell("writing the report")
    report = write_report(folder)
    speed = report.summary.speed
    summary: dict[str, Any] = {
        "folder": str(folder),
        "step": trained.result.step,
        "loss": trained.result.metrics.get("loss"),
        "eval_loss": trained.result.eval_loss,
        "tokens_per_second": None if speed is None else speed.tokens_per_second,
        "mfu": None if speed is None else speed.mfu,
        "report": str(report.html),
    }
    if json:
        output.show_json(summary)
    else:
        output.show_page(report.page)


def _preempted(text: str, json: bool, loud: bool) -> None:
    if not loud:
        return
    if json:
        output.show_json(failures.error(Code.PREEMPTED, text, fix="start it again with --resume"))
    else:
        typer.echo(f"capibara: {text}; go on with --resume", err=True)


def _simulate(devices: int | None) -> None:
    if devices is None:
        return
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def _in_processes(count: int, devices: int | None) -> None:
    """The same command in several processes of this machine, restarted together from their last checkpoint."""
    from capibara.train.supervisor import supervise

    words = list(sys.argv[1:])
    for position, word in enumerate(words):
        if word == "--processes":
            del words[position : position + 2]
            break
        if word.startswith("--processes="):
            del words[position]
            break
    code = supervise(
        [sys.executable, "-m", "capibara", *words],
        count,
        restart_words=[] if "--resume" in words else ["--resume"],
        plain="--json" in words,
    )
    if code:
        raise typer.Exit(code)
