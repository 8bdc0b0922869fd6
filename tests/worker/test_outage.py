"""What is logged of an outage: little, and each thing once."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import structlog

from step_worker import StepWorker
from tenuto_worker._errors import RedisAway
from tenuto_worker._health import Health, Stage
from tenuto_worker._redis import Outage


def _away() -> None:
    raise redis.ConnectionError("nobody there")


def _fail(outage: Outage) -> None:
    with pytest.raises(RedisAway):
        outage.attempt(_away)


def _outage(revive: Callable[[], int | None]) -> Outage:
    """One that has lasted so long that the server is started again at the next failure."""
    outage = Outage(revive)
    _fail(outage)
    assert outage._since is not None
    outage._since -= 2
    return outage


def test_a_server_that_cannot_start_is_told_once_and_in_one_line() -> None:
    def revive() -> int:
        raise RuntimeError("the server exited with 1; the end of /d/redis/log:\n  noise\n  more")

    outage = _outage(revive)
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            outage._revived = 0.0
            _fail(outage)

    (line,) = lines
    assert line["event"] == "embedded server not started"
    assert line["error"] == "the server exited with 1; the end of /d/redis/log"


def test_who_started_the_server_again_says_so_and_who_found_it_running_does_not() -> None:
    for pid, told in ((77, [77]), (None, [])):
        outage = _outage(lambda pid=pid: pid)  # type: ignore[misc]
        with structlog.testing.capture_logs() as lines:
            _fail(outage)
        found = [line for line in lines if line["event"] == "embedded server started again"]
        assert [line["pid"] for line in found] == told


# -- descriptors ---------------------------------------------------------------------------


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_open_files_are_told_as_such_and_not_as_an_outage_of_redis(
    redis_url: str,
) -> None:
    def revive() -> int:
        raise AssertionError("nothing is wrong with the server")

    outage = Outage(revive)
    health = Health(outage)
    health.stage = Stage.SERVING
    client = redis.Redis.from_url(redis_url)
    with structlog.testing.capture_logs() as lines:
        for since in (0, 2):
            with no_descriptors(), pytest.raises(RedisAway):
                outage.attempt(client.ping)
            assert outage._since is not None
            outage._since -= since
            assert health.unready() == "no file descriptor is left"
        assert outage.attempt(client.ping)
    client.close()

    assert health.unready() == ""
    assert [line["event"] for line in lines] == ["no file descriptor is left", "redis back"]
    assert "ulimit -n" in lines[0]["hint"]


def test_a_worker_without_descriptors_goes_on_announcing_itself(
    redis_url: str, namespace: str, tiny_model: Path, tmp_path: Path
) -> None:
    with StepWorker(redis_url, namespace, tiny_model, tmp_path) as worker, no_descriptors():
        worker.rooms._announcer.announce()


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.EIO, errno.ENOSPC])
def test_an_error_of_the_disk_is_no_outage_of_redis(number: int) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    outage = Outage()
    with pytest.raises(OSError, match=os.strerror(number)):
        outage.attempt(fail)
    assert not outage.is_on


@pytest.mark.parametrize("number", [errno.ECONNRESET, errno.EPIPE, errno.EHOSTUNREACH])
def test_an_error_of_the_network_is_an_outage(number: int) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    outage = Outage()
    with pytest.raises(RedisAway):
        outage.attempt(fail)
    assert outage.why == "redis is away"
