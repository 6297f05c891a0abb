"""What activation is held against: what a user writes with JAX alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.spec import Case
from capibara.kernels.ops.layers.activation.reference import FUNCTIONS


def jax_random(case: Case) -> Callable[..., Any] | None:
    """jax.nn's function, the gate's product, and a mask by jax.random.bernoulli: another mask than the op's."""
    params: dict[str, Any] = dict(case.params)
    kind, rate = params.get("kind", "gelu"), params.get("rate", 0.0)

    def fn(x: Any, up: Any = None, seed: Any = None, offsets: Any = None) -> Any:
        y = FUNCTIONS[kind](x)
        y = y if up is None else y * up
        if not rate:
            return y
        keep = jax.random.bernoulli(jax.random.wrap_key_data(seed, impl="threefry2x32"), 1 - rate, x.shape)
        return jnp.where(keep, y / (1 - rate), 0).astype(x.dtype)

    return jax.jit(fn)
