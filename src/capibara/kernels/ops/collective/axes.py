"""The mesh axes that a collective is over: read, checked, and what a device's neighbours on them are."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from capibara.errors import rule_error, unknown_name
from capibara.kernels.core.spec import describe

AxisName = str | tuple[str, ...]
Tree = TypeVar("Tree")
State = TypeVar("State")

REDUCTIONS = ("sum", "mean", "max", "min")


def read_axes(
    who: str, axis_name: Any, keyword: str = "axis_name", *, on_global: bool = True
) -> tuple[tuple[str, ...], int]:
    """(the names as a tuple, how many devices they have together), for a call inside shard_map.

    `on_global` says that without a name the function takes global arrays, which is then part of the advice.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise rule_error(
            f"{keyword} of {who} is the name of a mesh axis, or a tuple of different names",
            repr(axis_name),
            "pass names that shard_map has taken" + (", or None for global arrays" if on_global else ""),
        )
    try:
        return names, lax.axis_size(names)
    except NameError as error:
        bound = jax.sharding.get_abstract_mesh().manual_axes
        raise rule_error(
            f"{who} with {keyword} is called inside jax.shard_map over those axes"
            + (f" (here {', '.join(map(repr, bound))})" if bound else ""),
            f"{keyword}={axis_name!r} where no axis has that name",
            "call it inside jax.shard_map"
            + (", or leave axis_name out for global arrays over the active mesh" if on_global else ""),
        ) from error


def read_reduction(op: Any) -> str:
    if op not in REDUCTIONS:
        raise unknown_name("reduction", str(op), REDUCTIONS)
    return str(op)


def check_reducible(who: str, x: Any, op: str) -> None:
    """The reduction is one that numbers of x's type have."""
    if not jnp.issubdtype(x.dtype, jnp.number):
        raise rule_error(f"{who} takes numbers", describe(x), "convert it, e.g. with x.astype(jnp.int32)")
    if op == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact):
        raise rule_error("The mean of whole numbers is none", describe(x), "convert x to a float, or take op='sum'")
    if op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise rule_error("Complex numbers have no order", f"op={op!r} of {describe(x)}", "reduce an absolute value")


def read_dimension(who: str, what: str, axis: Any, ndim: int) -> int:
    """A dimension of an array of `ndim`, counted from the front."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -ndim <= axis < ndim:
        raise rule_error(
            f"{what} of {who} is one of the array's {ndim} axes",
            repr(axis),
            f"pass a whole number from {-ndim} to {ndim - 1}" if ndim else "give the array an axis",
        )
    return axis % ndim


def neighbours(devices: int, by: int) -> list[tuple[int, int]]:
    """Each device and the one that is `by` places further round the ring."""
    return [(i, (i + by) % devices) for i in range(devices)]


def gather_known(x: Any, names: tuple[str, ...]) -> Any:
    """All devices' x along its first axis, known to shard_map as the same on every one of them."""
    if not x.size:  # XLA gathers no empty axis
        return jnp.zeros((lax.axis_size(names) * x.shape[0], *x.shape[1:]), x.dtype)
    # An axis that vmap names has no such marks.
    marked = set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes)
    return lax.all_gather(x, names, tiled=True, **({"to": "invarying"} if marked else {}))


def vary_over(x: Any, names: tuple[str, ...]) -> Any:
    """`x`, marked as different from device to device along these axes, where shard_map keeps such marks."""
    # An axis that vmap names has no such marks.
    marked = jax.sharding.get_abstract_mesh().manual_axes
    missing = tuple(n for n in names if n in marked and n not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x
