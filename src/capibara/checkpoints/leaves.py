"""The leaves of a state by name, as a checkpoint has them, and what to say where they are not those asked for.

A checkpoint knows nothing of classes: an optimizer's state of named tuples, a dict or a dataclass is a list of names
("params/layers/0/w") and arrays. So a state comes back into whatever tree the target is, from any version of its code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.errors import rule_error

__all__ = [
    "Leaf",
    "changed",
    "check_target",
    "default_sharding",
    "describe",
    "from_storable",
    "named_leaves",
    "storable",
]

_LISTED = 8  # leaves named in an error


@dataclass(frozen=True)
class Leaf:
    """Shape and type of an array; of a typed random key, those of its numbers, and its generator's name."""

    shape: tuple[int, ...]
    dtype: str
    key: str | None = None

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        return f"{self.dtype}[{shape}]" + (f" (random keys of {self.key!r})" if self.key else "")

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype} | ({"key": self.key} if self.key else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Leaf:
        return cls(tuple(data["shape"]), data["dtype"], data.get("key"))


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their place in the tree, in the tree's order.

    >>> sorted(named_leaves({"params": [1, 2], "step": 3}))
    ['params/0', 'params/1', 'step']
    """
    import jax

    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "value"
        if name in leaves:
            raise rule_error(
                "Each leaf of a state has a name of its own", f"two leaves called {name!r}", "rename one of the keys"
            )
        leaves[name] = leaf
    return leaves


def _key_impl(dtype: Any) -> str | None:
    """The generator of a typed random key's dtype; None for any other type."""
    import jax
    import jax.numpy as jnp

    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    return str(jax.random.key_impl(jnp.empty((), dtype)))


def describe(name: str, leaf: Any) -> Leaf:
    """What a checkpoint says of a leaf: an array, a shape, or a number of Python or NumPy."""
    import jax
    import numpy as np

    if isinstance(leaf, bool | int | float | complex):
        leaf = np.asarray(leaf)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise rule_error(
            "The leaves of a state are arrays",
            f"{type(leaf).__name__} at {name!r}",
            "keep what is not an array in `extra`, or make it an array",
        )
    impl = _key_impl(leaf.dtype)
    if impl is None:
        return Leaf(tuple(leaf.shape), str(jax.numpy.dtype(leaf.dtype)))
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return Leaf(tuple(data.shape), str(data.dtype), impl)


def storable(leaf: Any) -> Any:
    """The array to write: keys as the numbers that they are made of."""
    import jax
    import numpy as np

    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    return jax.random.key_data(leaf) if _key_impl(leaf.dtype) else leaf


def from_storable(array: Any, leaf: Leaf) -> Any:
    """The leaf as it was, from the array that was written."""
    import jax

    return jax.random.wrap_key_data(array, impl=leaf.key) if leaf.key else array


def default_sharding(name: str, leaf: Any) -> Any:
    """Where a target's leaf shall lie; on the first device where it does not say and there is one process."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        if jax.process_count() > 1:
            raise rule_error(
                "With several processes every leaf of a target has a sharding",
                f"none at {name!r}",
                "give jax.ShapeDtypeStruct(shape, dtype, sharding=...)",
            )
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if _key_impl(leaf.dtype) and isinstance(sharding, NamedSharding):
        # Of the keys; their numbers have one more axis, which is whole everywhere.
        spec = tuple(sharding.spec) + (None,) * (len(leaf.shape) - len(sharding.spec))
        return NamedSharding(sharding.mesh, PartitionSpec(*spec, None), memory_kind=sharding.memory_kind)
    return sharding


def changed(saved: Mapping[str, Leaf], target: Mapping[str, Leaf], below: Sequence[str]) -> frozenset[str]:
    """Leaves under these names that the checkpoint has otherwise, or that one of the two does not have."""
    names = {name for name in (*saved, *target) if any(name == top or name.startswith(f"{top}/") for top in below)}
    return frozenset(name for name in names if saved.get(name) != target.get(name))


def _several(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return "; ".join(lines[:_LISTED]) + more


def check_target(saved: Mapping[str, Leaf], target: Mapping[str, Leaf], where: str, partial: bool = False) -> None:
    """Refuse a target that the checkpoint is not of, with each leaf and its shape here and there.

    Args:
      where: which checkpoint, for the text.
      partial: the target may leave out leaves that the checkpoint has.
    """
    differ = [
        f"{name!r} is {saved[name]} in the checkpoint and {leaf} here"
        for name, leaf in target.items()
        if name in saved and saved[name] != leaf
    ]
    if differ:
        raise rule_error(
            "A checkpoint is restored into the shapes and types that it was saved with",
            f"of {where}: {_several(differ)}",
            "build the model and optimizer with the config that was saved (it is in `extra`), or take another folder",
        )
    absent = [f"{name!r} ({leaf})" for name, leaf in target.items() if name not in saved]
    if absent:
        raise rule_error(
            "Every leaf of the target is in the checkpoint",
            f"{where} lacks {_several(absent)}; it has {_several([repr(name) for name in saved])}",
            "restore a target of the leaves that were saved, and initialise the others",
        )
    left_over = [f"{name!r} ({leaf})" for name, leaf in saved.items() if name not in target]
    if left_over and not partial:
        raise rule_error(
            "Every leaf of the checkpoint is in the target",
            f"{where} also has {_several(left_over)}",
            "add them to the target, or restore with partial=True to leave them out",
        )
