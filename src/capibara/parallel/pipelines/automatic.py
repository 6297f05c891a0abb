"""Stages that XLA's partitioner lays out: one array holds what all stages work on, and passing on is shifting it.

The manual form (`capibara.parallel.pipelines.stages`) says itself what is sent where. Inside of it XLA cannot split a
lookup along a dimension that one of the other mesh axes splits: it stops with a check failure. Here nothing is manual,
and lookups are split as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from capibara.parallel.pipelines.schedule import Schedule

__all__ = ["along", "looks_up", "own_ticks", "run_automatic"]


def run_automatic(
    stage: Callable[..., Any], weights: Any, feed: Any, aside: Any, whole: Any, schedule: Schedule, mesh: Any, axis: str
) -> tuple[Any, Any]:
    """The last stage's carry at each tick, and what the layers gave beside it, [microbatches, layers, ...].

    `weights` are [stages, layers of a stage, ...], and where there are rounds [stages, rounds, ...].
    """
    stages = schedule.stages
    numbers = jnp.arange(stages)
    on_all = jax.vmap(stage, in_axes=(0, 0, 0, None), spmd_axis_name=axis)

    def tick(carry: Any, now: Any) -> tuple[Any, Any]:
        microbatch, turn = schedule.at(numbers, now)
        fresh = (numbers == 0) & (turn == 0)

        def taken(new: Any, old: Any) -> Any:
            first = jax.lax.dynamic_index_in_dim(new, microbatch[0])
            return jnp.where(fresh.reshape(stages, *[1] * (old.ndim - 1)), first, jnp.roll(old, 1, axis=0))

        carry = along(jax.tree.map(taken, feed, carry), mesh, axis)
        used = weights
        if schedule.rounds > 1:
            used = jax.tree.map(lambda leaf: jax.vmap(lambda one, n: one[n])(leaf, turn), weights)
        carry, beside = on_all(used, carry, jax.tree.map(lambda leaf: leaf[microbatch], aside), whole)
        return along(carry, mesh, axis), (jax.tree.map(lambda leaf: leaf[-1], carry), beside)

    def of_own_ticks(leaf: Any) -> Any:  # [ticks, stages, layers of a stage, ...]
        each = jax.vmap(lambda one, n: own_ticks(one, n, schedule), in_axes=(1, 0), out_axes=1)(leaf, numbers)
        return each.reshape(each.shape[0], -1, *each.shape[3:])

    # Every stage starts on real rows: zeros could make a layer divide by zero, see the manual form.
    start = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], (stages, *leaf.shape[1:])), feed)
    _, (last, beside) = jax.lax.scan(tick, along(start, mesh, axis), jnp.arange(schedule.ticks))
    return last, jax.tree.map(of_own_ticks, beside)


def own_ticks(leaf: Any, stage: Any, schedule: Schedule) -> Any:
    """[ticks, ...] of a stage as [microbatches, ...]: those at which the work was its own."""
    return jax.lax.dynamic_slice_in_dim(leaf, stage, schedule.microbatches)


def along(tree: Any, mesh: Any, axis: str) -> Any:
    """Leaves split along `axis` by their first dimension; of the others XLA decides."""

    def place(leaf: Any) -> Any:
        spec = PartitionSpec(axis, *[PartitionSpec.UNCONSTRAINED] * (leaf.ndim - 1))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else spec)

    return jax.tree.map(place, tree)


def looks_up(fn: Callable[..., Any], *args: Any) -> str | None:
    """The first lookup or scattered update by index in a function; None where it has none."""
    return next((name for name in _primitives(jax.make_jaxpr(fn)(*args).jaxpr) if name in _LOOKUPS), None)


_LOOKUPS = ("gather", "scatter", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub", "scatter-mul",
            "scatter_mul", "scatter-min", "scatter_min", "scatter-max", "scatter_max")  # fmt: skip


def _primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name == "pallas_call":
            continue  # a kernel: XLA splits it as it was told, or not at all
        for inner in _inner(equation.params):
            yield from _primitives(inner)


def _inner(params: Any) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(one, "jaxpr", one)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
