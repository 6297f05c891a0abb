"""What causal_conv1d is held against besides its own implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from capibara.kernels.core.spec import Case
from capibara.kernels.ops.conv.causal1d.reference import finished, history


def depthwise(case: Case) -> Callable[..., Any]:
    """JAX's convolution with as many groups as channels, then the bias and the activation: what users write."""
    keeps, activation = bool(case.params.get("return_final_state")), case.params.get("activation")

    @jax.jit
    def peer(x: jax.Array, w: jax.Array, bias: Any, initial_state: Any) -> Any:
        seen = history(x, w.shape[0], initial_state)
        total = lax.conv_general_dilated(
            seen, w[:, None].astype(x.dtype), (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=x.shape[2],
        )  # fmt: skip
        y = finished(total, bias, None if activation is None else str(activation))
        return (y, seen[:, x.shape[1] :]) if keeps else y

    return peer
