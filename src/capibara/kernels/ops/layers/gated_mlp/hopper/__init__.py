"""gated_products and its gradient for Hopper."""

from capibara.kernels.ops.layers.gated_mlp.hopper.backward import IMPLEMENTATION as GRAD_IMPLEMENTATION
from capibara.kernels.ops.layers.gated_mlp.hopper.forward import IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
