"""The application: which path is answered by what, and what every request passes on its way."""

from __future__ import annotations

import hashlib
import hmac
import importlib.resources
import ipaddress
import logging
import re
import secrets
import socket
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capibara.serve.http import generation
from capibara.serve.http.errors import ApiError, bad_request, error_response, unavailable
from capibara.serve.http.intake import decode, read_body
from capibara.serve.http.logs import log_event
from capibara.serve.http.metrics import CONTENT_TYPE
from capibara.serve.http.schema import EmbeddingRequest
from capibara.serve.http.state import Serving

__all__ = ["make_app"]

_log = logging.getLogger("capibara.serve")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/chat.css": ("chat.css", "text/css; charset=utf-8"),
}
_PAGE_HEADERS = {
    # Whatever a model writes, the page runs its own script and talks to its own server.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_app(serving: Serving) -> ASGIApp:
    """The server as an ASGI application."""
    routes = [
        Route("/v1/chat/completions", generation.chat_completions, methods=["POST"]),
        Route("/v1/completions", generation.completions, methods=["POST"]),
        Route("/v1/embeddings", _embeddings, methods=["POST"]),
        Route("/v1/models", _models, methods=["GET"]),
        Route("/v1/models/{name:path}", _model, methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
        Route("/ready", _ready, methods=["GET"]),
        Route("/metrics", _metrics, methods=["GET"]),
    ]
    if serving.settings.page:
        routes += [Route(path, _page, methods=["GET"]) for path in _PAGE]
    cors = []
    if serving.settings.cors_origins:
        cors = [
            Middleware(
                CORSMiddleware,
                allow_origins=list(serving.settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        ]
    app = Starlette(
        routes=routes,
        middleware=cors,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _unforeseen},
    )
    app.state.serving = serving
    return _Gate(app, serving)


def _json(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


async def _health(http: Request) -> Response:
    """Whether this process answers, whatever it is able to do."""
    return _json({"status": "alive"})


async def _ready(http: Request) -> Response:
    """Whether requests are answered now: the model is loaded and stays where it is, and nobody has said to stop."""
    serving: Serving = http.app.state.serving
    serving.check_ready()
    if serving.resizing:
        raise unavailable("The model goes over to other devices; requests that come wait for it.", "resizing")
    return _json({"status": "ready"})


async def _metrics(http: Request) -> Response:
    return Response(http.app.state.serving.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def _described(serving: Serving, name: str) -> dict[str, Any]:
    card = serving.prompts.card
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "capibara",
        "root": card.name,
        "parent": None if name == card.name else card.name,
        "max_model_len": card.max_length,
        "vocab_size": card.vocab_size,
    }


async def _models(http: Request) -> Response:
    serving: Serving = http.app.state.serving
    return _json({"object": "list", "data": [_described(serving, name) for name in serving.names()]})


async def _model(http: Request) -> Response:
    serving: Serving = http.app.state.serving
    name = http.path_params["name"]
    serving.adapter_of(name)
    return _json(_described(serving, name))


async def _embeddings(http: Request) -> Response:
    serving: Serving = http.app.state.serving
    raw = await read_body(http, serving.settings.max_body_bytes, serving.settings.client_timeout_s)
    body = decode(raw, EmbeddingRequest)
    serving.adapter_of(body.model)
    raise bad_request(
        f"{body.model} writes text and has no embeddings. Fix: serve a model that was trained for them.",
        "model",
        code="model_has_no_embeddings",
    )


async def _page(http: Request) -> Response:
    file, kind = _PAGE[http.url.path]
    content = importlib.resources.files("capibara.serve.http").joinpath("page", file).read_bytes()
    return Response(content, headers={"Content-Type": kind, **_PAGE_HEADERS})


async def _api_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(http: Request, error: Exception) -> Response:
    """Starlette's own: no such path, no such method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        text = f"{http.url.path} takes {allowed or 'another method'}. Got {http.method}. Fix: use that."
        return error_response(ApiError(405, text, code="method_not_allowed", headers=error.headers))
    text = f"There is no {http.method} {http.url.path}. Fix: see /v1/models, /v1/chat/completions, /v1/completions."
    return error_response(ApiError(404, text, code="unknown_url"))


async def _unforeseen(http: Request, error: Exception) -> Response:
    return error_response(
        ApiError(500, "The server failed at this request; its log says where.", code="internal_error")
    )


class _Gate:
    """Around the application: an id and a log line for every request, keys, and pages of other origins.

    It is outermost, so that what it counts is what clients were sent.
    """

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving
        self._keys = [_digest(key.encode()) for key in serving.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        asked = headers.get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else f"req-{secrets.token_hex(8)}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        metrics = self._serving.metrics
        metrics.opened()
        try:
            refused = self._refusal(scope, headers)
            app: Callable[..., Awaitable[None]] = self._app if refused is None else error_response(refused)
            await app(scope, receive, counted)
        except Exception:  # noqa: BLE001  # of one request: it is in the log, and the others go on
            status = status or 500
            _log.exception("failed", extra={"request_id": request_id, "path": scope["path"]})
        finally:
            metrics.answered(_known(scope), status)
            self._log(scope, status, started, state)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> ApiError | None:
        origin = headers.get("origin")
        if origin is not None and scope["method"] == "POST" and not self._same_origin(origin, headers):
            # A page somewhere else may make a browser post here without asking; it is not to spend this machine's time.
            return ApiError(
                403, f"Pages of {origin[:100]} may not ask. Fix: start the server with --cors-origin {origin[:100]}."
            )
        if not self._keys or not scope["path"].startswith("/v1/") or scope["method"] == "OPTIONS":
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1"))  # as it came
        # Every key is compared, and each in the same time whatever is wrong with it.
        known = [hmac.compare_digest(digest, own) for own in self._keys]
        if scheme.lower() == "bearer" and any(known):
            return None
        return ApiError(
            401,
            "A request has an API key of this server. Got " + ("another." if key else "none.") + " Fix: send it as "
            "Authorization: Bearer KEY.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _same_origin(self, origin: str, headers: dict[str, str]) -> bool:
        allowed = self._serving.settings.cors_origins
        if "*" in allowed or origin in allowed:
            return True
        place = origin.partition("://")[2]
        # Without keys a name has to be this machine's: any other may be made to lead here by whoever owns it, and a
        # page of that name would then be of the same origin.
        return place == headers.get("host") and (bool(self._keys) or _is_own(place))

    def _log(self, scope: Scope, status: int, started: float, state: dict[str, Any]) -> None:
        fields: dict[str, Any] = {
            "request_id": state["request_id"],
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status or 499,
            "duration_ms": round(1000 * (time.monotonic() - started), 2),
            "client": (scope.get("client") or ("?",))[0],
        }
        group, answer = state.get("group"), state.get("answer")
        if answer is not None:
            usage = answer.usage()
            fields |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
            fields["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
        if group is not None:
            firsts = [timeline.first - timeline.started for timeline in group.timelines if timeline.first is not None]
            fields["first_token_ms"] = round(1000 * min(firsts), 2) if firsts else None
        if "ended" in state:
            fields["ended"] = state["ended"]
        log_event(_log, "request", **fields)


def _is_own(place: str) -> bool:
    """Whether a host, with a port or without, is an address or this machine's name."""
    try:
        name = urllib.parse.urlsplit(f"//{place}").hostname or ""
    except ValueError:
        return False
    if name in ("localhost", socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


_PATHS = frozenset(
    ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/health", "/ready", "/metrics", *_PAGE]
)


def _known(scope: Scope) -> str:
    """The path for a label: of those that are not there, whose number is anybody's guess, one word for all."""
    return scope["path"] if scope["path"] in _PATHS else "other"
