"""The documented configs, as far as this version has them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.config import tpu_config as tpu_config
    from capibara.config.tpu_config import TPUConfig as TPUConfig

__all__ = ["TPUConfig", "tpu_config"]


def __getattr__(name: str) -> Any:
    if name == "tpu_config":
        return importlib.import_module(f"{__name__}.{name}")
    if name == "TPUConfig":
        return importlib.import_module(f"{__name__}.tpu_config").TPUConfig
    if name == "ModularModelConfig":
        raise AttributeError(f"{__name__}.{name} is not implemented yet in this version")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
