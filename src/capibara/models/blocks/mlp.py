"""The feed-forward block: gated (SwiGLU, GeGLU) or plain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from capibara.errors import rule_error, unknown_name
from capibara.kernels.ops.layers.activation.api import activation, gated_activation
from capibara.kernels.ops.layers.gated_fp8 import api as gated_fp8
from capibara.kernels.ops.layers.gated_mlp.api import gated_mlp, has_kernels
from capibara.mesh import with_sharding_constraint
from capibara.mesh.rules import is_placing
from capibara.models.blocks.spec import (
    FP8,
    LORA_DOWN,
    Block,
    BlockOutput,
    GatedMlp,
    LastProduct,
    PagedBatch,
    Projected,
    Sequences,
    Unsummed,
    Weight,
    gated_products,
    held_together,
    joint_name,
    product,
    products,
)
from capibara.parallel.remat import keeps_products

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["GATED", "Mlp"]

GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
PLAIN = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu": "relu", "silu": "silu"}
_INNER = ("batch", "sequence", "mlp")


@dataclass(frozen=True)
class Mlp(Block):
    """down(activation(gate(x)) · up(x)), or down(activation(up(x)))."""

    ffn: int
    activation: str = "swiglu"
    bias: bool = False

    def __post_init__(self) -> None:
        if self.ffn < 1:
            raise rule_error("ffn of an mlp is 1 or more", self.ffn, "use four times hidden")
        if self.activation not in {**GATED, **PLAIN}:
            raise unknown_name("activation of an mlp", self.activation, (*GATED, *PLAIN))

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    def weights(self, model: ModularModelConfig) -> dict[str, Weight]:
        wide = model.hidden
        weights = {"up": Weight((wide, self.ffn), (None, "mlp"))}
        if self.gated:
            weights["gate"] = Weight((wide, self.ffn), (None, "mlp"))
        weights["down"] = Weight((self.ffn, wide), ("mlp", None), fan_in=self.ffn, gain=model.residual_gain)
        if self.bias:
            weights["up_bias"] = Weight((self.ffn,), ("mlp",), "zeros")
            if self.gated:
                weights["gate_bias"] = Weight((self.ffn,), ("mlp",), "zeros")
            weights["down_bias"] = Weight((wide,), (None,), "zeros")
        return weights

    takes_fp8 = True

    def products(self) -> dict[str, int]:
        return dict.fromkeys(("gate", "up", "down") if self.gated else ("up", "down"), 1)

    def joint_products(self) -> tuple[tuple[str, ...], ...]:
        return (("gate", "up"),) if self.gated else ()

    def __call__(
        self, model: ModularModelConfig, params: Mapping[str, jax.Array], x: jax.Array, sequences: Sequences
    ) -> BlockOutput:
        if self.gated and not self.bias and not is_placing() and not keeps_products():
            y = self._by_kernels(params, x)
            if y is not None:
                return BlockOutput(y)
        return BlockOutput(self._biased(params, "down", product(params, "down", self._inner(params, x))))

    def paged(
        self,
        model: ModularModelConfig,
        params: Mapping[str, jax.Array],
        x: jax.Array | Unsummed | Projected,
        cache: Mapping[str, jax.Array],
        batch: PagedBatch,
    ) -> tuple[jax.Array | LastProduct, dict[str, jax.Array]]:
        if isinstance(x, Unsummed):
            total, inner = x.times(params, joint_name(("gate", "up")), gate=GATED[self.activation])
            return LastProduct(params, "down", inner, residual=total), dict(cache)
        assert not isinstance(x, Projected)
        if self.bias:
            return super().paged(model, params, x, cache, batch)
        return LastProduct(params, "down", self._inner(params, x)), dict(cache)

    def adds_up(
        self, model: ModularModelConfig, params: Mapping[str, Any], x: Unsummed, cache: Mapping[str, Any]
    ) -> bool:
        names = ("gate", "up")
        if self.bias or not self.gated or not held_together(params, names):
            return False
        return x.has_kernel(params, joint_name(names), gate=GATED[self.activation])

    def as_gated_mlp(self, params: Mapping[str, Any]) -> GatedMlp | None:
        names = ("gate", "up")
        if self.bias or not self.gated or not held_together(params, names) or "down" + LORA_DOWN in params:
            return None
        return GatedMlp(joint_name(names), "down", GATED[self.activation])

    def _by_kernels(self, params: Mapping[str, Any], x: jax.Array) -> jax.Array | None:
        """By kernels that have the activation inside, or None where there are none for three products of weights as
        they were declared: not held in another way, nor changed."""
        names, kind = ("gate", "up", "down"), GATED[self.activation]
        if not {*names} <= set(params):
            return None
        gate, up, down = (params[name] for name in names)
        if len(params) == len(names):
            return gated_mlp(x, gate, up, down, kind=kind) if has_kernels(x, gate, up, down, kind=kind) else None
        scaled = [params.get(joint_name(of) + FP8) for of in (("gate", "up"), ("down",))]
        histories = [fp8.history for fp8 in scaled if fp8 is not None and fp8.settings.scaling == "delayed"]
        first, second = histories if len(histories) == 2 else (None, None)
        if first is None or second is None or len(params) != len(names) + 2:
            return None
        if not gated_fp8.has_kernels(x, up, kind=kind):
            return None
        return gated_fp8.fp8_gated_mlp(kind, x, (gate, up, down), (first, second))

    def _biased(self, params: Mapping[str, jax.Array], name: str, y: jax.Array) -> jax.Array:
        return y + params[f"{name}_bias"].astype(y.dtype) if self.bias else y

    def _inner(self, params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
        """What `down` narrows, [..., ffn]."""
        if self.gated and not self.bias:
            inner = gated_products(params, ("gate", "up"), x, GATED[self.activation])
            if inner is not None:
                return inner
        names = ("gate", "up") if self.gated else ("up",)
        wide = [
            with_sharding_constraint(self._biased(params, name, y), _INNER)
            for name, y in zip(names, products(params, dict.fromkeys(names, (self.ffn,)), x), strict=True)
        ]
        if self.gated:
            inner = gated_activation(*wide, kind=GATED[self.activation])
        else:
            inner = activation(*wide, kind=PLAIN[self.activation])
        return with_sharding_constraint(inner, _INNER)
