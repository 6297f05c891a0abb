"""The selective scan on the TPU."""

from capibara.kernels.ops.scan.selective.tpu.backward import GRAD_IMPLEMENTATION
from capibara.kernels.ops.scan.selective.tpu.forward import IMPLEMENTATION

__all__ = ["GRAD_IMPLEMENTATION", "IMPLEMENTATION"]
