"""Connections to Redis, one for each thread, and waiting for a server that is away."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis
from redis.exceptions import AuthenticationError, ResponseError

from tenuto_client import Keys
from tenuto_client._endpoint import Endpoint, reason_of

from ._errors import Interrupted, RedisAway, RedisUnavailable
from ._logging import get_log, redacted

T = TypeVar("T")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_REVIVE_EVERY_S = 2.0
# A server that is up but takes no writes: it loads, fails over, or its disk or memory is full.
_OUTAGES = (
    "LOADING",
    "READONLY",
    "MISCONF",
    "OOM",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "NOREPLICAS",
    "BUSY",
    "UNBLOCKED",
)


# Any other error of the system, as of a disk, is none of Redis.
_AWAY = (redis.ConnectionError, redis.TimeoutError)
_NETWORK = (ConnectionError, TimeoutError, socket.gaierror, socket.herror, ssl.SSLError)
_NETWORK_ERRNOS = (
    *(errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET),
    *(errno.EADDRNOTAVAIL, errno.ENOTCONN, errno.ENOBUFS),
)


def is_outage(error: BaseException) -> bool:
    """Whether Redis is away or cannot serve now, so that the same call may succeed later.

    So may one for which this process had no descriptor left, though Redis is well."""
    if isinstance(error, (*_AWAY, *_NETWORK)):
        return True
    if isinstance(error, OSError):
        return error.errno in _NETWORK_ERRNOS or lacks_descriptors(error)
    if isinstance(error, redis.ReadOnlyError | redis.exceptions.OutOfMemoryError):
        return True
    return isinstance(error, ResponseError) and any(word in str(error) for word in _OUTAGES)


def lacks_descriptors(error: BaseException | None) -> bool:
    """Whether it comes of too many open files, as the error itself or as what led to it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


def connect(url: str, *, timeout: float = 5.0) -> redis.Redis:
    """A blocking client of its own connection; it connects at its first call.

    After a failover it finds the new master, through the sentinels where the URL names some.
    """
    return Endpoint.parse(url).blocking(socket_timeout=timeout, socket_connect_timeout=timeout)


def reach(client: redis.Redis, url: str) -> None:
    """Check that Redis answers.

    Raises:
        RedisUnavailable: it does not, or refuses us.
    """
    try:
        client.ping()
    except AuthenticationError as error:
        raise RedisUnavailable(f"Redis at {redacted(url)} refuses us: {error}") from error
    except (redis.RedisError, OSError) as error:
        raise RedisUnavailable(
            f"no Redis at {redacted(url)}: {reason_of(error)}",
            hint="start it, or set --redis or TENUTO_REDIS_URL",
        ) from error


def namespace_id(client: redis.Redis, keys: Keys, drawn: str) -> str:
    """The id of this data set; `drawn` becomes it where there is none yet."""
    found: Any = client.set(keys.namespace_id(), drawn, nx=True, get=True)
    return drawn if found is None else bytes(found).decode(errors="backslashreplace")


def uptime(client: redis.Redis) -> float:
    """Seconds since the server started."""
    info: Any = client.info("server")
    return float(info["uptime_in_seconds"])


def weaknesses(client: redis.Redis) -> list[str]:
    """Settings of the server under which an accepted job may be lost; empty if it hides them."""
    wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
    found = []
    for name, value in wanted.items():
        try:
            reply: Any = client.config_get(name)
            (actual,) = reply.values()
        except (redis.RedisError, ValueError):
            continue
        if actual != value:
            found.append(f"{name} is {actual}, not {value}")
    return found


@dataclass(slots=True)
class Backoff:
    """Pauses that grow until something succeeds."""

    first: float = _FIRST_PAUSE_S
    longest: float = _LONGEST_PAUSE_S
    next: float = 0.0

    def pause(self) -> float:
        """How long to wait now, in seconds."""
        self.next = min(self.longest, self.next * 2 or self.first)
        return self.next

    def reset(self) -> None:
        self.next = 0.0


class Outage:
    """Whether Redis is away, as all threads together see it; logged once each way.

    Args:
        revive: starts the embedded server again, and returns its pid if it did; None where the
            server is not ours.

    Attributes:
        why: "redis is away", or that this process cannot ask it; "" while neither is so.
        count: how often Redis went away.
        failed_at: when a call of any thread last failed, by the monotonic clock.
    """

    def __init__(self, revive: Callable[[], int | None] | None = None) -> None:
        self._revive = revive
        self._lock = threading.Lock()
        self._since: float | None = None
        self.why = ""
        self.count = 0
        self.failed_at = 0.0
        self._past = 0.0
        self._revived = 0.0
        self._complaint = ""
        self._log = get_log()

    @property
    def is_on(self) -> bool:
        """Whether Redis is away, as far as is known."""
        return self._since is not None

    def seconds(self) -> float:
        """How long Redis was away in all, up to now."""
        with self._lock:
            return self._past + (0.0 if self._since is None else time.monotonic() - self._since)

    def attempt(self, call: Callable[[], T]) -> T:
        """What `call` returns. Any error but that Redis cannot be asked is passed on: a bug, or
        the disk's trouble.

        Raises:
            RedisAway: the same call may succeed later.
        """
        started = time.monotonic()
        try:
            result = call()
        except (redis.RedisError, OSError) as error:
            if not is_outage(error):
                raise
            self._began(error)
            raise RedisAway(str(error)) from error
        if self._since is not None:
            self._ended(started)
        return result

    def _began(self, error: BaseException) -> None:
        is_ours = lacks_descriptors(error)
        why = "no file descriptor is left" if is_ours else "redis is away"
        with self._lock:
            now = self.failed_at = time.monotonic()
            if self._since is None:
                self._since = now
                self.count += 1
            if why != self.why:
                self.why = why
                self._tell(error, is_ours=is_ours)
            away = now - self._since
            due = not is_ours and away > 1.0 and now - self._revived > _REVIVE_EVERY_S
            if due:
                self._revived = now
        if due and self._revive is not None:
            self._try_revive(self._revive)

    def _tell(self, error: BaseException, *, is_ours: bool) -> None:
        words = str(error) or type(error).__name__
        if is_ours:
            hint = "ulimit -n (LimitNOFILE of systemd) is how many files it may have open"
            self._log.error("no file descriptor is left", error=words, hint=hint)
        else:
            self._log.warning("redis away", error=words)

    def _ended(self, started: float) -> None:
        with self._lock:
            # A call that began before proves nothing: its answer may have been on its way.
            if self._since is not None and started > self._since:
                self._log.info("redis back", seconds=round(time.monotonic() - self._since, 1))
                self._past += time.monotonic() - self._since
                self._since = None
                self.why = ""
                self._complaint = ""

    def _try_revive(self, revive: Callable[[], int | None]) -> None:
        try:
            pid = revive()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next try may succeed
            # The rest is an excerpt of the server's log, which the line names.
            complaint = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
            if complaint != self._complaint:
                self._log.warning("embedded server not started", error=complaint)
            self._complaint = complaint
        else:
            if pid is not None:
                self._log.warning("embedded server started again", pid=pid)


@dataclass(frozen=True, slots=True)
class Patience:
    """Repeats idempotent calls until Redis answers."""

    outage: Outage

    def __call__(
        self, call: Callable[[], T], *, until: Callable[[], bool], beat: Callable[[], object]
    ) -> T:
        """What `call` returns, once Redis lets it.

        Args:
            until: says that waiting is pointless now.
            beat: called before each try, since waiting for Redis is no lack of progress.

        Raises:
            Interrupted: `until` said so.
        """
        backoff = Backoff()
        while True:
            beat()
            try:
                return self.outage.attempt(call)
            except RedisAway:
                if until():
                    raise Interrupted("gave up waiting for Redis") from None
            time.sleep(backoff.pause())


def reviver(data_dir: Path) -> Callable[[], int | None]:
    """Starts the embedded server of a data dir, if it is not running; returns its pid if it did."""

    def revive() -> int | None:
        from tenuto_client._server import ensure_server, find_server

        if find_server(data_dir) is not None:
            return None
        client = connect(ensure_server(data_dir))
        try:
            info: Any = client.info("server")
        finally:
            client.close()
        return int(info["process_id"])

    return revive
