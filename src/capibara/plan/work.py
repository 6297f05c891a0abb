"""The job that was planned, in a line: rows, lengths, tokens, the optimizer, and the types of what is computed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from capibara.plan import words

if TYPE_CHECKING:
    from capibara.parallel.job import Job

__all__ = ["JobLine", "job_line"]

# A type that holds less of the bytes than this is a detail: a count, a norm.
_HARDLY = 0.02


@dataclass(frozen=True)
class JobLine:
    """What was planned, for the first lines of a report."""

    batch: int | None
    lengths: tuple[int, ...]
    count: int | None
    unit: str
    """Of `count`: "tokens" or "examples"."""
    optimizer: str
    weights: tuple[str, ...]
    """Types, the one with the most bytes first."""
    moments: tuple[str, ...]
    activations: tuple[str, ...]
    """Types of what the products of the forward pass take from the batch, the one with the most operations first."""
    roles: tuple[str, ...]

    def __str__(self) -> str:
        parts = []
        if self.batch is not None:
            length = f", length {' and '.join(map(str, self.lengths))}" if self.lengths else ""
            parts.append(f"batch {self.batch}{length}")
        if self.count is not None and (self.unit == "tokens" or self.count != self.batch):
            parts[-1:] = [", ".join([*parts[-1:], f"{words.count(self.count)} {self.unit} a step"])]
        if self.optimizer:
            parts.append(self.optimizer)
        typed = {"weights": self.weights, "moments": self.moments, "activations": self.activations}
        types = ", ".join(f"{name} {' and '.join(found)}" for name, found in typed.items() if found)
        return "; ".join([*parts, *([types] if types else [])])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def job_line(job: Job, activations: tuple[str, ...]) -> JobLine:
    """What a job is, from its arguments; `activations` are known from its trace."""
    import jax

    from capibara.parallel.job import leaf_roles

    _, args = job.build(**job.defaults())
    leaves = list(zip(leaf_roles(job, args), jax.tree.leaves(args), strict=True))
    moments = _types(leaf for role, leaf in leaves if role == "state")
    return JobLine(
        batch=job.rows,
        lengths=job.lengths,
        count=job.tokens,
        unit=job.unit,
        optimizer=job.optimizer or ("the program's own optimizer" if moments else ""),
        weights=_types(leaf for role, leaf in leaves if role == "params"),
        moments=moments,
        activations=activations,
        roles=job.roles,
    )


def _types(leaves: Iterable[Any]) -> tuple[str, ...]:
    import jax.numpy as jnp

    held: dict[str, float] = {}
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.inexact) or (leaf.dtype.name in ("int8", "int4", "uint8") and leaf.shape):
            held[leaf.dtype.name] = held.get(leaf.dtype.name, 0.0) + math.prod(leaf.shape) * leaf.dtype.itemsize
    total = sum(held.values())
    return tuple(name for name in sorted(held, key=lambda name: -held[name]) if held[name] > _HARDLY * total)
