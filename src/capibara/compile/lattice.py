"""The calls that published models make of each op, through the TPU compiler: what dispatch takes at drawn shapes.

`compile.kernels` compiles a kernel over the cases that it was written for; here nobody chose the shapes. The draws are
those of `capibara kernels bench --models`, a quarter of them of models that nothing was tuned on. Dispatch decides as
inside an optimisation context, which acts on predictions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from capibara.compile.pool import CompileJob, compile_many
from capibara.compile.report import CompileReport
from capibara.hardware import Chip
from capibara.hardware.topology import place

__all__ = ["LatticeRow", "compile_lattice", "workload_program"]

_PROGRAM = f"{__name__}:workload_program"


@dataclasses.dataclass(frozen=True)
class LatticeRow:
    """One op at one model's shape.

    Attributes:
      decisions: (op, implementation) of everything that dispatch chose for it, the gradient's too.
      seconds: predicted of the chip, as a plan predicts it, by the ops' own costs.
    """

    family: str
    model: str
    held_back: bool
    what: str
    direction: str
    decisions: tuple[tuple[str, str], ...]
    seconds: float
    report: CompileReport

    @property
    def ok(self) -> bool:
        return self.report.ok

    @property
    def name(self) -> str:
        return f"{self.family}: {self.what}, {self.direction} ({self.model})"

    def as_dict(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        decisions = [{"op": op, "implementation": implementation} for op, implementation in self.decisions]
        return {**plain, "ok": self.ok, "decisions": decisions, "report": self.report.as_dict()}


def _workloads(seed: int, families: Sequence[str] | None, chip: Chip) -> Iterator[Any]:
    """Drawn for the chip: which forms a workload has is asked there."""
    from capibara.kernels.core import context
    from capibara.kernels.lab.lattice.workloads import draw

    stream = draw(seed, families)
    while True:
        with context.target(chip.platform, chip.device_kinds[0]):
            workload = next(stream)
        yield workload


def workload_program(
    seed: int, families: Sequence[str] | None, index: int, device_kind: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A job's target: the draw of this number, as (function, argument shapes)."""
    from capibara import hardware

    chip = hardware.chip(device_kind)
    workload = next(itertools.islice(_workloads(seed, families, chip), index, None))
    return _program(workload, chip)


def _program(workload: Any, chip: Chip) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """As a model calls it; with the backward pass after it where the draw says so."""
    import jax

    from capibara.kernels.core import context
    from capibara.kernels.core.trusting import trust
    from capibara.kernels.lab.lattice.measure import with_gradient

    operands = jax.eval_shape(workload.arrange, workload.case.args())
    present = tuple(x for x in operands if x is not None)

    def forward(*arrays: Any) -> Any:
        given = iter(arrays)
        return workload.ours(*(None if x is None else next(given) for x in operands))

    def fn(*arrays: Any) -> Any:
        # Around the whole: a gradient is traced after its forward call has returned.
        with context.target(chip.platform, chip.device_kinds[0]), trust("predicted"):
            return with_gradient(forward)(*arrays) if workload.grad else forward(*arrays)

    if not workload.grad:
        return fn, present
    with context.target(chip.platform, chip.device_kinds[0]), trust("predicted"):
        cotangents = jax.tree.leaves(jax.eval_shape(forward, *present))
    return fn, (cotangents, *present)


def compile_lattice(
    slice_name: str,
    *,
    rows: int,
    seed: int = 0,
    families: Sequence[str] | None = None,
    workers: int | None = None,
    timeout_s: float = 600.0,
    on_result: Callable[[int, int, CompileReport], None] | None = None,
) -> list[LatticeRow]:
    """Compile the first `rows` draws for one chip of the slice; the arguments are those of `compile_kernels`."""
    from capibara import hardware

    chip = hardware.chip(place(slice_name).chip)
    drawn = list(itertools.islice(_workloads(seed, families, chip), rows))
    names = list(families) if families else None
    kind = chip.device_kinds[0]
    jobs = [
        CompileJob(_PROGRAM, {"seed": seed, "families": names, "index": i, "device_kind": kind}, str(workload))
        for i, workload in enumerate(drawn)
    ]
    done = 0

    def tell(_: int, report: CompileReport) -> None:
        nonlocal done
        done += 1
        if on_result is not None:
            on_result(done, len(jobs), report)

    reports = compile_many(jobs, slice_name, workers=workers, timeout_s=timeout_s, on_result=tell)
    return [
        LatticeRow(
            workload.family, workload.model, workload.held_back, workload.what, workload.direction,
            _decisions(workload, chip), _seconds(workload, chip), report,
        )
        for workload, report in zip(drawn, reports, strict=True)
    ]  # fmt: skip


def _decisions(workload: Any, chip: Chip) -> tuple[tuple[str, str], ...]:
    import jax

    from capibara.kernels.core import dispatch

    fn, args = _program(workload, chip)
    with dispatch.recording() as decided:
        jax.eval_shape(fn, *args)
    found = [(choice.call.op.name, choice.implementation) for choice in decided if hasattr(choice, "call")]
    return tuple(dict.fromkeys(found))


def _seconds(workload: Any, chip: Chip) -> float:
    import jax
    from jax.sharding import PartitionSpec

    from capibara.cost.estimate import estimate
    from capibara.mesh.layout import Layout
    from capibara.mesh.mesh import MeshConfig
    from capibara.program import spread, trace

    fn, args = _program(workload, chip)
    alone = Layout(MeshConfig((1,), ("data",)), (PartitionSpec(),) * len(jax.tree.leaves(args)))
    program = trace(fn, args, device_kind=chip.device_kinds[0])
    return estimate(spread(program, alone), alone.mesh, chip).seconds
