"""What is seen of a run and of its machines: the monitor, health, the flight recorder, time, profiles.

Names load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.observe.alerts import Alert as Alert
    from capibara.observe.alerts import AlertEvent as AlertEvent
    from capibara.observe.bottleneck import analyze_performance_bottlenecks as analyze_performance_bottlenecks
    from capibara.observe.crash_story import CrashStory as CrashStory
    from capibara.observe.crash_story import read_crash_story as read_crash_story
    from capibara.observe.goodput import Goodput as Goodput
    from capibara.observe.goodput import GoodputReport as GoodputReport
    from capibara.observe.goodput import read_goodput as read_goodput
    from capibara.observe.health.diagnostics import TpuDiagnostics as TpuDiagnostics
    from capibara.observe.health.report import Finding as Finding
    from capibara.observe.health.report import HealthReport as HealthReport
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
        "crash_story": "CrashStory read_crash_story",
        "goodput": "Goodput GoodputReport read_goodput",
        "health.diagnostics": "TpuDiagnostics",
        "health.report": "Finding HealthReport",
        "monitor": "TpuRealTimeMonitor",
        "notify": "command log_alerts webhook",
        "profiler.result": "Profile last_profile read_profile",
        "profiler.session": "profile",
        "recorder": "Recorder Recording read_recording",
    },
)
