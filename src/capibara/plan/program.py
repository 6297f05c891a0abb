"""From a plan to a run: the planned step on real devices, its arguments where the layout puts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error
from capibara.plan.compiled import jitted_layout, surroundings

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from capibara.parallel.layout import Layout
    from capibara.plan.result import Plan

__all__ = ["Program", "program_of"]


@dataclass(frozen=True)
class Program:
    """A planned step. Call it with what `place` returns; donated arguments are gone after the call."""

    mesh: Mesh
    layout: Layout
    arguments: tuple[Any, ...]
    """Of the step (for a training plan parameters, optimizer state and batch): shapes, each with its sharding."""
    _step: Callable[..., Any] = field(repr=False)

    def place(self, *args: Any) -> tuple[Any, ...]:
        """The arguments as arrays on the mesh, each where the layout puts it."""
        import jax

        if len(args) != len(self.arguments):
            raise rule_error(
                f"The planned step takes {len(self.arguments)} arguments",
                f"{len(args)}",
                "pass all of them: of a training plan parameters, optimizer state and batch",
            )
        for number, (given, planned) in enumerate(zip(args, self.arguments, strict=True)):
            here, there = str(jax.tree.structure(given)), str(jax.tree.structure(planned))
            if here != there:
                raise rule_error(
                    f"Argument {number} is a tree like the one that was planned", f"{here} for {there}", "plan this one"
                )
            _check_leaves(f"Argument {number}", given, planned)
        _check_alive(args)
        return jax.tree.map(lambda leaf, shape: _placed(leaf, shape.sharding), args, self.arguments)

    def __call__(self, *args: Any) -> Any:
        _check_alive(args)
        with surroundings(self.layout, self.mesh):
            return self._step(*args)


def _check_leaves(what: str, given: Any, planned: Any) -> None:
    """The shapes and types that the layout was made for: another is another plan."""
    import jax

    for (path, leaf), wanted in zip(jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(planned), strict=True):
        try:
            found = jax.typeof(leaf)
        except TypeError:
            found = None
        if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise rule_error(
                f"{what}{jax.tree_util.keystr(path)} was planned as {wanted.dtype}{list(wanted.shape)}",
                repr(type(leaf)) if found is None else f"{found.dtype}{list(found.shape)}",
                "pass an array of this shape and type, or plan with yours",
            )


def _check_alive(args: tuple[Any, ...]) -> None:
    """A donated array's memory is the result's by now. XLA would say so of the first, without its name."""
    import jax

    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
            raise rule_error(
                "A donated argument is gone after the call that it was passed to",
                f"args{jax.tree_util.keystr(path)}, which an earlier call took",
                "go on with what that call returned, or `place` the argument again",
            )


def _placed(leaf: Any, sharding: Any) -> Any:
    """A copy on the mesh: the step may take its arguments' memory over, and the caller's own arrays stay.

    What is moved may share the caller's memory where that already lies on one of the devices, so it is copied first.
    """
    import jax
    import jax.numpy as jnp

    return jax.device_put(jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, sharding, may_alias=False)


def program_of(plan: Plan, devices: Sequence[Any] | None) -> Program:
    """The best layout of a plan on these devices; of a plan that does not fit it is the nearest, and refused."""
    if plan.best is None or not plan.fits or plan.job is None:
        raise rule_error("A program is made of a plan that fits", repr(plan), "take one of plan.changes and plan again")
    if devices is not None and not hasattr(devices, "__len__"):
        raise rule_error("devices is a list of them", repr(devices), "pass jax.devices()[:n], or nothing for the first")
    layout = plan.best.layout
    mesh = layout.mesh.build(devices)
    on_chip = mesh.devices.flat[0].platform != "cpu"  # a CPU has one memory
    jitted, shaped = jitted_layout(plan.job, layout, mesh, host_memory=on_chip)
    return Program(mesh, layout, shaped, jitted)
