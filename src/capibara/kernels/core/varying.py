"""Inside shard_map: over which mesh axes arrays vary, where JAX's types want to know it of a kernel."""

from __future__ import annotations

from typing import Any

import jax


def vary_alike(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inside shard_map: mark every operand as varying over the axes that any of them varies over.

    A kernel's operands must agree; doing it outside of the kernel's custom_vjp makes the cotangent of a
    replicated operand the sum over the axes, as it must be.
    """
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None))

    def vary(x: Any) -> Any:
        if x is None:
            return None
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(map(vary, arrays))


def vary_like(x: Any, like: jax.Array) -> Any:
    """`x`, marked as varying over the mesh axes that `like` varies over: what a loop starts from in shard_map."""
    missing = jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def out_struct(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """A kernel's output, varying over the mesh axes that its operand `like` varies over.

    `pallas_call(out_shape=...)` of a plain `jax.ShapeDtypeStruct` does not trace inside `jax.shard_map`.
    """
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
