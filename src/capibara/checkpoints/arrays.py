"""Arrays to and from a folder, by Orbax."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from capibara.checkpoints.leaves import Leaf, default_sharding, from_storable, storable

__all__ = ["checkpointer", "read", "save"]


def checkpointer(timeout: float) -> Any:
    """Orbax's, which writes in the background."""
    import orbax.checkpoint as ocp

    options = ocp.options.AsyncOptions(timeout_secs=int(timeout))
    # Weights and moments hardly compress (7 % of float32 noise), and compressing them takes longer than writing them.
    plain = {"use_compression": False} if "use_compression" in signature(ocp.PyTreeCheckpointHandler).parameters else {}
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(**plain), async_options=options)


def save(checkpointer: Any, folder: Any, leaves: Mapping[str, Any], described: Mapping[str, Leaf]) -> None:
    """Copy the leaves to the host and begin to write them."""
    import orbax.checkpoint as ocp

    # Orbax refuses arrays of no numbers; their shape says all of them.
    arrays = {name: storable(leaf) for name, leaf in leaves.items() if 0 not in described[name].shape}
    checkpointer.save(folder, args=ocp.args.PyTreeSave(arrays))


def read(checkpointer: Any, folder: Any, leaves: Mapping[str, Any], saved: Mapping[str, Leaf]) -> dict[str, Any]:
    """The arrays of these names, laid out as the leaves' shardings say.

    Args:
      leaves: shapes or arrays; some or all of those that were saved.
      saved: what was saved.
    """
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    shardings = {name: default_sharding(name, leaf) for name, leaf in leaves.items()}
    full = [name for name in leaves if 0 not in saved[name].shape]
    item = {
        name: jax.ShapeDtypeStruct(saved[name].shape, jnp.dtype(saved[name].dtype), sharding=shardings[name])
        for name in full
    }
    arguments = {
        name: ocp.ArrayRestoreArgs(sharding=shape.sharding, global_shape=shape.shape, dtype=shape.dtype)
        for name, shape in item.items()
    }
    arrays: dict[str, Any] = {}
    if full:
        some: dict[str, Any] = {}
        if len(full) < sum(0 not in leaf.shape for leaf in saved.values()):
            # Orbax wants the whole tree unless it is told; an older one is told by a table of transforms, empty.
            newer = "partial_restore" in ocp.args.PyTreeRestore.__dataclass_fields__
            some = {"partial_restore": True} if newer else {"transforms": {}}
        request = ocp.args.PyTreeRestore(item=item, restore_args=arguments, **some)
        arrays = dict(checkpointer.restore(folder, args=request))
    for name in leaves:
        if name not in arrays:
            empty = jnp.zeros(saved[name].shape, saved[name].dtype)
            arrays[name] = jax.device_put(empty, shardings[name])
    return {name: from_storable(arrays[name], saved[name]) for name in leaves}
