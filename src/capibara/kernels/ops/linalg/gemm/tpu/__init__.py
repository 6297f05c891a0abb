"""gemm on the TPU."""

from capibara.kernels.ops.linalg.gemm.tpu.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
