"""The server's end of the link: requests out, each one's outputs back to whoever waits for them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from capibara.serve.http.errors import ApiError, bad_request, overloaded, unavailable
from capibara.serve.http.metrics import Timeline
from capibara.serve.link import Added, FromEngine, ToEngine, merge, read_frame_async, write_frame
from capibara.serve.request import Request, RequestOutput, Usage

__all__ = ["EngineClient", "Group"]

_GONE = unavailable("The engine has ended.", "engine_gone")
_RATE_OVER = 64  # answers, of which the pace is reckoned by


class Group:
    """The requests of one call: what they bring is read together, in the order of the requests."""

    def __init__(self, client: EngineClient, requests: Sequence[Request], form: str | None = None) -> None:
        self._client = client
        self._form = form
        self._ids = [request.id for request in requests]
        self._wake = asyncio.Event()
        self._pending: list[list[RequestOutput]] = [[] for _ in requests]
        self._refused: Added | None = None
        self._unsure = set(self._ids)
        self._lost: ApiError | None = None
        self.open = set(self._ids)
        self.timelines = [Timeline() for _ in requests]
        self._usages = [Usage(len(request.prompt), 0, 0) for request in requests]

    @property
    def unread(self) -> bool:
        """Whether anything more comes, or has come and was not read."""
        return bool(self.open) or any(self._pending)

    async def taken(self) -> None:
        """Wait until the engine has taken all of them; what it refuses is the caller's error."""
        while self._unsure and not self._refused and not self._lost:
            await self._woken()
        if self._refused is not None:
            if self._refused.full:
                raise overloaded(str(self._refused.refused), self._client.retry_after_s())
            if self._refused.failed:
                raise ApiError(500, str(self._refused.refused), code="engine_error")
            if self._refused.grammar:
                raise bad_request(str(self._refused.refused), self._form, code="invalid_grammar")
            raise bad_request(str(self._refused.refused))
        self._check()

    async def next(self) -> list[tuple[int, RequestOutput]]:
        """(which, what came): one output a request that something has come for, however many steps brought it."""
        while not any(self._pending):
            self._check()
            await self._woken()
        found = [(number, merge(outputs)[0]) for number, outputs in enumerate(self._pending) if outputs]
        self._pending = [[] for _ in self._pending]
        for number, output in found:
            self._usages[number] = output.usage
            self._client.on_output(self.timelines[number], output)
            if output.finish_reason == "error" and output.rejected:
                text = output.error or "The engine takes no such request."
                raise bad_request(text, self._form, code="invalid_grammar")
            if output.finish_reason == "error":
                raise ApiError(500, output.error or "The engine failed at this request.", code="engine_error")
        return found

    def cancel(self) -> None:
        """Stop those that still run: nobody waits for them any more."""
        self._stop(self._ids)

    def enough(self, number: int) -> None:
        """This one has all that it is going to have. Where the engine would go on, it ends here, and counts as done."""
        id = self._ids[number]
        if id in self.open:
            end = RequestOutput(id, (), "", self._usages[number], finish_reason="stop")
            self._client.on_output(self.timelines[number], end)
        self._stop([id])

    def _stop(self, ids: Sequence[str]) -> None:
        self._client.cancel([id for id in ids if id in self.open])
        self.open.difference_update(ids)
        for id in ids:
            self._pending[self._ids.index(id)].clear()

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def _woken(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    # Called by the client.

    def added(self, added: Added) -> None:
        self._unsure.discard(added.id)
        if added.refused is not None:
            self._refused = self._refused or added
            self.open.discard(added.id)
        self._wake.set()

    def output(self, output: RequestOutput) -> None:
        if output.id in self.open:
            self._pending[self._ids.index(output.id)].append(output)
            if output.finish_reason is not None:
                self.open.discard(output.id)
            self._wake.set()

    def lost(self, why: ApiError) -> None:
        self._lost = why
        self._wake.set()


class EngineClient:
    """Sends requests to the engine's process and hands out what comes back.

    Args:
      told: called with every message, for what in it is not of a request.
      on_output: called when somebody takes an output.
    """

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        told: Callable[[FromEngine], None],
        on_output: Callable[[Timeline, RequestOutput], None],
    ) -> None:
        self._writer = writer
        self._told = told
        self.on_output = on_output
        self._groups: dict[str, Group] = {}
        self._add: list[msgspec.Raw] = []
        self._cancel: list[str] = []
        self._flushing = False
        self._ends: collections.deque[float] = collections.deque(maxlen=_RATE_OVER)
        """Of the last answers, on a clock that stands still while there is nothing to answer."""
        self._busy_s = self._busy_since = 0.0
        self.gone = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests that the engine has and has not ended."""
        return len(self._groups)

    def submit(self, requests: Sequence[Request], form: str | None = None) -> Group:
        """Send the requests of one call; `form` is the field that holds their answers to a grammar."""
        # Here and not where it is sent: what cannot be written is this caller's error, and not that of all whose
        # requests go in the same message.
        written = [_written(request) for request in requests]
        group = Group(self, requests, form)
        if self.gone.is_set():
            group.lost(_GONE)
            return group
        if not self._groups:
            self._busy_since = time.monotonic()
        for request in requests:
            self._groups[request.id] = group
        self._add += written
        self._flush_soon()
        return group

    def cancel(self, ids: Sequence[str]) -> None:
        self._cancel += ids
        if ids:
            self._flush_soon()

    def say_ready(self) -> None:
        self._writer.write(write_frame(ToEngine(ready=True)))

    def stop(self) -> None:
        """Tell the engine that nothing more comes."""
        with contextlib.suppress(OSError):
            self._writer.write(write_frame(ToEngine(stop=True)))

    def retry_after_s(self) -> int:
        """When there may be room again: the time in which half as many requests as are here have lately ended."""
        if len(self._ends) < 2:
            return 1
        pace = (self._busy() - self._ends[0]) / len(self._ends)
        return min(max(math.ceil(pace * max(self.in_flight, 1) / 2), 1), 60)

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Hand out messages until the engine's process has ended."""
        try:
            while (message := await read_frame_async(reader, FromEngine)) is not None:
                for added in message.added:
                    group = self._groups.get(added.id)
                    if group is not None:
                        group.added(added)
                        if added.refused is not None:
                            self._forget(added.id)
                for output in message.outputs:
                    group = self._groups.get(output.id)
                    if group is not None:
                        group.output(output)
                        if output.finish_reason is not None:
                            self._ends.append(self._busy())
                            self._forget(output.id)
                self._told(message)
        except (OSError, msgspec.DecodeError, asyncio.IncompleteReadError):
            pass
        self.gone.set()
        self.give_up(_GONE)
        self._groups.clear()

    def _busy(self) -> float:
        """Seconds in which there was something to answer, as of now."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._groups else 0.0)

    def _forget(self, id: str) -> None:
        busy = self._busy()
        del self._groups[id]
        if not self._groups:
            self._busy_s = busy

    def give_up(self, why: ApiError) -> None:
        """Let everybody who waits go, with this error."""
        for group in set(self._groups.values()):
            group.lost(why)

    def _flush_soon(self) -> None:
        # What comes in one turn of the event loop goes in one message.
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        add: Any = tuple(self._add)
        message = ToEngine(add=add, cancel=tuple(self._cancel))
        self._add, self._cancel = [], []
        if not self.gone.is_set():
            self._writer.write(write_frame(message))


def _written(request: Request) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.msgpack.encode(request))
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise bad_request(
            f"A request has whole numbers of 64 bits at the most, text in UTF-8, and a schema that is not endlessly "
            f"deep. Got: {error}. Fix: use smaller ones.",
            code="invalid_value",
        ) from None
