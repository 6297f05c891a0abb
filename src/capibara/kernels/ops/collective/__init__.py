"""Collectives: what devices of a mesh do together, exact and compressed, alone and overlapped with products."""

from capibara.kernels.ops.collective.api import (
    all_gather,
    all_gather_matmul,
    all_reduce,
    all_to_all,
    matmul_reduce_scatter,
    permute,
    reduce_scatter,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from capibara.kernels.ops.collective.buckets import bucketed, bucketed_all_reduce
from capibara.kernels.ops.collective.compressed import (
    compressed_all_reduce,
    decode_int8,
    encode_int8,
    error_bound,
    feedback_state,
    redistribute,
)
from capibara.kernels.ops.collective.hierarchical import hierarchical_all_reduce
from capibara.kernels.ops.collective.trees import all_reduce_tree

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_tree",
    "all_to_all",
    "bucketed",
    "bucketed_all_reduce",
    "compressed_all_reduce",
    "decode_int8",
    "encode_int8",
    "error_bound",
    "feedback_state",
    "hierarchical_all_reduce",
    "matmul_reduce_scatter",
    "permute",
    "redistribute",
    "reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
]
