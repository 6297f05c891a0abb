"""What the rows say, family by family; and the file that they accumulate in."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capibara.errors import rule_error
from capibara.kernels.lab.bench import versions
from capibara.kernels.lab.lattice.measure import SHORT

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Line:
    """One family: how dispatch's choice stands against the best peer and against the best of our own."""

    family: str
    held_back: bool
    rows: int
    mean: float | None
    """Geometric mean against the best peer; None where no row has one."""
    worst: float | None
    short: int
    """Rows below 0.97 of the best peer, in both of their runs."""
    own: float | None
    """Geometric mean against our own best."""
    own_worst: float | None
    failed: int

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def summary(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """A line a family, those that may be fitted on first, the held-back quarter after them.

    >>> row = {"family": "norm", "held_back": False, "against_best_peer": 0.5, "against_own_best": 1.0}
    >>> [(line.rows, line.mean, line.short) for line in summary([row, {**row, "against_best_peer": 2.0}])]
    [(2, 1.0, 1)]
    """
    found: dict[tuple[bool, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "held_back" in row:
            found.setdefault((row["held_back"], row["family"]), []).append(row)
    made = []
    for (kept, family), group in sorted(found.items()):
        ran = [row for row in group if "failed" not in row]
        peers = [row["against_best_peer"] for row in ran if row["against_best_peer"] is not None]
        own = [row["against_own_best"] for row in ran if row["against_own_best"] is not None]
        made.append(
            Line(
                family, kept, len(ran), _mean(peers), min(peers, default=None), sum(r < SHORT for r in peers),
                _mean(own), min(own, default=None), len(group) - len(ran),
            )
        )  # fmt: skip
    return made


def _mean(ratios: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def read(path: Path) -> dict[str, Any]:
    """The results file; an empty one where there is none."""
    if not path.exists():
        return {"format": FORMAT, "device": None, "runs": [], "rows": []}
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT or "runs" not in document:
        raise rule_error(
            "Rows of the lattice accumulate in a file that such a run has made", str(path), "name another, or a new one"
        )
    return document


class Results:
    """Rows added to the file as they are made: a run that is cut has what it measured."""

    def __init__(self, path: Path | None, device: str, command: str, seed: int, commit: str | None = None) -> None:
        self.path = path
        self.document: dict[str, Any] = (
            {"format": FORMAT, "device": device, "runs": [], "rows": []} if path is None else read(path)
        )
        if self.document["device"] not in (None, device):
            raise rule_error(
                "A results file has the rows of one kind of device",
                f"{path} of {self.document['device']}, on {device}",
                "name another file",
            )
        self.document["device"] = device
        self.number = len(self.document["runs"])
        self.document["runs"].append(
            {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "commit": commit or _commit(), "command": command, "seed": seed, "versions": versions(),
            }
        )  # fmt: skip

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of this run."""
        return [row for row in self.document["rows"] if row["run"] == self.number]

    def add(self, row: Mapping[str, Any]) -> None:
        self.document["rows"].append({"run": self.number, **row})
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(self.document, out, indent=1, ensure_ascii=False)
        os.replace(temporary, self.path)


def _commit() -> str | None:
    """Of the checkout that this package lies in; None for an installed one."""
    asked = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return asked.stdout.strip() or None
