"""TLS before a server's Unix socket, as a server that speaks TLS itself looks to its clients.

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
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import trustme

T = TypeVar("T")


class TlsProxy:
    """A context manager.

    Args:
        server: the server's Unix socket.
        folder: for certificates and keys.
        asks_clients: only a client with a certificate of our authority gets in.
    """

    def __init__(self, server: Path, folder: Path, *, asks_clients: bool = False) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
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

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls", daemon=True)
        self._thread.start()
        self._listener = self._run(
            asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        )
        self.port = int(self._listener.sockets[0].getsockname()[1])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    @property
    def address(self) -> str:
        """Host and port."""
        return f"localhost:{self.port}"

    @property
    def options(self) -> str:
        """Of a URL: trust our authority."""
        return f"?ssl_ca_certs={self._authority}"

    @property
    def url(self) -> str:
        """For a client without a certificate."""
        return f"rediss://{self.address}{self.options}"

    @property
    def url_of_client(self) -> str:
        """For a client with one."""
        return f"{self.url}&ssl_certfile={self._client}&ssl_keyfile={self._client}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
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
            for end in (writer, downstream):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _close(self) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
