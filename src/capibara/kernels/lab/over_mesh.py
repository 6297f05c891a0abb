"""Is a collective right? Its result over devices that are there, against its reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.kernels.core import context, dispatch
from capibara.kernels.core.dispatch import Selection
from capibara.kernels.core.op import Op
from capibara.kernels.core.spec import Case, standard_normal
from capibara.kernels.lab import check
from capibara.kernels.lab.check import Check
from capibara.kernels.ops.collective.over_mesh import each_device


def check_over(op: Op, case: Case, devices: Sequence[jax.Device]) -> tuple[Selection, Check]:
    """Run a collective's case over these devices by dispatch's choice, against its reference in float64."""
    here = context.target_of(devices[0])
    call = op.call(*case.args(), target=here, **dict(case.params))
    chosen = dispatch.select(call)
    assert op.mesh_axes is not None
    axes = op.mesh_axes(call)
    kinds = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)
    rows = NamedSharding(mesh, P(mesh.axis_names))
    operands = [x for x in case.args() if x is not None]
    stacked = [standard_normal((mesh.size, *x.shape), x.dtype, (0, i)) for i, x in enumerate(operands)]
    local = functools.partial(op, implementation=chosen.implementation, **dict(case.params))
    plain = functools.partial(op.reference, **call.specified)
    with context.target(*here):
        out = jax.jit(each_device(local, mesh, check_vma=False))(*jax.device_put(stacked, rows))
    with jax.enable_x64(True):
        wide = jax.device_put([np.asarray(x).astype(np.float64) for x in stacked], rows)
        exact = jax.tree.leaves(jax.jit(each_device(plain, mesh, check_vma=False))(*wide))
    structs = tuple(jax.ShapeDtypeStruct(x.shape, y.dtype) for x, y in zip(exact, jax.tree.leaves(out), strict=True))
    wanted = check.Expected(tuple(map(np.asarray, exact)), structs, op.tolerance(call), "float64 on the same devices")
    return chosen, check.check_output(out, wanted)
