"""Layers as stages of a pipeline: each place of a mesh axis holds some of the layers, and microbatches pass through.

One program runs on every stage. At each tick a stage takes what the stage before it computed at the tick before,
applies its own layers, and hands the result on. Stage s works on microbatch m at tick m + s, so the first and the last
`stages - 1` ticks leave some stages without work of their own. They compute on other rows meanwhile, and nobody reads
the result: a chip that waited would be no faster. The backward pass is the same loop, differentiated: it runs the other
way round, with the same share of waiting.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from capibara.errors import rule_error, say_once, unknown_name
from capibara.parallel.pipelines.automatic import along, looks_up, own_ticks, run_automatic
from capibara.parallel.pipelines.schedule import Schedule, check_layers, in_microbatches, rows_again

__all__ = ["FORMS", "mesh_of", "pipeline", "run_stages", "wide"]

logger = logging.getLogger("capibara.parallel")

FORMS = ("manual", "automatic")
"""Who lays the stages out: this module, or XLA's partitioner."""

Tree = TypeVar("Tree")


def pipeline(
    layer: Callable[[Any, Any], Any],
    stacked: Any,
    x: Tree,
    *,
    microbatches: int,
    mesh: Any = None,
    axis_name: str = "pipeline",
    rounds: int = 1,
    remat: bool = False,
    float32_sums: bool = False,
    form: str | None = None,
) -> Tree:
    """`x` through a stack of equal layers that lie on the stages of a mesh axis.

    It is `lax.scan(lambda x, w: (layer(x, w), None), x, stacked)[0]`, values and gradients, for a layer that treats the
    rows of `x` one by one.

    Args:
      layer: `layer(x, w) -> x`, one layer: rows of any number, of one shape and type.
      stacked: the layers' parameters, leaves [layers, ...], of which each stage holds its run: lay them out with
        `PartitionSpec(axis_name)`. With `rounds`, leaves [rounds, layers of a round, ...] and
        `PartitionSpec(None, axis_name)`.
      x: a pytree of arrays [rows, ...].
      microbatches: parts that the rows are cut into, a multiple of the stages. More of them wait less.
      mesh: a mesh with the axis; the one in force (`jax.set_mesh`) by default. Its other axes stay automatic: what the
        layer says of data or model sharding holds inside.
      axis_name: the mesh axis of the stages.
      rounds: how often a microbatch passes all stages; see `Schedule`.
      remat: keep of a stage only what entered it, one microbatch a tick, and compute the rest again.
      float32_sums: add up the parameters' gradients over microbatches in float32 whatever their type, which takes
        memory for a float32 form of a stage's parameters. Otherwise they are added up in the parameters' type.
      form: "manual", where each send is written out, or "automatic", where XLA's partitioner puts them in. None takes
        the first, but for layers that look up by index on a mesh with other axes, which XLA cannot split inside of it.

    A stage keeps, beside its layers, the activations of all rows that enter the first layer and of all that leave the
    last (those of its part of the other mesh axes); for a backward pass also what its layers keep, a tick at a time.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("pipeline",))
        >>> w, x = jnp.ones((4, 2, 2)) / 2, jnp.ones((6, 2))
        >>> pipeline(lambda x, w: jnp.sin(x @ w), w, x, microbatches=2, mesh=mesh).shape
        (6, 2)
    """
    found = mesh_of(mesh, axis_name)
    schedule = Schedule(found.shape[axis_name], microbatches, rounds)
    _check_stacked(stacked, schedule)
    feed = jax.tree.map(lambda leaf: in_microbatches(leaf, microbatches), x)
    _check_carry(layer, stacked, feed, rounds)

    def stage(weights: Any, carry: Any, aside: Any, whole: Any) -> Any:
        del aside, whole
        return jax.lax.scan(lambda one, w: (layer(one, w), None), carry, weights)

    out, _ = run_stages(
        stage, stacked, feed, schedule, found, axis_name, remat=remat, float32_sums=float32_sums, form=form
    )
    return jax.tree.map(rows_again, out)


def run_stages(
    stage: Callable[..., Any],
    stacked: Any,
    feed: Any,
    schedule: Schedule,
    mesh: Any,
    axis: str,
    *,
    aside: Any = (),
    whole: Any = (),
    remat: bool = False,
    float32_sums: bool = False,
    form: str | None = None,
) -> tuple[Any, Any]:
    """The loop itself: manual along `axis` and automatic along every other, or all automatic (`FORMS`).

    `stage(weights, carry, aside, whole)` applies a stage's layers and returns the carry and what each layer gives
    beside it, leaves [layers of the stage, ...]. `feed` has each microbatch's first carry and `aside` what else a layer
    reads of it, leaves [microbatches, ...]; `whole` is what every stage reads. The result has each microbatch's last
    carry, [microbatches, ...], each stage holding as many of them, and what the layers gave, [microbatches, layers,
    ...], each stage holding its layers'. The second is for one round only.
    """
    stages = schedule.stages
    form = _form(form, stage, stacked, feed, aside, whole, schedule, mesh, axis)
    if remat:
        stage = jax.checkpoint(stage, prevent_cse=False)  # a scan already keeps the two computations apart
    if form == "automatic":
        return _automatic(stage, stacked, feed, aside, whole, schedule, mesh, axis, float32_sums)
    # A carry that comes round to the first stage again is taken up there only if there are rounds.
    steps = [(one, one + 1) for one in range(stages - 1)] + ([(stages - 1, 0)] if schedule.rounds > 1 else [])

    def on_one_stage(number: Any, weights: Any, mine: Any, aside: Any, whole: Any) -> Any:
        here = number[0]
        aside, whole = jax.tree.map(_typed_again, (aside, whole), types)
        first = jax.tree.map(lambda leaf: _to_the_first(leaf, axis, stages), mine)

        def tick(carry: Any, now: Any) -> tuple[Any, Any]:
            microbatch, turn = schedule.at(here, now)
            fresh = (here == 0) & (turn == 0)
            carry = jax.tree.map(lambda new, old: jnp.where(fresh, _row(new, microbatch), old), first, carry)
            used = weights if schedule.rounds == 1 else jax.tree.map(lambda leaf: _row(leaf, turn), weights)
            used = jax.tree.map(_typed_again, used, weight_types)
            carry, beside = stage(used, carry, jax.tree.map(lambda leaf: _row(leaf, microbatch), aside), whole)
            return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, axis, steps), carry), (carry, beside)

        # A stage that waits works on rows too, and on real ones: zeros could make a layer divide by zero, and no
        # factor of zero would take that out of the gradients.
        start = jax.tree.map(lambda leaf: leaf[0], mine)
        _, (seen, beside) = jax.lax.scan(tick, start, jnp.arange(schedule.ticks))
        done = jax.tree.map(lambda leaf: _from_the_last(_finished(leaf, schedule), axis, here, stages), seen)
        return done, jax.tree.map(lambda leaf: own_ticks(leaf, here, schedule), beside)

    types, weight_types = jax.tree.map(lambda leaf: leaf.dtype, ((aside, whole), stacked))
    aside, whole = jax.tree.map(wide, (aside, whole))
    stacked = jax.tree.map(wide, stacked) if float32_sums else stacked
    split, everywhere = PartitionSpec(axis), PartitionSpec()
    mapped = jax.shard_map(
        on_one_stage,
        mesh=mesh,
        in_specs=(split, split if schedule.rounds == 1 else PartitionSpec(None, axis), split, everywhere, everywhere),
        out_specs=(split, PartitionSpec(None, axis)),
        axis_names={axis},
        # The layers may hold kernels and traced functions, whose results are not typed by the axes they vary over.
        check_vma=False,
    )
    # Partly manual maps run inside of jit only.
    return jax.jit(mapped)(jnp.arange(stages), stacked, feed, aside, whole)


def _form(
    form: str | None,
    stage: Any,
    stacked: Any,
    feed: Any,
    aside: Any,
    whole: Any,
    schedule: Schedule,
    mesh: Any,
    axis: str,
) -> str:
    if form is not None:
        if form not in FORMS:
            raise unknown_name("form of a pipeline", form, FORMS)
        return form
    if all(size == 1 for name, size in mesh.shape.items() if name != axis):
        return "manual"
    part = _shapes(stacked, 0 if schedule.rounds == 1 else 1), _shapes(feed, 1), _shapes(aside, 1), _shapes(whole, 0)
    found = looks_up(stage, *part)
    if found is None:
        return "manual"
    text = "layers with a %s: the pipeline's stages are left to XLA's partitioner (form='automatic')"
    say_once(logger, found, text, found, level=logging.INFO)
    return "automatic"


def _shapes(tree: Any, cut: int) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf)[cut:], leaf.dtype), tree)


def _automatic(
    stage: Any,
    stacked: Any,
    feed: Any,
    aside: Any,
    whole: Any,
    schedule: Schedule,
    mesh: Any,
    axis: str,
    float32_sums: bool,
) -> tuple[Any, Any]:
    stages, types = schedule.stages, jax.tree.map(lambda leaf: leaf.dtype, stacked)

    def typed(weights: Any, *rest: Any) -> Any:
        return stage(jax.tree.map(_typed_again, weights, types), *rest)

    def by_stage(leaf: Any) -> Any:
        leaf = wide(leaf) if float32_sums else leaf
        if schedule.rounds == 1:
            return leaf.reshape(stages, -1, *leaf.shape[1:])
        return jnp.moveaxis(leaf.reshape(schedule.rounds, stages, -1, *leaf.shape[2:]), 1, 0)

    def run(stacked: Any, feed: Any, aside: Any, whole: Any) -> Any:
        weights = along(jax.tree.map(by_stage, stacked), mesh, axis)
        seen, beside = run_automatic(typed, weights, feed, aside, whole, schedule, mesh, axis)
        return along(jax.tree.map(lambda leaf: _finished(leaf, schedule), seen), mesh, axis), beside

    return jax.jit(run)(stacked, feed, aside, whole)


def mesh_of(mesh: Any, axis: str) -> Any:
    """The mesh that was given or is in force, which has the axis."""
    found = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if found.empty:
        raise rule_error(
            "A pipeline runs on a mesh", "none given and none in force", "pass mesh=, or call it under jax.set_mesh"
        )
    if axis not in found.shape:
        raise unknown_name("mesh axis", axis, found.axis_names)
    kind = dict(zip(found.axis_names, found.axis_types, strict=True))[axis]
    if kind != AxisType.Auto:
        raise rule_error(
            "The mesh axis of the stages is of type Auto, and no shard_map has taken it",
            f"{axis!r} of type {kind.name}",
            "build the mesh with MeshConfig(...).build(), or with axis_types=(AxisType.Auto, ...)",
        )
    return found


def _row(leaf: Any, index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def _finished(leaf: Any, schedule: Schedule) -> Any:
    """Of what the last stage made at each tick, what was a microbatch's last."""
    if schedule.rounds == 1:
        return leaf[schedule.stages - 1 :]
    firsts = schedule.finished()[:: schedule.stages]
    return jnp.concatenate([leaf[one : one + schedule.stages] for one in firsts])


# Both ways by sends from one stage to one other. They add nothing up, so that their gradients are exact in every type,
# and XLA keeps the layout along the other mesh axes through them, which it does not through an all-to-all.


def _to_the_first(leaf: Any, axis: str, stages: int) -> Any:
    """[n, ...] of each stage as [stages * n, ...] on the first; elsewhere nothing of use."""
    return jnp.concatenate([leaf, *(jax.lax.ppermute(leaf, axis, [(one, 0)]) for one in range(1, stages))])


def _from_the_last(leaf: Any, axis: str, here: Any, stages: int) -> Any:
    """[stages * n, ...] of the last stage as [n, ...] on each."""
    parts = jnp.split(leaf, stages)
    mine = parts[-1]
    for one in range(stages - 1):
        mine = jnp.where(here == one, jax.lax.ppermute(parts[one], axis, [(stages - 1, one)]), mine)
    return mine


def wide(leaf: Any) -> Any:
    """What is added up over stages or microbatches, or has a gradient that is: in float32 where it was narrower."""
    narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return leaf.astype(jnp.float32) if narrow else leaf


def _typed_again(leaf: Any, dtype: Any) -> Any:
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _check_stacked(stacked: Any, schedule: Schedule) -> None:
    lead = 1 if schedule.rounds == 1 else 2
    fronts = sorted({jnp.shape(leaf)[:lead] for leaf in jax.tree.leaves(stacked)})
    if len(fronts) != 1 or len(fronts[0]) < lead or (lead == 2 and fronts[0][0] != schedule.rounds):
        form = "[layers, ...]" if lead == 1 else f"[{schedule.rounds} rounds, layers of a round, ...]"
        raise rule_error(
            f"Every leaf of the stacked parameters is {form}",
            f"leading dimensions {', '.join(map(str, fronts))}",
            "stack the parameters of equal layers" if lead == 1 else "reshape [layers, ...] to that",
        )
    check_layers(math.prod(fronts[0]), schedule)


def _check_carry(layer: Callable[[Any, Any], Any], stacked: Any, feed: Any, rounds: int) -> None:
    lead = 1 if rounds == 1 else 2
    carry, weights = _shapes(feed, 1), _shapes(stacked, lead)
    made = jax.eval_shape(layer, carry, weights)
    words = [_words(tree) for tree in (carry, made)]
    if words[0] != words[1]:
        raise rule_error(
            "A layer gives what it takes, so that the next can follow it: same tree, shapes and types",
            f"{words[1]} from {words[0]}",
            "convert or project at the end of the layer",
        )


def _words(tree: Any) -> str:
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree))
