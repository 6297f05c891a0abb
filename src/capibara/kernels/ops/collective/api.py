"""The collectives' public functions: inside shard_map with `axis_name`, on global arrays over a mesh without."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from jaxtyping import Array, Num, Shaped

from capibara.errors import rule_error
from capibara.kernels.core.op import Op
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Config
from capibara.kernels.ops.collective import over_mesh
from capibara.kernels.ops.collective.axes import (
    AxisName,
    check_reducible,
    neighbours,
    read_axes,
    read_dimension,
    read_reduction,
)
from capibara.kernels.ops.collective.ops import (
    ALL_GATHER,
    ALL_GATHER_MATMUL,
    ALL_REDUCE,
    ALL_TO_ALL,
    MATMUL_REDUCE_SCATTER,
    PERMUTE,
    REDUCE_SCATTER,
    RINGS,
)


def all_reduce(
    x: Num[Array, " ..."],
    axis_name: AxisName | None = None,
    *,
    op: str = "sum",
    mesh: Any = None,
    implementation: str | None = None,
    config: Config = None,
) -> Num[Array, " ..."]:
    """Every device's x, reduced, on every device.

    Args:
      x: this device's array; without `axis_name`, a global array. There, a leading axis with one row a device of the
        mesh is reduced away; an array without one is taken as already the same everywhere, and comes back as it is.
      axis_name: the mesh axis, or axes, inside shard_map.
      op: "sum", "mean", "max" or "min".
      mesh: for global arrays, the mesh; by default the active one. With no mesh, or one device, x is the result.
      implementation: "xla"; "xla_ring" or "xla_ring_two_way", made of `ppermute`; "pallas_tpu". By default dispatch
        chooses. What a ring or a kernel returns is equal everywhere, but shard_map's check_vma does not know it.
      config: of the implementation named.

    >>> import jax.numpy as jnp
    >>> all_reduce(jnp.ones(3)).tolist()
    [1.0, 1.0, 1.0]
    """
    x, op = as_array("all_reduce", "x", x), read_reduction(op)
    if axis_name is None:
        check_reducible("all_reduce", x, op)
        local = _bound(ALL_REDUCE, op=op, implementation=implementation, config=config)
        return over_mesh.reduce_rows(local, x, mesh)
    over_mesh.expect_none("all_reduce", mesh)
    names, devices = read_axes("all_reduce", axis_name)
    return ALL_REDUCE(x, axis_name=names, devices=devices, op=op, implementation=implementation, config=config)


def reduce_scatter(
    x: Num[Array, " ..."],
    axis_name: AxisName | None = None,
    *,
    axis: int = 0,
    op: str = "sum",
    mesh: Any = None,
    implementation: str | None = None,
    config: Config = None,
) -> Num[Array, " ..."]:
    """Device i has part i, along `axis`, of what `all_reduce` gives; the axis must divide evenly.

    On global arrays the rows of a leading axis, one a device, are reduced away, and `axis` counts the axes after it;
    an array without such an axis is the same everywhere already, and is only split. Other arguments as in `all_reduce`.
    """
    x, op = as_array("reduce_scatter", "x", x), read_reduction(op)
    if axis_name is None:
        check_reducible("reduce_scatter", x, op)
        local = _bound(REDUCE_SCATTER, axis=axis, op=op, implementation=implementation, config=config)
        return over_mesh.scatter_rows(local, x, mesh, axis)
    over_mesh.expect_none("reduce_scatter", mesh)
    names, devices = read_axes("reduce_scatter", axis_name)
    given = {"axis_name": names, "devices": devices, "axis": read_dimension("reduce_scatter", "axis", axis, x.ndim)}
    return REDUCE_SCATTER(x, **given, op=op, implementation=implementation, config=config)


def all_gather(
    x: Shaped[Array, " ..."],
    axis_name: AxisName | None = None,
    *,
    axis: int = 0,
    tiled: bool = True,
    mesh: Any = None,
    implementation: str | None = None,
    config: Config = None,
) -> Shaped[Array, " ..."]:
    """Every device's x on every device: one after the other along `axis`, or stacked on a new axis there.

    On global arrays the rows of a leading axis, one a device, are gathered, and `axis` counts the axes after it; an
    array without such an axis is the same everywhere already, and comes back whole. Other arguments as for
    `all_reduce`; the gradient of a gather is `reduce_scatter`.
    """
    x = as_array("all_gather", "x", x)
    if axis_name is None:
        local = _bound(ALL_GATHER, axis=axis, tiled=tiled, implementation=implementation, config=config)
        return over_mesh.gather_rows(local, x, mesh, axis, tiled)
    over_mesh.expect_none("all_gather", mesh)
    names, devices = read_axes("all_gather", axis_name)
    ndim = x.ndim if tiled else x.ndim + 1
    place = read_dimension("all_gather", "axis", axis, ndim)
    given = {"axis_name": names, "devices": devices, "axis": place, "tiled": bool(tiled)}
    return ALL_GATHER(x, **given, implementation=implementation, config=config)


def all_to_all(
    x: Shaped[Array, " ..."],
    axis_name: AxisName | None = None,
    *,
    split_axis: int = 0,
    concat_axis: int = 0,
    mesh: Any = None,
    implementation: str | None = None,
) -> Shaped[Array, " ..."]:
    """Part j of x, along `split_axis`, goes to device j; what arrives is put together along `concat_axis`.

    On global arrays the rows of a leading axis, one a device, exchange their parts, and the axes count after it.
    """
    x = as_array("all_to_all", "x", x)
    if axis_name is None:
        local = _bound(ALL_TO_ALL, split_axis=split_axis, concat_axis=concat_axis, implementation=implementation)
        return over_mesh.exchange_rows(local, x, mesh, split_axis, concat_axis)
    over_mesh.expect_none("all_to_all", mesh)
    names, devices = read_axes("all_to_all", axis_name)
    places = {
        name: read_dimension("all_to_all", name, axis, x.ndim)
        for name, axis in (("split_axis", split_axis), ("concat_axis", concat_axis))
    }
    return ALL_TO_ALL(x, axis_name=names, devices=devices, **places, implementation=implementation)


def permute(
    x: Shaped[Array, " ..."],
    axis_name: AxisName,
    *,
    shift: int | None = None,
    pairs: Iterable[tuple[int, int]] | None = None,
    implementation: str | None = None,
) -> Shaped[Array, " ..."]:
    """x of the device that sends here: the one `shift` places before, round the ring; or as (source, target) pairs.

    A device that none of the pairs sends to has zeros. Devices count along several axes as along one, the last fastest.
    """
    x = as_array("permute", "x", x)
    names, devices = read_axes("permute", axis_name, on_global=False)
    if (shift is None) == (pairs is None):
        raise rule_error("permute takes shift or pairs", f"shift={shift} and pairs={pairs}", "pass one of them")
    if shift is not None and (isinstance(shift, bool) or not isinstance(shift, int)):
        raise rule_error("shift is a whole number of places", repr(shift), "pass 1 for the next device")
    made = tuple(neighbours(devices, shift)) if shift is not None else _read_pairs(pairs)
    return PERMUTE(x, axis_name=names, devices=devices, pairs=made, implementation=implementation)


def ring_all_reduce(
    x: Num[Array, " ..."], axis_name: AxisName, *, op: str = "sum", directions: int = 2
) -> Num[Array, " ..."]:
    """`all_reduce` by rings in one or two directions: 2 (n - 1) steps of a part of x, to neighbours alone."""
    return all_reduce(x, axis_name, op=op, implementation=_ring(directions))


def ring_reduce_scatter(
    x: Num[Array, " ..."], axis_name: AxisName, *, axis: int = 0, op: str = "sum", directions: int = 2
) -> Num[Array, " ..."]:
    """`reduce_scatter` by a ring in one or two directions."""
    return reduce_scatter(x, axis_name, axis=axis, op=op, implementation=_ring(directions))


def ring_all_gather(
    x: Shaped[Array, " ..."], axis_name: AxisName, *, axis: int = 0, tiled: bool = True, directions: int = 2
) -> Shaped[Array, " ..."]:
    """`all_gather` by a ring in one or two directions."""
    return all_gather(x, axis_name, axis=axis, tiled=tiled, implementation=_ring(directions))


def all_gather_matmul(
    x: Num[Array, "*B rows k"],
    w: Num[Array, "k columns"],
    axis_name: AxisName | None = None,
    *,
    mesh: Any = None,
    implementation: str | None = None,
    config: Config = None,
) -> Num[Array, "*B all_rows columns"]:
    """`all_gather(x) @ w` along the rows, w being this device's own, with the gather hidden behind the product.

    Args:
      x: this device's rows; global, all of them, split here.
      w: this device's weights, e.g. its share of the columns; global, all columns, split here.
      axis_name: the mesh axis, or axes, inside shard_map.
      mesh: for global arrays, the mesh; by default the active one. The result is then split along its columns.
      implementation: "xla" gathers and then multiplies. "xla_ring" and "xla_ring_two_way" multiply a part while the
        next travels. "pallas_tpu" does so in one kernel. By default a ring where the product of a part is predicted to
        cover its trip, XLA's otherwise; `explain` shows the figures.
      config: of the implementation named.
    """
    x, w = as_array("all_gather_matmul", "x", x), as_array("all_gather_matmul", "w", w)
    if axis_name is None:
        local = _bound(ALL_GATHER_MATMUL, implementation=implementation, config=config)
        return over_mesh.gather_then_multiply(local, x, w, mesh)
    over_mesh.expect_none("all_gather_matmul", mesh)
    names, devices = read_axes("all_gather_matmul", axis_name)
    return ALL_GATHER_MATMUL(x, w, axis_name=names, devices=devices, implementation=implementation, config=config)


def matmul_reduce_scatter(
    x: Num[Array, "*B all_rows k"],
    w: Num[Array, "k columns"],
    axis_name: AxisName | None = None,
    *,
    mesh: Any = None,
    implementation: str | None = None,
    config: Config = None,
) -> Num[Array, "*B rows columns"]:
    """Part i of the rows of the sum, over the devices, of x @ w, with the sums hidden behind the products.

    x and w are this device's part of the contraction; global, all of it, split here, and the result is split along its
    rows. Arguments as for `all_gather_matmul`, whose gradient this is.
    """
    x, w = as_array("matmul_reduce_scatter", "x", x), as_array("matmul_reduce_scatter", "w", w)
    if axis_name is None:
        local = _bound(MATMUL_REDUCE_SCATTER, implementation=implementation, config=config)
        return over_mesh.multiply_then_scatter(local, x, w, mesh)
    over_mesh.expect_none("matmul_reduce_scatter", mesh)
    names, devices = read_axes("matmul_reduce_scatter", axis_name)
    return MATMUL_REDUCE_SCATTER(x, w, axis_name=names, devices=devices, implementation=implementation, config=config)


def _bound(collective: Op, /, **given: Any) -> over_mesh.Local:
    if given["implementation"] is not None:
        collective.implementation(given["implementation"])  # a name nobody has is an error on one device too
    assert collective.public is not None
    return over_mesh.Local(collective.public, tuple(sorted(given.items())))


def _read_pairs(pairs: Any) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((operator.index(source), operator.index(target)) for source, target in pairs)
    except (TypeError, ValueError) as error:
        raise rule_error(
            "pairs are (source, target), the numbers of two devices each", repr(pairs), "pass e.g. [(0, 1), (1, 0)]"
        ) from error


def _ring(directions: int) -> str:
    for name, number in RINGS.items():
        if type(directions) is int and number == directions:
            return name
    raise rule_error("A ring goes in 1 direction or 2", repr(directions), "pass directions=1 or directions=2")


# What `explain` of an op's name calls.
for _op, _fn in (
    (ALL_REDUCE, all_reduce),
    (REDUCE_SCATTER, reduce_scatter),
    (ALL_GATHER, all_gather),
    (ALL_TO_ALL, all_to_all),
    (PERMUTE, permute),
    (ALL_GATHER_MATMUL, all_gather_matmul),
    (MATMUL_REDUCE_SCATTER, matmul_reduce_scatter),
):
    _op.public = _fn
