"""What is logged of an outage: little, and each thing once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis
import structlog

from tenuto_worker._errors import RedisAway
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
