"""The optimizers that a planned training step can have: what they keep for each parameter is most of the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import rule_error, unknown_name

__all__ = ["OPTIMIZERS", "optimizer_named"]

Init = Callable[[Any], Any]
Update = Callable[[Any, Any, Any], tuple[Any, Any]]

# The usual ones for language models. A plan depends on what is kept and computed, not on these numbers.
_RATE, _B1, _B2, _EPSILON, _DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1


def _adamw(mixed: bool) -> tuple[Init, Update]:
    def init(params: Any) -> Any:
        def zeros(p: Any) -> Any:
            return jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32) if mixed else p.dtype)

        return {"count": jnp.int32(0), "mean": jax.tree.map(zeros, params), "square": jax.tree.map(zeros, params)}

    def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        count = state["count"] + 1
        # The moments start at zero; this takes out what that pulls them down by.
        first, second = 1 - _B1**count, 1 - _B2**count

        def moved(p: Any, m: Any, v: Any, g: Any) -> tuple[Any, Any, Any]:
            m = (_B1 * m + (1 - _B1) * g).astype(m.dtype)
            v = (_B2 * v + (1 - _B2) * g * g).astype(v.dtype)
            way = (m / first) / (jnp.sqrt(v / second) + _EPSILON)
            return (p - _RATE * (way + _DECAY * p)).astype(p.dtype), m, v

        # All of one parameter before the next one's: moments that lie with the host can come and go one after another.
        made = jax.tree.map(moved, params, state["mean"], state["square"], gradients)
        params, mean, square = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), made)
        return params, {"count": count, "mean": mean, "square": square}

    return init, update


def _sgd(mixed: bool) -> tuple[Init, Update]:
    del mixed  # it keeps nothing, so there is no type to choose

    def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda p, g: (p - _RATE * g).astype(p.dtype), params, gradients), state

    return lambda params: (), update


def _like_optax(optimizer: Any) -> tuple[Init, Update]:
    def update(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        changes, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, changes), state

    return optimizer.init, update


OPTIMIZERS: dict[str, Callable[[bool], tuple[Init, Update]]] = {"adamw": _adamw, "sgd": _sgd}


def optimizer_named(optimizer: Any, mixed: bool) -> tuple[Init, Update]:
    """(init, update) of an optimizer by name, or of an object with `init` and `update` as optax makes them."""
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", optimizer, OPTIMIZERS)
        return OPTIMIZERS[optimizer](mixed)
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return _like_optax(optimizer)
    raise rule_error(
        "An optimizer is a name or has init(params) and update(gradients, state, params)",
        type(optimizer).__name__,
        f"use one of {', '.join(map(repr, OPTIMIZERS))}, or an optax transformation",
    )
