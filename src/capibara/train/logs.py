"""What a run tells while it goes: metrics.jsonl with a line a step, TensorBoard, and lines on the terminal."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from capibara.distribution import NAME
from capibara.errors import rule_error

__all__ = ["MetricsLog", "read_metrics"]


def read_metrics(file: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that a crash cut off at the end is left out."""
    path = Path(file)
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class MetricsLog:
    """Writes a run's metrics. Lines after `step` that an earlier process wrote are steps that are done again: they go.

    Args:
      folder: of the run; None writes nothing.
      step: the step that the run goes on after.
      tensorboard: write for TensorBoard too.
      tell: gets a line of text every `every` steps.
    """

    def __init__(
        self,
        folder: Path | None,
        step: int = 0,
        *,
        tensorboard: bool = False,
        every: int = 10,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._every = max(1, every)
        self._tell = tell
        self._file: Any = None
        self._board: Any = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        self._open(step)
        if tensorboard:
            self._board = _summary_writer()(str(folder / "tensorboard"), purge_step=step + 1)

    def _open(self, step: int) -> None:
        """Go on with the lines up to this step."""
        kept = [row for row in read_metrics(self._path) if row["step"] <= step]
        draft = self._path.with_suffix(".draft")
        draft.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        os.replace(draft, self._path)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def rewind(self, step: int) -> None:
        """The state went back to this step: lines of later ones go, as they do when a process is started again."""
        if self._file is not None:
            self._file.close()
            self._open(step)

    def write(self, row: Mapping[str, Any]) -> None:
        """One step's metrics, an evaluation's ("eval_loss"), or a checkpoint's ("expert_share")."""
        if self._file is not None:
            self._file.write(_line(row))
            self._file.flush()
        step = int(row["step"])
        if self._board is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)
        told = "eval_loss" in row or ("loss" in row and (step % self._every == 0 or step == 1))
        if self._tell is not None and told:
            self._tell(_words(row))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as missing:
        raise rule_error(
            "log.tensorboard needs tensorboardX",
            str(missing),
            f"pip install '{NAME}[train]', or set log.tensorboard=false",
        ) from missing
    return SummaryWriter


def _line(row: Mapping[str, Any]) -> str:
    # JSON has no word for what is not finite.
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(plain) + "\n"


def _words(row: Mapping[str, Any]) -> str:
    if "eval_loss" in row:
        return f"step {row['step']}: held-out loss {row['eval_loss']:.4f} nats a token"
    parts = [f"step {row['step']}: loss {row['loss']:.4f}", f"{row['tokens_per_second']:,.0f} tokens/s"]
    # More than all of the peak: a CPU's was measured while it was busy, and says nothing.
    if row.get("mfu") is not None and row["mfu"] <= 1:
        parts.append(f"MFU {row['mfu']:.1%}")
    parts.append(f"{row['seconds'] * 1e3:.1f} ms")
    if row.get("grad_norm") is not None:
        parts.append(f"grad norm {row['grad_norm']:.3g}")
    return ", ".join(parts)
