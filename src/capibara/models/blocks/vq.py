"""A vector-quantizing bottleneck: what passes a layer is the nearest of a few codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from capibara.errors import rule_error
from capibara.kernels.ops.vq.quantize import quantize
from capibara.models.blocks.spec import Block, BlockOutput, Sequences, Weight

if TYPE_CHECKING:
    from capibara.models.config import ModularModelConfig

__all__ = ["Vq"]


@dataclass(frozen=True)
class Vq(Block):
    """Projected to `dim`, replaced by the nearest code, projected back. The codebook is learned by a loss of its own.

    As every block its output is added to what entered it; the documented `VQbitLayer` is a layer by itself, whose
    codebook may follow averages.
    """

    codes: int
    dim: int = 0
    """Width of a code; hidden when 0."""
    commitment: float = 0.25
    """Weight of the loss that pulls the input to its code, beside the one that pulls the code to its inputs."""
    loss_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.codes < 2:
            raise rule_error("A codebook has 2 codes or more", self.codes, "use codes = 256")
        for name in ("dim", "commitment", "loss_weight"):
            if getattr(self, name) < 0:
                raise rule_error(f"{name} of a codebook is 0 or more", getattr(self, name), "leave it out")

    def weights(self, model: ModularModelConfig) -> dict[str, Weight]:
        wide, dim = model.hidden, self.dim or model.hidden
        return {
            "in": Weight((wide, dim), (None, None)),
            "codebook": Weight((self.codes, dim), (None, None), fan_in=1, keep_float32=True),
            "out": Weight((dim, wide), (None, None), fan_in=dim, gain=model.residual_gain),
        }

    def __call__(
        self, model: ModularModelConfig, params: Mapping[str, jax.Array], x: jax.Array, sequences: Sequences
    ) -> BlockOutput:
        y = x @ params["in"].astype(x.dtype)
        codebook = params["codebook"]
        quantized, indices = quantize(y, codebook.astype(y.dtype), return_indices=True)
        wide = y.astype(jnp.float32)
        # The codebook's own gradient comes through the look-up here; `quantize` passes none to it.
        codes = codebook[jnp.maximum(indices, 0)]
        teach = jnp.mean((codes - jax.lax.stop_gradient(wide)) ** 2)
        commit = jnp.mean((wide - jax.lax.stop_gradient(codes)) ** 2)
        counts = jnp.zeros(self.codes, jnp.float32).at[indices.ravel()].add(1.0, mode="drop")
        share = counts / jnp.maximum(counts.sum(), 1)
        perplexity = jnp.exp(-jnp.sum(share * jnp.log(jnp.maximum(share, 1e-12))))
        loss = self.loss_weight * (teach + self.commitment * commit)
        return BlockOutput(quantized @ params["out"].astype(x.dtype), loss, {"vq_perplexity": perplexity})
