"""gated_fp8 by XLA: the activation in one pass, its rounding both ways in the next."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.kernels.core.dispatch import run
from capibara.kernels.ops.layers.activation.api import ACTIVATION_GRAD, gated_activation
from capibara.kernels.ops.linalg.round_fp8.xla import xla as round_fp8

Results = tuple[jax.Array, ...]


def xla(gate: jax.Array, up: jax.Array, factor: jax.Array, *, kind: str, dtype: str) -> Results:
    return round_fp8(gated_activation(gate, up, kind=kind), factor, dtype=dtype)


def xla_grad(
    gate: jax.Array, up: jax.Array, flow: jax.Array, factors: jax.Array, *, kind: str, dtype: str
) -> Results:  # fmt: skip
    gradients = run(ACTIVATION_GRAD, (gate, up, None, None, flow), {"kind": kind})
    (*of_gate, first), (*of_up, second) = (
        round_fp8(d, factors[number : number + 1], dtype=dtype) for number, d in enumerate(gradients)
    )
    return *of_gate, *of_up, jnp.concatenate((first, second))
