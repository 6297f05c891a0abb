"""State space duality on the TPU."""

from capibara.kernels.ops.scan.ssd.tpu.backward import GRAD_IMPLEMENTATION
from capibara.kernels.ops.scan.ssd.tpu.forward import IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
