"""An answer on its way: whole or in events, to a client that may be slow, or gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from capibara.serve.http.answers import Answer
from capibara.serve.http.engine_client import Group
from capibara.serve.http.errors import ApiError, error_body
from capibara.serve.http.schema import StreamOptions

__all__ = ["EventStream", "collect", "until_taken"]

Result = TypeVar("Result")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result, unless the client goes away first: then the work is dropped."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watch, doing = asyncio.create_task(gone()), asyncio.create_task(work)
    try:
        await asyncio.wait({watch, doing}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ApiError(499, "The client went away before its answer.")
        return doing.result()
    finally:
        for task in (watch, doing):
            task.cancel()
        await asyncio.wait({watch, doing})


def _timed_out(timeout_s: float) -> ApiError:
    return ApiError(
        504,
        f"An answer takes {timeout_s:g} s at the most, waiting for its turn included. Got none by then. Fix: ask for "
        f"fewer tokens, or start the server with --request-timeout-s.",
        code="timeout",
    )


async def until_taken(group: Group, receive: Receive, timeout_s: float) -> float:
    """Wait until the engine has taken the requests: at once, or when a grammar has been read.

    Returns:
      When the whole answer has to be there, by the event loop's clock: so long after now, the wait included.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s

    async def taken() -> None:
        async with asyncio.timeout_at(deadline):
            await group.taken()

    try:
        await unless_gone(receive, taken())
    except TimeoutError:
        group.cancel()
        raise _timed_out(timeout_s) from None
    except BaseException:
        group.cancel()
        raise
    return deadline


async def collect(group: Group, answer: Answer, receive: Receive, timeout_s: float) -> Response:
    """The whole answer, when it is there."""

    async def everything() -> None:
        async with asyncio.timeout(timeout_s):
            await group.taken()
            while group.unread:
                for number, output in await group.next():
                    answer.put(number, output)
                    if answer.finished(number):
                        group.enough(number)

    try:
        await unless_gone(receive, everything())
    except TimeoutError:
        raise _timed_out(timeout_s) from None
    finally:
        group.cancel()
    return Response(msgspec.json.encode(answer.body()), media_type="application/json")


@dataclass
class EventStream(Response):
    """Server-sent events, from the engine's outputs as they come.

    What came while a client was being written to goes in one piece: under load, and to slow clients, an event has
    several tokens. One that reads nothing for `client_timeout_s` is hung up on.
    """

    group: Group
    answer: Answer
    options: StreamOptions
    timeout_s: float
    deadline: float
    """Of the whole answer, by the event loop's clock: `timeout_s` after the engine was asked."""
    client_timeout_s: float
    status_code: int = 200

    def __post_init__(self) -> None:
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await unless_gone(receive, self._events(scope, send))
        except ApiError as error:
            scope["state"]["ended"] = error.status  # for the log: the status was sent long ago
            if error.status != 499:
                with contextlib.suppress(ApiError):
                    await self._write(scope, send, _event(error_body(error)), more=False)
        finally:
            self.group.cancel()

    async def _events(self, scope: Scope, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self.deadline):
                while self.group.unread:
                    data = b""
                    for number, output in await self.group.next():
                        data += b"".join(_event(self._dressed(event)) for event in self.answer.put(number, output))
                        if self.answer.finished(number):
                            self.group.enough(number)
                    if data:
                        await self._write(scope, send, data)
        except TimeoutError:
            raise _timed_out(self.timeout_s) from None
        end = _event(self.answer.usage_event()) if self.options.include_usage else b""
        await self._write(scope, send, end + b"data: [DONE]\n\n", more=False)

    def _dressed(self, event: dict[str, Any]) -> dict[str, Any]:
        if self.options.continuous_usage_stats:
            return event | {"usage": self.answer.usage()}
        return event | {"usage": None} if self.options.include_usage else event

    async def _write(self, scope: Scope, send: Send, data: bytes, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self.client_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            # Closing would first wait for what the client does not read.
            transport = scope.get("client_transport")
            if transport is not None:
                transport.abort()
            raise ApiError(499, f"The client read nothing for {self.client_timeout_s:g} s.") from None


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
