"""`pipelined`: a function that scans over its layers, run as a pipeline without changing it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp

from capibara.errors import rule_error, unknown_name
from capibara.parallel.pipelines.after_layers import AfterLayers
from capibara.parallel.pipelines.automatic import along
from capibara.parallel.pipelines.batch_mixing import check_rows_stay_apart
from capibara.parallel.pipelines.layer_scan import find_layers
from capibara.parallel.pipelines.microbatch_twin import Twins, check_layers_do_not_count, rows_of
from capibara.parallel.pipelines.schedule import Schedule, check_layers, in_microbatches, rows_again
from capibara.parallel.pipelines.stages import mesh_of, run_stages, wide

__all__ = ["COMBINE", "pipelined", "why_not_pipelined"]

COMBINE = ("mean", "sum")
"""What a result without rows is of the microbatches' results, where a user says so."""

P = ParamSpec("P")
R = TypeVar("R")


def pipelined(
    fn: Callable[P, R],
    *,
    microbatches: int,
    batch: int | Sequence[int] = 1,
    axis_name: str = "pipeline",
    mesh: Any = None,
    combine: str | None = None,
    remat: bool = False,
    float32_sums: bool = False,
    form: str | None = None,
) -> Callable[P, R]:
    """`fn` with its scan over layers run as a pipeline along a mesh axis: the same results and gradients.

    The function is traced, and the scan found that takes slices of parameters and carries an activation. What comes
    before it runs as written. The scan runs as stages (`capibara.parallel.pipeline`). What comes after it, a
    loss for one, runs a microbatch at a time, each stage taking its share of them, and again in a backward pass: so it
    is neither repeated on every stage, nor does one hold what it makes of more than one microbatch.

    Args:
      fn: any function of arrays; the numbered arguments are its batch. Rows may meet before the scan, and after it in
        sums, but not in it.
      microbatches: parts that the rows are cut into, a multiple of the stages. More of them wait less.
      batch: which arguments are the batch, arrays [rows, ...]. By default the second, as in `loss(params, batch)`.
      axis_name: the mesh axis of the stages; the stacked parameters lie there by `PartitionSpec(axis_name)`.
      mesh: a mesh with the axis; the one in force (`jax.set_mesh`) by default. Its other axes stay automatic.
      combine: None takes a result without rows apart where rows meet in it: sums over rows are added up over the
        microbatches, and what is made of them (a masked mean's division, a perplexity) is done once. It is refused
        where rows meet in another way. Then "mean" or "sum" says what it is of the microbatches' own results.
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
    if combine is not None and combine not in COMBINE:
        raise unknown_name("way to combine microbatches", combine, COMBINE)
    numbers = (batch,) if isinstance(batch, int) else tuple(batch)

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        found = mesh_of(mesh, axis_name)
        schedule = Schedule(found.shape[axis_name], microbatches)
        _check_batch(args, numbers)
        cut, tail = _cut(fn, args, numbers, microbatches, combine)
        check_layers(cut.part.equation.params["length"], schedule)
        carries, extras = run_stages(
            cut.stage,
            cut.stacked,
            cut.feed,
            schedule,
            found,
            axis_name,
            aside=cut.aside,
            whole=cut.consts,
            remat=remat,
            float32_sums=float32_sums,
            form=form,
        )
        return cut.finish(tail, carries, extras, schedule, found, axis_name, combine)

    return cast("Callable[P, R]", run)


def why_not_pipelined(
    fn: Callable[..., Any], args: Sequence[Any], batch: Sequence[int] = (1,), microbatches: Sequence[int] = ()
) -> str:
    """Why `pipelined` would refuse the function, whatever the mesh, from shapes alone; "" where it would not.

    `microbatches` are the numbers of them that may be asked for: the first that is more than one is tried, and where
    there is none the least that divides the rows.
    """
    rows = next((leaf.shape[0] for number in batch for leaf in jax.tree.leaves(args[number]) if leaf.shape), 1)
    count = next((n for n in (*microbatches, *range(2, rows + 1)) if n > 1 and (n in microbatches or rows % n == 0)), 1)

    def cut(*args: Any) -> None:
        _cut(fn, args, tuple(batch), count, None)

    try:
        jax.eval_shape(cut, *args)
    except ValueError as error:
        return str(error)
    return ""


def _cut(
    fn: Callable[..., Any], args: tuple[Any, ...], batch: tuple[int, ...], count: int, combine: str | None
) -> tuple[_Cut, AfterLayers]:
    """The call in its parts, of which each microbatch can pass alone; an error says why not."""
    cut = _Cut(fn, args, batch, count)
    check_rows_stay_apart(fn, args, batch, after=combine is None and count > 1)
    check_layers_do_not_count(cut.whole, cut.part)
    return cut, AfterLayers(Twins(cut.whole, cut.part, one_program=combine is None), by_hand=combine is not None)


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
        # Both from shapes: of arrays on a mesh jnp writes other operations than of shapes, which lie nowhere.
        whole, self.part = find_layers(fn, jax.eval_shape(lambda *trees: trees, *args), batch), self.trace()
        self.whole = whole
        self.results = jax.tree.structure(jax.eval_shape(fn, *args))

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

    def finish(
        self,
        tail: AfterLayers,
        carries: Any,
        extras: Any,
        schedule: Schedule,
        mesh: Any,
        axis: str,
        combine: str | None,
    ) -> Any:
        """What comes after the loop: a microbatch of every stage at a time, and once what is made of all of them."""
        layers, whole = tail.layers, dict(zip(self.whole.arguments, self.leaves, strict=True))
        ends, ended = [*layers.results, *layers.extras], [*carries, *extras]
        fixed = dict(zip(tail.fixed, tail.twins.compute(tail.fixed, whole), strict=True))

        def one(done: Any, rows: Any) -> tuple[Any, Any]:
            values = {**fixed, **dict(zip(ends, done, strict=True))}
            values.update({layers.arguments[n]: value for n, value in zip(tail.rows, rows, strict=True)})
            made = layers.compute([*tail.joined, *tail.made], values)
            return [*map(wide, made[: len(tail.joined)])], made[len(tail.joined) :]

        def on_all_stages(totals: Any, mine: Any) -> tuple[Any, Any]:
            # Nothing of it is kept for a backward pass: scores over a vocabulary are the largest arrays of a model.
            parts, stacks = jax.vmap(jax.checkpoint(one, prevent_cse=False), spmd_axis_name=axis)(*mine)
            return along(tail.join(totals, parts), mesh, axis), stacks

        parts = jax.tree.map(
            lambda leaf: _by_turn(leaf, schedule, mesh, axis), (ended, [self.rows[n] for n in tail.rows])
        )
        nothing = along(tail.nothing(schedule.stages), mesh, axis)
        totals, stacks = jax.lax.scan(on_all_stages, nothing, parts)
        totals = tail.join_stages(totals)
        if combine is None:
            whole.update({tail.twins.of[var]: total for var, total in _pairs(tail.joined, totals)})
            # What has no rows is the same for every microbatch.
            whole.update({tail.twins.of[v]: leaf[0] for v, leaf in _pairs(ends, ended) if tail.twins.rows(v) is None})
            totals = tail.twins.compute(tail.numbers, whole)
        elif combine == "mean":
            totals = [total / schedule.microbatches for total in totals]
        numbers, rows = iter(totals), iter(stacks)
        made = [next(numbers) if place is None else _in_order(next(rows), place) for place in tail.places]
        return jax.tree.unflatten(self.results, made)


def _pairs(one: Iterable[Any], other: Iterable[Any]) -> list[tuple[Any, Any]]:
    return list(zip(one, other, strict=True))


def _by_turn(leaf: Any, schedule: Schedule, mesh: Any, axis: str) -> Any:
    """[microbatches, ...] as [turns, stages, ...], a stage having the microbatches that it holds."""
    return jnp.swapaxes(along(leaf.reshape(schedule.stages, -1, *leaf.shape[1:]), mesh, axis), 0, 1)


def _in_order(leaf: Any, place: int) -> Any:
    """[turns, stages, ...] as the rows of all microbatches."""
    return rows_again(jnp.swapaxes(leaf, 0, 1).reshape(-1, *leaf.shape[2:]), place)


def _fed(value: Any, whole: Any, part: Any, count: int) -> Any:
    """What each microbatch has of a value: its rows, or where it has none the value."""
    place = rows_of(whole.aval, part.aval)
    if place is None:
        return jnp.broadcast_to(value, (count, *jnp.shape(value)))
    return in_microbatches(value, count, place)


def _check_batch(args: Sequence[Any], batch: Sequence[int]) -> None:
    for number in batch:
        if not 0 <= number < len(args):
            raise rule_error(
                "`batch` numbers arguments", f"{number} of {len(args)} arguments", f"use 0 to {len(args) - 1}"
            )
    shapes = [jnp.shape(leaf) for number in batch for leaf in jax.tree.leaves(args[number])]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise rule_error(
            "Every array of a batch has the same number of rows, its first dimension",
            f"shapes {', '.join(map(str, dict.fromkeys(shapes))) or 'of no array'}",
            "give each the rows as its first dimension, and pass the rest as another argument",
        )
