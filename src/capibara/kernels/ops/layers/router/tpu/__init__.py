"""The router on the TPU."""

from capibara.kernels.ops.layers.router.tpu.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
