"""gemm on Hopper: large tiles, and few rows."""

from capibara.kernels.ops.linalg.gemm.hopper.forward import IMPLEMENTATION
from capibara.kernels.ops.linalg.gemm.hopper.turned import IMPLEMENTATION as TURNED_IMPLEMENTATION

__all__ = ["IMPLEMENTATION", "TURNED_IMPLEMENTATION"]
