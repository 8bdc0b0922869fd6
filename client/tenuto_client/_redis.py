"""`Connection`: one Redis or Valkey server, its retries, and its errors mapped onto ours."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import redis
import redis.asyncio

from ._errors import InvalidRequest, ServerStartFailed, ServerUnavailable

_T = TypeVar("_T")
_FIRST_DELAY_S: Final = 0.05
_LONGEST_DELAY_S: Final = 2.0
_SOCKET_TIMEOUT_S: Final = 15.0
_CONNECT_TIMEOUT_S: Final = 5.0
# ReadOnlyError: a failover is under way. OSError: what asyncio raises below redis-py.
_TRANSIENT: Final = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ReadOnlyError,
    OSError,
)


def address_of(url: str) -> str:
    """The URL without user, password and options, for messages."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


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
        url: for redis-py, or None for the embedded server of `data_dir`, which is started
            where it does not run, also when it has died in between.
        retry_for: for how many seconds a call is tried again after the server was lost. A server
            that was never reached is not waited for.
    """

    def __init__(self, url: str | None, data_dir: Path, retry_for: float) -> None:
        self._url = url
        self._data_dir = data_dir
        self._retry_for = retry_for
        self._client: Any = None
        self._reached = False
        if url is not None:
            check_url(url)

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
        while self._url is None:
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

    async def close(self) -> None:
        """Close all connections. The embedded server goes on, for others and for later."""
        client, self._client = self._client, None
        if client is not None:
            # redis-py 5.0.0 has no `aclose`, later ones warn of `close`.
            await (client.aclose if hasattr(client, "aclose") else client.close)()
            await client.connection_pool.disconnect()

    async def _open(self) -> Any:
        if self._client is None:
            url = self._url if self._url is not None else await self._start_embedded()
            self._address = address_of(url)
            if self._client is None:
                self._client = _make_client(url)
        return self._client

    async def _start_embedded(self) -> str:
        from ._server import ensure_server  # only here: most clients have a URL

        return await asyncio.to_thread(ensure_server, self._data_dir)

    def _mapped(self, error: Exception) -> ServerUnavailable:
        if _is_refusal(error):
            return ServerUnavailable(
                f"{self._address} refuses: {error}",
                hint="user and password belong into the URL: redis://user:password@host",
            )
        if isinstance(error, _TRANSIENT):
            return ServerUnavailable(
                f"no answer from {self._address}: {_reason(error)}",
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
        if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
            return True
        error = error.__cause__
    return False


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def check_url(url: str) -> None:
    """Refuse what redis-py could not connect by.

    Raises:
        InvalidRequest: it says nothing of the URL but its scheme, since any part of a malformed
            one may be the password, and redis-py's own message may name it.
    """
    scheme = url.partition("://")[0] if "://" in url else "none"
    try:
        if _splits_a_password(url):
            raise ValueError
        # An unknown option is noticed by the connection only.
        redis.ConnectionPool.from_url(url).make_connection()
    except (ValueError, TypeError):
        raise InvalidRequest(
            "redis",
            f"not a Redis URL that can be used (its scheme is {scheme})",
            hint="redis://user:password@host:6379/0 or unix:///path, options as redis-py knows "
            "them; in a password write / as %2F, # as %23, ? as %3F",
        ) from None


def _splits_a_password(url: str) -> bool:
    """Whether a sign in the password made the rest of it path, query or fragment."""
    parts = urlsplit(url)
    query = "" if "=" in parts.query else parts.query
    return parts.scheme != "unix" and "@" in parts.path + query + parts.fragment


def _make_client(url: str) -> Any:
    # Any: redis-py's own types change from version to version.
    make: Any = redis.asyncio.from_url
    client = make(url, socket_timeout=_SOCKET_TIMEOUT_S, socket_connect_timeout=_CONNECT_TIMEOUT_S)
    # Set here because an option in the URL wins over an argument; what we read is bytes.
    client.connection_pool.connection_kwargs["decode_responses"] = False
    return client
