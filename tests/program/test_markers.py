"""Logical names in a trace, under jax's transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.mesh import with_sharding_constraint
from capibara.program.markers import recording_axes
from capibara.program.tracing import trace


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


@pytest.mark.quick
def test_names_are_kept_only_while_recording() -> None:
    x = jnp.ones((4, 2))
    assert names_in(jax.make_jaxpr(marked)(x).jaxpr) == []
    with recording_axes():
        assert names_in(jax.make_jaxpr(marked)(x).jaxpr) == [("batch", None)]
    assert names_in(jax.make_jaxpr(marked)(x).jaxpr) == []


@pytest.mark.quick
def test_transformations_keep_them() -> None:
    x = jnp.arange(8.0).reshape(4, 2)
    with recording_axes():
        # The value, and its cotangent.
        assert names_in(jax.make_jaxpr(jax.grad(marked))(x).jaxpr) == [("batch", None)] * 2
        assert names_in(jax.make_jaxpr(jax.vmap(marked))(x[None]).jaxpr) == [(None, "batch", None)]
        recorded = jax.jit(jax.grad(marked))(x), jax.jvp(marked, (x,), (x,)), jax.vmap(marked)(x[None])
    plain = jax.jit(jax.grad(marked))(x), jax.jvp(marked, (x,), (x,)), jax.vmap(marked)(x[None])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), recorded, plain))


def test_a_marker_is_never_shown_as_an_operation() -> None:
    """Its result has the name of what it was given, and an exchange that it asks for says so."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = with_sharding_constraint(jnp.tanh(x @ w), ("batch", "mlp"))
        return (with_sharding_constraint(hidden, ("batch", None)) * hidden).sum()

    shapes = (jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 128), "float32"))
    traced = trace(jax.grad(program, 1), shapes)
    names = [value.name for value in traced.values] + [node.title for node in traced.nodes]
    assert not any("logical_axes" in name for name in names)
    assert sum(name.startswith("tanh") for name in names) >= 3, "the value, and after each of its constraints"
    assert any(node.title.startswith("constraint test_markers.py") for node in traced.nodes)
    assert any(name.endswith("(backward)") for name in names)
    assert not any("jvp" in name or "transpose(" in name for name in names)
