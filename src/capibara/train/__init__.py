"""Training: the data that it reads.

Importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.train.data.batches import Batches as Batches
    from capibara.train.data.batches import open_batches as open_batches
    from capibara.train.data.config import DataConfig as DataConfig
    from capibara.train.data.wrapped import wrap_dataset as wrap_dataset

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "data.batches": "Batches open_batches",
        "data.config": "DataConfig",
        "data.wrapped": "wrap_dataset",
    },
)
