"""`Endpoint`: where Redis is. It parses a URL, and makes redis-py's clients for it.

    redis://user:password@host:6379/0                     rediss:// for TLS
    unix:///path/of/socket?db=0
    redis+sentinel://user:password@host:26379,host/service/0    rediss+sentinel:// for TLS

User and password are the server's; those of the sentinels are the options `sentinel_username` and
`sentinel_password`. All other options are redis-py's own.
"""

from __future__ import annotations

import math
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.connection
import redis.retry
import redis.sentinel
from redis.backoff import NoBackoff

from ._errors import InvalidRequest

_SENTINEL: Final = re.compile(r"rediss?\+sentinel")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_SERVICE: Final = re.compile(r"[A-Za-z0-9._-]+")
_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_DEMOTION: Final = re.compile("^NOREPLICAS|-READONLY|-NOREPLICAS")
_LOOKUP_S: Final = 1.0
_LOOKUP_SHARE: Final = 20
# A sentinel that does not answer must not keep the others from being asked.
_SENTINEL_TIMEOUT_S: Final = 2.0


_SPLIT: Final = "a sign in its password splits it"


class _Fault(ValueError):
    """What is wrong with a URL, in words that show nothing of it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One Redis or Valkey server, or the master of a group that sentinels watch.

    A connection is closed whose server became a replica, or lost its replicas and refuses writes
    for it, so that the next one finds the master: through the sentinels, or through a name that
    points to it by now. Sentinels are also asked once a second while nothing seems broken.

    Attributes:
        address: for messages: the URL without user, password and options.
    """

    address: str
    _url: str = field(repr=False)
    _group: _Group | None = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> Self:
        """What the URL says; nothing is connected.

        Raises:
            InvalidRequest: redis-py could not connect by it. Says nothing of the URL but its
                scheme, since any part of a malformed one may be the password, and redis-py's own
                message may name it.
        """
        scheme = url.partition("://")[0] if "://" in url else "none"
        try:
            group = _Group.parse(url) if _SENTINEL.fullmatch(scheme) else None
            if group is None and _splits_a_password(url):
                raise _Fault(_SPLIT)
            endpoint = cls(address_of(url), url, group)
            # An unknown option is noticed by the connection only.
            endpoint.blocking().connection_pool.make_connection()
        except (ValueError, TypeError) as error:
            what = str(error) if isinstance(error, _Fault) else f"its scheme is {scheme}"
            raise InvalidRequest(
                "redis",
                f"not a Redis URL that can be used: {what}",
                hint="redis://user:password@host:6379/0, unix:///path or "
                "redis+sentinel://user:password@host:26379,host:26379/service, options as "
                "redis-py knows them; in a password write / as %2F, # as %23, ? as %3F, @ as %40",
            ) from None
        return endpoint

    @property
    def place(self) -> str:
        """Server and database, the same for every way to write them that can be told."""
        if self._group is not None:
            return self.address
        options = self.blocking().connection_pool.connection_kwargs
        database = int(options.get("db") or 0)
        if path := options.get("path"):
            return f"unix://{path}?db={database}"
        host = str(options.get("host") or "localhost")
        host = "localhost" if host in ("127.0.0.1", "::1") else host
        return f"{host}:{options.get('port') or _PORT}/{database}"

    @property
    def has_secret(self) -> bool:
        """Whether the URL has a user, a password, or options that may be one."""
        return self._url.partition("?")[0] != self.address or "password" in self._url

    @property
    def has_password(self) -> bool:
        """Whether the server gets one."""
        options = self.blocking().connection_pool.connection_kwargs
        return bool(options.get("password"))

    def flags(self, master: tuple[str, int] | None = None) -> list[str]:
        """What redis-cli has to be told to reach the server; no password.

        Args:
            master: where it is, if sentinels know. Without it, the first sentinel is reached.
        """
        options = self.blocking().connection_pool.connection_kwargs
        database = ["-n", str(options["db"])] if options.get("db") else []
        if path := options.get("path"):
            return ["-s", str(path), *database, *self._user(options)]
        host, port = options.get("host") or "localhost", options.get("port") or _PORT
        if self._group is not None:
            if master is None:
                (host, port), database = self._group.hosts[0], []
            else:
                host, port = master
        where = ["-h", str(host), "-p", str(port), *database]
        return [*where, *self._tls(options), *self._user(options)]

    def _user(self, options: Mapping[str, Any]) -> list[str]:
        # Alone, it may be a password that somebody put in the wrong place.
        has_both = options.get("username") and options.get("password")
        return ["--user", str(options["username"])] if has_both else []

    def _tls(self, options: Mapping[str, Any]) -> list[str]:
        if not self._url.startswith("rediss"):
            return []
        flags = ["--tls"]
        names = {"ssl_ca_certs": "--cacert", "ssl_certfile": "--cert", "ssl_keyfile": "--key"}
        for name, flag in names.items():
            if value := options.get(name):
                flags += [flag, str(value)]
        return [*flags, "--insecure"] if options.get("ssl_cert_reqs") == "none" else flags

    @property
    def probe(self) -> tuple[str, ...]:
        """A command to type that tells more of what does not answer."""
        return ("ping",) if self._group is None else ("sentinel", "master", self._group.service)

    def blocking(self, **options: Any) -> redis.Redis:
        """A blocking client that returns bytes; `options` are redis-py's, and the URL's win."""
        client: Any
        if self._group is None:
            client = redis.Redis.from_url(self._url, **options)
        else:
            client = self._group.blocking(options)
        _prepare(client.connection_pool, _blocking)
        found: redis.Redis = client
        return found

    def asynchronous(self, **options: Any) -> Any:
        """An asyncio client that returns bytes; close it by `close_client`.

        Any, because redis-py's own types change from version to version.
        """
        if self._group is None:
            make: Any = redis.asyncio.from_url
            client = make(self._url, **options)
        else:
            client = self._group.asynchronous(options)
        _prepare(client.connection_pool, _asynchronous)
        return client


def once() -> Any:
    """The option `retry` of a blocking client that tries once."""
    return redis.retry.Retry(NoBackoff(), 0)


def once_asynchronously() -> Any:
    """The same of an asyncio one."""
    make: Any = redis.asyncio.retry.Retry
    return make(NoBackoff(), 0)


async def close_client(client: Any) -> None:
    """Close an asyncio client, its connections, and those to its sentinels."""
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    for each in (client, *(manager.sentinels if manager is not None else ())):
        # redis-py 5.0.0 has no `aclose`, later ones warn of `close`.
        await (each.aclose if hasattr(each, "aclose") else each.close)()
        await each.connection_pool.disconnect()


def address_of(url: str) -> str:
    """The URL without user, password and options, for messages."""
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


def is_demotion(error: redis.ResponseError) -> bool:
    """Whether the server is no master now, or one whose replicas are gone, perhaps to another.

    A server before version 7 says so inside a script's error.
    """
    return isinstance(error, redis.exceptions.ReadOnlyError) or bool(_DEMOTION.search(str(error)))


def _splits_a_password(url: str) -> bool:
    """Whether a sign in the password made the rest of it path, query or fragment."""
    parts = urlsplit(url)
    query = "" if "=" in parts.query else parts.query
    return parts.scheme != "unix" and "@" in parts.path + query + parts.fragment


@dataclass(frozen=True, slots=True)
class _Group:
    """A master and its replicas, as sentinels know them.

    Attributes:
        hosts: host and port of each sentinel.
        service: the sentinels' name of the group.
        server: redis-py's options of a connection to the master.
        sentinel: those of one to a sentinel.
    """

    hosts: tuple[tuple[str, int], ...]
    service: str
    server: Mapping[str, Any] = field(repr=False)
    sentinel: Mapping[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> Self:
        # Not by urlsplit, which knows of one host only.
        scheme, _, rest = url.partition("://")
        place, mark, query = rest.partition("?")
        authority, _, path = place.partition("/")
        user, at, hosts = authority.rpartition("@")
        service, _, database = path.partition("/")
        if "#" in rest or "@" in path or ("@" in query and "=" not in query):
            raise _Fault(_SPLIT)
        if not service:
            raise _Fault("the sentinels' name of the master is missing: /service after the hosts")
        if not _SERVICE.fullmatch(service):
            raise _Fault("the sentinels' name of the master has letters, digits and . _ - only")
        if not re.fullmatch("[0-9]*", database):
            raise _Fault("what follows /service/ is no number of a database")
        parse: Any = redis.connection.parse_url
        server: dict[str, Any] = dict(parse(f"redis://{user}{at}_/{database}{mark}{query}"))
        del server["host"]
        if scheme.startswith("rediss"):
            server["ssl"] = True
        return cls(tuple(map(_host, hosts.split(","))), service, server, _sentinel_options(server))

    def blocking(self, options: Mapping[str, Any]) -> Any:
        return self._client(_Sentinels, redis.retry.Retry, options)

    def asynchronous(self, options: Mapping[str, Any]) -> Any:
        return self._client(_AsyncSentinels, redis.asyncio.retry.Retry, options)

    def _client(self, manager: Any, retry: Any, options: Mapping[str, Any]) -> Any:
        # redis-py's own retries (from version 6 on, with seconds between them) nest here: each try
        # to connect would ask each sentinel several times. Whoever calls us tries again anyway.
        once = retry(NoBackoff(), 0)
        sentinels = manager(
            self.hosts,
            sentinel_kwargs={
                "socket_timeout": _SENTINEL_TIMEOUT_S,
                "socket_connect_timeout": _SENTINEL_TIMEOUT_S,
                "retry": once,
                **self.sentinel,
            },
        )
        return sentinels.master_for(self.service, **{"retry": once, **options, **self.server})


class _Complaints:
    """Why no sentinel named the master, each by its host; redis-py shows its own objects."""

    def __init__(self, sentinels: Any) -> None:
        self._why: dict[str, str] = {}
        for each in sentinels:
            each.sentinel_masters = self._noting(each, each.sentinel_masters)

    def _noting(self, sentinel: Any, ask: Any) -> Any:
        options = sentinel.connection_pool.connection_kwargs
        name = f"{options['host']}:{options['port']}"
        self._why[name] = "was not asked"

        def noting() -> Any:
            with self._noted(name):
                return ask()

        async def noting_async() -> Any:
            with self._noted(name):
                return await ask()

        return noting_async if isinstance(sentinel, redis.asyncio.Redis) else noting

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            self._why[name] = reason_of(error)
            raise
        self._why[name] = "knows none of this name that is up"

    def error(self, service: str) -> redis.ConnectionError:
        says = ", ".join(f"{host} ({why})" for host, why in self._why.items())
        return redis.sentinel.MasterNotFoundError(f"no sentinel names a master {service!r}: {says}")


# redis-py's own types change from version to version.
_RedisSentinels: Any = redis.sentinel.Sentinel
_RedisAsyncSentinels: Any = redis.asyncio.sentinel.Sentinel


class _Sentinels(_RedisSentinels):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._complaints = _Complaints(self.sentinels)

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)
        except redis.sentinel.MasterNotFoundError as error:
            raise self._complaints.error(service_name) from error


class _AsyncSentinels(_RedisAsyncSentinels):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._complaints = _Complaints(self.sentinels)

    async def discover_master(self, service_name: str) -> Any:
        try:
            return await super().discover_master(service_name)
        except redis.asyncio.sentinel.MasterNotFoundError as error:
            raise self._complaints.error(service_name) from error


def reason_of(error: BaseException) -> str:
    """Why something could not be reached, in the words of the system where it gave a number."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror) and cause.strerror:
            return cause.strerror
        if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) and cause.errno:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    # Of a name with several addresses asyncio tells the errors in one text.
    if numbers := re.findall(r"\[Errno (\d+)\]", str(error)):
        return os.strerror(int(numbers[-1]))
    return str(error) or type(error).__name__


def _host(text: str) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    if found is None:
        raise _Fault("each sentinel is host or host:port, with commas between them")
    host, port = found.groups()
    return host.strip("[]"), int(port or _SENTINEL_PORT)


def _sentinel_options(server: dict[str, Any]) -> dict[str, Any]:
    """Takes the sentinels' own options out of the server's; they share what TLS needs."""
    own = {
        name: server.pop(f"sentinel_{name}")
        for name in ("username", "password")
        if f"sentinel_{name}" in server
    }
    return own | {name: value for name, value in server.items() if name.startswith("ssl")}


def _prepare(pool: Any, kind: Callable[[Any, _Lookups], Any]) -> None:
    # An option of the URL wins over an argument, and what we read is bytes.
    pool.connection_kwargs["decode_responses"] = False
    pool.connection_class = kind(pool.connection_class, _Lookups(pool))


class _Lookups:
    """When a pool asks the sentinels anew where the master is, though nothing is broken.

    At a failover that an operator asks for, the old master goes on taking writes, all of which
    will be lost, until the sentinels make it a replica some ten seconds later.
    """

    def __init__(self, pool: Any) -> None:
        self._next = 0.0 if hasattr(pool, "get_master_address") else math.inf

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One lookup at a time. Where it fails, what is connected is still the best guess."""
        began, self._next = time.monotonic(), math.inf
        try:
            with suppress(redis.RedisError, OSError):
                yield
        finally:
            ended = time.monotonic()
            # Sentinels that do not answer must not slow down a master that does.
            self._next = ended + max(_LOOKUP_S, _LOOKUP_SHARE * (ended - began))


def _blocking(kind: Any, lookups: _Lookups) -> Any:
    """A kind of connection that does not stay with a server that is no master any more."""

    class LoyalConnection(kind):  # type: ignore[misc]
        def connect(self, *args: Any, **kwargs: Any) -> Any:
            # The pool calls it before each use.
            if lookups.is_due:
                with lookups.turn():
                    self.connection_pool.get_master_address()
            if _is_left_behind(self):
                self.disconnect()
            return super().connect(*args, **kwargs)

        def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().read_response(*args, **kwargs)
            except redis.ResponseError as error:
                _hide_arguments(error)
                if not is_demotion(error):
                    raise
                self.disconnect()
                raise _demoted(error) from error

    return LoyalConnection


def _asynchronous(kind: Any, lookups: _Lookups) -> Any:
    """The same for asyncio."""

    class LoyalConnection(kind):  # type: ignore[misc]
        async def connect(self, *args: Any, **kwargs: Any) -> Any:
            if lookups.is_due:
                with lookups.turn():
                    await self.connection_pool.get_master_address()
            if _is_left_behind(self):
                await self.disconnect()
            return await super().connect(*args, **kwargs)

        async def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super().read_response(*args, **kwargs)
            except redis.ResponseError as error:
                _hide_arguments(error)
                if not is_demotion(error):
                    raise
                await self.disconnect()
                raise _demoted(error) from error

    return LoyalConnection


def _is_left_behind(connection: Any) -> bool:
    """Whether the sentinels have named another master since it was connected."""
    named = getattr(getattr(connection, "connection_pool", None), "master_address", None)
    return named is not None and named != (connection.host, connection.port)


def _hide_arguments(error: redis.ResponseError) -> None:
    """A server that does not know a command repeats what it was sent, users' texts among it."""
    told, hidden, _ = str(error).partition(", with args beginning with")
    if hidden:
        error.args = (told,)


def _demoted(error: redis.ResponseError) -> redis.ConnectionError:
    # What redis-py makes of it where there are sentinels, and what everybody takes for an outage.
    return redis.ConnectionError(f"it takes no writes, being no master now: {error}")
