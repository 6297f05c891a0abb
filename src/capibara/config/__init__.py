"""The documented configs, as far as this version has them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from capibara import to_come

if TYPE_CHECKING:
    from capibara.config import tpu_config as tpu_config
    from capibara.config.tpu_config import TPUConfig as TPUConfig

__all__ = ["TPUConfig", "tpu_config"]

to_come.announce(__name__)


def __getattr__(name: str) -> Any:
    if name == "tpu_config":
        return importlib.import_module(f"{__name__}.{name}")
    if name == "TPUConfig":
        return importlib.import_module(f"{__name__}.tpu_config").TPUConfig
    raise to_come.no_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
