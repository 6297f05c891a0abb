"""Whether an array lies on a mesh as it should."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.errors import rule_error, unknown_name

__all__ = ["validate_sharding"]


def validate_sharding(array: jax.Array, mesh: Mesh, spec: PartitionSpec | tuple[Any, ...] | None) -> jax.Array:
    """The array itself, when it is laid out on `mesh` as `spec` says; else an error that shows both layouts.

    Layouts are compared by which part of the array each device holds, so that another way to write the same
    one passes: `P('data')` and `P('data', None)`, or any split over an axis of one device.
    """
    spec = _checked(spec, mesh, array)
    expected = NamedSharding(mesh, spec)
    actual = array.sharding
    if actual.is_equivalent_to(expected, array.ndim):
        return array
    raise ValueError(
        f"The array of shape {array.shape} is not laid out as expected.\n"
        f"  expected: {_words(expected, array)}\n"
        f"  actual:   {_words(actual, array)}\n"
        f"Fix: jax.device_put(array, NamedSharding(mesh, {_spec(spec)})), or a constraint inside of jit."
    )


def _checked(spec: Any, mesh: Any, array: Any) -> PartitionSpec:
    if isinstance(array, jax.core.Tracer):
        raise rule_error(
            "validate_sharding looks at an array that exists",
            "a value inside of a function that jax traces",
            "call it on the function's arguments or result, or write a sharding constraint inside",
        )
    if not isinstance(array, jax.Array):
        raise rule_error("validate_sharding takes a jax array", type(array).__name__, "jax.device_put it first")
    if not isinstance(mesh, Mesh):
        raise rule_error("mesh is a jax.sharding.Mesh", type(mesh).__name__, "build one over the devices")
    if spec is not None and not isinstance(spec, PartitionSpec | tuple | list):
        raise rule_error("spec is a PartitionSpec", repr(spec), "write PartitionSpec('data', 'model')")
    made = PartitionSpec(*(spec or ()))
    if len(made) > array.ndim:
        raise rule_error(
            "A spec has one entry a dimension at most",
            f"{len(made)} entries {made} for an array of shape {array.shape}",
            "drop the entries that are too many",
        )
    used: list[str] = []
    for position, entry in enumerate(made):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        parts = 1
        for name in names:
            if name not in mesh.shape:
                raise unknown_name("mesh axis", name, mesh.axis_names)
            if name in used:
                raise rule_error("A mesh axis splits one dimension", f"{name!r} twice in {made}", "use it once")
            used.append(name)
            parts *= mesh.shape[name]
        if array.shape[position] % parts:
            above = -(-array.shape[position] // parts) * parts
            raise rule_error(
                f"Dimension {position} divides over the {parts} devices of {names}",
                f"{array.shape[position]} of shape {array.shape}",
                f"pad it to {above}, the nearest above that does, or leave the dimension whole",
            )
    return made


def _words(sharding: Any, array: jax.Array) -> str:
    piece = "x".join(map(str, sharding.shard_shape(array.shape))) or "a scalar"
    devices = len(sharding.device_set)
    if isinstance(sharding, NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"{_spec(sharding.spec)} on the mesh ({axes}): {piece} on each of {devices} devices"
    return f"{sharding}: {piece} on each of {devices} device{'s' if devices != 1 else ''}"


def _spec(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"
