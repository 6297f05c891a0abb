"""Whether a machine and its slice are well: products, memory, links, sensors, the host, and hosts that are not there.

Names load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.observe.health.diagnostics import TpuDiagnostics as TpuDiagnostics
    from capibara.observe.health.host import HostFiles as HostFiles
    from capibara.observe.health.report import Finding as Finding
    from capibara.observe.health.report import HealthReport as HealthReport
    from capibara.observe.health.slice_hosts import hosts_of_environment as hosts_of_environment
    from capibara.observe.health.slice_hosts import missing_hosts as missing_hosts

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "diagnostics": "TpuDiagnostics",
        "host": "HostFiles",
        "report": "Finding HealthReport",
        "slice_hosts": "hosts_of_environment missing_hosts",
    },
)
