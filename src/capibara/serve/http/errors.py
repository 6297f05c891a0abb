"""What a client did wrong, in the shape that OpenAI's clients read; every status that the server answers with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


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
    return Response(
        msgspec.json.encode(error_body(error)), error.status, headers=error.headers, media_type="application/json"
    )
