"""A mixture of experts that drops no token, with shared experts; over a mesh axis where there is one for experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from capibara.axes import current_rules, mesh_axes_of
from capibara.errors import rule_error, unknown_name
from capibara.kernels.ops.layers.moe.expert_parallel import expert_parallel_moe
from capibara.kernels.ops.layers.moe.layer import moe_layer
from capibara.models.blocks.mlp import GATED, Mlp
from capibara.models.blocks.spec import Block, BlockOutput, Sequences, Weight

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["Moe"]

GATES = ("softmax", "sigmoid", "softmax_topk")


@dataclass(frozen=True)
class Moe(Block):
    """Each token through its `top_k` experts, and through the shared ones, which every token meets."""

    experts: int
    top_k: int
    ffn: int
    """Of one expert."""
    activation: str = "swiglu"
    gate: str = "softmax"
    normalize: bool = True
    """Divide a token's weights by their sum."""
    shared_ffn: int = 0
    """Width of the experts that every token meets, together; none when 0."""
    shared_gate: bool = False
    """A sigmoid of one product of the token weights what the shared experts give."""
    balance_loss: float = 0.01
    z_loss: float = 0.001
    jitter: float = 0.0
    """Noise on the router's input while training."""

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "ffn"):
            if getattr(self, name) < 1:
                raise rule_error(f"{name} of a mixture of experts is 1 or more", getattr(self, name), f"use {name} = 2")
        for name in ("shared_ffn", "balance_loss", "z_loss"):
            if getattr(self, name) < 0:
                raise rule_error(f"{name} of a mixture of experts is 0 or more", getattr(self, name), f"use {name} = 0")
        if not 0 <= self.jitter < 1:
            raise rule_error("jitter is from 0 to below 1", self.jitter, "use jitter = 0.01")
        if self.top_k > self.experts:
            raise rule_error(
                "top_k is at most the number of experts", f"{self.top_k} of {self.experts}", "choose fewer"
            )
        if self.activation not in GATED:
            raise unknown_name("activation of experts", self.activation, GATED)
        if self.gate not in GATES:
            raise unknown_name("gate of a router", self.gate, GATES)
        if self.shared_gate and not self.shared_ffn:
            raise rule_error("shared_gate weights shared experts", "shared_ffn = 0", "set shared_ffn, or leave it out")

    @property
    def _shared(self) -> Mlp:
        return Mlp(ffn=self.shared_ffn, activation=self.activation)

    def weights(self, model: ModularModelConfig) -> dict[str, Weight]:
        wide = model.hidden
        weights = {
            "router": Weight((wide, self.experts), (None, None), keep_float32=True),
            "gate": Weight((self.experts, wide, self.ffn), ("expert", None, "mlp"), fan_in=wide),
            "up": Weight((self.experts, wide, self.ffn), ("expert", None, "mlp"), fan_in=wide),
            "down": Weight(
                (self.experts, self.ffn, wide), ("expert", "mlp", None), fan_in=self.ffn, gain=model.residual_gain
            ),
        }
        if self.shared_ffn:
            weights |= {f"shared_{name}": weight for name, weight in self._shared.weights(model).items()}
        if self.shared_gate:
            weights["shared_gating"] = Weight((wide, 1), (None, None))
        return weights

    def __call__(
        self, model: ModularModelConfig, params: Mapping[str, jax.Array], x: jax.Array, sequences: Sequences
    ) -> BlockOutput:
        routed = {name: params[name] for name in ("router", "gate", "up", "down")}
        noisy = self.jitter > 0 and sequences.key is not None
        options: dict[str, Any] = {
            "top_k": self.top_k,
            "activation": GATED[self.activation],
            "gate": self.gate,
            "normalize": self.normalize,
            "jitter": self.jitter if noisy else 0.0,
            "key": sequences.key if noisy else None,
        }
        over = _expert_axis(self.experts, math.prod(x.shape[:-1]))
        if over is None:
            y, metrics = moe_layer(routed, x, **options)
        else:
            mesh, axis, others = over
            y, metrics = expert_parallel_moe(routed, x, mesh=mesh, axis_name=axis, token_axis_names=others, **options)
        if self.shared_ffn:
            own = {name: params[f"shared_{name}"] for name in self._shared.weights(model)}
            shared = self._shared(model, own, x, sequences).value
            if self.shared_gate:
                shared = shared * jax.nn.sigmoid(x @ params["shared_gating"].astype(x.dtype))
            y = y + shared
        loss = self.balance_loss * metrics.load_balancing_loss + self.z_loss * metrics.z_loss
        # How much busier than an even share the busiest expert is, and the share of each.
        share = metrics.counts / jnp.maximum(metrics.counts.sum(), 1)
        return BlockOutput(y, loss.astype(jnp.float32), {"expert_share": share.astype(jnp.float32)})

    def active_parameters(self, model: ModularModelConfig) -> int:
        sizes = {name: math.prod(weight.shape) for name, weight in self.weights(model).items()}
        experts = sum(sizes.pop(name) for name in ("gate", "up", "down"))
        return sum(sizes.values()) + experts * self.top_k // self.experts


def _expert_axis(experts: int, tokens: int) -> tuple[Any, str, tuple[str, ...]] | None:
    """(mesh, the experts' mesh axis, the other axes that split the tokens) on a mesh that splits either.

    Tokens are sorted by their experts. Over all devices that is an exchange of everything; here each device sorts its
    own. Where no axis has the experts, every device has all of them, and an axis of one device stands in for theirs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return None
    rules = current_rules()
    axes = [axis for axis in mesh_axes_of(rules.get("expert")) if mesh.shape.get(axis, 1) > 1]
    axes = axes or [axis for axis, size in mesh.shape.items() if size == 1][:1]
    if len(axes) != 1 or experts % mesh.shape[axes[0]]:
        return None
    others = tuple(
        axis
        for name in ("batch", "sequence")
        for axis in mesh_axes_of(rules.get(name))
        if mesh.shape.get(axis, 1) > 1 and axis != axes[0]
    )
    parts = math.prod(mesh.shape[axis] for axis in (*others, *axes))
    return None if parts == 1 or tokens % parts else (mesh, axes[0], others)
