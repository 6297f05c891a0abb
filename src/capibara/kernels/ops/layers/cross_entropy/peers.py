"""What cross_entropy is held against: what a user writes with JAX alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.kernels.core.spec import Case
from capibara.kernels.ops.layers.cross_entropy.reference import capped


def logits_in_memory(case: Case) -> Callable[..., Any] | None:
    """All logits at once, in the operands' type as matrix products give them; their softmax in float32."""
    params: dict[str, Any] = dict(case.params)
    if params.get("return_sum"):
        return None
    cap, transposed = params.get("soft_cap"), params.get("transpose_weights", False)

    def fn(hidden: Any, weights: Any, labels: Any) -> Any:
        logits = capped((hidden @ (weights.T if transposed else weights)).astype(jnp.float32), cap)
        at = jnp.clip(labels, 0, logits.shape[-1] - 1)[..., None]
        return jax.nn.logsumexp(logits, axis=-1), jnp.take_along_axis(logits, at, axis=-1)[..., 0]

    return jax.jit(fn)
