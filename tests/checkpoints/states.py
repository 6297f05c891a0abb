"""A small training state, and what the tests do to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Moments(NamedTuple):
    """As an optimizer keeps them."""

    count: jax.Array
    mu: dict[str, jax.Array]


def mesh_of(count: int, model: int = 2) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]).reshape(count // model, model), ("data", "model"))


def shardings(mesh: Mesh, state: Any) -> Any:
    """Matrices over both axes, rows of random keys over data, the rest whole."""

    def spec(leaf: Any) -> PartitionSpec:
        if leaf.ndim == 2:
            return PartitionSpec("data", "model")
        is_keys = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return PartitionSpec("data") if leaf.ndim == 1 and is_keys else PartitionSpec()

    return jax.tree.map(lambda leaf: NamedSharding(mesh, spec(leaf)), state)


def state_on(mesh: Mesh, seed: int = 0) -> dict[str, Any]:
    w = np.random.default_rng(seed).standard_normal((64, 32)).astype(np.float32)
    state = {
        "params": {"w": jnp.asarray(w), "b": jnp.asarray(w[0], jnp.bfloat16)},
        "opt": (Moments(jnp.int32(seed), {"w": jnp.asarray(w * 2)}), None),
        "step": jnp.int32(seed),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 16),
        "old_key": jax.random.PRNGKey(seed),
        "empty": jnp.zeros((0, 4)),
    }
    return dict(jax.device_put(state, shardings(mesh, state)))


def target_on(mesh: Mesh, state: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings(mesh, state),
    )


def numbers(leaf: Any) -> np.ndarray:
    keys = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if keys else leaf)


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(numbers(x), numbers(y))


def array_file(folder: Path) -> Path:
    """The largest file of a checkpoint: array data."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_bit(path: Path, position: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 0x10
    path.write_bytes(data)
