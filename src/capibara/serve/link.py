"""What the engine's process and the server's tell each other, and the stream of bytes that carries it.

The HTTP server is a process of its own: parsing, templates, tokenizing and thousands of sockets take no time from the
thread that feeds the device. Between the two is one pair of connected sockets. A message is a MessagePack document
with its length before it; all that happened since the last one is in it, so that under load there are fewer and
larger ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from capibara.serve.request import Request, RequestOutput

__all__ = [
    "Added",
    "FromEngine",
    "Link",
    "ModelCard",
    "ServerSettings",
    "Stats",
    "ToEngine",
    "merge",
    "read_frame",
    "read_frame_async",
    "write_frame",
]

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")


class ModelCard(msgspec.Struct, frozen=True):
    """What the server has to know of the model that the engine runs."""

    name: str
    origin: str
    created: int
    tokenizer: str
    """As `load_tokenizer` takes it."""
    max_length: int
    max_prompt: int
    vocab_size: int
    prompt_bos: bool
    max_sequences: int
    max_queue: int
    adapters: tuple[str, ...] = ()
    sampling_defaults: dict[str, int | float] = {}
    """For requests that say nothing of them."""
    dollars_per_hour: float | None = None
    """What the machine's devices cost, where that is known."""


class ServerSettings(msgspec.Struct, frozen=True):
    """How the server's process behaves: sent to it before anything else, so that keys are in no command line."""

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    request_timeout_s: float = 600.0
    """From a request's last byte to the last byte of its answer."""
    client_timeout_s: float = 30.0
    """How long a client may take to send its request, or to read a part of the answer."""
    drain_timeout_s: float = 60.0
    """How long running requests may still take when the server is told to stop."""
    tool_parser: str | None = None
    """The format of tool calls; as the model's chat template has it when None."""
    chat_template: str | None = None
    """In place of the model's own."""
    page: bool = True
    """Whether / is a page to chat on."""
    log_level: str = "info"


class Stats(msgspec.Struct, frozen=True):
    """Of the engine, since it started or as it is now."""

    running: int = 0
    waiting: int = 0
    compiling: int = 0
    preemptions: int = 0
    kv_cache_usage: float = 0.0
    pages: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    compilations: int = 0
    drafted: int = 0
    accepted: int = 0
    phase_seconds: dict[str, float] = {}
    """Where the server's time went, over all of its restarts that are known of; whole seconds."""


class Added(msgspec.Struct, frozen=True):
    """Whether a request was taken: `refused` says why not."""

    id: str
    refused: str | None = None
    full: bool = False
    """There is no room, and nothing is wrong with it."""
    failed: bool = False
    """The engine could not make anything of it, which is the engine's fault."""
    grammar: bool = False
    """What is wrong is the schema, regular expression or grammar."""


class ToEngine(msgspec.Struct, frozen=True):
    add: tuple[Request, ...] = ()
    cancel: tuple[str, ...] = ()
    ready: bool = False
    """The model's name is known, and clients are answered."""
    stop: bool = False
    """The server has ended, and wants nothing more."""


class FromEngine(msgspec.Struct, frozen=True):
    settings: ServerSettings | None = None
    model: ModelCard | None = None
    """Sent when the engine is ready, and again when it has gone over to other devices."""
    added: tuple[Added, ...] = ()
    outputs: tuple[RequestOutput, ...] = ()
    stats: Stats | None = None
    drain: bool = False
    """Take nothing new, answer what runs, and end."""
    resizing: bool | None = None
    """Whether the engine goes over to other devices: what comes meanwhile is kept. None says nothing of it."""


Message = TypeVar("Message", ToEngine, FromEngine)


def write_frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def read_frame(read: Callable[[int], bytes], kind: type[Message]) -> Message | None:
    """The next message; None where the other side is gone."""
    head = read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = read(length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None


async def read_frame_async(reader: asyncio.StreamReader, kind: type[Message]) -> Message | None:
    """The same for the server's event loop."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)
    except asyncio.IncompleteReadError:
        return None


def merge(outputs: Iterable[RequestOutput]) -> tuple[RequestOutput, ...]:
    """Several steps' outputs as one a request: tokens and text joined, the last one's usage and end."""
    merged: dict[str, RequestOutput] = {}
    for new in outputs:
        old = merged.get(new.id)
        if old is None:
            merged[new.id] = new
            continue
        logprobs = (
            None if new.logprobs is None and old.logprobs is None else (old.logprobs or ()) + (new.logprobs or ())
        )
        merged[new.id] = RequestOutput(
            id=new.id,
            tokens=old.tokens + new.tokens,
            text=old.text + new.text,
            usage=new.usage,
            logprobs=logprobs,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            error=new.error,
            rejected=new.rejected,
            waited_s=new.waited_s if old.waited_s is None else old.waited_s,
        )
    return tuple(merged.values())


class Link:
    """The engine's end: messages are read and written by threads of their own, and the engine's never waits.

    Args:
      connection: one of a pair of connected sockets.
      received: called in the reading thread with each message, and with None when the other side is gone.
    """

    def __init__(self, connection: socket.socket, received: Callable[[ToEngine | None], None]) -> None:
        self._socket = connection
        self._received = received
        self._waiting = threading.Condition()
        self._out: list[FromEngine] = []
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="serve-link-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="serve-link-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def send(self, message: FromEngine) -> None:
        """Leave a message to be written. What is left before the writer comes to it goes in one piece."""
        with self._waiting:
            self._out.append(message)
            self._waiting.notify()

    def close(self) -> None:
        """Write what is left, and hang up."""
        with self._waiting:
            self._closed = True
            self._waiting.notify()
        self._writer.join(timeout=5)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # the reader has it open as well, and would keep the line up
        self._socket.close()

    def _read(self) -> None:
        with self._socket.makefile("rb") as stream:
            try:
                while (message := read_frame(stream.read, ToEngine)) is not None:
                    self._received(message)
            except OSError:
                pass  # closed while it was read: the same as an end
            except Exception:  # noqa: BLE001
                # After what cannot be read nothing can: an engine that hears nothing more must not go on as if all
                # were well.
                _log.exception("the server's message cannot be read")
        self._received(None)

    def _write(self) -> None:
        while True:
            with self._waiting:
                while not self._out and not self._closed:
                    self._waiting.wait()
                messages, self._out = self._out, []
                if not messages and self._closed:
                    return
            try:
                self._socket.sendall(write_frame(_one(messages)))
            except OSError:
                return  # the other side is gone, which the reader says


def _one(messages: list[FromEngine]) -> FromEngine:
    if len(messages) == 1:
        return messages[0]
    return FromEngine(
        settings=next((m.settings for m in messages if m.settings is not None), None),
        model=next((m.model for m in reversed(messages) if m.model is not None), None),
        added=tuple(one for m in messages for one in m.added),
        outputs=merge(one for m in messages for one in m.outputs),
        stats=next((m.stats for m in reversed(messages) if m.stats is not None), None),
        drain=any(m.drain for m in messages),
        resizing=next((m.resizing for m in reversed(messages) if m.resizing is not None), None),
    )
