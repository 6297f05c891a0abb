"""Attention over sequences that are split along a mesh axis: by a ring of blocks, or by trading length for heads."""

from capibara.kernels.ops.attention.sequence.api import sequence_parallel_attention
from capibara.kernels.ops.attention.sequence.order import unzigzag, zigzag
from capibara.kernels.ops.attention.sequence.schedule import ring_load

__all__ = ["ring_load", "sequence_parallel_attention", "unzigzag", "zigzag"]
