"""Training: data, checkpoints, recovery, and what keeps a run going.

Names load when they are first used: importing this package does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.train.checkpoints.policy import Keep as Keep
    from capibara.train.checkpoints.storage import Alert as Alert
    from capibara.train.checkpoints.store import Checkpoints as Checkpoints
    from capibara.train.checkpoints.store import Restored as Restored
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
        "checkpoints.policy": "Keep",
        "checkpoints.storage": "Alert",
        "checkpoints.store": "Checkpoints Restored",
    },
)
