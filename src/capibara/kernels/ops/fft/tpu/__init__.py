"""The transform on the TPU."""

from capibara.kernels.ops.fft.tpu.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
