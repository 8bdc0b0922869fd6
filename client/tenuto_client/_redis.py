"""`Connection`: one Redis or Valkey server, its retries, and its errors mapped onto ours."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import redis

from ._endpoint import Endpoint, close_client, reason_of
from ._errors import ServerStartFailed, ServerUnavailable

_T = TypeVar("_T")
_FIRST_DELAY_S: Final = 0.05
_LONGEST_DELAY_S: Final = 2.0
_SOCKET_TIMEOUT_S: Final = 15.0
_CONNECT_TIMEOUT_S: Final = 5.0
# OSError: what asyncio raises below redis-py.
_TRANSIENT: Final = (redis.ConnectionError, redis.TimeoutError, OSError)
# What a server says that stopped being the master while we waited, or lost it.
_TRANSIENT_WORDS: Final = ("UNBLOCKED", "MASTERDOWN", "TRYAGAIN")


class Backoff:
    """How long to wait before the next try, and when to give up.

    `limit` is in seconds since the server last answered; None is forever.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self.reset()

    def reset(self) -> None:
        """The server answered."""
        self._since = time.monotonic()
        self._delay = _FIRST_DELAY_S

    async def wait(self, error: ServerUnavailable) -> None:
        """Wait before the next try, or raise the error when trying is over."""
        waited = time.monotonic() - self._since
        if not error.transient or (self._limit is not None and waited >= self._limit):
            raise error
        # Jitter, so that a thousand readers do not come back in one instant.
        await asyncio.sleep(self._delay * random.uniform(0.5, 1.0))  # noqa: S311  not a secret
        self._delay = min(self._delay * 2, _LONGEST_DELAY_S)


class Connection:
    """A pool of connections to one server, opened when it is first needed.

    Args:
        url: what `Endpoint` knows, or None for the embedded server of `data_dir`, which is started
            where it does not run, also when it has died in between.
        retry_for: for how many seconds a call is tried again after the server was lost. A server
            that was never reached is not waited for.
        options: redis-py's, over ours.
    """

    def __init__(self, url: str | None, data_dir: Path, retry_for: float, **options: Any) -> None:
        self._given = None if url is None else Endpoint.parse(url)
        self._data_dir = data_dir
        self._retry_for = retry_for
        self._options = {
            "socket_timeout": _SOCKET_TIMEOUT_S,
            "socket_connect_timeout": _CONNECT_TIMEOUT_S,
            **options,
        }
        self._client: Any = None
        self._reached = False

    async def once(self, *command: Any) -> Any:
        """Run a command, one try.

        Raises:
            ServerUnavailable: no answer, or a refusal; `transient` when trying again may help.
        """
        async with self.session() as client:
            return await client.execute_command(*command)

    async def call(self, *command: Any) -> Any:
        """Run a command that may be run twice, through short outages."""
        return await self.retrying(lambda: self.once(*command))

    async def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run reading commands in one round trip, through short outages."""

        async def run() -> list[Any]:
            async with self.session() as client:
                pipe = client.pipeline(transaction=False)
                for command in commands:
                    pipe.execute_command(*command)
                replies: list[Any] = await pipe.execute()
                return replies

        return await self.retrying(run)

    async def retrying(self, operation: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat an operation while the server is away, for at most `retry_for` seconds."""
        backoff = Backoff(self._retry_for)
        while True:
            try:
                return await operation()
            except ServerUnavailable as error:
                await self.recover(error, backoff)

    async def recover(self, error: ServerUnavailable, backoff: Backoff) -> None:
        """Wait before the next try, or raise the error where there shall be none."""
        if not self._reached:
            raise error
        await backoff.wait(error)
        while self._given is None:
            try:
                await self._start_embedded()
                return
            except ServerStartFailed as failed:
                await backoff.wait(failed)

    @asynccontextmanager
    async def session(self, *, pinned: bool = False) -> AsyncIterator[Any]:
        """redis-py's client, with errors mapped; `pinned` keeps one connection throughout."""
        client = await self._open()
        try:
            if pinned:
                async with client.client() as single:
                    yield single
            else:
                yield client
        except (redis.RedisError, OSError) as error:
            raise self._mapped(error) from error
        self._reached = True

    @property
    def master(self) -> tuple[str, int] | None:
        """Where the sentinels say that the server is; None without sentinels."""
        pool = getattr(self._client, "connection_pool", None)
        found: tuple[str, int] | None = getattr(pool, "master_address", None)
        return found

    async def close(self) -> None:
        """Close all connections. The embedded server goes on, for others and for later."""
        client, self._client = self._client, None
        if client is not None:
            await close_client(client)

    async def _open(self) -> Any:
        if self._client is None:
            endpoint = self._given or Endpoint.parse(await self._start_embedded())
            self._address = endpoint.address
            if self._client is None:
                self._client = endpoint.asynchronous(**self._options)
        return self._client

    async def _start_embedded(self) -> str:
        from ._server import ensure_server  # only here: most clients have a URL

        return await asyncio.to_thread(ensure_server, self._data_dir)

    def _mapped(self, error: Exception) -> ServerUnavailable:
        if isinstance(error, redis.exceptions.NoPermissionError):
            return ServerUnavailable(
                f"{self._address} refuses: {error}",
                hint="ops/users.conf has the rights that clients and workers need",
            )
        if _is_refusal(error):
            return ServerUnavailable(
                f"{self._address} refuses: {error}",
                hint="user and password belong into the URL: redis://user:password@host",
            )
        if isinstance(error, _TRANSIENT) or str(error).startswith(_TRANSIENT_WORDS):
            return ServerUnavailable(
                f"no answer from {self._address}: {reason_of(error)}",
                hint="is the server up? tenuto doctor looks",
                transient=True,
            )
        if isinstance(error, redis.exceptions.OutOfMemoryError):
            return ServerUnavailable(
                f"{self._address} is out of memory: {error}",
                hint="raise maxmemory, or delete old jobs",
            )
        return ServerUnavailable(
            f"{self._address} refused a command: {error}", hint="tenuto doctor looks for the cause"
        )


def _is_refusal(error: BaseException | None) -> bool:
    """Whether the server knows us not, which redis-py hides below a lost connection."""
    while error is not None:
        if isinstance(error, redis.AuthenticationError):
            return True
        error = error.__cause__
    return False
