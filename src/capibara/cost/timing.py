"""Seconds of a whole program: its passes, its exchanges, and how much of the second hides behind the first.

A latency-hiding scheduler starts an exchange early where its operands are already there (a weight that is gathered for
the next product) and finishes it late where no product waits for it (a gradient that is reduced). Most of such an
exchange hides behind the work of the same level, as far as that is long enough; an exchange on the path from one
product to the next costs all of its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from capibara.cost.fusion import LoopPass, Pass
from capibara.cost.links import Exchange, Wiring, exchange
from capibara.cost.result import LinkUse, Part
from capibara.cost.roofline import HOST, pass_work
from capibara.hardware.facts import Chip
from capibara.program.chip import Buffer, Collective

__all__ = ["Timer", "Totals"]

_RANGE = ("low", "mid", "high")


@dataclass(slots=True)
class _Row:
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    bound: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Link:
    link: str
    count: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    why: str = ""
    worst: float = 0.0


@dataclass(slots=True)
class Totals:
    """Seconds of one level, one trip of it."""

    mid: float = 0.0
    slowest: float = 0.0
    """At the lowest efficiency, nothing hidden."""
    fastest: float = 0.0
    """At the highest efficiency, everything hidden that is shorter than the rest."""
    compute: float = 0.0
    links: float = 0.0
    exposed: float = 0.0
    """Of the exchanges, what nothing hides."""


class Timer:
    """Adds up one program on one chip of a mesh."""

    def __init__(self, buffers: Mapping[int, Buffer], chip: Chip, wiring: Wiring) -> None:
        self.buffers, self.chip, self.wiring = buffers, chip, wiring
        self.rows: dict[str, _Row] = {}
        self.uses: dict[tuple[str, tuple[str, ...]], _Link] = {}
        self.flops = 0.0
        self.model_flops = 0.0
        self.loops: dict[int, float] = {}
        """Seconds of each loop of the outermost level, by its place there."""
        self._exchanges: dict[Collective, Exchange] = {}

    def level(self, passes: Sequence[Pass | LoopPass], times: int = 1, loop: LoopPass | None = None) -> Totals:
        """One trip of these passes, which run `times` times in all."""
        found = Totals()
        work = dict.fromkeys(_RANGE, 0.0)
        hidden = shown = 0.0
        hideable = _hideable(passes, loop)
        for index, one in enumerate(passes):
            if isinstance(one, LoopPass):
                trips = one.loop.trips
                inner = self.level(one.body, times * trips, one)
                found.slowest += trips * inner.slowest
                found.mid += trips * inner.mid
                if loop is None:
                    self.loops[index] = trips * inner.mid
                found.fastest += trips * inner.fastest
                found.compute += trips * inner.compute
                found.links += trips * inner.links
                found.exposed += trips * inner.exposed
            elif one.kind == "collective":
                seconds = self._collective(one, times)
                if index in hideable:
                    hidden += seconds
                else:
                    shown += seconds
            else:
                self._pass(one, times, work)
        behind = min(self.chip.efficiency.overlap * hidden, work["mid"])
        exposed = shown + hidden - behind
        links = hidden + shown
        ratio_low = self.chip.efficiency.links.mid / self.chip.efficiency.links.low
        ratio_high = self.chip.efficiency.links.mid / self.chip.efficiency.links.high
        found.compute += work["mid"]
        found.links += links
        found.exposed += exposed
        found.mid += work["mid"] + exposed
        found.slowest += work["low"] + links * ratio_low
        found.fastest += max(work["high"], links * ratio_high)
        return found

    def _pass(self, one: Pass, times: int, work: dict[str, float]) -> None:
        todo = pass_work(one, self.buffers, self.chip)
        parts = todo.parts()
        seconds = max(parts.values()) + todo.fixed
        work["mid"] += seconds
        work["low"] += todo.seconds("low")
        work["high"] += todo.seconds("high")
        row = self.rows.setdefault(one.name, _Row())
        row.flops += times * todo.flops
        row.bytes += times * todo.bytes
        row.seconds += times * seconds
        bound = max(parts, key=lambda part: parts[part])
        row.bound[bound] = row.bound.get(bound, 0.0) + times * seconds
        for step in one.steps:
            if step.primitive in HOST:
                use = self.uses.setdefault((step.primitive, ()), _Link("PCIe"))
                use.count += times
                use.bytes += times * sum(self.buffers[written].bytes for written in step.writes)
                use.seconds += times * seconds
                use.why = step.name or "kept in the host's memory"
            self.flops += times * step.matrix_flops
            if not step.recompute:
                self.model_flops += times * step.matrix_flops

    def _collective(self, one: Pass, times: int) -> float:
        asked = one.steps[0].collective
        assert asked is not None
        if asked not in self._exchanges:
            self._exchanges[asked] = exchange(self.wiring, asked.kind, asked.axes, asked.bytes)
        taken = self._exchanges[asked]
        seconds = taken.seconds / self.chip.efficiency.links.mid + taken.latency
        use = self.uses.setdefault((asked.kind, asked.axes), _Link(taken.link))
        use.count += times
        use.bytes += times * taken.sent
        use.seconds += times * seconds
        if times * seconds >= use.worst:
            use.worst, use.why = times * seconds, asked.why or one.name
        return seconds

    def parts(self, smallest: float = 0.01) -> tuple[Part, ...]:
        """The passes by name, longest first; those under `smallest` of the whole are one part."""
        total = sum(row.seconds for row in self.rows.values())
        made: list[Part] = []
        rest: dict[str, _Row] = {}
        for name, row in self.rows.items():
            bound = max(row.bound, key=lambda one: row.bound[one])
            if row.seconds >= smallest * total:
                made.append(Part(name, row.flops, row.bytes, row.seconds, bound))
            else:
                into = rest.setdefault(bound, _Row())
                into.flops += row.flops
                into.bytes += row.bytes
                into.seconds += row.seconds
        made += [
            Part(f"smaller passes ({bound})", row.flops, row.bytes, row.seconds, bound) for bound, row in rest.items()
        ]
        return tuple(sorted(made, key=lambda part: (-part.seconds, part.name)))

    def links(self) -> tuple[LinkUse, ...]:
        """Every kind of exchange, longest first."""
        made = [
            LinkUse(kind, axes, use.link, use.count, use.bytes, use.seconds, use.why)
            for (kind, axes), use in self.uses.items()
        ]
        return tuple(sorted(made, key=lambda use: (-use.seconds, use.kind, use.axes)))


def _is_product(one: Pass | LoopPass) -> bool:
    return isinstance(one, LoopPass) or one.kind in ("matrix", "op")


def _hideable(passes: Sequence[Pass | LoopPass], loop: LoopPass | None) -> set[int]:
    """Exchanges that need not be waited for: by index."""
    if not any(isinstance(one, Pass) and one.kind == "collective" for one in passes):
        return set()
    carried = () if loop is None else loop.loop.carried
    starts, ends = [body for _, body in carried[0::2]], [body for _, body in carried[1::2]]
    same: Mapping[int, int] = {} if loop is None else loop.same
    ends = [same.get(end, end) for end in ends]
    # Backwards: what a product of this trip, or through the carry of the next one, waits for.
    awaited: set[int] = set()
    for _ in range(2):
        for one in reversed(passes):
            if _is_product(one) or any(b in awaited for b in one.writes):
                awaited.update(one.reads)
        awaited.update(end for start, end in zip(starts, ends, strict=True) if start in awaited)
    # Forwards: what no product of this trip has made. A carry is what the trip before made last.
    late = set(starts)
    found = set()
    for index, one in enumerate(passes):
        behind = any(b in late for b in one.reads)
        if isinstance(one, Pass) and one.kind == "collective":
            if not behind or not any(b in awaited for b in one.writes):
                found.add(index)
            else:
                behind = True
        if behind or _is_product(one):
            late.update(one.writes)
    return found
