"""Layer norm, gated activations and experts, for `vishwamai.kernels.tpu`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array, Float

from capibara.errors import unknown_name
from capibara.kernels.ops import layers
from capibara.kernels.ops.layers import MoeMetrics
from capibara.kernels.ops.layers import init_moe as init_expert_layer
from capibara.precision import POLICIES, PrecisionConfig
from capibara.surface.in_precision import moe_in_precision

__all__ = ["expert_layer", "geglu", "glu", "init_expert_layer", "layer_norm", "swiglu"]


def layer_norm(
    x: Float[Array, "*rows columns"],
    scale: Float[Array, " columns"] | None = None,
    bias: Float[Array, " columns"] | None = None,
    use_fused_ops: bool = True,
    eps: float = 1e-5,
    **extra: Any,
) -> Any:
    """(x - mean) / sqrt(variance + eps) · scale + bias over the last axis, of x's type; statistics are float32.

    Args:
      use_fused_ops: the fastest implementation, whose gradient keeps x and two numbers a row. False runs the
        specification in plain JAX, and keeps for its gradient what JAX would.
      extra: residual, return_residual, config.
    """
    return layers.layer_norm(x, scale, bias, eps=eps, implementation=None if use_fused_ops else "reference", **extra)


def glu(
    gate: Float[Array, "*rows columns"], up: Float[Array, "*rows columns"], use_fused_ops: bool = True, **extra: Any
) -> Float[Array, "*rows columns"]:
    """sigmoid(gate) · up; `use_fused_ops` as in `layer_norm`, `extra`: dropout_rate with key, config."""
    return layers.glu(gate, up, implementation=None if use_fused_ops else "reference", **extra)


def swiglu(
    gate: Float[Array, "*rows columns"], up: Float[Array, "*rows columns"], use_fused_ops: bool = True, **extra: Any
) -> Float[Array, "*rows columns"]:
    """silu(gate) · up; the other arguments as in `glu`."""
    return layers.swiglu(gate, up, implementation=None if use_fused_ops else "reference", **extra)


def geglu(
    gate: Float[Array, "*rows columns"], up: Float[Array, "*rows columns"], use_fused_ops: bool = True, **extra: Any
) -> Float[Array, "*rows columns"]:
    """gelu(gate) · up; the other arguments as in `glu`, and approximate for gelu by tanh."""
    return layers.geglu(gate, up, implementation=None if use_fused_ops else "reference", **extra)


def expert_layer(
    params: Mapping[str, Any],
    x: Float[Array, "*tokens width"],
    top_k: int = 2,
    mesh: Mesh | None = None,
    precision: PrecisionConfig | str | None = None,
    **extra: Any,
) -> tuple[Float[Array, "*tokens width"], MoeMetrics]:
    """(y, metrics): each token through its `top_k` gated experts, added by weight.

    Args:
      params: from `init_expert_layer(key, width, hidden, num_experts)`.
      mesh: have experts and tokens over the mesh's axis "expert" (or `axis_name`, in extra).
      precision: a policy to round rows and experts by, or its name ("default", "high", "highest", "fp8", or "bfloat16",
        "mixed", "float32"); None keeps x's type.
      extra: activation, gate, normalize, scale, jitter with key; without a mesh capacity_factor and keep, with one
        axis_name, token_axis_names and pair_capacity_factor.
    """
    return moe_in_precision(params, x, _policy_name(precision), mesh, top_k=top_k, **extra)


def _policy_name(precision: PrecisionConfig | str | None) -> str | None:
    """Of a config, its name as `tpu_kernel` takes it, or a policy's own name."""
    if precision is None:
        return None
    if isinstance(precision, PrecisionConfig):
        return precision.policy.name
    configs = {config.value: config for config in PrecisionConfig}
    name = precision.lower() if isinstance(precision, str) else precision
    if name in configs:
        return configs[name].policy.name
    if name not in POLICIES:
        raise unknown_name("precision", precision, dict.fromkeys((*configs, *POLICIES)))
    return name
