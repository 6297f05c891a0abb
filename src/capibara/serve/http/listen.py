"""Sockets: uvicorn with our errors, with clients that take forever, and without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Any

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from capibara.serve.http.errors import bad_request, error_body

__all__ = ["make_server"]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the process that started this one says when to stop


def make_server(app: ASGIApp, client_timeout_s: float) -> uvicorn.Server:
    """A server to be given a socket that listens: `await server.serve(sockets=[...])`.

    Args:
      app: what answers.
      client_timeout_s: how long a client may take for a request's head, to read an answer, or to ask again.
    """

    class Protocol(H11Protocol):
        """A connection. One that does not get its request's head together in time is closed."""

        _patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            inner = self.app

            async def with_transport(scope: Scope, receive: Receive, send: Send) -> None:
                scope["client_transport"] = transport  # to hang up on a client that does not read
                await inner(scope, receive, send)

            self.app = with_transport
            self._be_patient()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                self._be_patient()
            elif self._patience is not None:
                self._patience.cancel()
                self._patience = None

        def connection_lost(self, exc: Exception | None) -> None:
            if self._patience is not None:
                self._patience.cancel()
            super().connection_lost(exc)

        def timeout_keep_alive_handler(self) -> None:
            if not self.transport.is_closing() and self.transport.get_write_buffer_size():
                self.transport.abort()  # the answer lies here unread: closing would wait for it for ever
            else:
                super().timeout_keep_alive_handler()

        def _be_patient(self) -> None:
            if self._patience is None:
                self._patience = self.loop.call_later(client_timeout_s, self.transport.close)

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.close()  # in the middle of an answer there is nothing to say
                return
            body = msgspec.json.encode(error_body(bad_request(msg, code="invalid_http")))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(client_timeout_s),
        timeout_graceful_shutdown=5,
    )
    return _Server(config)
