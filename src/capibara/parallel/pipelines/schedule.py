"""Who works on what when in a pipeline, and a batch as the microbatches that pass through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from capibara.errors import rule_error

__all__ = ["Schedule", "check_layers", "in_microbatches", "rows_again"]


@dataclass(frozen=True)
class Schedule:
    """Which stage works on which microbatch at which tick.

    With `rounds` 1 every stage has one run of layers (GPipe). With more, a microbatch passes all stages that often, and
    each stage has a run of layers for each round (circular, or interleaved): ticks are shorter, and so is the waiting.

    Examples:
        >>> Schedule(stages=4, microbatches=8).ticks
        11
        >>> round(Schedule(4, 8).bubble, 3), round(Schedule(4, 8, rounds=2).bubble, 3)
        (0.273, 0.158)
    """

    stages: int
    microbatches: int
    rounds: int = 1

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches", "rounds"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise rule_error(f"{name} is a whole number from 1 up", repr(count), "use 1 or more")
        if self.microbatches % self.stages:
            raise rule_error(
                "microbatches is a multiple of the stages, for each stage feeds and takes back as many of them",
                f"{self.microbatches} microbatches for {self.stages} stages",
                f"use {' or '.join(map(str, _near_multiples(self.microbatches, self.stages)))}",
            )

    @property
    def ticks(self) -> int:
        """Steps of the loop; at each of them a stage applies 1/rounds of its layers to one microbatch."""
        return self.microbatches * self.rounds + self.stages - 1

    @property
    def bubble(self) -> float:
        """Of a stage's ticks, the share that is not its own work."""
        return (self.stages - 1) / self.ticks

    def at(self, stage: Any, tick: Any) -> tuple[Any, Any]:
        """Microbatch and round of a stage at a tick; out of work, the nearest that it has."""
        turn = jnp.clip(tick - stage, 0, self.microbatches * self.rounds - 1)
        # As many microbatches as there are stages go round together: one is back at the first stage just when that
        # stage has sent off the last of them, so that nothing waits to be taken up again.
        group, place = turn // (self.stages * self.rounds), turn % self.stages
        return group * self.stages + place, (turn // self.stages) % self.rounds

    def finished(self) -> list[int]:
        """For each microbatch, the tick at which the last stage is done with it."""
        groups = (divmod(one, self.stages) for one in range(self.microbatches))
        last = self.rounds - 1
        return [(group * self.rounds + last) * self.stages + place + self.stages - 1 for group, place in groups]


def check_layers(layers: int, schedule: Schedule) -> None:
    parts = schedule.stages * schedule.rounds
    if layers % parts:
        raise rule_error(
            "The layers divide into the stages" + (", in each round" if schedule.rounds > 1 else ""),
            f"{layers} layers for {schedule.stages} stages"
            + (f" and {schedule.rounds} rounds" if schedule.rounds > 1 else ""),
            f"use {' or '.join(map(str, _near_multiples(layers, parts)))} layers, or stages that divide {layers}",
        )


def in_microbatches(leaf: Any, count: int, dimension: int = 0) -> Any:
    """[.., rows, ..] as [count, .., rows / count, ..]: rows of one chip go to different microbatches.

    The axis that is looped over is then the inner one, and every microbatch is spread over the chips as the rows were.
    """
    shape = jnp.shape(leaf)
    if not shape or shape[dimension] % count:
        rows = shape[dimension] if shape else 0
        raise rule_error(
            f"The rows of a batch divide into {count} microbatches",
            f"{rows} rows" if shape else "a number, which has no rows",
            f"use {' or '.join(map(str, _near_multiples(rows, count)))} rows, or microbatches that divide {rows}",
        )
    parted = jnp.reshape(leaf, (*shape[:dimension], shape[dimension] // count, count, *shape[dimension + 1 :]))
    return jnp.moveaxis(parted, dimension + 1, 0)


def rows_again(leaf: Any, dimension: int = 0) -> Any:
    """What `in_microbatches` took apart, together."""
    back = jnp.moveaxis(leaf, 0, dimension + 1)
    return back.reshape(*back.shape[:dimension], -1, *back.shape[dimension + 2 :])


def _near_multiples(number: int, of: int) -> list[int]:
    """The multiples around a number that is none."""
    below = number // of * of
    return [one for one in (below, below + of) if one]
