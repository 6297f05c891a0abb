"""What a search for layouts comes back with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from capibara.cost.result import Estimate
from capibara.errors import CapibaraError
from capibara.mesh.layout import Layout
from capibara.parallel.job import Job

__all__ = ["DoesNotFit", "Fix", "Plans", "Ranked", "Refused", "bytes_in_words"]


def bytes_in_words(*counts: float) -> str:
    """Bytes in the unit that suits the last of them: "6.1 of 2.0 MiB"."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    unit, size = next((one for one in units if counts[-1] >= one[1]), ("bytes", 1))
    return " of ".join(f"{count / size:.1f}" for count in counts) + f" {unit}"


class DoesNotFit(CapibaraError, ValueError):
    """No layout fits; the text names the cheapest change with which one does, `plans` has everything."""

    plans: Plans | None = None


@dataclass(frozen=True)
class Ranked:
    """A layout that fits, and what it costs."""

    layout: Layout
    estimate: Estimate
    confirmed: bool = False
    """Whether a compiler took it."""


@dataclass(frozen=True)
class Refused:
    """A layout that was looked at and is out."""

    layout: Layout | None
    """None where the choice is no layout at all: an axis that does not divide."""
    reason: str
    name: str = ""
    estimate: Estimate | None = None
    bytes: float | None = None
    """What it needs of a chip, or at the least; None where memory is not the reason."""
    by_compiler: bool = False
    """Whether a compiler refused it, and `bytes` are its own; else the model did."""


@dataclass(frozen=True)
class Fix:
    """A change with which the job fits."""

    change: str
    """In words: "v4-64 (32 chips, 2x4x4)", "half the batch"."""
    slice: Any
    job: Job
    layout: Layout
    estimate: Estimate

    @property
    def cost(self) -> float:
        """Chip-seconds a token (a step, where the tokens are not known)."""
        return self.estimate.seconds * self.slice.chips / (self.job.tokens or 1)


@dataclass(frozen=True)
class Plans:
    """The best layouts of a job on a slice, and why the others are out."""

    job: Job
    slice: Any
    target: str
    ranked: tuple[Ranked, ...]
    refused: tuple[Refused, ...]
    evaluations: int
    """How many layouts were costed."""
    fixes: tuple[Fix, ...] = ()
    """When nothing fits: changes with which something does, the cheapest first."""
    notes: tuple[str, ...] = ()
    unasked: int = 0
    """Layouts that may fit by the model and that no compiler was asked about, where it took none that it was."""
    low: float = 1.0
    """How many times the model's bytes a compiler needed, of what it refused for its size."""
    complete: bool = True
    """False where the clock ended the search, or the search for changes, before it was done."""
    activations: tuple[str, ...] = ()
    """Types of what the program's forward products take from the batch."""

    @property
    def best(self) -> Ranked | None:
        return self.ranked[0] if self.ranked else None

    @property
    def nearest_fix(self) -> Fix | None:
        return self.fixes[0] if self.fixes else None

    @property
    def by_compiler(self) -> tuple[Refused, ...]:
        """The layouts that a compiler refused, in the order in which it was asked."""
        return tuple(one for one in self.refused if one.by_compiler)

    @property
    def closest(self) -> Refused | None:
        """When nothing fits: the layout that lacks the least memory, by the compiler where it said so of any."""
        named = [one for one in self.by_compiler if one.bytes is not None]
        if named:
            return min(named, key=lambda one: (one.bytes, one.name))
        # What was costed whole comes first: of the others only the arguments were counted.
        short = [one for one in self.refused if one.bytes is not None and not one.by_compiler]
        return min(short, key=lambda one: (one.estimate is None, one.bytes, one.name), default=None)

    def require(self) -> Ranked:
        """The best layout, or the error that names the nearest change."""
        if self.best is not None:
            return self.best
        error = DoesNotFit(self._why_not())
        error.plans = self
        raise error

    def _why_not(self) -> str:
        near = self.closest
        if near is not None:
            rule, text = "A job has to fit into its chips' memory", f"{near.name} {near.reason}"
        else:
            rule = "A layout divides the batch and every dimension that it cuts"
            text = self.refused[0].reason if self.refused else "no layout to try"
        fix = self.nearest_fix
        if fix is None:
            change = "none of more chips, a smaller batch or recomputation was found to do"
        else:
            change = f"{fix.change} ({fix.layout.name}: {bytes_in_words(fix.estimate.memory.total)} a chip, predicted)"
        return f"{rule}. Got, at best on {self.slice}: {text}. Fix: {change}."
