"""The grouped products on Hopper."""

from capibara.kernels.ops.layers.grouped.hopper.forward import GATED_IMPLEMENTATION, IMPLEMENTATION
from capibara.kernels.ops.layers.grouped.hopper.weights import WEIGHTS_IMPLEMENTATION

__all__ = ["GATED_IMPLEMENTATION", "IMPLEMENTATION", "WEIGHTS_IMPLEMENTATION"]
