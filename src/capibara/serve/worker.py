"""The engine's process: requests in from the link, steps while there is work, outputs out; moves to other devices."""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from capibara.models import step_hooks
from capibara.observe.goodput import SERVER_PHASES, Goodput
from capibara.serve.grammar import GrammarError
from capibara.serve.link import Added, FromEngine, Link, ModelCard, ServerSettings, Stats, ToEngine
from capibara.serve.request import QueueFull, Request, RequestOutput, Usage
from capibara.serve.resizing import Move, Occupancy

if TYPE_CHECKING:
    from capibara.serve.engine import Engine
    from capibara.serve.latency import LatencyController

__all__ = ["EngineWorker", "Loaded"]

_log = logging.getLogger(__name__)
_STATS_EVERY_S = 0.25
_STOP_WITHIN_S = 0.1
"""While an engine is made, the server learns so soon that it is to stop."""
_COUNTED = (
    "preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens", "compilations", "drafted",
    "accepted",
)  # fmt: skip
"""Of `Stats`, what only grows: an engine on other devices goes on counting where the last one ended."""


class Loaded(NamedTuple):
    """A model that is ready to be served."""

    engine: Engine
    card: ModelCard
    latency: LatencyController | None = None


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
        self._drain_timeout_s = settings.drain_timeout_s
        self._wanted: deque[list[Any]] = deque(maxlen=1)
        self._move: Move | None = None
        self._occupancy: Occupancy | None = None
        self._finished = 0
        self._counted: Mapping[str, int] = dict.fromkeys(_COUNTED, 0)
        self.engine: Engine | None = None
        """That runs now; None where it is closed."""

    def run(
        self,
        loaded: Loaded,
        ready: Callable[[ModelCard], None],
        reload: Callable[[Sequence[Any]], Loaded] | None = None,
    ) -> bool:
        """Serve until the server has ended; whether it said so itself.

        Args:
          loaded: what is served; its `latency` bounds each step, so that a target is kept.
          ready: called when clients are answered.
          reload: makes the same on other devices, when the one before is closed; without it the server stays.
        """
        self._ready = lambda: ready(loaded.card)
        engine, card, latency = loaded
        self.engine = engine
        self.link.send(FromEngine(model=card, stats=self._stats(engine)))
        while not self._stopping and not self._gone:
            if reload is not None:
                self._look_for_devices(engine, card)
            # Whoever has work looks whether something came; whoever has none waits for it.
            self._take(engine, wait=not engine.has_work() and self._move is None)
            outputs: tuple[RequestOutput, ...] = ()
            added: tuple[Added, ...] = ()
            if engine.has_work():
                if latency is not None:
                    latency.adjust()
                outputs = tuple(self._step(engine))
                added, outputs = self._settled(engine, outputs)
                self._finished += sum(output.finish_reason is not None for output in outputs)
                if latency is not None:
                    latency.saw(outputs, time.perf_counter())
            stats = self._new_stats(engine)
            drain = self._drain and not self._told_drain
            if outputs or added or stats or drain:
                self.link.send(FromEngine(added=added, outputs=outputs, stats=stats, drain=drain))
                self._told_drain |= drain
            if self._move is not None:
                if self._drain or (engine.has_work() and time.monotonic() > self._move.deadline):
                    self._stay(engine, "the server stops" if self._drain else "running answers take too long")
                elif not engine.has_work():
                    assert reload is not None
                    engine, card, latency = self._go_over(engine, reload)
        return self._stopping

    # Other devices.

    def resize(self, devices: Sequence[Any]) -> None:
        """Go over to these devices when what has begun is finished. From any thread."""
        self._wanted.append(list(devices))

    def _look_for_devices(self, engine: Engine, card: ModelCard) -> None:
        """Begin a move, where somebody wants one."""
        if self._move is not None or self._drain:
            return
        wanted = self._wanted.popleft() if self._wanted else None
        placed = wanted is None and step_hooks.is_placed()
        if placed:
            stats = engine.stats()
            self._occupancy = self._occupancy or Occupancy(card.max_sequences)
            self._occupancy.places = engine.limits.max_sequences
            self._occupancy.saw(stats.running, stats.waiting, self._finished)
            wanted = step_hooks.devices_wanted(engine.devices, self._load)
        if wanted is None or set(wanted) == set(engine.devices):
            return
        self._move = Move(wanted, time.monotonic() + self._drain_timeout_s, placed=placed)
        for request in engine.hand_back():
            # One whose grammar was still being read is not known to be taken.
            (self._move.new if request.id in self._unsettled else self._move.taken).append(request)
        self._unsettled.clear()
        _log.info("%d devices become %d; %d wait", len(engine.devices), len(wanted), len(self._move.taken))
        self.link.send(FromEngine(resizing=True))

    def _load(self) -> dict[str, Any]:
        assert self._occupancy is not None
        return {**self._occupancy(), "steps": self._finished}

    def _go_over(self, engine: Engine, reload: Callable[[Sequence[Any]], Loaded]) -> Loaded:
        """Close the engine and make one on the other devices; where that fails, on those that it had."""
        assert self._move is not None
        before, stats = engine.devices, self._stats(engine)
        self._counted = {name: getattr(stats, name) for name in _COUNTED}
        engine.close()
        self.engine = None
        with self.books.phase("load"), self._telling_the_end():
            loaded = self._made(reload, self._move.devices)
            if loaded is None:
                gc.collect()
                self._call_off(before)
                loaded = reload(before)
        self.engine = loaded.engine
        self._occupancy = None
        self.link.send(FromEngine(model=loaded.card))
        self._put_back(loaded.engine)
        return loaded

    def _made(self, reload: Callable[[Sequence[Any]], Loaded], devices: Sequence[Any]) -> Loaded | None:
        """What is served on these devices; None where that fails, and then nothing is left of what was half made."""
        try:
            return reload(devices)
        except Exception as error:  # noqa: BLE001  # whatever it is, requests wait
            _log.exception("the model cannot be served on %d devices", len(devices))
            traceback.clear_frames(error.__traceback__)  # logs may keep the error, and it the engine and its memory
            return None

    @contextlib.contextmanager
    def _telling_the_end(self) -> Iterator[None]:
        """Inside, where the loop tells nobody anything, the server still learns that it is to stop."""
        done = threading.Event()

        def look() -> None:
            while not done.wait(_STOP_WITHIN_S):
                if self._drain:
                    self.link.send(FromEngine(drain=True))
                    return

        looking = threading.Thread(target=look, name="serve-look-for-the-end", daemon=True)
        looking.start()
        try:
            yield
        finally:
            done.set()
            looking.join()

    def _call_off(self, devices: Sequence[Any]) -> None:
        if self._move is not None and self._move.placed:
            step_hooks.called_off(devices)

    def _stay(self, engine: Engine, why: str) -> None:
        _log.warning("the server stays on %d devices: %s", len(engine.devices), why)
        self._call_off(engine.devices)
        self._put_back(engine)

    def _put_back(self, engine: Engine) -> None:
        """The move is over: what was kept is queued, in its order, and the server is ready."""
        assert self._move is not None
        kept, self._move = self._move, None
        added, ended = [], []
        for request in kept.taken:
            refusal = self._add(engine, request, taken=True)
            self._unsettled.discard(request.id)  # the client was told already
            if refusal is not None and refusal.refused is not None:
                usage = Usage(len(request.prompt), 0, 0)
                text = f"The server went over to other devices, which do not take this request: {refusal.refused}"
                ended.append(RequestOutput(request.id, (), "", usage, finish_reason="error", error=text))
        for request in kept.new:
            told = self._add(engine, request)
            added += [] if told is None else [told]
        self.link.send(FromEngine(added=tuple(added), outputs=tuple(ended), resizing=False))

    # Requests and steps.

    def _step(self, engine: Engine) -> list[RequestOutput]:
        """A step, booked: where it had to make a program first, under that."""
        ending = self._drain or self._move is not None
        phase, made, start = "drain" if ending else "serving", engine.compilations, time.perf_counter()
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
        cancelled: list[RequestOutput] = []
        try:
            message = self._inbox.get(timeout=_STATS_EVERY_S) if wait else self._inbox.get_nowait()
            while True:
                if message is None:
                    self._gone = True
                    return
                self._stopping |= message.stop
                if message.ready:
                    self._ready()
                if self._move is not None:
                    self._move.new += message.add
                else:
                    told = [self._add(engine, request) for request in message.add]
                    added += [one for one in told if one is not None]
                for id in message.cancel:  # after those that came with it, which they may be of
                    kept = None if self._move is None else self._move.cancel(id)
                    if kept is None:
                        engine.cancel(id)
                    else:
                        cancelled.append(kept)
                message = self._inbox.get_nowait()
        except queue.Empty:
            pass
        if added or cancelled:
            self.link.send(FromEngine(added=tuple(added), outputs=tuple(cancelled)))

    def _add(self, engine: Engine, request: Request, *, taken: bool = False) -> Added | None:
        """Queue a request; what the server is told of it, None where that is not known yet."""
        try:
            engine.add(request, taken=taken)
        except QueueFull as full:
            return Added(request.id, str(full), full=True)
        except ValueError as refusal:
            return Added(request.id, str(refusal), grammar=isinstance(refusal, GrammarError))
        except Exception:  # noqa: BLE001  # of one request: the others go on
            _log.exception("request %s cannot be added", request.id)
            return Added(request.id, "The engine failed at this request.", failed=True)
        # Whether a grammar is one is known when it has been read.
        if engine.compiling(request.id):
            self._unsettled.add(request.id)
            return None
        return Added(request.id)

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
        added = tuple(Added(id, refused.get(id), grammar=id in refused) for id in settled)
        return added, tuple(output for output in outputs if output.id not in refused)

    def _new_stats(self, engine: Engine) -> Stats | None:
        told, last = self._told_stats
        now = time.monotonic()
        if now - told < _STATS_EVERY_S:
            return None
        stats = self._stats(engine)
        self._told_stats = (now, stats)
        return stats if stats != last else None

    def _stats(self, engine: Engine) -> Stats:
        now = engine.stats()
        counts = {name: getattr(now, name) for name in Stats.__struct_fields__ if name != "phase_seconds"}
        for name, before in self._counted.items():
            counts[name] += before
        if self._move is not None:
            counts["waiting"] += len(self._move.taken) + len(self._move.new)
        # To the second: what changes at every look would be told at every look.
        spent = {name: float(int(seconds)) for name, seconds in self.books.report().seconds.items() if name != "lost"}
        return Stats(**counts, phase_seconds=spent)
