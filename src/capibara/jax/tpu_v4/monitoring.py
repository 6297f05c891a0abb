"""The documented monitoring names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.observe.monitor import TpuRealTimeMonitor as TpuRealTimeMonitor

__all__, __getattr__, __dir__ = exports(__name__, {"capibara.observe.monitor": "TpuRealTimeMonitor"})
