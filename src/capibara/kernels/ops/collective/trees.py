"""All-reduce of a whole tree of arrays, such as gradients: in buckets, exact or compressed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, overload

import jax
from jax.sharding import PartitionSpec as P

from capibara.errors import rule_error
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import describe
from capibara.kernels.ops.collective import over_mesh
from capibara.kernels.ops.collective.axes import AxisName, State, Tree, read_reduction
from capibara.kernels.ops.collective.buckets import BUCKET_BYTES, bucketed_all_reduce, plan_buckets
from capibara.kernels.ops.collective.compressed import compressed_all_reduce
from capibara.kernels.ops.collective.compressed.rules import check_sum


@overload
def all_reduce_tree(
    tree: Tree, axis_name: AxisName | None = None, *, op: str = "sum", compress: bool = False, overlap: bool = True,
    state: None = None, mesh: Any = None, bucket_bytes: int = BUCKET_BYTES,
) -> Tree: ...  # fmt: skip


@overload
def all_reduce_tree(
    tree: Tree, axis_name: AxisName | None = None, *, op: str = "sum", compress: bool = False, overlap: bool = True,
    state: State, mesh: Any = None, bucket_bytes: int = BUCKET_BYTES,
) -> tuple[Tree, State]: ...  # fmt: skip


def all_reduce_tree(
    tree: Tree,
    axis_name: AxisName | None = None,
    *,
    op: str = "sum",
    compress: bool = False,
    overlap: bool = True,
    state: State | None = None,
    mesh: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Tree | tuple[Tree, State]:
    """Every leaf, reduced over the devices; (tree, state) when a state is given.

    Args:
      tree: arrays; without `axis_name`, global ones. There, leaves with a leading axis of one row a device are reduced,
        and others are taken as already the same everywhere.
      axis_name: the mesh axis, or axes, inside shard_map.
      op: "sum", "mean", "max" or "min".
      compress: send blockwise int8 codes, for sums and means of floats; see `compressed_all_reduce` for the bound.
      overlap: buckets do not wait for each other, and the compiler may run them beside other work. False sends one
        after another.
      state: what compression has not sent yet, from `feedback_state` or the last call.
      mesh: for global arrays, the mesh; by default the active one.
      bucket_bytes: leaves of one type are joined up to this size.
    """
    op = read_reduction(op)
    tree = jax.tree.map(lambda leaf: as_array("all_reduce_tree", "a leaf", leaf), tree)
    if state is not None and not compress:
        raise rule_error("A state holds what compression left out", "state without compression", "leave state out")
    plan = _Plan(op, bool(compress), bool(overlap), bucket_bytes)
    # What the devices of a mesh would refuse is refused without one too.
    plan_buckets(tree, bucket_bytes)
    if compress:
        check_sum(op)
    if axis_name is not None:
        over_mesh.expect_none("all_reduce_tree", mesh)
        made, kept = plan.local(tree, state, axis_name)
        return made if state is None else (made, kept)
    found = over_mesh.active_mesh(mesh)
    if found is None:
        return tree if state is None else (tree, state)
    return _over_mesh(plan, tree, state, found)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What one device does with its leaves."""

    op: str
    compress: bool
    overlap: bool
    bucket_bytes: int

    def local(self, tree: Any, state: Any, names: AxisName) -> tuple[Any, Any]:
        given: dict[str, Any] = {"op": self.op, "overlap": self.overlap, "bucket_bytes": self.bucket_bytes}
        if self.compress:
            return compressed_all_reduce(tree, names, state=state, **given)
        return bucketed_all_reduce(tree, names, **given), None


def _over_mesh(plan: _Plan, tree: Any, state: Any, mesh: Any) -> Any:
    leaves, shape = jax.tree.flatten(tree)
    kept: list[Any] = [None] * len(leaves) if state is None else jax.tree.leaves(state)
    given: Any = jax.tree.structure(state)
    if state is not None and given != shape:
        raise rule_error(
            f"The state is a tree like the gradients, {shape}",
            str(given),
            f"make it with feedback_state(gradients, devices={mesh.size})",
        )
    chosen = [i for i, leaf in enumerate(leaves) if over_mesh.has_rows(leaf, mesh)]
    for i in chosen:
        if state is not None and jax.numpy.shape(kept[i]) != leaves[i].shape:
            raise rule_error(
                f"The state of a leaf with rows, {describe(leaves[i])}, has the same shape: a row a device",
                str(jax.numpy.shape(kept[i])),
                f"make it with feedback_state(gradients, {mesh.size}), or change it with redistribute",
            )
    if chosen:
        before = None if state is None else [kept[i] for i in chosen]
        reduced, after = _on_rows(plan, mesh)([leaves[i] for i in chosen], before)
        for number, i in enumerate(chosen):
            leaves[i] = reduced[number]
            kept[i] = None if after is None else after[number]
    made = jax.tree.unflatten(shape, leaves)
    return made if state is None else (made, jax.tree.unflatten(jax.tree.structure(state), kept))


@functools.lru_cache(maxsize=64)
def _on_rows(plan: _Plan, mesh: Any) -> Any:
    """The jitted function of global leaves and their state; kept, so that calls outside of jit trace once."""
    rows = P(mesh.axis_names)

    def one(stacked: list[Any], kept: Any) -> tuple[Any, Any]:
        return plan.local([x.squeeze(0) for x in stacked], kept, tuple(mesh.axis_names))

    def on_global(stacked: list[Any], kept: Any) -> tuple[Any, Any]:
        stacked, kept = jax.tree.map(lambda x: over_mesh.resharded(x, mesh, rows), (stacked, kept))
        return jax.shard_map(one, mesh=mesh, in_specs=(rows, rows), out_specs=(P(), rows))(stacked, kept)

    return over_mesh.on_mesh(on_global, mesh)
