"""The documented autoscaling names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.fleet.scaling.scaler import TpuAutoScaler as TpuAutoScaler

__all__, __getattr__, __dir__ = exports(__name__, {"capibara.fleet.scaling.scaler": "TpuAutoScaler"})
