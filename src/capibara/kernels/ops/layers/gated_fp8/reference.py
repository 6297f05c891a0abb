"""The specification of gated_fp8 and of its gradient."""

from __future__ import annotations

import jax

from capibara.kernels.ops.layers.activation.reference import FUNCTIONS, wide_type
from capibara.kernels.ops.linalg.round_fp8 import reference as round_fp8

Results = tuple[jax.Array, ...]


def reference(
    gate: jax.Array, up: jax.Array, factor: jax.Array, *, kind: str = "silu", dtype: str = "float8_e4m3fn"
) -> Results:
    """activation(gate) · up, computed in float32 and rounded to its operands' type, as `round_fp8` has it: (values,
    their transpose, the largest magnitude)."""
    wide = wide_type(gate)
    inner = (FUNCTIONS[kind](gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)
    return round_fp8.reference(inner, factor, dtype=dtype)


def reference_grad(
    gate: jax.Array, up: jax.Array, flow: jax.Array, factors: jax.Array, *, kind: str = "silu",
    dtype: str = "float8_e5m2",
) -> Results:  # fmt: skip
    """(the gradient of gate, transposed, that of up, transposed, the largest magnitudes of both [2]), where flow is the
    gradient of activation(gate) · up."""
    wide = wide_type(gate)
    _, pull = jax.vjp(lambda gate, up: FUNCTIONS[kind](gate) * up, gate.astype(wide), up.astype(wide))
    return both_rounded([d.astype(gate.dtype) for d in pull(flow.astype(wide))], factors, dtype)


def both_rounded(gradients: list[jax.Array], factors: jax.Array, dtype: str) -> Results:
    """Two gradients, each by its own factor; the largest magnitudes of both last."""
    made = [
        round_fp8.reference(d, factor.reshape(1), dtype=dtype) for d, factor in zip(gradients, factors, strict=True)
    ]
    return *made[0][:2], *made[1][:2], jax.numpy.concatenate([largest for *_, largest in made])
