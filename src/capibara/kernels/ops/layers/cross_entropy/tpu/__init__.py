"""Cross-entropy on the TPU."""

from capibara.kernels.ops.layers.cross_entropy.tpu.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
