"""A mixture of experts that drops no token, with shared experts; on a mesh each device sorts its own tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from capibara.axes import current_rules, mesh_axes_of
from capibara.errors import rule_error, unknown_name
from capibara.kernels.ops.layers.moe.expert_parallel import moe_over_mesh
from capibara.kernels.ops.layers.moe.layer import moe_layer
from capibara.mesh import partition_spec, with_sharding_constraint
from capibara.mesh.traced_for import mesh_in_force
from capibara.models.blocks.mlp import GATED, Mlp
from capibara.models.blocks.spec import Block, BlockOutput, Sequences, Weight

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["Moe"]

GATES = ("softmax", "sigmoid", "softmax_topk")
_AXES = {"gate": ("expert", None, "mlp"), "up": ("expert", None, "mlp"), "down": ("expert", "mlp", None)}
"""Logical axes of the experts' weights."""


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
            "gate": Weight((self.experts, wide, self.ffn), _AXES["gate"], fan_in=wide),
            "up": Weight((self.experts, wide, self.ffn), _AXES["up"], fan_in=wide),
            "down": Weight((self.experts, self.ffn, wide), _AXES["down"], fan_in=self.ffn, gain=model.residual_gain),
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
        over = self._over_mesh(x.shape)
        if over is None:
            routed |= {name: with_sharding_constraint(routed[name], axes) for name, axes in _AXES.items()}
            y, metrics = moe_layer(routed, x, **options)
        else:
            y, metrics = moe_over_mesh(routed, x, **over, **options)
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

    def _over_mesh(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """Where tokens, experts and hidden width lie on the mesh in force, for `moe_over_mesh`; None without one.

        Tokens are sorted by their experts: over all devices that is an exchange of everything, so each sorts its own.
        """
        mesh = mesh_in_force(("batch", "sequence", "expert", "mlp"))
        if mesh.empty or mesh.manual_axes:
            return None
        sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
        rules = current_rules()
        tokens = partition_spec(("batch", "sequence")[: len(shape) - 1], sizes, shape[:-1], rules)
        entries = [mesh_axes_of(entry) for entry in (*tokens, *(None,) * (len(shape) - 1 - len(tokens)))]
        over_experts = [axis for axis in mesh_axes_of(rules.get("expert")) if axis in sizes]
        expert_axis = over_experts[0] if len(over_experts) == 1 and not self.experts % sizes[over_experts[0]] else None
        if expert_axis is not None and not any(expert_axis in axes for axes in entries):
            # Its devices have the same tokens: each takes a part of them, of the first dimension that has enough.
            parts = [math.prod(sizes[axis] for axis in (*axes, expert_axis)) for axes in entries]
            free = [dim for dim, length in enumerate(shape[:-1]) if length % parts[dim] == 0]
            if free:
                entries[free[0]] = (*entries[free[0]], expert_axis)
            else:
                expert_axis = None
        taken = {axis for axes in entries for axis in axes}
        hidden = tuple(axis for axis in mesh_axes_of(rules.get("mlp")) if axis in sizes and axis not in taken)
        if self.ffn % math.prod(sizes[axis] for axis in hidden):
            hidden = ()
        if not taken and not hidden:
            return None
        spec = PartitionSpec(*(axes or None for axes in entries))
        return {"mesh": mesh, "tokens": spec, "expert_axis": expert_axis, "hidden_axes": hidden}
