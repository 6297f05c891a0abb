"""What is seen of a run and of its machines: the monitor, the flight recorder, the accounting of time, profiles.

Names load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.observe.alerts import Alert as Alert
    from capibara.observe.alerts import AlertEvent as AlertEvent
    from capibara.observe.bottleneck import analyze_performance_bottlenecks as analyze_performance_bottlenecks
    from capibara.observe.goodput import Goodput as Goodput
    from capibara.observe.goodput import GoodputReport as GoodputReport
    from capibara.observe.goodput import read_goodput as read_goodput
    from capibara.observe.monitor import TpuRealTimeMonitor as TpuRealTimeMonitor
    from capibara.observe.notify import command as command
    from capibara.observe.notify import log_alerts as log_alerts
    from capibara.observe.notify import webhook as webhook
    from capibara.observe.profiler.result import Profile as Profile
    from capibara.observe.profiler.result import last_profile as last_profile
    from capibara.observe.profiler.result import read_profile as read_profile
    from capibara.observe.profiler.session import profile as profile
    from capibara.observe.recorder import Recorder as Recorder
    from capibara.observe.recorder import Recording as Recording
    from capibara.observe.recorder import read_recording as read_recording

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "alerts": "Alert AlertEvent",
        "bottleneck": "analyze_performance_bottlenecks",
        "goodput": "Goodput GoodputReport read_goodput",
        "monitor": "TpuRealTimeMonitor",
        "notify": "command log_alerts webhook",
        "profiler.result": "Profile last_profile read_profile",
        "profiler.session": "profile",
        "recorder": "Recorder Recording read_recording",
    },
)
