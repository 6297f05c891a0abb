"""Scaling a slice with its load: traces, what they cost, the cheapest that could be, policies, `TpuAutoScaler`.

Names load when they are first used: importing this package imports neither jax nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.fleet.scaling.account import Outcome as Outcome
    from capibara.fleet.scaling.account import replay as replay
    from capibara.fleet.scaling.drawn import FIXED_TRACES as FIXED_TRACES
    from capibara.fleet.scaling.drawn import TraceKind as TraceKind
    from capibara.fleet.scaling.drawn import draw_trace as draw_trace
    from capibara.fleet.scaling.drawn import fixed_trace as fixed_trace
    from capibara.fleet.scaling.oracle import cheapest as cheapest
    from capibara.fleet.scaling.policies import POLICIES as POLICIES
    from capibara.fleet.scaling.scaler import Simulation as Simulation
    from capibara.fleet.scaling.scaler import TpuAutoScaler as TpuAutoScaler
    from capibara.fleet.scaling.trace import Trace as Trace
    from capibara.fleet.scaling.trace import read_trace as read_trace

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "account": "Outcome replay",
        "drawn": "FIXED_TRACES TraceKind draw_trace fixed_trace",
        "oracle": "cheapest",
        "policies": "POLICIES",
        "scaler": "Simulation TpuAutoScaler",
        "trace": "Trace read_trace",
    },
)
