"""The step of a run for batches of one shape, on some devices: laid out by the planner, compiled, its state begun."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from capibara.axes import mesh_axes_of
from capibara.compile.persistent import stable_key
from capibara.errors import rule_error, unsaid
from capibara.hardware.topology import Slice
from capibara.kernels.core.dispatch import recording
from capibara.mesh.layout import Layout
from capibara.models.preset import TrainSettings
from capibara.parallel import run as layouts_run
from capibara.parallel.job import Job
from capibara.parallel.remat import OFFLOAD, POLICIES
from capibara.parallel.trainer_step import (
    EXPERT_SHARE,
    FP8_HISTORY,
    FROZEN,
    UNSENT,
    StepOptions,
    initial_state,
    trainer_job,
)
from capibara.plan.api import plan
from capibara.plan.result import Plan
from capibara.plan.search.space import PARAMETERS
from capibara.train.layouts import Chosen, choose_layout, slice_of, with_choice
from capibara.train.placing import copied, rows_and_length
from capibara.train.trainable import Trainable

__all__ = ["CompiledStep", "LoopOptions", "StepMaker"]

_UNROLL_AT_MOST = 64
"""Repeats of a pattern that a GPU's program writes out: beyond, compiling takes longer than it gives."""


_REPLAN_SECONDS = 10.0
"""After an out-of-memory error, for its report."""


@dataclass(frozen=True)
class LoopOptions:
    """How the step is made, beside the settings of the run."""

    axes: Mapping[str, int] | None = None
    """Of the mesh; None lets the planner choose."""
    devices: Sequence[Any] | None = None
    parameters: Sequence[str] = PARAMETERS
    """What may be cut over the data axis."""
    communication: str = "automatic"
    offload_activations: bool = False
    compiler_options: Mapping[str, Any] | None = None
    load_threshold: float = math.inf
    """Of the busiest device's part of the experts' work, in even parts; above it experts are placed anew."""


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step, where it puts its arguments, and how it came to be."""

    chosen: Chosen
    program: layouts_run.Program
    executable: Any
    """`executable(params, state, batch) -> (params, state, metrics)`; parameters and state are donated."""
    seconds: float
    """That compiling took."""
    decisions: list[Any] = field(repr=False)
    """What kernel dispatch decided while the step was traced."""

    def memory_analysis(self) -> Any:
        """The compiler's count of the step's memory on a device; None where there is none."""
        return self.executable.memory_analysis()

    @property
    def data_size(self) -> int:
        return data_size(self.chosen)

    @property
    def expert_devices(self) -> int:
        """How many devices the experts are divided over."""
        axes = mesh_axes_of(self.program.layout.rules.get("expert"))
        return math.prod(self.program.mesh.shape.get(axis, 1) for axis in axes)

    def on_mesh(self, make: Callable[..., Any], shapes: Any, *args: Any) -> Any:
        """`make(*args)`, each array of it made where these shapes lie."""
        places = jax.tree.map(lambda s: s.sharding, shapes)
        with layouts_run.surroundings(self.program.layout, self.program.mesh):
            return jax.jit(make, out_shardings=places)(*args)


def data_size(chosen: Chosen) -> int:
    return int(chosen.layout.mesh.axes.get("data", 1))


class StepMaker:
    """Makes the step of a run, and what it starts from; for other devices another one."""

    def __init__(
        self,
        trainable: Trainable,
        settings: TrainSettings,
        optimizer: Any,
        step_options: StepOptions,
        tell: Callable[[str], None],
    ) -> None:
        self.trainable = trainable
        self.settings = settings
        self.optimizer = optimizer
        self.step_options = step_options
        self.tell = tell
        self._planned: tuple[Job, Slice, Mapping[str, int] | None] | None = None
        self._losses: dict[int | bool, Any] = {}

    def compile(self, batch: Any, options: LoopOptions, devices: Sequence[Any]) -> CompiledStep:
        """The step for batches like this one, of all processes."""
        if len(devices) > 1:
            self.tell(f"planning the step's layout on {len(devices)} devices")
        chosen = self._lay_out(batch, options, devices)
        job = self._job(batch, devices, self._unroll(devices), data_size(chosen))
        layout = chosen.layout
        if options.offload_activations:
            layout = with_choice(layout, remat=OFFLOAD)
            if devices[0].platform == "cpu":
                self.tell("a CPU has one memory: activations stay there, and are computed again as on a chip")
        self.tell(f"compiling the step: {chosen.layout.name}")
        started = time.perf_counter()
        with recording() as decisions:  # traced in the first of these two, and not again in the second
            program = layouts_run.laid_out(job, layout, devices)
            lowered = layouts_run.lower_program(program)
        with stable_key(lowered):
            executable = lowered.compile(compiler_options=self._compiler_options(options, devices))
        seconds = time.perf_counter() - started
        self.tell(f"compiled in {seconds:.1f} s")
        return CompiledStep(chosen, program, executable, seconds, decisions)

    def _compiler_options(self, options: LoopOptions, devices: Sequence[Any]) -> dict[str, Any] | None:
        found = dict(options.compiler_options or {})
        if self.settings.deterministic and devices[0].platform == "gpu":
            found["xla_gpu_deterministic_ops"] = True
        if self.settings.precision == "fp8" and devices[0].platform == "gpu":
            # Triton's products would each round their operands again; cuBLASLt's share what was rounded once.
            found.setdefault("xla_gpu_enable_triton_gemm", False)
        return found or None

    def _unroll(self, devices: Sequence[Any]) -> int | bool:
        asked = self.settings.unroll
        repeats = getattr(self.trainable, "repeats", 1)
        if asked:
            return True if asked < 0 else min(asked, repeats)
        # A loop over layers copies what it keeps for the backward pass into stacks and out again; a GPU's products
        # cannot read and write there. A TPU's can.
        return (devices[0].platform == "gpu" and repeats <= _UNROLL_AT_MOST) or 1

    def _loss(self, unroll: int | bool) -> Any:
        """One function however often it is asked for: the job that is planned and the one that runs look at the shapes
        of its metrics, and jax traces it for both of them once."""
        if unroll not in self._losses:
            self._losses[unroll] = self.trainable.loss(unroll)
        return self._losses[unroll]

    def _job(self, batch: Any, devices: Sequence[Any], unroll: int | bool, data_size: int) -> Job:
        settings = self.settings
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype)), batch
        )
        rows, length = rows_and_length(shapes)
        remat = POLICIES if settings.remat == "auto" else (settings.remat,)
        parts = (settings.accumulate,) if settings.accumulate else _divisors(rows)
        if len(devices) == 1 and devices[0].platform == "cpu":
            # A CPU has the host's memory, and nothing to choose.
            remat = remat[:1]
            parts = parts[:1]
        return trainer_job(
            self._loss(unroll),
            self.trainable.shapes(),
            shapes,
            self.optimizer,
            self.step_options,
            tokens=rows * length,
            remat=remat,
            accumulate=parts,
            data_size=data_size,
            frozen=getattr(self.trainable, "frozen_shapes", lambda: None)(),
            fp8_history=getattr(self.trainable, "fp8_history_shapes", lambda: None)(),
            name=self.trainable.name,
        )

    def _lay_out(self, batch: Any, options: LoopOptions, devices: Sequence[Any]) -> Chosen:
        axes, parameters = options.axes, options.parameters
        if options.communication != "automatic":
            # Summed by hand over the data axis, of parameters that every device has whole.
            axes = axes or {"data": len(devices)}
            others = [f"{name} {size}" for name, size in axes.items() if name != "data" and size > 1]
            if others:
                raise rule_error(
                    f'Gradients are summed by hand ("{options.communication}") on a mesh of the data axis alone',
                    ", ".join(others),
                    'use communication "automatic", which leaves the sums to the compiler',
                )
            parameters = tuple(word for word in parameters if word != "full")
        job = self._job(batch, devices, 1, int((axes or {}).get("data", 1)))
        self._planned = (job, slice_of(devices)[0], axes)
        chosen = choose_layout(job, devices, axes, parameters=parameters)
        return replace(chosen, layout=_with_own_places(job, chosen.layout))

    def replan(self, memory_limit_gb: float | None = None) -> Plan:
        """The planner's word on the step that was compiled last; with a limit, on the nearest one that keeps to it."""
        if self._planned is None:
            raise rule_error("A step is planned when it is laid out", "no step", "prepare the loop first")
        job, where, axes = self._planned
        mesh = axes if memory_limit_gb is None else None  # to make it fit, another mesh may do
        with unsaid():  # what is planned here does not run
            return plan(job, on=where, mesh=mesh, memory_limit_gb=memory_limit_gb, time_limit=_REPLAN_SECONDS)

    # What the step starts from.

    def frozen(self, step: CompiledStep) -> dict[str, Any]:
        """Weights that are not trained, where the step puts them: {} where there are none."""
        shapes = step.program.arguments[1].get(FROZEN)
        if shapes is None:
            return {}
        weights = self.trainable.frozen(step.program.mesh)  # type: ignore[attr-defined]
        return {FROZEN: jax.tree.map(copied, weights, shapes)}

    def params(self, step: CompiledStep) -> Any:
        """Parameters to start from, each made where it lies."""
        shapes = step.program.arguments[0]
        starting = getattr(self.trainable, "starting_params", lambda mesh: None)(step.program.mesh)
        if starting is not None:
            return jax.tree.map(copied, starting, shapes)
        return step.on_mesh(self.trainable.init, shapes, jax.random.key(self.settings.seed))

    def state(self, step: CompiledStep, params: Any) -> dict[str, Any]:
        """What the step keeps beside them and beside what is frozen, before the first one."""
        shapes = {name: shape for name, shape in step.program.arguments[1].items() if name != FROZEN}
        beside = {"expert_share": shapes.get(EXPERT_SHARE), "fp8_history": shapes.get(FP8_HISTORY)}
        return step.on_mesh(
            lambda p: initial_state(self.optimizer, p, self.step_options, step.data_size, **beside),
            shapes,
            params,
        )


def _divisors(rows: int) -> tuple[int, ...]:
    return tuple(n for n in (1, 2, 4, 8, 16, 32, 64) if rows % n == 0)


def _with_own_places(job: Job, layout: Layout) -> Layout:
    """The layout with what is no parameter's: each device has what it has not sent itself and no other's, and every
    process can read how the experts were used and how fp8 products are scaled."""
    _, args = job.build(**job.defaults())
    paths = [[getattr(key, "key", None) for key in path] for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    cut = PartitionSpec("data") if layout.mesh.axes.get("data", 1) > 1 else PartitionSpec()
    own = {UNSENT: cut, EXPERT_SHARE: PartitionSpec(), FP8_HISTORY: PartitionSpec()}
    specs = [
        next((place for name, place in own.items() if name in path), spec)
        for path, spec in zip(paths, layout.specs, strict=True)
    ]
    return replace(layout, specs=tuple(specs))
