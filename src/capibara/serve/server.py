"""A served model: this process runs the engine, and starts the one that answers HTTP."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from capibara.errors import CapibaraError, rule_error
from capibara.serve.link import ModelCard, ServerSettings
from capibara.serve.worker import EngineWorker, Loaded

if TYPE_CHECKING:
    from capibara.observe.goodput import Goodput

__all__ = ["Loaded", "Server"]

_BACKLOG = 2048
_END_WITHIN_S = 15.0


class _Stopped(BaseException):
    """Told to stop while there was nothing yet to finish."""


class Server:
    """Listens from the start, so that /health answers while the model is loaded; `run` then serves it.

    Args:
      host: the address to listen on.
      port: 0 takes a free one.
      settings: of the HTTP process.
      books: where the time goes is written there; in memory when None.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        settings: ServerSettings | None = None,
        *,
        books: Goodput | None = None,
    ) -> None:
        self.host = host
        listening = _listen(host, port)
        self.port: int = listening.getsockname()[1]
        ours, theirs = socket.socketpair()
        with listening, theirs:
            handed = (listening.fileno(), theirs.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-m", "capibara.serve.http", *map(str, handed)],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                stdout=2,  # this process's standard output has one line, and it is not theirs
            )
        self._worker = EngineWorker(ours, settings or ServerSettings(), books)
        self._serving = self._resizable = False

    @property
    def address(self) -> str:
        host = self.host
        if ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self.port}"

    @property
    def books(self) -> Goodput:
        """Where the time goes, by `SERVER_PHASES`."""
        return self._worker.books

    @property
    def exposed(self) -> bool:
        """Whether other machines may reach it."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True

    def run(
        self,
        load: Callable[[], Loaded],
        ready: Callable[[ModelCard], None],
        reload: Callable[[Sequence[Any]], Loaded] | None = None,
    ) -> None:
        """Load the engine, say that it is ready, and serve until told to stop; then finish what runs, and return.

        Args:
          load: makes what is served.
          ready: called when clients are answered.
          reload: makes the same on other devices, after the one before is closed. With it the server can be resized, by
            `resize` or by an autoscaler in whose `managed_scaling` it runs.
        """
        try:
            with self.books.phase("load"):
                loaded = Loaded(*load())
        except BaseException:
            self.close()
            raise
        try:
            if self.process.poll() is not None:
                raise CapibaraError(f"The HTTP process ended with code {self.process.returncode}; its log says why")
            self._serving = True
            self._resizable = reload is not None
            if not self._worker.run(loaded, ready, reload):
                raise CapibaraError(f"The HTTP process ended with code {self._code()}; its log says why")
        finally:
            self._serving = self._resizable = False
            if self._worker.engine is not None:
                self._worker.engine.close()
            self.close()
            self.books.close()

    def resize(self, devices: Sequence[Any]) -> None:
        """Go over to other devices, from any thread, and return at once.

        `/ready` says no from then on; what has begun is finished, what waits or comes is kept, and answered on the
        other devices. Where running answers take longer than `drain_timeout_s`, the server stays where it is.
        """
        if not devices or len(set(devices)) != len(devices):
            raise rule_error("A server runs on one device or more, each once", devices, "name others")
        if not self._resizable:
            raise rule_error(
                "A server that is resized was run with what makes its engine anew", "none", "pass reload= to run"
            )
        self._worker.resize(devices)

    @property
    def stopping(self) -> bool:
        return self._worker.draining

    def stop(self) -> None:
        """Take nothing new, finish what runs, and let `run` return. From any thread, and from a signal's handler."""
        self._worker.drain()

    def close(self) -> None:
        """End the HTTP process, whatever it is doing."""
        self._worker.link.close()
        try:
            self.process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_WITHIN_S)
        return self.process.returncode

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT stop it in good order; before it serves, at once; a second Ctrl-C at once as well.

        A second SIGTERM changes nothing: whoever stops a group of processes sends several.
        """

        def told(number: int, frame: FrameType | None) -> None:
            if self._serving and self.stopping and number == signal.SIGINT:
                self.process.kill()
            elif self._serving:
                self.stop()
            else:
                raise _Stopped

        before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        except _Stopped:
            pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise rule_error(
            "A server listens on an address of this machine, at a port that nobody else has",
            f"{host}:{port} ({error})",
            "use --port 0 for a free one, or another --host",
        ) from error
