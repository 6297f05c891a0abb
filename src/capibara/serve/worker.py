"""The engine's process: requests in from the link, steps while there is work, outputs out."""

from __future__ import annotations

import logging
import queue
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from capibara.observe.goodput import SERVER_PHASES, Goodput
from capibara.serve.link import Added, FromEngine, Link, ModelCard, ServerSettings, Stats, ToEngine
from capibara.serve.request import QueueFull, RequestOutput

if TYPE_CHECKING:
    from capibara.serve.engine import Engine
    from capibara.serve.latency import LatencyController

__all__ = ["EngineWorker"]

_log = logging.getLogger(__name__)
_STATS_EVERY_S = 0.25


class EngineWorker:
    """Runs an engine for the server at the other end of a connection.

    `settings` go to the server at once, so that it answers /health while the model is still being loaded.
    """

    def __init__(self, connection: socket.socket, settings: ServerSettings, books: Goodput | None = None) -> None:
        self._inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self.link = Link(connection, self._inbox.put)
        self.link.send(FromEngine(settings=settings))
        self.books = books or Goodput(None, phases=SERVER_PHASES, counts="serving")
        """Where the time goes."""
        self._gone = False
        self._drain = self._told_drain = False
        self._stopping = False
        self._told_stats = (0.0, Stats())
        self._unsettled: set[str] = set()
        """Requests of which the server was not told yet whether they were taken."""
        self._ready: Callable[[], None] = lambda: None

    def run(
        self,
        engine: Engine,
        card: ModelCard,
        ready: Callable[[ModelCard], None],
        latency: LatencyController | None = None,
    ) -> bool:
        """Serve until the server has ended; whether it said so itself.

        Args:
          ready: called when clients are answered.
          latency: bounds each step, so that a target is kept.
        """
        self._ready = lambda: ready(card)
        self.link.send(FromEngine(model=card, stats=_stats(engine, self.books)))
        while not self._stopping and not self._gone:
            # Whoever has work looks whether something came; whoever has none waits for it.
            self._take(engine, wait=not engine.has_work())
            outputs: tuple[RequestOutput, ...] = ()
            added: tuple[Added, ...] = ()
            if engine.has_work():
                if latency is not None:
                    latency.adjust()
                outputs = tuple(self._step(engine))
                added, outputs = self._settled(engine, outputs)
                if latency is not None:
                    latency.saw(outputs, time.perf_counter())
            stats = self._new_stats(engine)
            drain = self._drain and not self._told_drain
            if outputs or added or stats or drain:
                self.link.send(FromEngine(added=added, outputs=outputs, stats=stats, drain=drain))
                self._told_drain |= drain
        return self._stopping

    def _step(self, engine: Engine) -> list[RequestOutput]:
        """A step, booked: where it had to make a program first, under that."""
        phase, made, start = "drain" if self._drain else "serving", engine.compilations, time.perf_counter()
        with self.books.phase(phase):
            outputs = engine.step()
        if engine.compilations > made:
            self.books.move(time.perf_counter() - start, phase, "compile")
        return outputs

    @property
    def draining(self) -> bool:
        return self._drain

    def drain(self) -> None:
        """Ask the server to take nothing new, to finish what runs, and to end.

        It takes no lock, and so may be called by a signal handler, whatever it interrupts.
        """
        self._drain = True

    def _take(self, engine: Engine, *, wait: bool) -> None:
        added: list[Added] = []
        try:
            message = self._inbox.get(timeout=_STATS_EVERY_S) if wait else self._inbox.get_nowait()
            while True:
                if message is None:
                    self._gone = True
                    return
                self._stopping |= message.stop
                if message.ready:
                    self._ready()
                for request in message.add:
                    try:
                        engine.add(request)
                        # Whether a grammar is one is known when it has been read.
                        if engine.compiling(request.id):
                            self._unsettled.add(request.id)
                        else:
                            added.append(Added(request.id))
                    except QueueFull as full:
                        added.append(Added(request.id, str(full), full=True))
                    except ValueError as refusal:
                        added.append(Added(request.id, str(refusal)))
                    except Exception:  # noqa: BLE001  # of one request: the others go on
                        _log.exception("request %s cannot be added", request.id)
                        added.append(Added(request.id, "The engine failed at this request.", failed=True))
                for id in message.cancel:  # after those that came with it, which they may be of
                    engine.cancel(id)
                message = self._inbox.get_nowait()
        except queue.Empty:
            pass
        if added:
            self.link.send(FromEngine(added=tuple(added)))

    def _settled(
        self, engine: Engine, outputs: tuple[RequestOutput, ...]
    ) -> tuple[tuple[Added, ...], tuple[RequestOutput, ...]]:
        """Of requests whose grammar has been read since: whether they were taken, and the outputs of those that were.

        One whose grammar is none was refused, and has no answer that could end.
        """
        if not self._unsettled:
            return (), outputs
        settled = {id for id in self._unsettled if not engine.compiling(id)}
        self._unsettled -= settled
        refused = {output.id: output.error for output in outputs if output.id in settled and output.rejected}
        added = tuple(Added(id, refused.get(id)) for id in settled)
        return added, tuple(output for output in outputs if output.id not in refused)

    def _new_stats(self, engine: Engine) -> Stats | None:
        told, last = self._told_stats
        now = time.monotonic()
        if now - told < _STATS_EVERY_S:
            return None
        stats = _stats(engine, self.books)
        self._told_stats = (now, stats)
        return stats if stats != last else None


def _stats(engine: Engine, books: Goodput) -> Stats:
    now = engine.stats()
    counts = {name: getattr(now, name) for name in Stats.__struct_fields__ if name != "phase_seconds"}
    # To the second: what changes at every look would be told at every look.
    spent = {name: float(int(seconds)) for name, seconds in books.report().seconds.items() if name != "lost"}
    return Stats(**counts, phase_seconds=spent)
