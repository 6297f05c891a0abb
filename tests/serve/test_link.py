"""The link between the engine's process and the server's: what is sent arrives, and what waits is joined."""

from __future__ import annotations

import asyncio
import queue
import socket
import struct
import time
from dataclasses import replace

import msgspec
import pytest

from capibara.serve.link import (
    Added,
    FromEngine,
    Link,
    ModelCard,
    ServerSettings,
    Stats,
    ToEngine,
    merge,
    read_frame,
    read_frame_async,
    write_frame,
)
from capibara.serve.request import Request, RequestOutput, SamplingParams, TokenLogprobs, Usage


def _output(id: str, *tokens: int, done: int = 0, end: str | None = None, logprobs: bool = False) -> RequestOutput:
    told = tuple(TokenLogprobs(token, -0.5, ((1, -0.1),)) for token in tokens) if logprobs else None
    reason = "stop" if end is not None else None
    return RequestOutput(
        id, tokens, bytes(tokens).decode(), Usage(3, done + len(tokens), 1), told, reason, end, None
    )  # fmt: skip


@pytest.mark.quick
def test_steps_of_a_request_are_joined() -> None:
    steps = [_output("a", 97, logprobs=True), _output("b", 120), _output("a", 98, 99, done=1, end="!", logprobs=True)]
    first, second = merge(steps)
    assert (first.tokens, first.text, first.usage.completion_tokens) == ((97, 98, 99), "abc", 3)
    assert (first.finish_reason, first.stop_reason) == ("stop", "!")
    assert first.logprobs is not None
    assert len(first.logprobs) == 3
    assert second == steps[1]
    ran, told = replace(_output("c", 97), waited_s=0.5), _output("c", 98, done=1)
    assert [merge(pair)[0].waited_s for pair in ([ran, told], [told, ran])] == [0.5, 0.5]


@pytest.mark.quick
def test_every_message_comes_as_it_was_sent() -> None:
    sampling = SamplingParams(
        max_tokens=3, stop=("x",), stop_token_ids=(4,), json_schema={"type": "object"}, seed=-5, logprobs=2
    )
    up = ToEngine(add=(Request("a", (1, 2), sampling),), cancel=("b",), ready=True)
    down = FromEngine(
        settings=ServerSettings(api_keys=("k",)),
        model=ModelCard("m", "o", 1, "bytes", 8, 7, 259, True, 2, 2, ("x",)),
        added=(Added("a", "no", full=True),),
        outputs=(_output("a", 97, logprobs=True),),
        stats=Stats(running=3, kv_cache_usage=0.5),
    )
    ours, theirs = socket.socketpair()
    with ours, theirs, theirs.makefile("rb") as stream:
        ours.sendall(write_frame(up) + write_frame(down))
        assert read_frame(stream.read, ToEngine) == up
        assert read_frame(stream.read, FromEngine) == down
        ours.sendall(write_frame(up)[:-1])
        ours.close()
        assert read_frame(stream.read, ToEngine) is None, "a message that breaks off is none"


def test_what_waits_behind_a_slow_reader_goes_in_one_piece() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    received: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
    link = Link(ours, received.put)
    started = time.monotonic()
    count = 2000
    for number in range(count):
        link.send(FromEngine(outputs=(_output("a", 97 + number % 26, done=number),)))
    assert time.monotonic() - started < 30, "the engine does not wait for whoever reads"

    async def read() -> list[FromEngine]:
        reader, writer = await asyncio.open_connection(sock=theirs)
        messages: list[FromEngine] = []
        while not messages or messages[-1].outputs[-1].usage.completion_tokens < count:
            message = await read_frame_async(reader, FromEngine)
            assert message is not None
            messages.append(message)
        writer.write(write_frame(ToEngine(stop=True)))
        await writer.drain()
        writer.close()
        return messages

    messages = asyncio.run(read())
    assert len(messages) < count / 4
    tokens = [token for message in messages for output in message.outputs for token in output.tokens]
    assert tokens == [97 + number % 26 for number in range(count)]
    assert received.get(timeout=60) == ToEngine(stop=True)
    assert received.get(timeout=60) is None, "the other side is gone"
    link.close()


def test_a_message_that_cannot_be_read_is_the_end_of_the_link() -> None:
    ours, theirs = socket.socketpair()
    received: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
    link = Link(ours, received.put)
    with theirs:
        theirs.sendall(struct.pack("<I", 3) + b"\xc1\xc1\xc1")
        assert received.get(timeout=60) is None
    link.close()


def test_settings_have_no_room_for_typing_errors() -> None:
    with pytest.raises(TypeError):
        ServerSettings(max_body_byte=3)  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"outputs": 3}), type=FromEngine)
