"""One streamed completion over HTTP/1.1, with the time of everything that arrives."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import h11

from capibara.errors import CapibaraError, rule_error

__all__ = ["Address", "Record", "get_json", "streamed_completion"]


@dataclass(frozen=True)
class Address:
    """Where a server is: http://host:port, with or without /v1."""

    scheme: str
    host: str
    port: int
    base: str
    api_key: str | None = None

    @staticmethod
    def parse(text: str, api_key: str | None = None) -> Address:
        parts = urllib.parse.urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise rule_error("An address is http://host:port or https://host", repr(text), "write it so")
        base = parts.path.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return Address(parts.scheme, parts.hostname, port, base, api_key)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


@dataclass
class Record:
    """What a client saw of its request; times are of one clock, in seconds."""

    due: float
    """When it was to be sent."""
    sent: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)
    """When something came, and how many tokens had come by then."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ended: float = 0.0
    status: int = 0
    """HTTP's; 0 where there was no answer."""
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None and bool(self.events)


async def _exchange(
    address: Address, method: str, path: str, body: bytes, headers: Mapping[str, str]
) -> AsyncIterator[h11.Response | h11.Data]:
    """The answer's events as they arrive."""
    secure = ssl.create_default_context() if address.scheme == "https" else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=secure, limit=1 << 20)
    connection = h11.Connection(h11.CLIENT)
    try:
        fields = {"Host": f"{address.host}:{address.port}", "Connection": "close", **headers}
        if body:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        if address.api_key:
            fields["Authorization"] = f"Bearer {address.api_key}"
        request = h11.Request(method=method, target=f"{address.base}{path}", headers=list(fields.items()))
        writer.write((connection.send(request) or b"") + (connection.send(h11.Data(body)) or b""))
        connection.send(h11.EndOfMessage())
        await writer.drain()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Response | h11.Data):
                yield event
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return
    finally:
        writer.close()


async def get_json(address: Address, path: str) -> Any:
    """A document of the server's."""
    status, body = 0, b""
    try:
        async for event in _exchange(address, "GET", path, b"", {}):
            if isinstance(event, h11.Response):
                status = event.status_code
            else:
                body += event.data
    except (OSError, h11.RemoteProtocolError) as error:
        raise CapibaraError(f"{address} does not answer: {error}") from error
    if status != 200:
        raise CapibaraError(f"{address}{address.base}{path} answered {status}: {body[:300].decode(errors='replace')}")
    return json.loads(body)


async def streamed_completion(address: Address, body: dict[str, Any], record: Record) -> None:
    """Send a request, and write down what comes and when. What goes wrong is written down as well."""
    record.sent = time.perf_counter()
    try:
        await _read_events(address, json.dumps(body).encode(), record)
    except (OSError, h11.RemoteProtocolError, ValueError, KeyError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.ended = time.perf_counter()


async def _read_events(address: Address, body: bytes, record: Record) -> None:
    rest, refusal, events = b"", b"", 0
    async for part in _exchange(address, "POST", "/completions", body, {}):
        if isinstance(part, h11.Response):
            record.status = part.status_code
            continue
        if record.status != 200:
            refusal += bytes(part.data)
            continue
        now = time.perf_counter()
        lines = (rest + bytes(part.data)).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                record.error = str(event["error"].get("message"))
                return
            usage = event.get("usage")
            events += bool(event.get("choices"))
            count = usage["completion_tokens"] if usage else events
            if usage:
                record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], count
            if event.get("choices") and count > (record.events[-1][1] if record.events else 0):
                record.events.append((now, count))
    if record.status != 200:
        record.error = refusal[:300].decode(errors="replace")
    record.completion_tokens = record.completion_tokens or (record.events[-1][1] if record.events else 0)
