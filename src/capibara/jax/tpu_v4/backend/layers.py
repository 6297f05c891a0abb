"""Norms, activations, cross-entropy and mixtures of experts by their documented names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from capibara.kernels.ops import layers
from capibara.kernels.ops.layers import MoeMetrics, Routing, init_moe
from capibara.surface.in_precision import in_precision, moe_in_precision

__all__ = ["TpuV4LayerOps", "init_moe"]


class TpuV4LayerOps:
    """Norms, activations, cross-entropy and mixtures of experts.

    Every method takes a `precision`: "bfloat16", "float32", "mixed" or "fp8", what rows and matrices are rounded to and
    the result's type; None keeps the operands' own. Statistics, sums and losses are float32 always.

    For forward-mode derivatives (`jvp`, `jacfwd`) pass implementation="reference", where a method takes one: plain JAX.
    """

    def layer_norm(
        self,
        x: Float[Array, "*rows columns"],
        scale: Float[Array, " columns"] | None = None,
        bias: Float[Array, " columns"] | None = None,
        residual: Float[Array, "*rows columns"] | None = None,
        eps: float = 1e-5,
        precision: str | None = "bfloat16",
        **extra: Any,
    ) -> Any:
        """(s - mean) / sqrt(variance + eps) · scale + bias over the last axis of s = x + residual.

        `extra`: return_residual, implementation, config: see `capibara.kernels.layer_norm`.

        >>> import jax.numpy as jnp
        >>> y = TpuV4LayerOps().layer_norm(jnp.array([[1.0, 2.0, 3.0]]), precision="float32")
        >>> [round(number, 2) for number in y[0].tolist()]
        [-1.22, 0.0, 1.22]
        """
        arrays = (x, scale, bias, residual)
        return in_precision(layers.layer_norm, precision, arrays, rounds=(0, 3), eps=eps, **extra)

    def rms_norm(
        self,
        x: Float[Array, "*rows columns"],
        scale: Float[Array, " columns"] | None = None,
        residual: Float[Array, "*rows columns"] | None = None,
        eps: float = 1e-6,
        precision: str | None = "bfloat16",
        **extra: Any,
    ) -> Any:
        """s / sqrt(mean of s² + eps) · scale over the last axis of s = x + residual.

        `extra`: offset, return_residual, implementation, config: see `capibara.kernels.rms_norm`.
        """
        return in_precision(layers.rms_norm, precision, (x, scale, residual), rounds=(0, 2), eps=eps, **extra)

    def activation(
        self,
        x: Float[Array, "*rows columns"],
        kind: str = "gelu",
        dropout_rate: float = 0.0,
        rng: Any = None,
        precision: str | None = "bfloat16",
        **extra: Any,
    ) -> Float[Array, "*rows columns"]:
        """An activation and dropout of its result in one pass; a rate above 0 needs `rng`, a JAX key.

        `extra`: implementation, config. `kind` is one of those of `capibara.kernels.activation`.
        """
        drops = {"dropout_rate": dropout_rate, "key": rng}
        return in_precision(layers.activation, precision, (x,), kind=kind, **drops, **extra)

    def gated_activation(
        self,
        gate: Float[Array, "*rows columns"],
        up: Float[Array, "*rows columns"],
        kind: str = "silu",
        dropout_rate: float = 0.0,
        rng: Any = None,
        precision: str | None = "bfloat16",
        **extra: Any,
    ) -> Float[Array, "*rows columns"]:
        """activation(gate) · up: "silu" is SwiGLU, "gelu" GEGLU, "sigmoid" GLU; the rest as in `activation`."""
        drops = {"dropout_rate": dropout_rate, "key": rng}
        return in_precision(layers.gated_activation, precision, (gate, up), rounds=(0, 1), kind=kind, **drops, **extra)

    def cross_entropy(
        self,
        hidden: Float[Array, "*tokens depth"],
        weights: Float[Array, "depth vocabulary"],
        labels: Int[Array, "*tokens"],
        precision: str | None = "bfloat16",
        **extra: Any,
    ) -> Any:
        """The softmax cross-entropy of hidden @ weights, whose logits are never all in memory; float32.

        `extra`: transpose_weights, label_smoothing, z_loss, softcap, ignore_index, reduction, gradient, block_size,
        implementation: see `capibara.kernels.cross_entropy`.
        """
        arrays = (hidden, weights, labels)
        return in_precision(layers.cross_entropy, precision, arrays, rounds=(0, 1), results="none", **extra)

    def route(
        self,
        logits: Float[Array, "*tokens experts"],
        top_k: int,
        precision: str | None = "float32",
        **extra: Any,
    ) -> Routing:
        """(weights, indices, counts): the `top_k` experts of each token with the largest scores, best first.

        `precision` is what the logits are rounded to; the weights are float32. `extra`: gate, bias, normalize, scale,
        return_counts, implementation, config: see `capibara.kernels.route`.
        """
        return in_precision(layers.route, precision, (logits,), results="none", top_k=top_k, **extra)

    def moe_layer(
        self,
        params: Mapping[str, Any],
        x: Float[Array, "*tokens width"],
        top_k: int,
        precision: str | None = "bfloat16",
        mesh: Mesh | None = None,
        **extra: Any,
    ) -> tuple[Float[Array, "*tokens width"], MoeMetrics]:
        """(y, metrics): each token through its `top_k` experts, added by weight.

        Args:
          params: from `init_moe`. The router keeps float32.
          mesh: have the experts, and the tokens, over an axis of this mesh.
          extra: activation, gate, normalize, scale, jitter with key; without a mesh capacity_factor and keep, with one
            axis_name, token_axis_names and pair_capacity_factor. See `moe_layer` and `expert_parallel_moe` in
            `capibara.kernels`.

        >>> import jax
        >>> params = init_moe(jax.random.key(0), width=8, hidden=16, num_experts=4)
        >>> y, metrics = TpuV4LayerOps().moe_layer(params, jax.numpy.ones((2, 3, 8)), top_k=2)
        >>> y.shape, str(y.dtype), int(metrics.counts.sum())
        ((2, 3, 8), 'bfloat16', 12)
        """
        return moe_in_precision(params, x, precision, mesh, top_k=top_k, **extra)
