"""The documented configs, as far as this version has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara import to_come
from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.config import tpu_config as tpu_config
    from capibara.config.tpu_config import TPUConfig as TPUConfig

to_come.announce(__name__)

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "tpu_config": "TPUConfig",
    },
    modules=("tpu_config",),
    missing=to_come.no_attribute,
)
