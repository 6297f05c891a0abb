"""What a client did wrong, in the shape that OpenAI's clients read; every status that the server answers with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["STATUSES", "ApiError", "bad_request", "error_body", "error_response", "overloaded", "unavailable"]

STATUSES: dict[int, tuple[str, str]] = {
    400: ("invalid_request_error", "the request is not one: JSON, types, values, a prompt that is too long, a schema"),
    401: ("authentication_error", "no API key, or one that is not known"),
    403: ("permission_error", "a page of another origin asks, and --cors-origin does not name it"),
    404: ("invalid_request_error", "no such path, model or adapter"),
    405: ("invalid_request_error", "the path is there, and takes another method"),
    408: ("timeout_error", "the body did not arrive in time"),
    413: ("invalid_request_error", "the body is larger than --max-body-bytes"),
    415: ("invalid_request_error", "the body is not said to be JSON"),
    429: ("rate_limit_error", "as many requests as may are running and waiting; Retry-After says when to come again"),
    499: ("client_closed_request", "the client went away before its answer; in logs alone, nobody is there to read it"),
    500: ("server_error", "a fault of ours; the log has where"),
    503: ("server_error", "the model is being loaded, or the server stops; of `/ready`, also while it is resized"),
    504: ("timeout_error", "the answer took longer than --request-timeout-s"),
}
"""Status -> the type that an error of it has, and what it says. The guide's table is this one."""


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        drop_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.drop_s = drop_s
        """How long what the client still writes is read, and dropped."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after_s: int) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(retry_after_s)})


def unavailable(message: str, code: str, retry_after_s: int = 5) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def error_body(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": STATUSES[error.status][0],
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError) -> Response:
    body = msgspec.json.encode(error_body(error))
    if error.drop_s:
        return _WhileItWrites(body, error)
    return Response(body, error.status, headers=error.headers, media_type="application/json")


_QUIET_S = 2.0
"""After so long without a byte a client writes no more."""


class _WhileItWrites(Response):
    """An answer to a client that is not done with its body. To close at once would reset the connection, and most
    clients, which read when they have written, would see that and not the answer."""

    def __init__(self, body: bytes, error: ApiError) -> None:
        super().__init__(body, error.status, headers=error.headers, media_type="application/json")
        self._drop_s = error.drop_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drop_s):
                more = True
                while more:
                    more = (await asyncio.wait_for(receive(), _QUIET_S)).get("more_body", False)
        await send({"type": "http.response.body", "body": b""})
