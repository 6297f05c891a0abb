"""Logical names in a trace, under jax's transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.parallel import with_sharding_constraint
from capibara.parallel.program.markers import recording_axes


def names_in(jaxpr: Any) -> list[tuple[str | None, ...]]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "logical_axes":
            found.append(eqn.params["names"])
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                found += names_in(inner)
    return found


@jax.jit
def marked(x: jax.Array) -> jax.Array:
    return jnp.sum(with_sharding_constraint(jnp.sin(x), ("batch",)) ** 2)


@pytest.mark.newest
def test_names_are_kept_only_while_recording() -> None:
    x = jnp.ones((4, 2))
    assert names_in(jax.make_jaxpr(marked)(x).jaxpr) == []
    with recording_axes():
        assert names_in(jax.make_jaxpr(marked)(x).jaxpr) == [("batch", None)]
    assert names_in(jax.make_jaxpr(marked)(x).jaxpr) == []


@pytest.mark.newest
def test_transformations_keep_them() -> None:
    x = jnp.arange(8.0).reshape(4, 2)
    with recording_axes():
        # The value, and its cotangent.
        assert names_in(jax.make_jaxpr(jax.grad(marked))(x).jaxpr) == [("batch", None)] * 2
        assert names_in(jax.make_jaxpr(jax.vmap(marked))(x[None]).jaxpr) == [(None, "batch", None)]
        recorded = jax.jit(jax.grad(marked))(x), jax.jvp(marked, (x,), (x,)), jax.vmap(marked)(x[None])
    plain = jax.jit(jax.grad(marked))(x), jax.jvp(marked, (x,), (x,)), jax.vmap(marked)(x[None])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), recorded, plain))
