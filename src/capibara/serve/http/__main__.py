"""The server's process: `python -m capibara.serve.http LISTENING_FD LINK_FD`, as `capibara serve` starts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys

import uvicorn

from capibara.serve.http.app import make_app
from capibara.serve.http.errors import unavailable
from capibara.serve.http.listen import make_server
from capibara.serve.http.logs import log_event, set_up
from capibara.serve.http.state import Serving
from capibara.serve.link import FromEngine, read_frame_async

_log = logging.getLogger("capibara.serve")


async def _main(listening: socket.socket, link: socket.socket) -> int:
    reader, writer = await asyncio.open_connection(sock=link)
    first = await read_frame_async(reader, FromEngine)
    if first is None or first.settings is None:
        return 1
    settings = first.settings
    set_up(settings.log_level)
    serving = Serving(settings, writer)
    serving.told(first)
    server = make_server(make_app(serving), settings.client_timeout_s)
    reading = asyncio.create_task(serving.engine.read(reader))
    listen = asyncio.create_task(server.serve(sockets=[listening]))
    announced = asyncio.create_task(_announce(serving, server))
    draining = asyncio.create_task(serving.draining.wait())
    await asyncio.wait({listen, reading, draining}, return_when=asyncio.FIRST_COMPLETED)
    if not reading.done():
        log_event(_log, "draining", in_flight=serving.engine.in_flight)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_timeout_s):
                while (serving.engine.in_flight or server.server_state.tasks) and not reading.done():
                    await asyncio.sleep(0.02)
        # Whoever still waits is told, and not just cut off.
        serving.engine.give_up(unavailable("The server stopped before the answer was whole.", "stopping"))
    server.should_exit = True
    await listen
    serving.close()
    announced.cancel()
    log_event(_log, "stopped", unfinished=serving.engine.in_flight)
    if reading.done():
        if (failure := reading.exception()) is not None:
            _log.error("failed", exc_info=failure)
        return 1
    serving.engine.stop()
    await writer.drain()
    reading.cancel()
    return 0


async def _announce(serving: Serving, server: uvicorn.Server) -> None:
    while not (server.started and serving.ready):
        await asyncio.sleep(0.01)
    serving.engine.say_ready()


def main() -> None:
    # Ctrl-C and SIGTERM reach both processes of a terminal or a service. The engine's tells this one what to do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    listening, link = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    sys.exit(asyncio.run(_main(listening, link)))


if __name__ == "__main__":
    main()
