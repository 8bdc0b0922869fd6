"""`HealthServer`: /metrics, /healthz and /readyz over HTTP.

    /metrics  what the worker counts, for Prometheus
    /healthz  200, or 503 with the reason while a part of the worker is stuck
    /readyz   200 while it takes jobs, else 503 with the reason: starting, loading, draining, ...

No answer waits for Redis or for the decode thread. There are no secrets in any of them, and no
access control either, so it listens on this machine only unless told otherwise.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from ._errors import ConfigError
from ._health import Health
from ._logging import get_log

_TEXT: Final = "text/plain; charset=utf-8"
# From its first byte to the last of the answer. Whoever is slower must not keep a thread.
_REQUEST_S: Final = 5.0
# Each takes a thread and a descriptor, which jobs need more.
_MOST_CONNECTIONS: Final = 32
_NO_DESCRIPTOR_PAUSE_S: Final = 0.2
_BIND_AGAIN_S: Final = 1.0

Answer = tuple[HTTPStatus, str, bytes]


class HealthServer:
    """Answers on threads of its own, from `start` to the end of the process or `close`.

    Args:
        host, port: where; port 0 takes a free one.
    """

    def __init__(self, host: str, port: int, health: Health, registry: CollectorRegistry) -> None:
        self._address = (host, port)
        self._pages: dict[str, Callable[[str], Answer]] = {
            "/metrics": lambda accept: _metrics(registry, accept),
            "/healthz": lambda _: _probe(health.unwell()),
            "/readyz": lambda _: _probe(health.unready()),
        }
        self._server: ThreadingHTTPServer | None = None
        self._log = get_log()

    @property
    def port(self) -> int:
        """The port that it listens on. It must have been started."""
        assert self._server is not None, "not started"
        return int(self._server.server_address[1])

    def start(self, *, must: bool = True) -> None:
        """Begin to answer.

        Args:
            must: False goes on without an answer where the port is taken, and tries again: a
                worker that was well does not end because somebody took its port.

        Raises:
            ConfigError: the port is taken, or the host is none of this machine.
        """
        try:
            self._bind()
        except OSError as error:
            if must:
                raise self._refusal(error) from error
            self._log.error("metrics not served", error=str(self._refusal(error)))
            self._run(self._bind_in_time)

    def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _bind(self) -> None:
        host, port = self._address
        server = _Server((host, port), _handler(self._answer))
        self._server = server
        self._log.info("metrics served", host=host, port=self.port)
        self._run(server.serve_forever)

    def _bind_in_time(self) -> None:
        while self._server is None:
            time.sleep(_BIND_AGAIN_S)
            try:
                self._bind()
            except OSError:
                continue

    def _refusal(self, error: OSError) -> ConfigError:
        host, port = self._address
        return ConfigError(
            "--metrics-port",
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            hint="give each worker of this machine a port of its own, or 0 for a free one",
        )

    @staticmethod
    def _run(body: Callable[[], None]) -> None:
        threading.Thread(target=body, name="health", daemon=True).start()

    def _answer(self, path: str, accept: str) -> Answer:
        known = " ".join(self._pages)
        try:
            page = self._pages.get(urlsplit(path).path)
        except ValueError:
            return HTTPStatus.BAD_REQUEST, _TEXT, f"that is no path; there is {known}\n".encode()
        if page is None:
            return HTTPStatus.NOT_FOUND, _TEXT, f"there is {known}\n".encode()
        try:
            return page(accept)
        except Exception as error:  # noqa: BLE001 - whoever asks gets an answer
            self._log.exception("request not answered")
            why = f"{type(error).__name__}; the worker's log has more\n"
            return HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, why.encode()


class _Server(ThreadingHTTPServer):
    """A thread for each connection, of which there are few, and none for long."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[Any, float] = {}
        self._guard = threading.Lock()
        self._room = threading.BoundedSemaphore(2 * _MOST_CONNECTIONS)
        super().__init__(address, handler)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            # Without a descriptor the connection stays, and would be asked for without a pause.
            time.sleep(_NO_DESCRIPTOR_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give it a thread. Where there are too many, the oldest goes."""
        if not self._room.acquire(blocking=False):
            # Those that were told to go are not gone yet.
            self.shutdown_request(request)
            return
        with self._guard:
            self._open[request] = time.monotonic()
            oldest = next(iter(self._open))
        if len(self._open) > _MOST_CONNECTIONS:
            self._break(oldest)
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread could be started.
            self._forget(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """Some times a second: break what takes too long."""
        late = time.monotonic() - _REQUEST_S
        with self._guard:
            slow = [request for request, began in self._open.items() if began < late]
        for request in slow:
            self._break(request)

    def _break(self, request: Any) -> None:
        """Wake its thread, which closes it."""
        with self._guard:
            if self._open.pop(request, None) is None:
                return
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def _forget(self, request: Any) -> None:
        with self._guard:
            self._open.pop(request, None)
        self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing to tell."""


def _handler(answer: Callable[[str, str], Answer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S
        server_version = "tenuto"
        sys_version = ""

        def do_GET(self) -> None:
            status, kind, body = answer(self.path, self.headers.get("Accept") or "")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - as its caller names it

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its caller's name
            """A line for each probe would drown the log."""

    return Handler


def _probe(problem: str) -> Answer:
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return status, _TEXT, f"{problem or 'ok'}\n".encode()


def _metrics(registry: CollectorRegistry, accept: str) -> Answer:
    try:
        encode, kind = choose_encoder(accept)
    except Exception:  # noqa: BLE001 - a version that is none; whoever asked gets the plain format
        encode, kind = choose_encoder("")
    return HTTPStatus.OK, kind, encode(registry)
