"""The documented TPU configuration."""

from __future__ import annotations

from capibara.errors import TPUError
from capibara.surface.tpu_config import ScalingConfig, TPUConfig

__all__ = ["ScalingConfig", "TPUConfig", "TPUError"]
