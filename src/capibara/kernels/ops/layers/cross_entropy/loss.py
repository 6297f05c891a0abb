"""From a token's lse, its label's logit and the sum of its logits to its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def token_losses(sums: Sequence[Any], size: int, label_smoothing: float, z_loss: float) -> Any:
    """`sums` are (lse, the label's logit[, the sum of the logits]); the last is needed where labels are smoothed."""
    lse, picked, *rest = sums
    loss = lse - picked
    if label_smoothing:
        loss = lse - (1 - label_smoothing) * picked - (label_smoothing / size) * rest[0]
    return loss + z_loss * jnp.square(lse) if z_loss else loss


def token_flows(lse: Any, size: int, label_smoothing: float, z_loss: float) -> tuple[Any, float, float | None]:
    """The derivative of a token's loss by each of the three sums: a number a token, or one for all."""
    of_lse = 1 + 2 * z_loss * lse if z_loss else jnp.ones_like(lse)
    return of_lse, -(1 - label_smoothing), -label_smoothing / size if label_smoothing else None
