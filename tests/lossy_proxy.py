"""A proxy before a server's Unix socket that loses what a test tells it to lose."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self


class LossyProxy:
    """Forwards, until a request holds `needle`: its reply is lost, and so is the connection.

    An asynchronous context manager. `lost` counts the replies that were lost.
    """

    def __init__(self, server: Path) -> None:
        self._server = server
        self._socket = server.with_name(f"{server.name}-lossy")
        self.url = f"unix://{self._socket}"
        self.needle: bytes | None = None
        self.lost = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_unix_server(self._serve, self._socket)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        upstream, downstream = await asyncio.open_unix_connection(self._server)
        back = asyncio.create_task(_copy(upstream, writer))
        try:
            while data := await reader.read(1 << 16):
                if self.needle is not None and self.needle in data:
                    self.needle = None
                    back.cancel()
                    await asyncio.gather(back, return_exceptions=True)
                    downstream.write(data)
                    # The server has answered, so it has done what was asked.
                    await upstream.read(1)
                    self.lost += 1
                    return
                downstream.write(data)
        finally:
            back.cancel()
            for end in (writer, downstream):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
