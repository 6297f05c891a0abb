"""The way through the layouts: coarse over meshes, then fine around the best.

One evaluation traces nothing and compiles nothing, and still takes tens of milliseconds, so not every layout is looked
at. First every mesh is scored with the usual cuts and the setting of the knobs that needs little memory. Then the knobs
of the best few are turned: the setting that recomputes least and fits is the fastest. Then the best is changed in one
respect at a time while that helps. The order is fixed, so the same job gets the same plan.

A program that asks for its mesh is traced for each, which takes seconds. Then meshes of more than two axes are come to
by changing the best only, and the knobs of the first are turned before the others are looked at, so that a search that
the clock stops has seen what it runs with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from capibara.cost.result import Estimate
from capibara.mesh.layout import Layout
from capibara.parallel.remat import POLICIES
from capibara.plan.search.evaluation import CostModel
from capibara.plan.search.space import Point, Space, Unfit

__all__ = ["BUDGET", "TARGETS", "Exploration", "Result"]

TARGETS = ("throughput", "latency", "memory")
"""Least seconds a step; least seconds when nothing overlaps, which is what one request may wait; least bytes a chip."""

BUDGET = 260
# Meshes whose other shardings are looked at, and layouts whose knobs are turned.
_WIDER, _REFINED = 8, 6
# Axes of a mesh that is looked at from the start where that is dear.
_FEW_AXES = 2
# A job whose most frugal layouts need so many times what a chip has is given up: other cuts and knobs save less.
_OUT_OF_REACH, _FRUGAL = 1.25, 4


@dataclass
class Result:
    """One point that was looked at."""

    point: Point
    layout: Layout | None = None
    estimate: Estimate | None = None
    reason: str = ""
    bytes: float | None = None

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.memory.fits


@dataclass
class Exploration:
    """One search: what was looked at so far, and how far it may go."""

    space: Space
    model: CostModel
    target: str = "throughput"
    budget: int = BUDGET
    deadline_s: float | None = None
    share: float = 1.0
    """Of that time, what a search may take that has found nothing that fits: the rest is for changes with which it
    does."""
    tell: Callable[[str], None] | None = None
    """Called with a line of text after each layout that was costed."""
    dear: bool = False
    """Whether a layout on another mesh takes seconds."""
    evaluations: int = 0
    cut_short: bool = False
    """Whether the clock ended it before it was done."""
    results: dict[Point, Result] = field(default_factory=dict)
    _same: dict[Any, Estimate] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    # What a result is worth.

    def worth(self, result: Result) -> tuple[Any, ...]:
        """Smaller is better: what fits before what does not, then the target, then the name."""
        if result.estimate is None:
            return (2, 0.0, 0.0, result.reason)
        memory = result.estimate.memory
        name = result.layout.name if result.layout else ""
        if not memory.fits:
            return (1, memory.total, result.estimate.seconds, name)
        if self.target == "memory":
            return (0, memory.total, result.estimate.seconds, name)
        # Equal times, as of two layouts that differ in something the program never uses: the one with less memory.
        return (0, self._seconds(result.estimate), memory.total, name)

    def look(self, point: Point) -> Result:
        """Evaluate a point, once; two points that come to the same layout are evaluated together."""
        if point in self.results:
            return self.results[point]
        result = Result(point)
        try:
            result.layout = layout = self.space.layout(point)
        except Unfit as reason:
            result.reason, result.bytes = str(reason), reason.bytes
        else:
            key = (layout.mesh, layout.specs, tuple(layout.rules.items()), layout.choices, layout.host, layout.stages)
            if key not in self._same:
                if self.spent:
                    self.cut_short |= self._late
                    return result  # Not kept: it was not looked at.
                self.evaluations += 1
                self._same[key] = self.model.estimate(layout)
            result.estimate = self._same[key]
        self.results[point] = result
        if self.tell is not None and result.estimate is not None:
            self.tell(self._so_far())
        return result

    @property
    def _late(self) -> bool:
        # Something has to be looked at before the clock may stop it.
        if self.deadline_s is None or self.evaluations == 0:
            return False
        share = 1.0 if any(result.fits for result in self.results.values()) else self.share
        return time.monotonic() - self._started > share * self.deadline_s

    @property
    def spent(self) -> bool:
        return self.evaluations >= self.budget or self._late

    def _so_far(self) -> str:
        able = [result for result in self.results.values() if result.estimate is not None]
        best = min(able, key=self.worth)
        fits = "" if best.fits else ", which does not fit"
        seconds = best.estimate.seconds if best.estimate is not None else math.nan
        name = "" if best.layout is None else best.layout.name
        return f"{self.evaluations} layouts looked at, best so far {name}{fits}: {seconds:.3g} s a step"

    # The search itself.

    def go(self) -> None:
        """Coarse, then fine."""
        frugal = self._frugal()
        first = [self._in_flight(Point(mesh, cut, how, frugal)) for mesh, cut, how in self._usual()]
        if self.dear:
            self._turn_first(first)
        looked = [self.look(point) for point in first]
        if self._out_of_reach(looked):
            return
        for result in self._promising(looked, _WIDER):
            mesh = result.point.mesh
            looked += [
                self.look(self._in_flight(Point(mesh, cut, how, frugal)))
                for cut in self.space.cuts(mesh)
                for how in self.space.shardings(mesh)
                if (cut, how) != (result.point.model, result.point.parameters)
            ]
        for result in self._promising(looked, _REFINED):
            self.turn_knobs(result.point)
        if not any(result.fits for result in self.results.values()):
            self._most_frugal(first)
        self.climb()

    def _usual(self) -> list[tuple[Any, tuple[int, ...], str]]:
        """Every mesh with the cut that is written most often, and everything sharded that can be.

        The first is the one that most programs run on, where the batch alone is cut, and all its shardings are there:
        a search that the clock stops after a few layouts has seen them.
        """
        made = []
        meshes = self.space.meshes()
        few = [mesh for mesh in meshes if len(mesh) <= _FEW_AXES]
        for mesh in few if self.dear and few else meshes:
            shardings = self.space.shardings(mesh)
            chosen = shardings[::-1] if set(dict(mesh)) <= {"data"} else shardings[-1:]
            made += [(mesh, cut, how) for cut in self.space.cuts(mesh)[:1] for how in chosen]
        return made

    def _turn_first(self, first: list[Point]) -> None:
        """The mesh that comes first in all its shardings, and the knobs of its best."""
        looked = [self.look(point) for point in first if point.mesh == first[0].mesh]
        for result in self._promising(looked, 1):
            self.turn_knobs(result.point)

    def exhaust(self) -> None:
        """Every point of the space: for problems small enough to enumerate."""
        for point in self.space.points():
            self.look(point)

    def _frugal(self) -> tuple[tuple[str, Any], ...]:
        """A setting with which most layouts fit, so that they can be compared: everything recomputed."""
        chosen = {name: values[0] for name, values in self.space.knobs.items()}
        if "remat" in chosen:
            chosen["remat"] = max(self.space.knobs["remat"], key=POLICIES.index)
        return tuple(chosen.items())

    def _in_flight(self, point: Point) -> Point:
        """A pipeline's point with microbatches to fill it: the most up to four for each stage that divide the rows."""
        stages = point.axis("pipeline")
        if stages == 1 or "accumulate" not in dict(point.choices):
            return point
        for parts in sorted(self.space.knobs["accumulate"], reverse=True):
            if parts <= 4 * stages:
                tried = point.choosing(accumulate=parts)
                try:
                    self.space.layout(tried)
                except Unfit as why:
                    if why.bytes is None:
                        continue
                return tried
        return point

    def _promising(self, looked: list[Result], most: int) -> list[Result]:
        """The best that fit, and the fastest and the smallest that do not yet but may with other knobs."""
        able = [result for result in looked if result.estimate is not None]
        fit = sorted((r for r in able if r.fits), key=self.worth)[:most]
        rest = [r for r in able if not r.fits]
        found = fit + sorted(rest, key=self._pace)[: most // 2] + sorted(rest, key=self.worth)[: most // 2]
        return list({result.point: result for result in found}.values())

    def turn_knobs(self, point: Point) -> None:
        """Look at the settings of a point's knobs, from the one that computes least.

        For time, more microbatches or more recomputation than it takes to fit only cost, and so do more of them where
        fewer are already too slow: those are skipped. A pipeline is kept busier by more microbatches, and least memory
        wants to see all.
        """
        thorough = self.target == "memory" or point.axis("pipeline") > 1
        done: set[Any] = set()
        before: dict[Any, tuple[int, Estimate]] = {}
        for setting in self._by_effort():
            values = dict(setting)
            others = tuple((n, v) for n, v in setting if n not in ("remat", "accumulate"))
            remat, parts = values.get("remat", "none"), values.get("accumulate", 1)
            if not thorough:
                if (others, remat) in done or (others, None) in done:
                    continue
                if (others, remat) in before and self._hopeless(*before[others, remat], parts):
                    continue
            result = self.look(replace(point, choices=setting))
            if result.fits:
                done.add((others, remat))
                least = remat == min(self.space.knobs.get("remat", ("none",)), key=POLICIES.index)
                if least and parts == min(self.space.knobs.get("accumulate", (1,))):
                    done.add((others, None))
            elif result.estimate is not None:
                before[others, remat] = parts, result.estimate
                if not thorough and self._too_slow(result.estimate):
                    done.add((others, remat))

    def _hopeless(self, parts: int, estimate: Estimate, more: int) -> bool:
        """Whether cutting a microbatch further cannot be enough: what it holds shrinks with it at the most."""
        memory = estimate.memory
        return memory.arguments + memory.temporaries * parts / more > memory.limit

    def _too_slow(self, estimate: Estimate) -> bool:
        """Whether a layout that does not fit is slower than the best that does: what makes it fit only adds.

        A tenth of slack, since recomputing can save a little traffic.
        """
        best = min(
            (self._seconds(r.estimate) for r in self.results.values() if r.fits and r.estimate), default=math.inf
        )
        return 0.9 * self._seconds(estimate) > best

    def _seconds(self, estimate: Estimate) -> float:
        return estimate.high if self.target == "latency" else estimate.seconds

    def _by_effort(self) -> list[tuple[tuple[str, Any], ...]]:
        def effort(setting: tuple[tuple[str, Any], ...]) -> tuple[int, int]:
            values = dict(setting)
            return POLICIES.index(values.get("remat", "none")), values.get("accumulate", 1)

        return sorted(self.space.settings(), key=effort)

    def _most_frugal(self, points: list[Point]) -> None:
        """Nothing fits yet: as many microbatches as divide, everything recomputed, and then the state on the host."""
        for host in (False, True) if self.space.can_offload else (False,):
            found = []
            for point in points:
                tried = (replace(point, choices=setting, offload=host) for setting in reversed(self._by_effort()))
                able = (self.look(one) for one in tried)
                found += [next((result for result in able if result.estimate is not None), None)]
            fit = sorted((r for r in found if r is not None and r.fits), key=self.worth)
            for result in fit[:2]:
                self.turn_knobs(result.point)
            if fit:
                return

    def _out_of_reach(self, looked: list[Result]) -> bool:
        """Whether even the smallest of these, turned to need the least memory, are far from fitting."""
        if any(result.fits for result in looked):
            return False
        sized = [result for result in looked if self._needs(result) is not None]
        near = sorted(sized, key=lambda result: (self._needs(result), result.point))[:_FRUGAL]
        if not near:
            return False
        for host in (False, True) if self.space.can_offload else (False,):
            for result in near:
                # More microbatches than divide are no layout, which costs nothing to find out.
                for setting in reversed(self._by_effort()):
                    tried = self.look(replace(result.point, choices=setting, offload=host))
                    if self._needs(tried) is not None:
                        break
        least = [self._needs(result) for result in self.results.values()]
        return min(size for size in least if size is not None) > _OUT_OF_REACH * self.space.memory_limit

    @staticmethod
    def _needs(result: Result) -> float | None:
        """Bytes of a chip, at the least; None where memory is not what speaks against it."""
        return result.bytes if result.estimate is None else result.estimate.memory.total

    def climb(self) -> None:
        """Change the best in one respect at a time while that helps."""
        expanded: set[Point] = set()
        while True:
            best = sorted((r for r in self.results.values() if r.estimate is not None), key=self.worth)[:2]
            ahead = [result for result in best if result.point not in expanded]
            if not ahead:
                return
            if self.spent:
                self.cut_short |= self._late
                return
            here = ahead[0]
            expanded.add(here.point)
            self.turn_knobs(here.point)
            moved = [self.look(point) for point in self.space.moves(here.point)]
            near = [r for r in moved if r.estimate is not None and self._may_win(r, here)]
            for result in sorted(near, key=self._pace)[:_REFINED]:
                self.turn_knobs(result.point)

    def _pace(self, result: Result) -> tuple[Any, ...]:
        return (result.estimate.seconds if result.estimate else math.inf, result.point)

    def _may_win(self, result: Result, here: Result) -> bool:
        """Whether other knobs may make this the best: recomputation costs a quarter of a step at most."""
        assert result.estimate is not None
        assert here.estimate is not None
        return not here.fits or result.estimate.seconds * 0.75 < here.estimate.seconds
