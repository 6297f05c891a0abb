"""The nearest code on the TPU."""

from capibara.kernels.ops.vq.nearest.tpu.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
