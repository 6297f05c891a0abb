"""Collectives over two kinds of links: fast ones inside a group of devices, slow ones between groups.

What crosses the slow links is one part in `inner` of the data: the parts are reduced inside the groups first.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Num

from capibara.errors import rule_error
from capibara.kernels.core.operands import as_array
from capibara.kernels.ops.collective.api import all_gather, all_reduce, reduce_scatter
from capibara.kernels.ops.collective.axes import AxisName, gather_known, read_axes, read_reduction
from capibara.kernels.ops.collective.ring import in_parts


def hierarchical_all_reduce(
    x: Num[Array, " ..."],
    *,
    inner_axis_name: AxisName,
    outer_axis_name: AxisName,
    op: str = "sum",
    implementation: str | None = None,
) -> Num[Array, " ..."]:
    """`all_reduce` over both axes: reduce-scatter inside, all-reduce of the parts across, all-gather inside.

    Args:
      x: this device's array, inside shard_map; of any shape, padded to divide where it must be.
      inner_axis_name: the mesh axis, or axes, with fast links (ICI).
      outer_axis_name: those between the groups (DCN).
      op: "sum", "mean", "max" or "min".
      implementation: of the two collectives inside; the one across is always XLA's, whatever links there are.
    """
    x, op = as_array("hierarchical_all_reduce", "x", x), read_reduction(op)
    inner, devices = _two("hierarchical_all_reduce", inner_axis_name, outer_axis_name)
    flat, cut = in_parts(x, devices)
    part = reduce_scatter(flat, inner, op=op, implementation=implementation)
    part = all_reduce(part, outer_axis_name, op=op, implementation="xla")
    if implementation in (None, "xla"):
        # So that shard_map knows the result to be the same everywhere, as it knows it of psum's.
        return cut(gather_known(part, inner))
    return cut(all_gather(part, inner, implementation=implementation))


def _two(who: str, inner_axis_name: Any, outer_axis_name: Any) -> tuple[tuple[str, ...], int]:
    inner, devices = read_axes(who, inner_axis_name, "inner_axis_name", on_global=False)
    outer, _ = read_axes(who, outer_axis_name, "outer_axis_name", on_global=False)
    if set(inner) & set(outer):
        raise rule_error(
            "An axis is inside the groups or between them",
            f"{inner_axis_name!r} and {outer_axis_name!r}",
            "name different axes",
        )
    return inner, devices
