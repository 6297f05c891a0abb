"""On a mesh with explicit axes a layout is part of a type, which no rule gives for a loop over chunks of a split axis.

The op has its own mesh rule, for axes that the partitioner sees to. So explicit axes are handed to it for the length of
the call, and the result gets its type back at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from capibara.errors import rule_error


def with_automatic_axes(fn: Callable[..., Any], arrays: tuple[Any, ...], laid_out_as: Any) -> Any:
    """`fn(*arrays)`; on a mesh with explicit axes they are automatic inside of it.

    `laid_out_as` is the array whose layout the results have; None is for single numbers.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None:
        return fn(*arrays)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if AxisType.Manual in mesh.axis_types:
        raise rule_error(
            "Inside shard_map cross_entropy takes no mesh axes that are explicit",
            f"axes of the kinds {', '.join(str(kind) for kind in mesh.axis_types)}",
            "make all axes manual, or call it outside of shard_map, where it takes explicit axes",
        )
    spec = PartitionSpec() if laid_out_as is None else jax.typeof(laid_out_as).sharding.spec
    return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=NamedSharding(mesh, spec))(*arrays)


def on_one_device(local: Callable[..., Any]) -> Callable[..., Any]:
    """`local`, which the partitioner traces for one device's shards, outside of the mesh that the caller has set.

    The shards lie on no mesh. From JAX 0.12 on, a new array made under an explicit one would still be told a layout.
    """

    @functools.wraps(local)
    def outside(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return local(*args)

    return outside
