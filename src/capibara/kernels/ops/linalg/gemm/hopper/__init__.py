"""gemm on Hopper."""

from capibara.kernels.ops.linalg.gemm.hopper.forward import IMPLEMENTATION

__all__ = ["IMPLEMENTATION"]
