"""`capibara demo`: trains the dev preset on simulated devices, kills the process in the middle, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from capibara.errors import CapibaraError

__all__ = ["DemoFailed", "demo"]

_POLL_SECONDS = 0.1
_AFTER_CHECKPOINT = 3
"""Steps that are lost with the process, so that there is something to do again."""


class DemoFailed(CapibaraError, RuntimeError):
    """Training did not do what the demonstration is there to show."""


def demo(
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's folder; the first free runs/demo-N by default.")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, metavar="N", help="Simulate so many devices of a CPU.")] = 8,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the dev preset.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the end of it as JSON.")] = False,
) -> None:
    """Train the dev preset for two minutes, kill -9 in the middle, resume, write text, and report.

    For example: capibara demo; capibara demo --set train.steps=40
    """
    folder = out or _free()
    overrides = [word for setting in settings or () for word in ("--set", setting)]
    command = [sys.executable, "-m", "capibara", "train", "dev", "--devices", str(devices), "--out", str(folder)]
    command += overrides
    _say(f"training the dev preset on {devices} devices that this CPU simulates, from the help texts of Python")
    at, kept = _until_killed(command, folder)
    _say(f"killed with SIGKILL at step {at}; the last checkpoint is of step {kept}. The loss up to there:")
    _draw(folder)
    _say("going on from the checkpoint, as after a crash")
    ended = subprocess.run([*command, "--resume", *(["--json"] if json else [])], check=False)
    if ended.returncode:
        raise typer.Exit(ended.returncode)


def _say(text: str) -> None:
    typer.secho(f"== {text}", err=True, bold=True)


def _free() -> Path:
    number = 1
    while Path("runs", f"demo-{number}").exists():
        number += 1
    return Path("runs", f"demo-{number}")


def _until_killed(command: Sequence[str], folder: Path) -> tuple[int, int]:
    """Start training, and kill it some steps after a checkpoint of its second half: (step, the checkpoint's)."""
    if (folder / "config.toml").exists():
        raise typer.BadParameter(f"{folder} has a run already: name another folder", param_hint="--out")
    process = subprocess.Popen(list(command), stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            step, kept = _progress(folder)
            if kept and kept >= _middle(folder) and step >= kept + _AFTER_CHECKPOINT:
                # Nothing in the process can see this coming, or clean up after it.
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                return _progress(folder)
            time.sleep(_POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise typer.Exit(process.returncode)
    raise DemoFailed(
        f"Training ended before it was killed, in {folder}. Fix: more steps, or a smaller train.checkpoint_every"
    )


def _progress(folder: Path) -> tuple[int, int]:
    """The last step in metrics.jsonl, and that of the last whole checkpoint; 0 for none."""
    from capibara.train.logs import read_metrics

    rows = read_metrics(folder / "metrics.jsonl")
    whole = [file.parent.name for file in folder.glob("checkpoints/step_*/capibara.json")]
    steps = [int(name.removeprefix("step_").split(".")[0]) for name in whole]
    return int(rows[-1]["step"]) if rows else 0, max(steps, default=0)


def _middle(folder: Path) -> int:
    import tomllib

    tables: dict[str, Any] = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    return int(tables["train"]["steps"]) // 2


def _draw(folder: Path) -> None:
    from capibara.train.report.curves import loss_dots
    from capibara.train.report.summary import summarise

    unicode = (sys.stderr.encoding or "ascii").lower().startswith("utf")
    for line in loss_dots(summarise(folder), unicode=unicode):
        typer.echo(f"  {line}", err=True)
