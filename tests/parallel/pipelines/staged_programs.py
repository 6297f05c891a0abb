"""A small scan in float32 with all that a pipeline has to cut: a table, a mask of the batch, layers, a loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, HIDDEN, VOCAB, ROWS, LENGTH = 4, 16, 32, 16, 8


def mesh_of(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))


def init(layers: int = LAYERS, hidden: int = HIDDEN, vocab: int = VOCAB, dtype: Any = jnp.float32) -> dict[str, Any]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return (random.normal(size=shape) * hidden**-0.5).astype(dtype)

    return {
        "embed": normal(vocab, hidden),
        "layers": {"up": normal(layers, hidden, 2 * hidden), "down": normal(layers, 2 * hidden, hidden)},
        "unembed": normal(hidden, vocab),
    }


def tokens(rows: int = ROWS, length: int = LENGTH, vocab: int = VOCAB, dtype: Any = jnp.float32) -> dict[str, Any]:
    ids = np.random.default_rng(1).integers(0, vocab, (rows, length + 1), dtype=np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "mask": (ids[:, 1:] % 3 > 0).astype(dtype)}


def scores(params: Any, batch: Any) -> jax.Array:
    mask = batch["mask"][..., None]

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
        # Tokens of one row meet, rows do not; the mask is the batch's and not the carry's.
        mixed = normed + jnp.cumsum(normed * mask, 1) / x.shape[1]
        return x + jnp.tanh(mixed @ w["up"]) @ w["down"], None

    start = jnp.asarray(params["embed"])[batch["inputs"]]
    return jax.lax.scan(layer, start, params["layers"])[0] @ params["unembed"]


def loss(params: Any, batch: Any) -> jax.Array:
    found = scores(params, batch)
    chosen = jnp.take_along_axis(found, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(found, -1) - chosen)


def placed(mesh: Mesh, params: Any, batch: Any) -> tuple[Any, Any]:
    """Layers over the stages, rows over data."""

    def put(path: Any, leaf: Any) -> Any:
        return jax.device_put(leaf, NamedSharding(mesh, P("pipeline") if "layers" in str(path) else P()))

    rows = P("data") if "data" in mesh.shape else P()
    return jax.tree_util.tree_map_with_path(put, params), jax.device_put(batch, NamedSharding(mesh, rows))


def assert_close(found: Any, expected: Any, terms: int) -> None:
    """Equal but for the order of sums in float32: each of so many terms is rounded once, at the largest's size."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        wide = np.asarray(other, np.float64)
        atol = terms * np.finfo(np.float32).eps * max(1e-3, np.abs(wide).max())
        np.testing.assert_allclose(np.asarray(one, np.float64).reshape(wide.shape), wide, rtol=0, atol=atol)
