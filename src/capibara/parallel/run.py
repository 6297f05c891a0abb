"""A layout made into a step: traced under its mesh and its rules, its arguments where it puts them, compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from capibara.errors import rule_error

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from capibara.mesh.layout import Layout
    from capibara.parallel.job import Job

__all__ = ["Program", "jitted_layout", "laid_out", "lower_layout", "lower_program", "surroundings"]


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


def laid_out(job: Job, layout: Layout, devices: Sequence[Any] | None = None) -> Program:
    """The job's step under a layout, on these devices or the first of those there are."""
    if devices is not None and not hasattr(devices, "__len__"):
        raise rule_error("devices is a list of them", repr(devices), "pass jax.devices()[:n], or nothing for the first")
    mesh = layout.mesh.build(devices)
    on_chip = mesh.devices.flat[0].platform != "cpu"  # a CPU has one memory
    jitted, shaped = jitted_layout(job, layout, mesh, host_memory=on_chip)
    return Program(mesh, layout, shaped, jitted)


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


def lower_program(program: Program) -> Any:
    """A laid out program lowered for its mesh."""
    with surroundings(program.layout, program.mesh):
        return program._step.lower(*program.arguments)  # type: ignore[attr-defined]


def lower_layout(job: Job, layout: Layout, mesh: Mesh, *, host_memory: bool = True) -> Any:
    """The job's function lowered for `mesh` with its arguments where the layout puts them."""
    jitted, shaped = jitted_layout(job, layout, mesh, host_memory=host_memory)
    with surroundings(layout, mesh):
        return jitted.lower(*shaped)


@contextlib.contextmanager
def surroundings(layout: Layout, mesh: Mesh) -> Iterator[None]:
    """The mesh, the rules and the evidence that a laid out program is traced under."""
    import jax

    from capibara.kernels.core import trusting
    from capibara.mesh.rules import use_rules

    if mesh.size == 1:
        # One device has nothing to lay out: without a mesh constraints are nothing and kernels are called as they are.
        with trusting.optimising(True):
            yield
        return
    # Kernels as in an optimisation context, by which it was planned.
    with use_rules(layout.rules_in_force()), jax.set_mesh(mesh), trusting.optimising(True):
        yield


def jitted_layout(job: Job, layout: Layout, mesh: Mesh, *, host_memory: bool = True) -> tuple[Any, tuple[Any, ...]]:
    """The job's function under jit for `mesh`, and its arguments' shapes with the shardings of the layout.

    It is traced inside of `surroundings`. Outputs that can take a donated argument's memory lie like that argument; the
    compiler places the others. Without `host_memory` arguments that the layout keeps with the host stay on the device
    (the CPU has one memory).
    """
    import jax
    from jax.sharding import NamedSharding

    fn, args = job.built(dict(layout.choices), layout.stages)
    leaves, tree = jax.tree.flatten(tuple(args))
    if len(leaves) != len(layout.specs):
        raise rule_error(
            "A layout has one spec for each flat argument", f"{len(layout.specs)} for {len(leaves)}", "plan this job"
        )
    hosted = set(layout.host) if host_memory else set()

    def sharding(index: int) -> NamedSharding:
        if index in hosted:
            return NamedSharding(mesh, layout.specs[index], memory_kind="pinned_host")
        return NamedSharding(mesh, layout.specs[index])

    shaped = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(index)) for index, leaf in enumerate(leaves)
    ]
    run = _fetching(
        fn, tree, {index: NamedSharding(mesh, layout.specs[index], memory_kind="device") for index in hosted}
    )
    arguments = jax.tree.unflatten(tree, shaped)
    with surroundings(layout, mesh):
        # With the very function and shardings that it is lowered with: jax then traces it once.
        results, results_tree = jax.tree.flatten(jax.eval_shape(run, *arguments))
        taken = _replaced(results, leaves, _donated(job, args))
        placed = [None if index is None else sharding(index) for index in taken]
    jitted = jax.jit(run, donate_argnums=job.donate, out_shardings=jax.tree.unflatten(results_tree, placed))
    return jitted, arguments


def _donated(job: Job, args: Sequence[Any]) -> list[int]:
    """Flat positions of the donated arguments."""
    import jax

    found: list[int] = []
    position = 0
    for number, one in enumerate(args):
        count = len(jax.tree.leaves(one))
        if number in job.donate:
            found.extend(range(position, position + count))
        position += count
    return found


def _replaced(results: Iterable[Any], leaves: Sequence[Any], donated: Iterable[int]) -> list[int | None]:
    """For each result the donated argument whose place it takes: the first left with its shape and type."""
    free: dict[Any, list[int]] = {}
    for index in donated:
        free.setdefault((tuple(leaves[index].shape), str(leaves[index].dtype)), []).append(index)
    taken: list[int | None] = []
    for one in results:
        same = free.get((tuple(one.shape), str(one.dtype)))
        taken.append(same.pop(0) if same else None)
    return taken


def _fetching(fn: Callable[..., Any], tree: Any, homes: dict[int, Any]) -> Callable[..., Any]:
    """`fn` on arguments of which some are held by the host.

    Written before the step, but the compiler fetches each where it is read: the chip's peak of llama-70b on v4-64,
    31.3 GB, is less than parameters, gradients and the whole optimizer state at once, 34.5 GB.
    """
    import jax

    if not homes:
        return fn

    def run(*args: Any) -> Any:
        leaves = enumerate(jax.tree.leaves(args))
        here = [jax.device_put(one, homes[index]) if index in homes else one for index, one in leaves]
        return fn(*jax.tree.unflatten(tree, here))

    return run
