"""Collectives by their documented names."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Num, Shaped

from capibara.errors import rule_error
from capibara.kernels.ops import collective
from capibara.mesh.context import task_mesh

Axes = str | tuple[str, ...] | None


class TpuV4CollectiveOps:
    """What the devices of a mesh do together.

    With `axis_name` (a mesh axis or a tuple of them) inside `jax.shard_map`, on one device's arrays. Without, on global
    arrays over the active mesh: a leading axis with one row a device is reduced or gathered, and an array without one
    is taken as already the same everywhere. With no mesh, or on one device, nothing changes.
    """

    def async_all_reduce(
        self,
        tree: Any,
        reduction_op: str = "sum",
        use_compression: bool = False,
        overlap_compute: bool = True,
        axis_name: Axes = None,
        **extra: Any,
    ) -> Any:
        """Every leaf of the tree, reduced over the devices; returns at once, while it is computed.

        Args:
          reduction_op: "sum", "mean", "max" or "min".
          use_compression: send blocks of int8 codes, for sums and means; exact when off. The error's bound is
            `capibara.kernels.error_bound`.
          overlap_compute: buckets do not wait for each other, so that the compiler may run them beside other work;
            False sends one after another.
          extra: `state` (error feedback: (tree, state) is returned), `mesh`, `bucket_bytes`: see
            `capibara.kernels.all_reduce_tree`.

        >>> import jax.numpy as jnp
        >>> TpuV4CollectiveOps().async_all_reduce({"w": jnp.ones(2)}, "mean")["w"].tolist()
        [1.0, 1.0]
        """
        given = {"op": reduction_op, "compress": use_compression, "overlap": overlap_compute, **extra}
        return collective.all_reduce_tree(tree, axis_name, **_mesh(axis_name, given))

    def optimized_all_gather(
        self,
        x: Shaped[Array, " ..."],
        axis: int = 0,
        use_ring_algorithm: bool = False,
        axis_name: Axes = None,
        **extra: Any,
    ) -> Shaped[Array, " ..."]:
        """Every device's x on every device, one after the other along `axis`.

        Args:
          axis: where they are joined; of a global array's rows, counted after the leading axis.
          use_ring_algorithm: n - 1 steps between neighbours, halves in opposite directions. False leaves the choice to
            dispatch.
          extra: `tiled`, `mesh`, `implementation`: see `capibara.kernels.all_gather`.
        """
        if use_ring_algorithm and extra.get("implementation") is not None:
            raise rule_error(
                "use_ring_algorithm names the implementation",
                f"use_ring_algorithm=True and implementation={extra['implementation']!r}",
                "pass one of them",
            )
        given = {**extra, "axis": axis}
        if use_ring_algorithm:
            given["implementation"] = "xla_ring_two_way"
        return collective.all_gather(x, axis_name, **_mesh(axis_name, given))

    def reduce_scatter(
        self, x: Num[Array, " ..."], axis: int = 0, reduction_op: str = "sum", axis_name: Axes = None, **extra: Any
    ) -> Num[Array, " ..."]:
        """Device i has part i, along `axis`, of the reduced x; see `capibara.kernels.reduce_scatter`."""
        given = {"axis": axis, "op": reduction_op, **extra}
        return collective.reduce_scatter(x, axis_name, **_mesh(axis_name, given))

    def all_to_all(
        self,
        x: Shaped[Array, " ..."],
        split_axis: int = 0,
        concat_axis: int = 0,
        axis_name: Axes = None,
        **extra: Any,
    ) -> Shaped[Array, " ..."]:
        """Part j of x goes to device j; see `capibara.kernels.all_to_all`."""
        given = {"split_axis": split_axis, "concat_axis": concat_axis, **extra}
        return collective.all_to_all(x, axis_name, **_mesh(axis_name, given))

    def all_gather_matmul(
        self, x: Num[Array, "*B M K"], w: Num[Array, "K N"], axis_name: Axes = None, **extra: Any
    ) -> Num[Array, "*B all_M N"]:
        """`all_gather(x) @ w`, overlapped; see `capibara.kernels.all_gather_matmul`."""
        return collective.all_gather_matmul(x, w, axis_name, **_mesh(axis_name, extra))

    def matmul_reduce_scatter(
        self, x: Num[Array, "*B all_M K"], w: Num[Array, "K N"], axis_name: Axes = None, **extra: Any
    ) -> Num[Array, "*B M N"]:
        """`reduce_scatter(x @ w)`, overlapped; see `capibara.kernels.matmul_reduce_scatter`."""
        return collective.matmul_reduce_scatter(x, w, axis_name, **_mesh(axis_name, extra))


def _mesh(axis_name: Axes, given: dict[str, Any]) -> dict[str, Any]:
    """The keywords, with the mesh of a context that is only remembered, which jax does not know of."""
    held = task_mesh() if axis_name is None else None
    return given if held is None else {"mesh": held, **given}
