"""The documented diagnostics names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.observe.health.diagnostics import TpuDiagnostics as TpuDiagnostics

__all__, __getattr__, __dir__ = exports(__name__, {"capibara.observe.health.diagnostics": "TpuDiagnostics"})
