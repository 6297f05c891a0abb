"""conv2d on the TPU."""

from capibara.kernels.ops.conv.conv2d.tpu.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
