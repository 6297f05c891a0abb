"""What one would write without this library: softmax, lax.top_k, and a division."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.kernels.core.spec import Case


def softmax_top_k(case: Case) -> Callable[..., Any] | None:
    """For the softmax gates without a bias."""
    top_k: Any = case.params["top_k"]
    gate, normalize = case.params.get("gate", "softmax"), case.params.get("normalize", True)
    if gate == "sigmoid" or case.shapes[1] is not None or case.params.get("scale", 1.0) != 1.0:
        return None

    def peer(logits: jax.Array, bias: None = None) -> tuple[jax.Array, jax.Array]:
        weights, indices = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), -1), top_k)
        return (weights / weights.sum(-1, keepdims=True) if normalize else weights), indices

    return peer


PEERS = {"softmax+top_k": softmax_top_k}
