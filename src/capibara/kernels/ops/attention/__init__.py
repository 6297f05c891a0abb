"""The attention family."""

from capibara.kernels.ops.attention.api import ATTENTION, ATTENTION_GRAD, attention
from capibara.kernels.ops.attention.block_mask import BlockMask, block_mask_from
from capibara.kernels.ops.attention.paged import PAGED_ATTENTION, paged_attention
from capibara.kernels.ops.attention.paged_write import PAGED_WRITE, paged_write
from capibara.kernels.ops.attention.rope import Rope, rope, rope_tables
from capibara.kernels.ops.attention.sequence import ring_load, sequence_parallel_attention, unzigzag, zigzag

__all__ = [
    "ATTENTION",
    "ATTENTION_GRAD",
    "PAGED_ATTENTION",
    "PAGED_WRITE",
    "BlockMask",
    "Rope",
    "attention",
    "block_mask_from",
    "paged_attention",
    "paged_write",
    "ring_load",
    "rope",
    "rope_tables",
    "sequence_parallel_attention",
    "unzigzag",
    "zigzag",
]
