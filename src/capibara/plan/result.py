"""A plan: everything that was found out about a job on a slice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.cost.result import Estimate
from capibara.errors import rule_error
from capibara.hardware.topology import Slice
from capibara.plan.compiled import CHIP_LEVELS, LEVELS, NOT_A_VERDICT, Compiled
from capibara.plan.layout_text import layout_as_dict
from capibara.plan.money import Bill
from capibara.plan.place import hosts_of

if TYPE_CHECKING:
    from capibara.cost.calibration import Calibration
    from capibara.mesh.layout import Layout
    from capibara.parallel.job import Job
    from capibara.parallel.run import Program
    from capibara.plan.measured import Measurement
    from capibara.plan.work import JobLine

__all__ = ["Candidate", "Change", "Plan"]


@dataclass(frozen=True)
class Candidate:
    """One layout, what it is predicted to cost, and what a compiler said of it where one was asked."""

    layout: Layout
    estimate: Estimate
    compiled: Compiled | None = None

    @property
    def level(self) -> str:
        """The level of its evidence: a compiler's that took it, or that refused it for its size."""
        answered = self.compiled is not None and (self.compiled.ok or self.compiled.error_kind == "hbm_oom")
        return self.compiled.level if answered and self.compiled is not None else "analytic"

    @property
    def by_compiler(self) -> float | None:
        """Bytes of one chip by the chip's own compiler, where it named them.

        XLA's for the CPU are shown and not taken: another backend keeps other temporaries.
        """
        return self.compiled.total_bytes if self.compiled is not None and self.level in CHIP_LEVELS else None

    @property
    def bytes(self) -> float:
        """Of one chip: the compiler's figure where the chip's own gave one, else the prediction."""
        return self.estimate.memory.total if self.by_compiler is None else self.by_compiler

    @property
    def fits(self) -> bool:
        if self.compiled is not None and self.compiled.error_kind == "hbm_oom":
            return False
        # A compiler's figure is exact; the model's has a margin.
        return self.bytes <= self.estimate.memory.limit if self.level in CHIP_LEVELS else self.estimate.memory.fits

    @property
    def may_fit(self) -> bool:
        """Whether only a compiler can tell, and none has."""
        refused = self.compiled is not None and self.compiled.error_kind == "hbm_oom"
        return self.level not in CHIP_LEVELS and not refused and self.estimate.memory.may_fit

    @property
    def bytes_range(self) -> tuple[float, float]:
        """From what is predicted to the most that it may be; the chip's own compiler's figure is exact."""
        return (self.bytes, self.bytes if self.level in CHIP_LEVELS else self.estimate.memory.most)

    @property
    def bytes_by(self) -> str:
        """Whose figure `bytes` is."""
        return "predicted" if self.by_compiler is None else f"{self.level} compiler"

    @property
    def refused(self) -> bool:
        """Whether a compiler refused it."""
        return self.compiled is not None and not self.compiled.ok and self.compiled.error_kind not in NOT_A_VERDICT

    def as_dict(self) -> dict[str, Any]:
        return {
            "layout": layout_as_dict(self.layout),
            "fits": self.fits,
            "may_fit": self.may_fit,
            "bytes": self.bytes,
            "bytes_range": list(self.bytes_range),
            "bytes_by": self.bytes_by,
            "predicted_bytes": self.estimate.memory.total,
            "refused_by_compiler": self.refused,
            "level": self.level,
            "evidence": LEVELS[self.level],
            "estimate": _plain(dataclasses.asdict(self.estimate)),
            "compiled": None if self.compiled is None else self.compiled.as_dict(),
        }


@dataclass(frozen=True)
class Change:
    """A change that makes a job fit."""

    what: str
    """In words: "remat full", "v4-128", "half the batch"."""
    on: str
    seconds: float
    bytes: float
    usd_per_billion_tokens: float | None
    bytes_at_worst: float | None = None
    """With the model as low as the compiler found it to be, where that refused a layout for its size."""


@dataclass(frozen=True, repr=False)
class Plan:
    """Does it fit, how fast, what does it cost; print it, or read its parts."""

    name: str
    where: Slice
    fits: bool
    candidates: tuple[Candidate, ...]
    """Those that fit, the best first; of a job that does not fit, the nearest to fitting."""
    bills: tuple[Bill, ...]
    tokens: int | None
    """Of a step; what they are, `unit` says."""
    state_bytes: float
    """Of a checkpoint."""
    refused: tuple[tuple[str, str], ...] = ()
    """Layouts that were ruled out, and why."""
    refused_by_compiler: tuple[Candidate, ...] = ()
    """Of those, what a compiler was asked about and refused, in the order in which it was asked."""
    unasked: int = 0
    """Layouts that may fit by the model and that the compiler was not asked about, where it took none that it was."""
    asked_level: str = "analytic"
    """The level of evidence that was asked for."""
    complete: bool = True
    """False where the time limit ended the search: this is the best so far."""
    evaluations: int | None = None
    """How many layouts were costed."""
    time_limit: float | None = None
    """Seconds that the search had; None without a limit."""
    closest: str = ""
    """Where not even the arguments fit: the layout that needs the least, and how much, in words."""
    changes: tuple[Change, ...] = ()
    """What would make it fit, the cheapest first."""
    notes: tuple[str, ...] = ()
    date: str = ""
    planning_seconds: float = 0.0
    job: Job | None = field(default=None, compare=False)
    unit: str = "tokens"
    """What `tokens`, a second and dollars a billion count: "tokens" or "examples"."""
    work: JobLine | None = None
    """The job: batch, length, optimizer, types."""
    calibration: Calibration | None = None
    """What corrected the model, where a correction was kept for this chip."""

    @property
    def best(self) -> Candidate | None:
        """The layout to take, or the nearest to fitting when none fits; None when nothing could be laid out."""
        return self.candidates[0] if self.candidates else None

    @property
    def verdict(self) -> str:
        """ "fits"; "may not fit", where the limit lies inside of the range of the nearest layout's bytes and only the
        TPU compiler can tell; or "does not fit"."""
        if self.fits:
            return "fits"
        return "may not fit" if self.best is not None and self.best.may_fit else "does not fit"

    @property
    def level(self) -> str:
        """The level of evidence of the best layout: "analytic", "xla", "tpu" or "gpu"."""
        return "analytic" if self.best is None else self.best.level

    @property
    def evidence(self) -> str:
        return LEVELS[self.level]

    @property
    def tokens_per_second(self) -> float | None:
        """Of all chips together; examples where `unit` says so."""
        if self.best is None or not self.tokens:
            return None
        return self.tokens / self.best.estimate.seconds

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values that JSON has; infinities and figures that are not known are None."""
        best = self.best
        of_tokens = self.unit == "tokens"
        return _plain(
            {
                "name": self.name,
                "job": None if self.work is None else self.work.as_dict(),
                "on": self.where.name,
                "chip": self.where.chip.name,
                "chips": self.where.chips,
                "hosts": hosts_of(self.where),
                "fits": self.fits,
                "verdict": self.verdict,
                "level": self.level,
                "evidence": self.evidence,
                "asked_level": self.asked_level,
                "search": {
                    "complete": self.complete,
                    "layouts": self.evaluations,
                    "time_limit_seconds": self.time_limit,
                },
                "bytes_per_chip": None if best is None else best.bytes,
                "bytes_range": None if best is None else list(best.bytes_range),
                "bytes_by": None if best is None else best.bytes_by,
                "predicted_bytes_per_chip": None if best is None else best.estimate.memory.total,
                "refused_by_compiler": [one.as_dict() for one in self.refused_by_compiler],
                "compiler_not_asked_about": self.unasked,
                "limit_bytes": None if best is None else best.estimate.memory.limit,
                "largest_buffers": [] if best is None else [list(one) for one in best.estimate.memory.largest[:5]],
                "step_seconds": None if best is None else best.estimate.seconds,
                "step_seconds_range": None if best is None else [best.estimate.low, best.estimate.high],
                "bound": None if best is None else best.estimate.bound,
                "unit": self.unit,
                "tokens": self.tokens if of_tokens else None,
                "tokens_per_second": self.tokens_per_second if of_tokens else None,
                "examples": None if of_tokens else self.tokens,
                "examples_per_second": None if of_tokens else self.tokens_per_second,
                "mfu": None if best is None else best.estimate.mfu,
                "arguments": self._argument_names(),
                "bills": [_in_unit(one.as_dict(), self.unit) for one in self.bills],
                "layouts": [one.as_dict() for one in self.candidates],
                "refused": [list(one) for one in self.refused],
                "closest": self.closest or None,
                "changes": [_in_unit(dataclasses.asdict(one), self.unit) for one in self.changes],
                "state_bytes": self.state_bytes,
                "calibration": None if self.calibration is None else self.calibration.as_dict(),
                "notes": list(self.notes),
                "date": self.date,
                "planning_seconds": self.planning_seconds,
            }
        )

    def _argument_names(self) -> list[str]:
        """Of each flat argument, in the order of a layout's specs: "args[0]['w']"."""
        if self.job is None or self.best is None:
            return []
        from jax.tree_util import keystr, tree_leaves_with_path

        layout = self.best.layout
        _, args = self.job.built(dict(layout.choices), layout.stages)
        return [f"args{keystr(path)}" for path, _ in tree_leaves_with_path(tuple(args))]

    def __str__(self) -> str:
        from capibara.plan.report import as_text

        return as_text(self)

    def __repr__(self) -> str:
        """A line, for prompts and notebooks: the parts hold a timeline and every op."""
        best = "no layout" if self.best is None else self.best.layout.name
        name = self.name or "a program"
        return f"<Plan of {name} on {self.where.name}: {self.verdict}, {best} ({self.level}); print it>"

    def program(self, devices: Sequence[Any] | None = None) -> Program:
        """The step that was planned, ready to run with its arguments where the best layout puts them.

        `devices` are as many as the plan's chips, the attached ones by default.
        """
        from capibara.parallel.run import laid_out

        if self.best is None or not self.fits or self.job is None:
            fix = "take one of plan.changes and plan again"
            raise rule_error("A program is made of a plan that fits", repr(self), fix)
        return laid_out(self.job, self.best.layout, devices)

    def save_html(self, path: str | Path) -> Path:
        """One self-contained page: the figures, a memory timeline, a roofline chart, the layouts."""
        from capibara.plan.html import page

        file = Path(path)
        file.write_text(page(self), encoding="utf-8")
        return file

    def record(
        self, *, step_seconds: float | None = None, peak_bytes: float | None = None, note: str = ""
    ) -> Measurement:
        """Keep what a run measured beside what was predicted, for `capibara plan --calibrate`."""
        from capibara.plan.measured import record

        return record(self, step_seconds=step_seconds, peak_bytes=peak_bytes, note=note)


def _in_unit(fields: dict[str, Any], unit: str) -> dict[str, Any]:
    """Dollars a billion under the name of what they are for."""
    return {key.replace("billion_tokens", f"billion_{unit}"): value for key, value in fields.items()}


def _plain(value: Any) -> Any:
    """Values that JSON has: infinities and not-a-numbers are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, int | str | bool | None) else str(value)
