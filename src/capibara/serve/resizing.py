"""How a running server goes over to other devices: what runs is finished, what waits is handed on, nothing is lost.

While a server moves it is not ready, and says so; requests that still come are kept and answered afterwards. A move is
called off where running answers take too long to wait for, where the server is told to stop, or where the engine cannot
be made on the other devices: what was kept then goes to the devices that it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from capibara.serve.request import Request, RequestOutput, Usage

__all__ = ["Move", "Occupancy"]


@dataclass
class Move:
    """A change of devices that is under way."""

    devices: list[Any]
    deadline: float
    """When running answers have to be done, by `time.monotonic`."""
    taken: list[Request] = field(default_factory=list)
    """Requests that clients were told are taken, and that have not begun; the oldest first."""
    new: list[Request] = field(default_factory=list)
    """Those that came since."""
    placed: bool = False
    """Whether an autoscaler wants it, which is then told where it is called off; not somebody by hand."""

    def cancel(self, id: str) -> RequestOutput | None:
        """Take a request out, where it is kept here; its last output."""
        for kept in (self.taken, self.new):
            for place, request in enumerate(kept):
                if request.id == id:
                    del kept[place]
                    usage = Usage(len(request.prompt), 0, 0)
                    return RequestOutput(id, (), "", usage, finish_reason="cancelled")
        return None


class Occupancy:
    """How much of an engine was in use since somebody last asked, and how long what waits would take.

    A request holds one of the engine's places from its first token computed to its last. The mean share of places in
    use says how busy the devices are whatever their speed: on faster ones answers end sooner, and places are free.

    Examples:
        >>> clock = iter([0.0, 60.0])
        >>> occupancy = Occupancy(places=4, clock=lambda: next(clock))
        >>> occupancy.saw(running=4, waiting=6, finished=0)
        >>> occupancy.saw(running=2, waiting=6, finished=8)
        >>> occupancy()  # 4 places for a minute ended 8 answers: half a minute each, and 6 wait for one of 4 places
        {'utilization': 1.0, 'waiting_minutes': 0.75}
    """

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.places = places
        """As many requests run at a time; a controller of latency changes it."""
        self._clock = clock
        self._seen: tuple[float, int] | None = None
        self._place_seconds = self._running_seconds = self._answer_seconds = 0.0
        self._finished = self._finished_before = self._waiting = 0

    def saw(self, running: int, waiting: int, finished: int) -> None:
        """What the engine is at now: requests that run and wait, and how many have ended so far."""
        now = self._clock()
        if self._seen is not None:
            before, then_running = self._seen
            self._place_seconds += self.places * (now - before)
            self._running_seconds += then_running * (now - before)
        else:
            self._finished_before = finished  # by an engine before this one
        self._seen = now, running
        self._waiting, self._finished = waiting, finished

    def __call__(self) -> dict[str, float | None]:
        """Since the last call: the mean share of places, and minutes that the devices would take for what waits."""
        place_seconds, running_seconds = self._place_seconds, self._running_seconds
        ended = self._finished - self._finished_before
        if ended > 0:
            self._answer_seconds = running_seconds / ended
        elif self._seen is not None and self._seen[1]:  # they take at least as long as they were seen
            self._answer_seconds = max(self._answer_seconds, running_seconds / self._seen[1])
        self._place_seconds = self._running_seconds = 0.0
        self._finished_before = self._finished
        used = min(1.0, running_seconds / place_seconds) if place_seconds > 0 else None
        return {"utilization": used, "waiting_minutes": self._waiting * self._answer_seconds / self.places / 60}
