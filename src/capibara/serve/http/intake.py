"""A request's body: within its size and its time, as the type that the path takes."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from capibara.errors import unknown_name
from capibara.serve.http.errors import ApiError, bad_request

__all__ = ["decode", "read_body"]

Body = TypeVar("Body", bound=msgspec.Struct)
_PATH = re.compile(r"(.*) - at `\$\.?(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """All of the body. One that is too large is not read to its end, and one that trickles is not waited for."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"A body is JSON. Got Content-Type {kind!r}. Fix: send Content-Type: application/json.")
    too_large = ApiError(
        413,
        f"A body has {limit:,} bytes at the most. Got more. Fix: send less, or start the server with --max-body-bytes.",
        code="request_too_large",
        headers={"Connection": "close"},
        drop_s=timeout_s,
    )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise ApiError(
            408,
            f"A body arrives within {timeout_s:g} s. Got {len(body):,} bytes by then. Fix: send it faster.",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ApiError(499, "The client went away before its request was whole.") from None
    return bytes(body)


def decode(body: bytes, kind: type[Body]) -> Body:
    """The body as `kind`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), kind) from None
    except UnicodeDecodeError as error:
        raise bad_request(f"A body is UTF-8. Got {error}. Fix: encode it.", code="invalid_utf8") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"A body is JSON. Got: {error}. Fix: send a JSON object.", code="invalid_json") from None


def _wrong_field(text: str, kind: type[msgspec.Struct]) -> ApiError:
    found = _PATH.match(text)
    what, path = (found[1], found[2]) if found else (text, "")
    if unknown := _UNKNOWN.match(what):
        name = unknown[1]
        param = f"{path}.{name}" if path else name
        choices = kind.__struct_encode_fields__ if not path else ()
        said = str(unknown_name("field", name, choices)) if choices else f"Unknown field {name!r} in {path}."
        return bad_request(said, param, code="unknown_parameter")
    if "missing required field" in what:
        missing = what.rpartition("`")[0].rpartition("`")[2]
        param = f"{path}.{missing}" if path else missing
        return bad_request(f"A request has {param!r}. Got none. Fix: add it.", param, code="missing_required_parameter")
    where = path or "the body"
    return bad_request(f"{where}: {what}.", path or None, code="invalid_type")
