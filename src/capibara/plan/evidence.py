"""Asking a compiler about the best layouts: which ones, at what level, and what its answer means for the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from capibara.compile.availability import chip_compiler
from capibara.errors import rule_error, unknown_name
from capibara.hardware.topology import Slice
from capibara.plan.compiled import (
    CHIP_LEVELS,
    LEVELS,
    NOT_A_VERDICT,
    Compiled,
    compile_layout,
    partition_layout,
)

if TYPE_CHECKING:
    from capibara.mesh.layout import Layout
    from capibara.parallel.job import Job
    from capibara.plan.target import Recipe

__all__ = ["Said", "Witness", "checked_level"]


def checked_level(level: str, confirm: int | None, where: Slice) -> int:
    """How many layouts to compile at this level; an error where it cannot be had here."""
    if level not in LEVELS:
        raise unknown_name("level of evidence", level, LEVELS)
    if level == "analytic":
        if confirm:
            raise rule_error(
                "Confirming compiles the best layouts, which is level 'xla', 'tpu' or 'gpu'",
                f"confirm={confirm} at level 'analytic'",
                "add --level xla, or --level tpu or gpu where the chip's compiler is",
            )
        return 0
    if confirm is not None and confirm < 1:
        raise rule_error("confirm is how many layouts are compiled, from 1 up", repr(confirm), "use 1")
    if level in CHIP_LEVELS:
        own = where.chip.platform
        if own != level:
            what = {"tpu": "TPU slices", "gpu": "GPUs"}[level]
            raise rule_error(f"Level {level!r} is for {what}", where.name, f"use level {own!r} or 'xla'")
        compiler = chip_compiler(level)
        if not compiler.available:
            rule = f"Level {level!r} needs {CHIP_LEVELS[level]}"
            raise rule_error(rule, str(compiler), "use level 'xla' on this machine")
    return confirm or 1


@dataclass(frozen=True)
class Said:
    """What the search reads of a compiler's answer."""

    error: str | None = None
    total_bytes: float | None = None
    """Of what was refused, the compiler's bytes. None of what was taken: the estimate stays the prediction, and the
    report shows the compiler's figure beside it."""


@dataclass
class Witness:
    """Compiles the first layouts that the search asks about, and keeps what was said of each."""

    job: Job
    where: Slice
    level: str
    most: int
    limit: float
    recipe: Recipe | None = None
    """With one, layouts are compiled in a process of their own; without, the job exists in this process only."""
    tell: Callable[[str], None] | None = None
    said: list[tuple[Layout, Compiled]] = field(default_factory=list)

    def __call__(self, layout: Layout) -> Said | None:
        # What was refused does not count: the best that stand are to be confirmed.
        if sum(self._verdict(one) is None for _, one in self.said) >= self.most:
            return None
        if self.tell is not None:
            self.tell(f"compiling {layout.name}")
        compiled = self._compile(layout)
        self.said.append((layout, compiled))
        verdict = self._verdict(compiled)
        if verdict is None:
            # A compiler that did not answer has confirmed nothing, and the next may take as long.
            return Said() if compiled.ok else None
        return Said(verdict, compiled.total_bytes if compiled.level in CHIP_LEVELS else None)

    @property
    def settles(self) -> bool:
        """Whether what the compiler takes fits: XLA's for the CPU knows no chip's memory."""
        return self.level in CHIP_LEVELS

    def about(self, layout: Layout) -> Compiled | None:
        return next((compiled for one, compiled in self.said if one == layout), None)

    def _compile(self, layout: Layout) -> Compiled:
        if self.recipe is not None:
            from capibara.plan.worker import compile_elsewhere

            return compile_elsewhere(self.recipe, layout, self.level, self.where.name)
        if self.level in CHIP_LEVELS:
            return compile_layout(self.job, layout, self.where)
        return partition_layout(self.job, layout)

    def _verdict(self, compiled: Compiled) -> str | None:
        if compiled.error is not None:
            return None if compiled.error_kind in NOT_A_VERDICT else compiled.error
        total = compiled.total_bytes
        if compiled.level in CHIP_LEVELS and total is not None and total > self.limit:
            return f"it needs {total / 2**30:.2f} of {self.limit / 2**30:.2f} GiB a chip"
        return None
