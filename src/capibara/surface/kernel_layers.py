"""The kernel object's layers, and its operations on many tensors."""

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Array, Float

from capibara.surface import batched
from capibara.surface import layers as layers
from capibara.surface.draws import Draws
from capibara.surface.figures import LastKernel
from capibara.surface.products import Settings


class LayerKernels:
    """Norm, activation, routing and batches by the choices of the object that they are part of."""

    settings: Settings
    draws: Draws
    last: LastKernel

    def batch_operations(
        self,
        operation_type: str,
        inputs: Any,
        parameters: Any = None,
        parallel_execution: bool = True,
        precision: str | None = None,
    ) -> list[Array]:
        """One operation on many tensors of different shapes, in as few launches as their shapes allow.

        Args:
          operation_type: "layer_norm", "rms_norm", "softmax" (each over the last axis), "gelu" or "matmul".
          inputs: a list of tensors, or an array whose first axis counts them; for "matmul" pairs (a, b), or left
            sides with the right one in the parameters.
          parameters: a dictionary for all tensors, or a list of one for each. Norms take weight, bias (layer norm),
            eps and offset (RMS norm), gelu takes approximate, matmul takes b.
          parallel_execution: one program, in which tensors that can be computed together are. False: a program for
            each tensor, one after another.
          precision: another than the object's.
        """
        return self.last.run(
            functools.partial(batched.batch_operations, self.settings),
            counted_as={"parallel_execution": True},
            operation_type=operation_type,
            inputs=inputs,
            parameters=parameters,
            parallel_execution=parallel_execution,
            precision=precision,
        )

    def moe_routing_kernel(
        self,
        tokens: Float[Array, "*tokens width"],
        num_experts: int,
        top_k: int = 2,
        load_balancing: bool = True,
        precision: str | None = None,
        router: Float[Array, "width experts"] | None = None,
        **extra: Any,
    ) -> layers.TokenRouting:
        """(weights, indices, counts, load_balancing_loss): the `top_k` experts of each token, best first.

        Args:
          tokens: logits [..., num_experts]; or [..., width], multiplied by the router's weights, to float32 logits.
          load_balancing: count the tokens of each expert, and compute the loss (1 when they are evenly used) that the
            caller weights and adds; False leaves both None.
          precision: another than the object's: what tokens and router are rounded to, and the weights' type.
          router: [width, num_experts]. None, where the tokens are no logits, draws it from the object's seed, the same
            at every call, and says so once.
          extra: gate ("softmax", "sigmoid", "softmax_topk"), normalize, scale: see `capibara.kernels.route`.
        """
        return self.last.run(
            functools.partial(layers.route_tokens, self.settings, self.draws),
            tokens=tokens,
            num_experts=num_experts,
            top_k=top_k,
            load_balancing=load_balancing,
            precision=precision,
            router=router,
            **extra,
        )

    def fast_layer_norm(
        self,
        input_tensor: Float[Array, "*rows columns"],
        weight: Float[Array, " columns"] | None = None,
        bias: Float[Array, " columns"] | None = None,
        eps: float = 1e-5,
        memory_efficient: bool = True,
        precision: str | None = None,
    ) -> Float[Array, "*rows columns"]:
        """(x - mean) / sqrt(variance + eps) · weight + bias over the last axis; statistics are float32.

        Args:
          memory_efficient: for its gradient keep the rows and two numbers for each. False runs the specification and
            leaves it to JAX what to keep: the intermediates, in float32.
          precision: another than the object's.
        """
        return self.last.run(
            functools.partial(layers.normalise, self.settings),
            input_tensor=input_tensor,
            weight=weight,
            bias=bias,
            eps=eps,
            memory_efficient=memory_efficient,
            precision=precision,
        )

    def fused_gelu_dropout(
        self,
        input_tensor: Float[Array, "*rows columns"],
        dropout_rate: float = 0.0,
        training: bool = True,
        inplace: bool = False,
        **extra: Any,
    ) -> Float[Array, "*rows columns"]:
        """gelu and dropout in one pass over memory.

        Args:
          dropout_rate: the share to drop; the others are scaled by 1 / (1 - rate). It draws the object's next key,
            or from `rng`.
          training: False drops nothing.
          inplace: the result takes the input's memory, and the input is gone. Inside of jit or grad, where the result
            has another type, for NumPy arrays and at level "none" it cannot, which is said once.
          extra: rng, approximate (gelu by tanh), and precision for another than the object's.
        """
        return self.last.run(
            functools.partial(layers.gelu_dropout, self.settings, self.draws),
            keys=("rng",),
            again={"inplace": False},
            input_tensor=input_tensor,
            dropout_rate=dropout_rate,
            training=training,
            inplace=inplace,
            **extra,
        )
