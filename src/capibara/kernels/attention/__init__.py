"""The attention family. The package itself is called as `attention(...)`, the op it is named after."""

from __future__ import annotations

import sys
import types
from typing import Any

from capibara.kernels.attention.api import ATTENTION, ATTENTION_GRAD, attention
from capibara.kernels.attention.block_mask import BlockMask, block_mask_from
from capibara.kernels.attention.paged import PAGED_ATTENTION, paged_attention
from capibara.kernels.attention.rope import Rope, rope, rope_tables
from capibara.kernels.attention.sequence import ring_load, sequence_parallel_attention, unzigzag, zigzag

__all__ = [
    "ATTENTION",
    "ATTENTION_GRAD",
    "PAGED_ATTENTION",
    "BlockMask",
    "Rope",
    "attention",
    "block_mask_from",
    "paged_attention",
    "ring_load",
    "rope",
    "rope_tables",
    "sequence_parallel_attention",
    "unzigzag",
    "zigzag",
]


class _Callable(types.ModuleType):
    """`capibara.kernels.attention` is both the documented function and the folder of its family.

    Importing a submodule binds the folder's name in `capibara.kernels`, over any function of that name, so the
    module takes the call.
    """

    __wrapped__ = staticmethod(attention)  # what help() and inspect.signature() show

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return attention(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
