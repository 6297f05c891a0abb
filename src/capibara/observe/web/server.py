"""The monitor over HTTP: a page, its figures as they come (server-sent events), and /metrics.

Python's own server with a thread a connection: a monitor has a handful of viewers, and needs no extra for them.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.resources
import ipaddress
import json
import logging
import socket
import threading
import urllib.parse
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from capibara.errors import CapibaraError, rule_error
from capibara.observe.monitor import TOGETHER, TpuRealTimeMonitor
from capibara.observe.prometheus import PrometheusText

__all__ = ["MonitorServer"]

_log = logging.getLogger("capibara.observe")

_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/monitor.js": ("monitor.js", "text/javascript; charset=utf-8"),
    "/monitor.css": ("monitor.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_COOKIE = "capibara_monitor"
_MOST_CONNECTIONS = 64
_CLIENT_S = 15.0
_FASTEST_S = 0.25  # four pictures a second are enough for people
_POINTS = 240  # of a curve, when a page opens


class MonitorServer:
    """Serves a monitor until `close`. The monitor is started and stopped by whoever made it.

    Args:
      monitor: whose figures.
      host: the address to listen on; one that other machines reach needs a token.
      port: 0 takes a free one.
      token: what a viewer has to know: in the page's address as ?token=, or as "Authorization: Bearer".

    Examples:
        >>> import urllib.request
        >>> with TpuRealTimeMonitor() as monitor, MonitorServer(monitor, port=0) as server:
        ...     urllib.request.urlopen(server.address + "/api/now").status
        200
    """

    def __init__(
        self, monitor: TpuRealTimeMonitor, host: str = "127.0.0.1", port: int = 8430, token: str | None = None
    ) -> None:
        if _is_exposed(host) and not token:
            raise rule_error(
                "An address that other machines reach needs a token",
                f"{host!r} without one",
                "add --token SECRET, or listen on 127.0.0.1",
            )
        self.host, self.token = host, token or None  # a variable that is set to nothing is no token
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._server = _Server((host, port), _Handler, family, monitor, self.token)
        except OSError as error:
            raise rule_error(
                "A monitor listens on an address of this machine, at a port that nobody else has",
                f"{host}:{port} ({error})",
                "use --port 0 for a free one, or another --host",
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="monitor web", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        """Take no more connections, and end those that there are."""
        self._server.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

    def __enter__(self) -> MonitorServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a viewer that does not read is not waited for
    # Two on one port would share its viewers; a port that was just let go of may be taken all the same.
    allow_reuse_address = True
    allow_reuse_port = False
    request_queue_size = 64

    def __init__(
        self,
        place: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        family: socket.AddressFamily,
        monitor: TpuRealTimeMonitor,
        token: str | None,
    ) -> None:
        self.address_family = family
        self.monitor = monitor
        self.digest = None if token is None else _digest(token.encode())
        self.closing = threading.Event()
        self.room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self.prometheus: PrometheusText | None = None
        super().__init__(place, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.room.acquire(blocking=False):
            self.shutdown_request(request)  # the page tries again by itself
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a viewer's connection failed", exc_info=True)  # one that went away, nearly always


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "capibara"
    sys_version = ""
    timeout = _CLIENT_S  # for a request's head, and for a viewer to take what it is sent
    _routes: ClassVar[dict[str, str]] = {"/api/now": "_now", "/events": "_events", "/metrics": "_metrics"}

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)

    def do_GET(self) -> None:  # as the base class calls it
        path, _, query = self.path.partition("?")
        self.close_connection = True
        if not self._is_own_name():
            self._answer(HTTPStatus.FORBIDDEN, b"This monitor is reached by an address, not by that name.\n")
        elif path == "/" and "token" in (asked := urllib.parse.parse_qs(query)):
            self._come_in(asked["token"][0])
        elif not self._is_known():
            self._answer(
                HTTPStatus.UNAUTHORIZED,
                b"This monitor has a token: open /?token=TOKEN, or send Authorization: Bearer TOKEN.\n",
                headers={"WWW-Authenticate": "Bearer"},
            )
        elif path in _PAGE:
            file, kind = _PAGE[path]
            self._answer(
                HTTPStatus.OK, importlib.resources.files(__package__).joinpath("page", file).read_bytes(), kind
            )
        elif path in self._routes:
            getattr(self, self._routes[path])()
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"There is /, /events, /api/now and /metrics.\n")

    def _is_own_name(self) -> bool:
        """Without a token the name asked for is an address or localhost: a page of another name that was made to lead
        here would be of the same origin, and read along."""
        if self.server.digest is not None:
            return True
        try:
            name = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            return name in ("localhost", socket.gethostname().lower()) or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _is_known(self) -> bool:
        if self.server.digest is None:
            return True
        scheme, _, sent = self.headers.get("Authorization", "").partition(" ")
        # Headers are read as latin-1, whatever the bytes are.
        if scheme.lower() == "bearer" and hmac.compare_digest(
            _digest(sent.strip().encode("latin-1")), self.server.digest
        ):
            return True
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self.server.digest.encode())

    def _come_in(self, sent: str) -> None:
        """A token in the address becomes a cookie, so that it does not stay in the history of the browser."""
        headers = {"Location": "/"}
        if self.server.digest is not None:
            if not hmac.compare_digest(_digest(sent.encode()), self.server.digest):
                self._answer(HTTPStatus.UNAUTHORIZED, b"That is not the token of this monitor.\n")
                return
            headers["Set-Cookie"] = f"{_COOKIE}={self.server.digest}; HttpOnly; SameSite=Strict; Path=/"
        self._answer(HTTPStatus.SEE_OTHER, b"", headers=headers)

    def _answer(
        self,
        status: HTTPStatus,
        body: bytes,
        kind: str = "text/plain; charset=utf-8",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _now(self) -> None:
        self._answer(HTTPStatus.OK, _json(self.server.monitor.get_current_metrics()), "application/json")

    def _metrics(self) -> None:
        try:
            if self.server.prometheus is None:
                self.server.prometheus = PrometheusText(self.server.monitor)
            self._answer(HTTPStatus.OK, self.server.prometheus.text(), self.server.prometheus.content_type)
        except CapibaraError as missing:
            self._answer(HTTPStatus.NOT_IMPLEMENTED, f"{missing}\n".encode())

    def _events(self) -> None:
        """The curves so far, then every sample, four a second at most."""
        self.send_response(HTTPStatus.OK)
        for name, value in {"Content-Type": "text/event-stream", **_HEADERS, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        monitor = self.server.monitor
        seen = monitor.wait_for_sample(0, _CLIENT_S)
        self._send("history", _json({TOGETHER: monitor.curves(_POINTS).get(TOGETHER, {})}))
        while not self.server.closing.is_set():
            # Sent again where nothing new came for five seconds: a viewer that is gone shows by that.
            self._send("sample", _json(monitor.get_current_metrics()))
            self.server.closing.wait(_FASTEST_S)
            seen = monitor.wait_for_sample(seen, 5.0)

    def _send(self, event: str, data: bytes) -> None:
        self.wfile.write(b"event: " + event.encode() + b"\ndata: " + data + b"\n\n")
        self.wfile.flush()


def _json(document: Any) -> bytes:
    return json.dumps(document, allow_nan=False).encode()


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


def _is_exposed(host: str) -> bool:
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True
