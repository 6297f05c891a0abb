"""What a program does while it runs: how often, how long, how near the chip's peaks.

Names load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.observe.profiler.result import OpRow as OpRow
    from capibara.observe.profiler.result import Profile as Profile
    from capibara.observe.profiler.result import ProgramRow as ProgramRow
    from capibara.observe.profiler.result import last_profile as last_profile
    from capibara.observe.profiler.result import read_profile as read_profile
    from capibara.observe.profiler.session import profile as profile

__all__, __getattr__, __dir__ = exports(
    __name__,
    {"result": "OpRow Profile ProgramRow last_profile read_profile", "session": "profile"},
)
