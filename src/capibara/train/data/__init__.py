"""Training data: files of text, conversations or tokens, as batches in one global order.

    files -> documents -> token cache -> rows of T tokens -> batches

Text is tokenised once, into a memory-mapped cache. Which row is the i-th of a run is a pure function of the seed and i,
so that any number of processes reads the same batches, and the state of the iterator is a few numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.train.data.batches import Batches as Batches
    from capibara.train.data.batches import open_batches as open_batches
    from capibara.train.data.config import DataConfig as DataConfig
    from capibara.train.data.tokens import Tokens as Tokens
    from capibara.train.data.tokens import write_tokens as write_tokens
    from capibara.train.data.wrapped import wrap_dataset as wrap_dataset

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "batches": "Batches open_batches",
        "config": "DataConfig",
        "tokens": "Tokens write_tokens",
        "wrapped": "wrap_dataset",
    },
)
