"""HTTP over a plain socket: what a well-behaved client would not send, and what it would not do."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

CHAT = "/v1/chat/completions"


def post(
    address: str, body: bytes | dict[str, Any], path: str = CHAT, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return call(address, "POST", path, data, {"Content-Type": "application/json", **(headers or {})})


def call(
    address: str, method: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=120)
    try:
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        text = answer.read()
        got = {name.lower(): value for name, value in answer.getheaders()}
        is_json = got.get("content-type", "").startswith("application/json")
        return answer.status, json.loads(text) if is_json else text.decode(), got
    finally:
        connection.close()


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "stand-in", "messages": [{"role": "user", "content": f"say[{text}]yas"}], **fields}


def connect(address: str, receive_bytes: int | None = None) -> socket.socket:
    host, _, port = address.removeprefix("http://").rpartition(":")
    client = socket.socket()
    client.settimeout(30)
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect((host, int(port)))
    return client


def raw_request(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += headers or (f"Content-Length: {len(body)}",)
    return "\r\n".join([*lines, "", ""]).encode() + body
