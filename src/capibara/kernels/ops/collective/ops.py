"""The collectives as ops: what runs inside shard_map, on one device's operands, over the axes that a call names.

XLA's own form of each comes first everywhere until others are measured on a TPU; the rings and the kernels are taken by
name, and the rings of the products also by cost (`choice`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.spec import Call, Gradient, Implementation, describe, unit_roundoff
from capibara.kernels.ops.collective import (
    cases,
    choice,
    costs,
    matmul,
    reference,
    ring,
    tpu,
)
from capibara.kernels.ops.collective.axes import check_reducible


def _mesh_axes(call: Call) -> dict[str, int]:
    """All devices on the first axis: what a program of one call is compiled over."""
    names, devices = call.params["axis_name"], call.params["devices"]
    assert isinstance(names, tuple)
    assert isinstance(devices, int)
    return {name: devices if i == 0 else 1 for i, name in enumerate(names)}


def _splits(call: Call, axis: Any) -> None:
    x, devices = call.need("x"), call.params["devices"]
    assert isinstance(devices, int)
    names, length = call.params["axis_name"], x.shape[axis]
    assert isinstance(names, tuple)
    if length % devices:
        raise rule_error(
            f"{call.op.name} splits axis {axis} of x evenly over the {devices} devices of {'+'.join(map(repr, names))}",
            f"a length of {length} in {describe(x)}",
            f"pad it to {-(-length // devices) * devices}",
        )


def _check_reduction(call: Call) -> None:
    check_reducible(call.op.name, call.need("x"), str(call.params["op"]))


def _check_reduce_scatter(call: Call) -> None:
    _check_reduction(call)
    _splits(call, call.params["axis"])


def _check_all_to_all(call: Call) -> None:
    _splits(call, call.params["split_axis"])


def _check_permute(call: Call) -> None:
    pairs, devices = call.params["pairs"], call.params["devices"]
    assert isinstance(pairs, tuple)
    assert isinstance(devices, int)
    sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
    outside = [place for place in (*sources, *targets) if not 0 <= place < devices]
    if outside or len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
        raise rule_error(
            f"permute sends from each of the {devices} devices, 0 to {devices - 1}, and to each, at most once",
            f"pairs={pairs}",
            "name each source and each target once",
        )


def _check_matmul(call: Call) -> None:
    x, w = call.need("x"), call.need("w")
    if len(x.shape) < 2 or len(w.shape) != 2 or x.shape[-1] != w.shape[0]:
        raise rule_error(
            f"{call.op.name} takes x [..., rows, k] and w [k, columns]",
            f"{describe(x)} and {describe(w)}",
            "transpose or reshape them so that k agrees",
        )


def _check_matmul_reduce_scatter(call: Call) -> None:
    _check_matmul(call)
    _splits(call, len(call.need("x").shape) - 2)


def _sum_tolerance(call: Call) -> float:
    """A partial sum is rounded once on each of n - 1 hops, and the first order of that is n roundings."""
    devices = call.params["devices"]
    assert isinstance(devices, int)
    return (devices + 2) * max(unit_roundoff(x.dtype) for x in call.args if x is not None)


def _matmul_tolerance(call: Call) -> float:
    """The sum's own, in float32 or wider, over every product that is added; and the hops' roundings on top."""
    k = call.need("w").shape[0]
    return _sum_tolerance(call) + 2 * k**0.5 * unit_roundoff(jnp.float32)


def _forward(op: Op, arrays: Any, params: Any, prefer: Any) -> Any:
    return run(op, arrays, params, prefer=prefer), ()


def _gather_backward(_: Any, cotangent: Any, params: Any, prefer: Any) -> Any:
    given = {name: params[name] for name in ("axis_name", "devices", "axis")}
    dx = run(REDUCE_SCATTER, (cotangent,), {**given, "op": "sum"}, prefer=prefer)
    return (dx if params["tiled"] else dx.squeeze(params["axis"]),)


def _scatter_backward(_: Any, cotangent: Any, params: Any, prefer: Any) -> Any:
    given = {name: params[name] for name in ("axis_name", "devices", "axis")}
    if params["op"] == "mean":
        wide = reference.sum_type(cotangent.dtype)
        cotangent = (cotangent.astype(wide) / params["devices"]).astype(cotangent.dtype)
    return (run(ALL_GATHER, (cotangent,), {**given, "tiled": True}, prefer=prefer),)


def _reduce_backward(_: Any, cotangent: Any, params: Any, prefer: Any) -> Any:
    # Of a sum that shard_map takes as different everywhere, as a kernel's is: every device's result has every x in it.
    return (run(ALL_REDUCE, (cotangent,), params, prefer=prefer),)


_AXES: dict[str, Any] = {"axis_name": ("x",), "devices": 1}

ALL_REDUCE = Op(
    "all_reduce",
    family="collective",
    reference=reference.all_reduce,
    operands=("x",),
    params={**_AXES, "op": "sum"},
    check=_check_reduction,
    cost=costs.all_reduce,
    tolerance=_sum_tolerance,
    gradient=Gradient(_forward, _reduce_backward),
    cases=cases.ALL_REDUCE,
    mesh_axes=_mesh_axes,
)
REDUCE_SCATTER = Op(
    "reduce_scatter",
    family="collective",
    reference=reference.reduce_scatter,
    operands=("x",),
    params={**_AXES, "op": "sum", "axis": 0},
    check=_check_reduce_scatter,
    cost=costs.reduce_scatter,
    tolerance=_sum_tolerance,
    gradient=Gradient(_forward, _scatter_backward),
    cases=cases.REDUCE_SCATTER,
    mesh_axes=_mesh_axes,
)
ALL_GATHER = Op(
    "all_gather",
    family="collective",
    reference=reference.all_gather,
    operands=("x",),
    params={**_AXES, "axis": 0, "tiled": True},
    cost=costs.all_gather,
    tolerance=lambda call: 0.0,
    gradient=Gradient(_forward, _gather_backward),
    cases=cases.ALL_GATHER,
    mesh_axes=_mesh_axes,
)
ALL_TO_ALL = Op(
    "all_to_all",
    family="collective",
    reference=reference.all_to_all,
    operands=("x",),
    params={**_AXES, "split_axis": 0, "concat_axis": 0},
    check=_check_all_to_all,
    cost=costs.all_to_all,
    tolerance=lambda call: 0.0,
    cases=cases.ALL_TO_ALL,
    mesh_axes=_mesh_axes,
)
PERMUTE = Op(
    "permute",
    family="collective",
    reference=reference.permute,
    operands=("x",),
    params={**_AXES, "pairs": ()},
    check=_check_permute,
    cost=costs.permute,
    tolerance=lambda call: 0.0,
    cases=cases.PERMUTE,
    mesh_axes=_mesh_axes,
)
ALL_GATHER_MATMUL = Op(
    "all_gather_matmul",
    family="collective",
    reference=reference.all_gather_matmul,
    operands=("x", "w"),
    params=_AXES,
    check=_check_matmul,
    cost=costs.all_gather_matmul,
    efficiency=functools.partial(costs.matmul_efficiency, gathered=True),
    tolerance=_matmul_tolerance,
    cases=cases.ALL_GATHER_MATMUL,
    mesh_axes=_mesh_axes,
)
MATMUL_REDUCE_SCATTER = Op(
    "matmul_reduce_scatter",
    family="collective",
    reference=reference.matmul_reduce_scatter,
    operands=("x", "w"),
    params=_AXES,
    check=_check_matmul_reduce_scatter,
    cost=costs.matmul_reduce_scatter,
    efficiency=functools.partial(costs.matmul_efficiency, gathered=False),
    tolerance=_matmul_tolerance,
    cases=cases.MATMUL_REDUCE_SCATTER,
    mesh_axes=_mesh_axes,
)
ALL_GATHER_MATMUL.gradient, MATMUL_REDUCE_SCATTER.gradient = matmul.gradients(ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)

OPS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, PERMUTE, ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER)
RINGS = {"xla_ring": 1, "xla_ring_two_way": 2}
"""The rings by name, and how many directions their parts travel in."""


def _add_rings(op: Op, fn: Any) -> None:
    for name, directions in RINGS.items():
        op.implement(Implementation(name, functools.partial(fn, two_way=directions == 2)))


def _add_overlapped(op: Op, fn: Any) -> None:
    for name, directions in RINGS.items():
        op.implement(
            Implementation(
                name,
                functools.partial(fn, two_way=directions == 2),
                ahead_of=functools.partial(choice.ahead_of, directions=directions),
                remark=functools.partial(choice.remark, directions=directions),
                own_gradient=True,
            )
        )


for _op in OPS:
    _op.implement(Implementation("xla", _op.reference))
_add_rings(ALL_REDUCE, ring.all_reduce)
_add_rings(REDUCE_SCATTER, ring.reduce_scatter)
_add_rings(ALL_GATHER, ring.all_gather)
_add_overlapped(ALL_GATHER_MATMUL, matmul.all_gather_matmul)
_add_overlapped(MATMUL_REDUCE_SCATTER, matmul.matmul_reduce_scatter)
ALL_REDUCE.implement(tpu.ALL_REDUCE)
REDUCE_SCATTER.implement(tpu.REDUCE_SCATTER)
ALL_GATHER.implement(tpu.ALL_GATHER)
ALL_GATHER_MATMUL.implement(tpu.ALL_GATHER_MATMUL)
MATMUL_REDUCE_SCATTER.implement(tpu.MATMUL_REDUCE_SCATTER)
for _op in OPS:
    register(_op)
