"""What an estimate says: bytes a chip, seconds a step, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capibara.cost.correction import Correction

__all__ = ["Estimate", "LinkUse", "Memory", "Part"]


@dataclass(frozen=True)
class Memory:
    """Bytes of one chip, at the moment when most of them are live."""

    arguments: float
    """Held for the whole step: parameters, optimizer state, the batch."""
    temporaries: float
    """The most that is live beside them."""
    limit: float
    """What a program can have of the chip."""
    peak_at: str
    """The step at which it happens."""
    largest: tuple[tuple[str, float], ...]
    """Name and bytes of the largest buffers live at the peak."""
    timeline: tuple[tuple[str, float], ...]
    """Name of a step and the bytes live then, in order."""
    margin: float = 0.0
    """Share by which the total may be too low, from the worst programs that were compared with a compiler."""
    unsure: float = 0.0
    """Bytes beside the total that a compiler keeps of some programs like this and not of others (`cost.tables`)."""

    @property
    def total(self) -> float:
        return self.arguments + self.temporaries

    @property
    def most(self) -> float:
        """The upper end of the range that the total is the lower end of."""
        return (self.total + self.unsure) * (1 + self.margin)

    @property
    def fits(self) -> bool:
        """Whether it fits even when it is the most that it may be."""
        return self.most <= self.limit

    @property
    def may_fit(self) -> bool:
        """Whether only a compiler can tell: the limit is inside of the range."""
        return self.total <= self.limit < self.most


@dataclass(frozen=True)
class LinkUse:
    """Everything sent along one set of mesh axes by one kind of exchange."""

    kind: str
    axes: tuple[str, ...]
    link: str
    """ "ICI", "DCN", "NVLink" or "PCIe"."""
    count: int
    bytes: float
    """Sent by one chip over its links in a step."""
    seconds: float
    why: str


@dataclass(frozen=True)
class Part:
    """One kind of work: a point of the roofline chart."""

    name: str
    flops: float
    bytes: float
    seconds: float
    bound: str
    """ "matrix", "vector", "memory", or "host" where it is copied from or to the host's memory."""


@dataclass(frozen=True)
class Estimate:
    """One layout on one slice."""

    memory: Memory
    seconds: float
    low: float
    high: float
    """The range: everything overlaps that can, and nothing does."""
    bound: str
    compute_seconds: float
    link_seconds: float
    bubble_seconds: float
    flops: float
    """Of one chip in one step, recomputation included."""
    model_flops: float
    """Of one chip, without recomputation: what MFU counts."""
    mfu: float
    links: tuple[LinkUse, ...]
    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    exposed_seconds: float = 0.0
    """Of `link_seconds`, what nothing hides."""
    correction: Correction | None = None
    """What measured runs changed in it."""

    @property
    def seconds_by_bound(self) -> dict[str, float]:
        """Seconds that each unit decides: the parts' bounds and "links". What a calibration is fitted to."""
        found = {"matrix": 0.0, "vector": 0.0, "memory": 0.0, "host": 0.0, "links": self.exposed_seconds}
        for part in self.parts:
            found[part.bound] += part.seconds
        return found
