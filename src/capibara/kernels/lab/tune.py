"""Tune what a user runs: every op call of a function, measured on the attached chip and remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core import tables
from capibara.kernels.core.dispatch import Selection
from capibara.kernels.core.explanation import explain
from capibara.kernels.core.spec import Call, Case
from capibara.kernels.lab.timing import format_seconds
from capibara.kernels.lab.tuning import LEFT_OUT, Progress, TuneReport, autotune

__all__ = ["FunctionReport", "tune"]


@dataclasses.dataclass(frozen=True)
class FunctionReport:
    """What tuning a function found, call by call."""

    reports: tuple[TuneReport, ...]
    skipped: Mapping[str, str]
    """The calls that were not measured, and why."""
    calls: Mapping[str, int]
    """How often a trace of the function has each call."""
    before: Mapping[str, str]
    """What dispatch took of each that was measured."""

    def gain(self, report: TuneReport) -> float | None:
        """How many times as fast the best is as what dispatch took before; None where that was not timed."""
        call = str(report.call)
        taken = next((c for c in report.candidates if c.name == self.before[call] and c.rejected is None), None)
        best = report.best
        if taken is None or best is None or not taken.seconds or not best.seconds:
            return None
        return taken.seconds / best.seconds

    def __str__(self) -> str:
        lines = []
        for report in self.reports:
            call, best, gain = str(report.call), report.best, self.gain(report)
            found = "none is right" if best is None else f"{best.name}, {format_seconds(best.seconds or 0.0)}"
            told = "" if gain is None else f", {gain:.2f} times as fast as {self.before[call]}"
            lines.append(f"{call} ({self.calls[call]}x): {found}{told}")
        lines += [f"{call} ({self.calls[call]}x): not measured: {why}" for call, why in self.skipped.items()]
        return "\n".join(lines) or "no capibara op is called"

    def as_dict(self) -> dict[str, Any]:
        return {
            "reports": [
                {**r.as_dict(), "before": self.before[str(r.call)], "gain": self.gain(r)} for r in self.reports
            ],
            "skipped": dict(self.skipped),
            "calls": dict(self.calls),
        }


def tune(
    fn: Callable[..., Any] | str,
    *args: Any,
    max_configs: int | None = None,
    again: bool = False,
    save: bool | str | Path = True,
    on_progress: Callable[[Progress], None] | None = None,
    **kwargs: Any,
) -> FunctionReport:
    """Measure every op call that a function makes, and remember the fastest right implementation and config of each.

    The function is traced on its arguments' shapes and does not run: `jax.value_and_grad(loss)` has the calls of both
    passes. Each different call is then measured by itself, on operands that are drawn as the op's own cases draw them.
    What is found goes into the user's tables, which dispatch reads from then on; functions that are compiled already
    keep what they have.

    Args:
      fn: any function that calls ops, or an op's name.
      args: its arguments: arrays, or `jax.ShapeDtypeStruct`s; what is not an array is passed as it is.
      max_configs: at most so many configs of each implementation; None tries all.
      again: measure calls that the user's tables have from this version of JAX too.
      save: True stores in the user's tables; a path in those of that folder. False stores nothing.
      on_progress: called at each step.
      kwargs: arguments of `fn` by name.

    >>> from capibara.kernels import rms_norm
    >>> x, scale = jax.ShapeDtypeStruct((8, 32), "float32"), jax.ShapeDtypeStruct((32,), "float32")
    >>> print(tune(rms_norm, x, scale, save=False))
    norm(f32[8,32] f32[32] - - kind=rms) (1x): not measured: xla alone takes it here, and has nothing to configure
    """
    selections = [s for s in explain(fn, *args, **kwargs).selections if isinstance(s, Selection)]
    calls: dict[str, int] = {}
    chosen: dict[str, Selection] = {}
    for selection in selections:
        key = str(selection.call)
        calls[key] = calls.get(key, 0) + 1
        # The same call may be made by name in one place and without one in another.
        if key not in chosen or chosen[key].pinned:
            chosen[key] = selection
    reports, skipped, before = [], {}, {}
    for key, selection in chosen.items():
        why, case = _skipped(selection, again), None
        if why is None:
            case = case_of(selection.call)
            why = (
                None
                if case is not None
                else "no case of the op has such operands, whose values follow from others or mean something"
            )
        if why is not None or case is None:
            skipped[key] = why or ""
            continue
        config = selection.config
        before[key] = selection.implementation + ("" if config is None else f" {config}")
        reports.append(
            autotune(selection.call.op, case, max_configs=max_configs, save=save, on_progress=on_progress)
        )  # fmt: skip
    return FunctionReport(tuple(reports), skipped, calls, before)


def _skipped(selection: Selection, again: bool) -> str | None:
    """Why there is nothing to measure; None where there is."""
    call, op = selection.call, selection.call.op
    if op.mesh_axes is not None:
        return "it runs over mesh axes, which one device has none of"
    if selection.pinned:
        return f"it runs on {selection.implementation} because {selection.why}"
    accepting = [name for name, impl in op.implementations.items() if name not in LEFT_OUT and not impl.refusal(call)]
    if len(accepting) == 1 and op.implementations[accepting[0]].config_type is None:
        return f"{accepting[0]} alone takes it here, and has nothing to configure"
    if not again and tables.has_own(call, f"jax {jax.__version__},"):
        return "the user's table has it; again=True measures it once more"
    return None


def case_of(call: Call) -> Case | None:
    """The call as a workload, whose operands are drawn as those of a case of the op that is like it.

    None where some follow from others, or are whole numbers that mean something, and no case says how.
    """
    shapes = tuple(None if x is None else tuple(x.shape) for x in call.args)
    types = {i: x.dtype.name for i, x in enumerate(call.args) if x is not None}
    numbers = [i for i, x in enumerate(call.args) if x is not None and not jnp.issubdtype(x.dtype, jnp.floating)]
    for case in call.op.cases:
        if _alike(case, call) and (not numbers or case.shapes == shapes):
            return dataclasses.replace(case, name="call", shapes=shapes, dtypes=types, tags=frozenset())
    if numbers or any(case.complete is not None or case.draw for case in call.op.cases):
        return None
    return Case("call", shapes, next(iter(types.values())), call.changed_params, frozenset(), types)


def _alike(case: Case, call: Call) -> bool:
    """Whether what a case draws and completes is right for a call of other sizes: the same operands and parameters."""
    given = case.args()
    ranks = [None if x is None else (len(x.shape), jnp.issubdtype(x.dtype, jnp.floating)) for x in given]
    wanted = [None if x is None else (len(x.shape), jnp.issubdtype(x.dtype, jnp.floating)) for x in call.args]
    params = {name: value for name, value in case.params.items() if name not in call.op.hints}
    return ranks == wanted and {**call.op.params, **params} == {**call.op.params, **call.changed_params}
