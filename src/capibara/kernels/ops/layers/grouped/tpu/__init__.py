"""The grouped products on the TPU."""

from capibara.kernels.ops.layers.grouped.tpu.forward import GATED_IMPLEMENTATION, IMPLEMENTATION
from capibara.kernels.ops.layers.grouped.tpu.weights import WEIGHTS_IMPLEMENTATION

__all__ = ["GATED_IMPLEMENTATION", "IMPLEMENTATION", "WEIGHTS_IMPLEMENTATION"]
