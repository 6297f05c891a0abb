"""Collectives as rings on the TPU."""

from capibara.kernels.ops.collective.tpu.matmul import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from capibara.kernels.ops.collective.tpu.ring import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

__all__ = ["ALL_GATHER", "ALL_GATHER_MATMUL", "ALL_REDUCE", "MATMUL_REDUCE_SCATTER", "REDUCE_SCATTER"]
