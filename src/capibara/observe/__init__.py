"""What a run says of itself: the flight recorder, and the accounting of its time.

Names load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara._exports import exports

if TYPE_CHECKING:
    from capibara.observe.goodput import Goodput as Goodput
    from capibara.observe.goodput import GoodputReport as GoodputReport
    from capibara.observe.goodput import read_goodput as read_goodput
    from capibara.observe.recorder import Recorder as Recorder
    from capibara.observe.recorder import Recording as Recording
    from capibara.observe.recorder import read_recording as read_recording

__all__, __getattr__, __dir__ = exports(
    __name__,
    {"goodput": "Goodput GoodputReport read_goodput", "recorder": "Recorder Recording read_recording"},
)
