"""The linear algebra family."""

from capibara.kernels.linalg.gemm.api import GEMM, gemm

__all__ = ["GEMM", "gemm"]
