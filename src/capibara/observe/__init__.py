"""What a run says of itself: the flight recorder, the accounting of its time, profiles and what is in the way.

Names load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.observe.bottleneck import analyze_performance_bottlenecks as analyze_performance_bottlenecks
    from capibara.observe.goodput import Goodput as Goodput
    from capibara.observe.goodput import GoodputReport as GoodputReport
    from capibara.observe.goodput import read_goodput as read_goodput
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
        "bottleneck": "analyze_performance_bottlenecks",
        "goodput": "Goodput GoodputReport read_goodput",
        "profiler.result": "Profile last_profile read_profile",
        "profiler.session": "profile",
        "recorder": "Recorder Recording read_recording",
    },
)
