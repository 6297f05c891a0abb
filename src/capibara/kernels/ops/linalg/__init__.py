"""The linear algebra family."""

from capibara.kernels.ops.linalg.gemm.api import GEMM, gemm
from capibara.kernels.ops.linalg.round_fp8.api import ROUND_FP8
from capibara.kernels.ops.linalg.svd.api import fast_svd, svd_plan

__all__ = ["GEMM", "ROUND_FP8", "fast_svd", "gemm", "svd_plan"]
