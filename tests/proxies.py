"""Proxies before a server's Unix socket, each on a thread of its own.

    with CutProxy(server.socket) as proxy:
        client = SyncClient(proxy.url)
        proxy.cut()                                  # every connection, in the middle of whatever
        proxy.refuse()                               # and nobody gets in any more
        proxy.admit()

    with TlsProxy(server.socket, folder) as tls:
        redis.Redis.from_url(tls.url)                # rediss://localhost:..., with the authority
        tls.url_of_client                            # the same with a client's certificate

The bundled server is built without TLS; what is tested here is our side of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import trustme

T = TypeVar("T")

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class _Proxy:
    """Forwards what comes to a listener; a context manager."""

    def __init__(self, server: Path) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self._admits = True

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._listener = self._run(self._listen(self._serve))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._admits = False
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def cut(self) -> None:
        """End every connection. What was on its way, either way, is lost."""
        self._run(self._cut())

    async def _listen(self, serve: Serve) -> asyncio.Server:
        raise NotImplementedError

    async def _close(self) -> None:
        # In this order: Python 3.11 stumbles over connections that end after their listener.
        await self._cut()
        self._listener.close()

    async def _cut(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            if self._admits:
                await self._forward(reader, writer)
        writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_unix_connection(self._server)
        ways = [
            asyncio.create_task(_copy(upstream, writer)),
            asyncio.create_task(_copy(reader, downstream)),
        ]
        try:
            # Either side may be the one that goes.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            downstream.transport.abort()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)


class CutProxy(_Proxy):
    """A connection that breaks when a test says so, while the server is well.

    `name` tells several of one server apart.
    """

    def __init__(self, server: Path, name: str = "cut") -> None:
        super().__init__(server)
        self._socket = server.with_name(f"{server.name}-{name}")
        self.url = f"unix://{self._socket}"

    def refuse(self) -> None:
        """Cut, and let nobody in any more."""
        self._admits = False
        self.cut()

    def admit(self) -> None:
        """Undo `refuse()`."""
        self._admits = True

    async def _listen(self, serve: Serve) -> asyncio.Server:
        return await asyncio.start_unix_server(serve, self._socket)


class TlsProxy(_Proxy):
    """TLS, as a server that speaks it itself looks to its clients.

    Args:
        server: the server's Unix socket.
        folder: for certificates and keys.
        asks_clients: only a client with a certificate of our authority gets in.
    """

    def __init__(self, server: Path, folder: Path, *, asks_clients: bool = False) -> None:
        super().__init__(server)
        authority = trustme.CA()
        self._authority = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self._authority))
        self._client = folder / "client.pem"
        authority.issue_cert("client@localhost").private_key_and_cert_chain_pem.write_to_path(
            str(self._client)
        )
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("localhost").configure_cert(self._context)
        if asks_clients:
            authority.configure_trust(self._context)
            self._context.verify_mode = ssl.CERT_REQUIRED

    @property
    def address(self) -> str:
        """Host and port."""
        return f"localhost:{self._listener.sockets[0].getsockname()[1]}"

    @property
    def url(self) -> str:
        """For a client without a certificate."""
        return f"rediss://{self.address}?ssl_ca_certs={self._authority}"

    @property
    def url_of_client(self) -> str:
        """For a client with one."""
        return f"{self.url}&ssl_certfile={self._client}&ssl_keyfile={self._client}"

    async def _listen(self, serve: Serve) -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=self._context)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
