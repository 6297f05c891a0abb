"""What a layout costs, by the model on paper: trace the job once a choice of its knobs, spread it, estimate it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from jax.sharding import PartitionSpec

from capibara.cost.estimate import estimate
from capibara.cost.result import Estimate
from capibara.lru import LRU
from capibara.mesh.layout import Layout
from capibara.parallel.job import Job, leaf_roles
from capibara.program import ChipProgram, Program, spread, trace
from capibara.program.anatomy import Anatomy, anatomy

__all__ = ["CostModel", "PaperModel"]

# A type that less of the operations are done in is a detail: a router, a norm.
_HARDLY = 0.02
# Traces for a mesh each: a search goes through the knobs of one mesh before it comes to the next.
_MESHES_KEPT = 16


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's search for cycles, which the objects that a layout of an unrolled program is made of set off
    (hundreds of thousands, none in a cycle): a tenth of the time. Between two layouts it is on."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class CostModel(Protocol):
    """What the search asks of a model of cost."""

    def anatomy(self) -> Anatomy:
        """The job's arguments and what their dimensions are for."""

    def estimate(self, layout: Layout) -> Estimate:
        """The cost of one layout."""


class PaperModel:
    """The library's own model: no compiler, no device."""

    def __init__(self, job: Job, slice: Any, *, memory_limit: float | None = None, calibration: Any = None) -> None:
        self.job, self.slice, self.memory_limit, self.calibration = job, slice, memory_limit, calibration
        self._programs: dict[tuple[tuple[str, Any], ...], Program] = {}
        self._by_mesh: LRU[Any, Program] = LRU(_MESHES_KEPT)

    def elsewhere(self, job: Job, slice: Any, memory_limit: float | None = None) -> PaperModel:
        """The same model of a job on a slice of this chip, with this limit where one is given; what was traced of the
        same job is not traced again."""
        made = PaperModel(job, slice, memory_limit=memory_limit or self.memory_limit, calibration=self.calibration)
        if job.build is self.job.build and slice.chip == self.slice.chip:
            made._programs, made._by_mesh = self._programs, self._by_mesh
        return made

    def program(self, choices: tuple[tuple[str, Any], ...]) -> Program:
        """The traced program of one choice of the knobs, for no mesh yet."""
        if choices not in self._programs:
            self._programs[choices] = self._traced(choices)
        return self._programs[choices]

    @property
    def asks_for_mesh(self) -> bool:
        """Whether the job's function asks which mesh it runs on, and so has a trace for each."""
        return self.program(self._defaults).asks_for_mesh

    @property
    def _defaults(self) -> tuple[tuple[str, Any], ...]:
        return tuple(self.job.defaults().items())

    def program_on(self, layout: Layout) -> Program:
        """The traced program of a layout: the one for all meshes, unless the function asks for its own."""
        if not self.asks_for_mesh:
            return self.program(layout.choices)
        places = self.program(self._defaults).places
        rules = tuple(sorted((name, axes) for name, axes in layout.rules.items() if places is None or name in places))
        key = (layout.choices, tuple(layout.mesh.axes.items()), rules)
        found = self._by_mesh.get(key)
        if found is None:
            found = self._by_mesh[key] = self._traced(layout.choices, layout)
        return found

    def _traced(self, choices: tuple[tuple[str, Any], ...], layout: Layout | None = None) -> Program:
        fn, args = self.job.build(**dict(choices))
        kind = self.slice.chip.device_kinds[0]
        with _no_collection():
            return trace(fn, args, donate=self.job.donate, roles=self.job.roles, device_kind=kind, layout=layout)

    def anatomy(self) -> Anatomy:
        _, args = self.job.build(**dict(self._defaults))
        return anatomy(self.program(self._defaults), leaf_roles(self.job, args))

    def activations(self) -> tuple[str, ...]:
        """Types of what the forward products take from the batch, the one with the most operations first."""
        program = self.program(self._defaults)
        work: dict[str, float] = {}

        def look(nodes: Any, trips: int) -> None:
            for node in nodes:
                if node.body is not None:
                    look(node.body.nodes, trips * node.body.trips)
                elif node.matrix and not node.backward:
                    taken = [program.values[value] for value in node.inputs]
                    for dtype in {value.dtype for value in taken if value.from_batch}:
                        work[dtype] = work.get(dtype, 0.0) + trips * node.flops

        look(program.nodes, 1)
        most = max(work.values(), default=0.0)
        return tuple(dtype for dtype in sorted(work, key=lambda one: -work[one]) if work[dtype] > _HARDLY * most)

    def estimate(self, layout: Layout) -> Estimate:
        program = self.program_on(layout)
        with _no_collection():
            chip = spread(program, layout)
            found = self._estimate(chip, layout)
            if chip.loose:
                whole = self._estimate(spread(program, self._with_whole_batch(layout)), layout).memory
                more = whole.total + whole.unsure - found.memory.total
                found = replace(found, memory=replace(found.memory, unsure=max(found.memory.unsure, more)))
        # The knobs change what is computed again, which is no work of the model's.
        anywhere = self.program(self._defaults if self.asks_for_mesh else layout.choices)
        if anywhere.local:  # Inside of shard_map the program is written for one chip, and so is its work.
            return found
        # A chip's share of what the program has to do: work that several chips repeat is not more of it.
        useful = anywhere.model_flops / layout.mesh.size
        peak = self.slice.chip.peak_flops("bfloat16")
        return replace(found, model_flops=useful, mfu=useful / found.seconds / peak if found.seconds else 0.0)

    def _estimate(self, chip: ChipProgram, layout: Layout) -> Estimate:
        return estimate(
            chip,
            layout.mesh,
            self.slice,
            stages=layout.stages,
            microbatches=dict(layout.choices).get("accumulate", 1),
            calibration=self.calibration,
            memory_limit=self.memory_limit,
        )

    def _with_whole_batch(self, layout: Layout) -> Layout:
        _, args = self.job.build(**dict(layout.choices))
        roles = leaf_roles(self.job, args)
        specs = [PartitionSpec() if role == "batch" else spec for role, spec in zip(roles, layout.specs, strict=True)]
        return replace(layout, specs=tuple(specs))
