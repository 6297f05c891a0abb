"""What a scan would run, decided from its step alone, in words and as data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from capibara.errors import ImplementationRefused
from capibara.kernels.core.context import current_target
from capibara.kernels.ops.scan.parallel import affine, diagonal, linear, sequential
from capibara.kernels.ops.scan.parallel.affine import Affine, General
from capibara.kernels.ops.scan.parallel.step import Step

PATHS = ("diagonal", "matrix", "sequential")


@dataclasses.dataclass(frozen=True)
class ScanPlan:
    """One scan's path and why. `primitive` and `line` name what kept it from the faster paths."""

    path: str
    why: str
    length: int
    segments: int
    use_checkpointing: bool
    platform: str
    rounds: tuple[tuple[int, ...], ...] = ()
    """The leaves whose trajectories are found in parallel over time, in the order in which one needs another."""
    leaves: tuple[str, ...] = ()
    primitive: str | None = None
    line: str | None = None
    one_loop: bool = False
    """Diagonal, but run one step after another: on a CPU, where that reads each number once and is faster."""
    inexact: tuple[int, ...] = ()
    """The leaves of `rounds` whose scale and offset are the step's for finite numbers alone."""
    checked: bool = False
    """Looked over when it has run, and run again one step after another where a carry is not finite."""
    recurrences: tuple[Any, ...] = ()
    """The `linear_recurrence` calls that would run: dispatch's selections. Filled by `explain_scan`."""

    @property
    def implementation(self) -> str:
        return self.path

    def __str__(self) -> str:
        pieces = f"{self.segments} segment{'s' * (self.segments != 1)}"
        kept = "with" if self.use_checkpointing else "without"
        path = f"{self.path} in one loop" if self.one_loop else self.path
        said = f"parallel_scan of {self.length} steps on {self.platform}: {path}, {pieces}, {kept} checkpoints"
        return "\n".join([said, f"  because {self.why}", *(f"  {line}" for line in self._recurrence_lines())])

    def _recurrence_lines(self) -> list[str]:
        return [line for selection in self.recurrences for line in str(selection).splitlines()]

    def as_dict(self) -> dict[str, Any]:
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        kept["recurrences"] = [selection.as_dict() for selection in self.recurrences]
        return {"op": "parallel_scan", **kept}


def make(step: Step, segments: int | None, checkpoints: bool, path: str | None, pinned: bool = False) -> ScanPlan:
    """Decide. A `path` that was asked for and cannot run is an error that says why.

    `pinned` says that the recurrence's implementation was asked for, so that it must run.
    """
    if path == "sequential":
        return _sequential(step, segments, checkpoints, "it was asked for by name")
    if getattr(step.jaxpr, "effects", None):
        return _sequential(step, segments, False, "the step has side effects, which keep their order", path)
    if not step.size and path is None:
        return _sequential(
            step, segments, checkpoints, "there is no carry, and one by one takes the memory of one step"
        )
    rounds, stuck, inexact = solve(step)
    left = [i for i in range(step.size) if not any(i in found for found in rounds)]
    asked = "; it was asked for by name" if path else ""
    if not left and path in (None, "diagonal"):
        if step.length == 1 and path is None and not pinned:
            return _sequential(step, segments, checkpoints, "one step has nothing to run beside")
        why = "every leaf of the carry is scale * carry + offset, element by element" + asked
        freely = path is None and segments is None and not pinned
        if freely and current_target().platform == "cpu" and not _has(step.jaxpr, _PRODUCTS):
            why += "; on a CPU one loop over such steps is faster, unless path='diagonal' or num_segments is given"
            plan = _sequential(step, 1, checkpoints, why)
            return dataclasses.replace(plan, path="diagonal", rounds=rounds, one_loop=True)
        why += _CHECKED if inexact else ""
        pieces = _pieces(step.length, segments or 1)
        plan = ScanPlan("diagonal", why, step.length, pieces, checkpoints, current_target().platform)
        return dataclasses.replace(plan, rounds=rounds, leaves=step.carry_names, inexact=inexact, checked=bool(inexact))
    if path == "diagonal":
        return _sequential(step, segments, checkpoints, "", path, stuck[left[0]])
    if not left:  # The matrix path was asked for, and any diagonal step is one of its kind.
        rounds, inexact, left = (), (), list(range(step.size))
    blocking = linear.blocker(step, left)
    if blocking is not None:
        return _sequential(step, segments, checkpoints, "", path, blocking)
    if len({jax.typeof(step.init[i]).manual_axis_type.varying for i in left}) > 1:
        told = "leaves of the carry vary over different axes of the mesh, and a transition has one vector of them all"
        return _sequential(step, segments, checkpoints, told, path)
    size = sum(step.init[i].size for i in left)
    against = None if path or segments is not None else _why_no_matrix(size, step.length)
    if against is not None:
        return _sequential(step, segments, checkpoints, against, path, stuck[left[0]])
    why = f"the carry's {size} numbers are affine in themselves, by matrices" + (
        asked or ("; num_segments was given" if segments is not None else "; the cost rule finds it faster")
    )
    why += _CHECKED
    pieces = segments or max(1, math.isqrt(step.length))
    plan = ScanPlan("matrix", why, step.length, pieces, checkpoints, current_target().platform)
    return dataclasses.replace(plan, rounds=rounds, leaves=step.carry_names, inexact=inexact, checked=True)


_CHECKED = "; where that is not what the step gives, as with a carry that is not finite, it runs again one by one"

# Matrix products and convolutions, which gain by being made for all steps at once.
_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")


def _has(jaxpr: Any, names: Sequence[str]) -> bool:
    """Whether a step has an operation of one of these names."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names:
            return True
        inner = (getattr(value, "jaxpr", value) for value in eqn.params.values())
        if any(_has(body, names) for body in inner if hasattr(body, "eqns")):
            return True
    return False


def solve(step: Step) -> tuple[tuple[tuple[int, ...], ...], dict[int, General], tuple[int, ...]]:
    """The leaves that are affine in themselves, given those found before them; and what stops each of the others.

    Of the former, those whose form is the step's for finite numbers alone are told too.
    """
    rounds: list[tuple[int, ...]] = []
    stuck: dict[int, General] = {}
    inexact: list[int] = []

    # All leaves in one trace, and each of them once: what hangs on an unknown leaf is not affine, whatever it does.
    def look(carry: Sequence[Any], x: Sequence[Any]) -> None:
        known: set[int] = set()
        waiting = list(range(step.size))
        while True:
            ready = [leaf for leaf in waiting if step.depends[leaf] - {leaf} <= known]
            made = {leaf: inspected(step, leaf, known, carry, x) for leaf in ready}
            found = tuple(leaf for leaf in ready if not isinstance(made[leaf], General))
            stuck.update((leaf, one) for leaf, one in made.items() if isinstance(one, General))
            inexact.extend(leaf for leaf in found if not _exact(made[leaf], step.init[leaf].dtype))
            waiting = [leaf for leaf in waiting if leaf not in made]
            if not found:
                break
            rounds.append(found)
            known.update(found)
        for leaf in waiting:
            one = inspected(step, leaf, known, carry, x)
            assert isinstance(one, General)
            stuck[leaf] = one

    first = [jax.eval_shape(lambda x: x[0], x) for x in step.xs]
    jax.eval_shape(look, list(step.init), first)
    return tuple(rounds), stuck, tuple(inexact)


def _exact(made: Affine | General | None, dtype: Any) -> bool:
    """Whether the form is the step's also for numbers that are not finite."""
    if not isinstance(made, Affine) or not jnp.issubdtype(dtype, jnp.inexact):
        return True
    # A state of float32 goes on where one of float16 has overflowed; float64 has products over many steps.
    return made.exact and diagonal.takes(dtype) and jnp.finfo(dtype).max >= jnp.finfo(jnp.bfloat16).max


def inspected(
    step: Step, leaf: int, known: Collection[int], carry: Sequence[Any], x: Sequence[Any]
) -> Affine | General | None:
    """`Affine` in itself, `General`, or None for a new value that does not hang on the carry; on traced values."""
    others = [
        value if i in known else General("carry", step.carry_names[i], "another leaf that is not known before it")
        for i, value in enumerate(carry)
    ]
    made = affine.split(step, leaf, others, x)
    if isinstance(made, General):
        return made
    if not isinstance(made, Affine):
        return None
    leaf_type = step.init[leaf]
    if jnp.issubdtype(leaf_type.dtype, jnp.bool_):
        return General("carry", step.carry_names[leaf], "a leaf of truth values has no scale")
    if affine.moves(made, leaf_type.shape):
        return General(made.views[-1].key.split()[0], step.carry_names[leaf], "the carry's elements change places")
    return made


class LoopCost(NamedTuple):
    """A platform's loops: seconds a step beside its arithmetic, one by one and side by side, and flops a second."""

    step: float
    beside: float
    rate: float


# Measured on a CPU of two cores, where a loop of small steps is so cheap that products of transitions never pay: 4096
# steps of 2, 8 and 32 numbers took 0.07, 0.12 and 1.4 ms one by one, and 0.43, 0.76 and 26 ms in 64 segments. Chips
# that were not measured have no row, and the matrix path runs on them only when it is asked for.
LOOPS = {"cpu": LoopCost(step=2e-8, beside=3e-6, rate=6e9)}


def _why_no_matrix(size: int, length: int) -> str | None:
    """Why products of transitions would not pay; None where the rule finds them faster."""
    platform = current_target().platform
    if platform not in LOOPS:
        return (
            f"matrix transitions were not timed on {platform}; pass num_segments to run them in parallel all the same"
        )
    loop = LOOPS[platform]
    pieces = max(1, math.isqrt(length))
    # The step is taken to be a product with a square matrix. In parallel it is made twice, and once a column of the
    # transition, for all segments together; then the segments follow one another.
    product = 2 * size**2 / loop.rate
    one_by_one = length * (loop.step + product)
    rounds = -(-length // pieces)
    together = rounds * (2 * loop.beside + pieces * (size + 2) * product) + pieces * (loop.step + product)
    if together < one_by_one:
        return None
    return (
        f"a transition of {size} numbers costs {size}^3 to multiply against {size}^2 to apply: about "
        f"{together * 1e3:.3g} ms in {pieces} segments against {one_by_one * 1e3:.3g} ms one by one; pass num_segments "
        "to run it in parallel all the same"
    )


def _pieces(length: int, segments: int) -> int:
    """How many equal pieces there are, the last one being shorter: 10 steps in 6 segments are 5 of 2."""
    return -(-length // -(-length // segments))


def _sequential(
    step: Step, segments: int | None, checkpoints: bool, why: str, path: str | None = None, by: General | None = None
) -> ScanPlan:
    if by is not None:
        told = f"{by.operation} at {by.line}: {by.reason}"
        why = f"{why} ({told})" if why else told
    if path is not None:
        raise ImplementationRefused(
            f"parallel_scan: the path {path!r} was asked for and cannot run this step: {why}. "
            "Fix: change the step, or leave path out."
        )
    pieces = _pieces(step.length, segments or sequential.default_segments(step.length)) if checkpoints else 1
    plan = ScanPlan("sequential", why, step.length, pieces, checkpoints, current_target().platform)
    return dataclasses.replace(
        plan, leaves=step.carry_names, primitive=by.operation if by else None, line=by.line if by else None
    )
