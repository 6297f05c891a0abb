"""The documented recovery names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.train.device_errors import TpuError as TpuError
    from capibara.train.recovery import TpuRecoveryManager as TpuRecoveryManager
    from capibara.train.recovery import current_manager as current_manager

__all__, __getattr__, __dir__ = exports(
    __name__,
    {"capibara.train.device_errors": "TpuError", "capibara.train.recovery": "TpuRecoveryManager current_manager"},
)
