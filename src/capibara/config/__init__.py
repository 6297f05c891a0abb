"""The documented configs; `configs_toml/` is the one folder of presets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.config import tpu_config as tpu_config
    from capibara.config.tpu_config import TPUConfig as TPUConfig
    from capibara.models.config import ModularModelConfig as ModularModelConfig

__all__, __getattr__, __dir__ = exports(
    __name__,
    {"tpu_config": "TPUConfig", "capibara.models.config": "ModularModelConfig"},
    modules=("tpu_config",),
)
