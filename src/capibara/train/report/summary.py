"""A run in figures, from the files of its folder alone: a run that crashed has a report too."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.errors import rule_error
from capibara.models.preset import Preset, load_preset
from capibara.observe.goodput import GoodputReport, read_goodput
from capibara.train.logs import read_metrics
from capibara.train.report.facts import Life, read_lives

__all__ = ["Speed", "Summary", "summarise"]


@dataclass(frozen=True)
class Speed:
    """Steps of the last process, the first left out: it waits for what compiling left to do."""

    steps: int
    seconds: tuple[float, float, float]
    """Of a step: the tenth, the half and nine tenths of them are below these."""
    tokens_per_second: float
    """At the median step."""
    mfu: float | None
    """The same; None where the chip's peak or the model's operations are not known."""


@dataclass(frozen=True)
class Summary:
    """What a run's folder says."""

    folder: Path
    preset: Preset
    lives: Sequence[Life]
    """The processes that worked on it, in order."""
    losses: Sequence[tuple[int, float | None]]
    """Step and loss of training; None where it was not finite."""
    held_out: Sequence[tuple[int, float]]
    """Step and loss of each evaluation."""
    skipped: int
    """Steps whose loss or gradient was not finite."""
    speed: Speed | None
    """None for a run without a timed step."""
    goodput: GoodputReport | None

    @property
    def step(self) -> int:
        return self.losses[-1][0] if self.losses else 0

    @property
    def finished(self) -> bool:
        return self.step >= self.preset.train.steps

    @property
    def resumes(self) -> list[int]:
        """The steps that processes after the first went on from."""
        return [life.step for life in self.lives[1:]]

    @property
    def tokens(self) -> int:
        """That count for the state the run is in."""
        return self.step * self.preset.train.tokens


def summarise(folder: str | Path) -> Summary:
    """The figures of a run's folder, whether it ended well or not."""
    run = Path(folder)
    config = run / "config.toml"
    if not config.is_file():
        raise rule_error(
            "A training run's folder has its config.toml", f"{run} without", "name what --out of `capibara train` was"
        )
    rows = read_metrics(run / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    lives = read_lives(run)
    began = lives[-1].step if lives else 0
    return Summary(
        folder=run,
        preset=load_preset(config, environment={}),
        lives=lives,
        losses=[(row["step"], row["loss"]) for row in steps],
        held_out=[(row["step"], row["eval_loss"]) for row in rows if row.get("eval_loss") is not None],
        skipped=int(steps[-1].get("skipped") or 0) if steps else 0,
        speed=speed_of([row for row in steps if row["step"] > began]),
        goodput=read_goodput(run / "goodput.jsonl"),
    )


def speed_of(rows: Sequence[dict[str, Any]]) -> Speed | None:
    """The speed of one process's rows of metrics.jsonl."""
    timed = [row for row in rows[1:] or rows if row.get("seconds")]
    if not timed:
        return None
    seconds = sorted(row["seconds"] for row in timed)
    mfu = [row["mfu"] for row in timed if row.get("mfu") is not None]
    return Speed(
        steps=len(timed),
        seconds=(_quantile(seconds, 0.1), statistics.median(seconds), _quantile(seconds, 0.9)),
        tokens_per_second=statistics.median(row["tokens_per_second"] for row in timed),
        mfu=statistics.median(mfu) if mfu else None,
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, between the two nearest."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])
