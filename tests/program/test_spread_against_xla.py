"""Exchanges that `spread` predicts, beside those that XLA's partitioner puts into the compiled program.

Bytes are compared exactly, by kind and mesh axis, with one rewriting: on the CPU, XLA leaves a reduce_scatter as an
all_reduce and a slice, of the same operand. Losses name the layout of their activations, as programs for a mesh do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.mesh import with_sharding_constraint
from capibara.mesh.layout import Layout
from capibara.mesh.mesh import MeshConfig
from capibara.program import spread, trace
from capibara.program.hlo_collectives import collectives_in

ROWS, WIDE, INNER, VOCAB, LAYERS = 64, 32, 128, 96, 3
RULES = {"batch": "data", "mlp": "model", "vocab": "model"}


def array(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def two_layers(params: Any, batch: Any) -> jax.Array:
    inner = with_sharding_constraint(jax.nn.relu(batch["x"] @ params["up"]), ("batch", "mlp"))
    return jnp.mean((inner @ params["down"] - batch["y"]) ** 2)


def many_layers(params: Any, batch: Any) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)


def tokens(params: Any, batch: Any) -> jax.Array:
    scores = jnp.tanh(params["embed"][batch["ids"]]) @ params["out"]
    chosen = jnp.take_along_axis(scores, batch["next"][:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - chosen)


MLP = {"up": array(WIDE, INNER), "down": array(INNER, WIDE)}
STACK = {"up": array(LAYERS, WIDE, INNER), "down": array(LAYERS, INNER, WIDE)}
TABLES = {"embed": array(VOCAB, WIDE), "out": array(WIDE, VOCAB)}
ARRAYS = {"x": array(ROWS, WIDE), "y": array(ROWS, WIDE)}
IDS = {"ids": array(ROWS, dtype="int32"), "next": array(ROWS, dtype="int32")}


@dataclass(frozen=True)
class Setup:
    name: str
    loss: Callable[..., Any]
    params: Any
    batch: Any
    mesh: dict[str, int]
    weights: tuple[P, P]  # in the order of the leaves: down, up; embed, out
    rows: P
    state: tuple[P, P] | None = None


SETUPS = [
    Setup("data parallel", two_layers, MLP, ARRAYS, {"data": 8}, (P(), P()), P("data")),
    Setup("column, then row", two_layers, MLP, ARRAYS, {"model": 8}, (P("model"), P(None, "model")), P()),
    Setup("fully sharded and split", two_layers, MLP, ARRAYS, {"data": 2, "model": 4},
          (P("model", "data"), P("data", "model")), P("data")),
    Setup("sharded optimizer", two_layers, MLP, ARRAYS, {"data": 8}, (P(), P()), P("data"), (P("data"), P("data"))),
    Setup("data parallel layers", many_layers, STACK, ARRAYS, {"data": 8}, (P(), P()), P("data")),
    Setup("fully sharded layers", many_layers, STACK, ARRAYS, {"data": 8},
          (P(None, None, "data"), P(None, "data")), P("data")),
    Setup("split layers", many_layers, STACK, ARRAYS, {"model": 8},
          (P(None, "model"), P(None, None, "model")), P()),
    Setup("split vocabulary", tokens, TABLES, IDS, {"data": 2, "model": 4}, (P("model"), P(None, "model")), P("data")),
]  # fmt: skip


def exchanged(setup: Setup, step: Callable[..., Any]) -> tuple[dict[Any, float], dict[Any, float]]:
    """Bytes by kind and axes: XLA's, and ours."""
    axes, sizes = tuple(setup.mesh), tuple(setup.mesh.values())
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(sizes), axes)
    names, args = sorted(setup.params), (setup.params, setup.params, setup.batch)
    weights = dict(zip(names, setup.weights, strict=True))
    state = dict(zip(names, setup.state or setup.weights, strict=True))
    specs = (weights, state, dict.fromkeys(setup.batch, setup.rows))
    placed = jax.tree.map(lambda one: NamedSharding(mesh, one), specs, is_leaf=lambda x: isinstance(x, P))
    jitted = jax.jit(step, in_shardings=placed, out_shardings=(*placed[:2], None), donate_argnums=(0, 1))
    with jax.sharding.set_mesh(mesh):
        text = jitted.lower(*args).compile().as_text() or ""
    theirs: dict[Any, float] = defaultdict(float)
    for one in collectives_in(text, setup.mesh):
        theirs[one.kind, one.axes] += one.bytes
    program = trace(step, args, donate=(0, 1), roles=("params", "state", "batch"))
    flat = tuple(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)))
    ours: dict[Any, float] = defaultdict(float)
    for made, times in spread(program, Layout(MeshConfig(sizes, axes), flat, RULES)).walk():
        if made.collective is not None:
            kind = "all_reduce" if made.collective.kind == "reduce_scatter" else made.collective.kind
            ours[kind, made.collective.axes] += times * made.collective.bytes
    return theirs, ours


@pytest.mark.quick
@pytest.mark.parametrize("setup", SETUPS, ids=lambda one: one.name)
def test_the_same_bytes_are_exchanged(setup: Setup, momentum: Callable[..., Any]) -> None:
    theirs, ours = exchanged(setup, momentum(setup.loss))
    assert theirs == ours
    assert sum(ours.values()) > 0
