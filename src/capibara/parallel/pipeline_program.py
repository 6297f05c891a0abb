"""`pipelined`: a function that scans over its layers, run as a pipeline without changing it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error, unknown_name
from capibara.parallel.batch_mixing import check_rows_stay_apart
from capibara.parallel.layer_scan import LayerScan, find_layers
from capibara.parallel.pipeline_automatic import along
from capibara.parallel.pipeline_schedule import Schedule, check_layers, in_microbatches, rows_again
from capibara.parallel.pipeline_stages import mesh_of, run_stages

__all__ = ["COMBINE", "pipelined"]

COMBINE = ("mean", "sum")
"""What the function's result of all rows is of its results of the microbatches, where it has no rows itself."""


def pipelined(
    fn: Callable[..., Any],
    *,
    microbatches: int,
    batch: int | Sequence[int] = 1,
    axis: str = "pipeline",
    mesh: Any = None,
    combine: str = "mean",
    remat: bool = False,
    float32_sums: bool = False,
    form: str | None = None,
) -> Callable[..., Any]:
    """`fn` with its scan over layers run as a pipeline along a mesh axis: the same results and gradients.

    The function is traced, and the scan found that takes slices of parameters and carries an activation. What comes
    before it runs as written. The scan runs as stages (`capibara.parallel.pipeline`). What comes after it, a
    loss for one, runs a microbatch at a time, each stage taking its share of them, and again in a backward pass: so it
    is neither repeated on every stage, nor does one hold what it makes of more than one microbatch.

    Args:
      fn: any function of arrays; the numbered arguments are its batch. Rows do not meet before the scan is over.
      microbatches: parts that the rows are cut into, a multiple of the stages. More of them wait less.
      batch: which arguments are the batch, arrays [rows, ...]. By default the second, as in `loss(params, batch)`.
      axis: the mesh axis of the stages; the stacked parameters lie there by `PartitionSpec(axis)`.
      mesh: a mesh with the axis; the one in force (`jax.set_mesh`) by default. Its other axes stay automatic.
      combine: of a result without rows: "mean", where it is a mean over rows (a loss), or "sum".
      remat: keep of a stage only what entered it, one microbatch a tick, and compute the rest again.
      float32_sums: add up the layers' gradients over microbatches in float32 whatever the parameters' type, which
        takes memory for a float32 form of a stage's parameters.
      form: who lays the stages out, see `capibara.parallel.pipeline`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.mean(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0] ** 2)
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("pipeline",))
        >>> w, x = jnp.ones((4, 2, 2)) / 2, jnp.ones((6, 2))
        >>> staged = pipelined(loss, microbatches=3, mesh=mesh)
        >>> bool(jnp.allclose(jax.grad(loss)(w, x), jax.grad(staged)(w, x)))
        True
    """
    if not callable(fn):
        raise rule_error("A function is run as a pipeline", repr(fn), "pass loss(params, batch) or the like")
    if combine not in COMBINE:
        raise unknown_name("way to combine microbatches", combine, COMBINE)
    numbers = (batch,) if isinstance(batch, int) else tuple(batch)

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        found = mesh_of(mesh, axis)
        schedule = Schedule(found.shape[axis], microbatches)
        _check_batch(args, numbers)
        cut = _Cut(fn, args, numbers, microbatches)
        check_layers(cut.part.equation.params["length"], schedule)
        check_rows_stay_apart(fn, args, numbers)
        carries, extras = run_stages(
            cut.stage,
            cut.stacked,
            cut.feed,
            schedule,
            found,
            axis,
            aside=cut.aside,
            whole=cut.consts,
            remat=remat,
            float32_sums=float32_sums,
            form=form,
        )
        return cut.finish(carries, extras, schedule, found, axis, microbatches if combine == "mean" else 1)

    return run


class _Cut:
    """One call, cut at its loop over layers: what is computed before it, and what stages do in it and after it."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], batch: tuple[int, ...], count: int) -> None:
        rows = {n: jax.tree.map(lambda leaf: in_microbatches(leaf, count), args[n]) for n in batch}
        parts = tuple(
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows[n]) if n in rows else one
            for n, one in enumerate(args)
        )
        shapes = tuple(jax.eval_shape(lambda tree: tree, one) for one in parts)
        self.trace = functools.partial(find_layers, fn, shapes, batch)
        whole, self.part = find_layers(fn, args, batch), self.trace()
        self.results = jax.eval_shape(fn, *args)
        each = jax.tree.leaves(jax.eval_shape(fn, *parts))
        self.places = [_rows_of(*pair) for pair in zip(jax.tree.leaves(self.results), each, strict=True)]
        self.numbers = [leaf for leaf, place in zip(each, self.places, strict=True) if place is None]

        self.leaves = jax.tree.leaves(args)
        self.rows = [leaf for n, one in enumerate(args) for leaf in jax.tree.leaves(rows.get(n, one))]
        # Before the loop everything is computed as written, for all rows at once.
        given = dict(zip(whole.arguments, self.leaves, strict=True))
        before = iter(whole.compute([*whole.carries, *whole.consts, *whole.stacked], given))
        self.feed = [_fed(next(before), atom, part, count) for atom, part in _pairs(whole.carries, self.part.carries)]
        consts = [next(before) for _ in whole.consts]
        self.stacked = list(before)
        self.moving = [n for n, atom in enumerate(self.part.consts) if self.part.depends(atom)]
        self.aside = [_fed(consts[n], whole.consts[n], self.part.consts[n], count) for n in self.moving]
        self.consts = [value for n, value in enumerate(consts) if n not in self.moving]

    def stage(self, weights: Any, carry: Any, aside: Any, fixed: Any) -> Any:
        """A run of layers. Traced where the stages' axis is manual: constraints and kernels in it look at the mesh."""
        layers = self.trace()
        own, rest = dict(zip(self.moving, aside, strict=True)), iter(fixed)
        consts = [own[n] if n in own else next(rest) for n in range(len(layers.consts))]
        return jax.lax.scan(lambda one, w: layers.layer(consts, one, w), carry, weights)

    def finish(self, carries: Any, extras: Any, schedule: Schedule, mesh: Any, axis: str, over: int) -> Any:
        """What comes after the loop: a microbatch of every stage at a time. `over` divides what has no rows."""
        layers, tail = self.part, _Tail(self.part)
        given = dict(zip(layers.arguments, self.leaves, strict=True))
        fixed = {layers.arguments[n]: self.leaves[n] for n in tail.arguments}
        fixed.update(zip(tail.made, layers.compute(tail.made, given), strict=True))

        def one(done: Any, rows: Any) -> tuple[Any, Any]:
            values = {**fixed, **dict(zip([*layers.results, *layers.extras], done, strict=True))}
            values.update({layers.arguments[n]: value for n, value in zip(tail.rows, rows, strict=True)})
            made = _pairs(layers.compute(layers.outputs, values), self.places)
            return [leaf for leaf, place in made if place is None], [leaf for leaf, place in made if place is not None]

        def on_all_stages(totals: Any, mine: Any) -> tuple[Any, Any]:
            # Nothing of it is kept for a backward pass: scores over a vocabulary are the largest arrays of a model.
            sums, stacks = jax.vmap(jax.checkpoint(one, prevent_cse=False), spmd_axis_name=axis)(*mine)
            return jax.tree.map(lambda total, more: total + more.sum(0), totals, sums), stacks

        parts = jax.tree.map(
            lambda leaf: _by_turn(leaf, schedule, mesh, axis), ([*carries, *extras], [self.rows[n] for n in tail.rows])
        )
        zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.numbers]
        sums, stacks = jax.lax.scan(on_all_stages, zeros, parts)
        totals, rows = iter(sums), iter(stacks)
        made = [next(totals) / over if place is None else _in_order(next(rows), place) for place in self.places]
        return jax.tree.unflatten(jax.tree.structure(self.results), made)


class _Tail:
    """What the function does after its loop reads beside the loop's results."""

    def __init__(self, layers: LayerScan) -> None:
        _, sources = layers.needed(layers.stacked)
        # What is made of the stacked parameters, a norm of all of them for one, is made outside, where none is whole.
        of_stacks = layers.made_of(sources)
        fixed = [var for var in of_stacks if not layers.depends(var)]
        _, read = layers.needed(layers.outputs, [*layers.results, *layers.extras, *fixed])
        self.made = [var for var in read if var in of_stacks and not layers.depends(var)]
        rest = [n for n, var in enumerate(layers.arguments) if var in read and var not in of_stacks]
        self.rows = [n for n in rest if layers.depends(layers.arguments[n])]
        """Flat arguments of the batch."""
        self.arguments = [n for n in rest if n not in self.rows]
        """Flat arguments that are parameters."""


def _pairs(one: Iterable[Any], other: Iterable[Any]) -> list[tuple[Any, Any]]:
    return list(zip(one, other, strict=True))


def _by_turn(leaf: Any, schedule: Schedule, mesh: Any, axis: str) -> Any:
    """[microbatches, ...] as [turns, stages, ...], a stage having the microbatches that it holds."""
    return jnp.swapaxes(along(leaf.reshape(schedule.stages, -1, *leaf.shape[1:]), mesh, axis), 0, 1)


def _in_order(leaf: Any, place: int) -> Any:
    """[turns, stages, ...] as the rows of all microbatches."""
    return rows_again(jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[2:]), place)


def _rows_of(whole: Any, part: Any) -> int | None:
    """The dimension of the rows, which is longer of all rows than of a microbatch's; None where there is none."""
    found = [dim for dim, sizes in enumerate(zip(whole.shape, part.shape, strict=True)) if sizes[0] != sizes[1]]
    if len(found) > 1:
        raise rule_error(
            "The rows of a batch are one dimension of what is made of it",
            f"{whole.shape} of all rows and {part.shape} of a microbatch",
            "keep them apart from other dimensions",
        )
    return found[0] if found else None


def _fed(value: Any, whole: Any, part: Any, count: int) -> Any:
    """What each microbatch has of a value: its rows, or where it has none the value."""
    place = _rows_of(whole.aval, part.aval)
    if place is None:
        return jnp.broadcast_to(value, (count, *jnp.shape(value)))
    return in_microbatches(value, count, place)


def _check_batch(args: Sequence[Any], batch: Sequence[int]) -> None:
    for number in batch:
        if not 0 <= number < len(args):
            raise rule_error(
                "`batch` numbers arguments", f"{number} of {len(args)} arguments", f"use 0 to {len(args) - 1}"
            )
