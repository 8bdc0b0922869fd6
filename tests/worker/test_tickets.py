"""arq reads what the client's script wrote, and a ticket wakes the claimer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest
import redis.asyncio
from redis.asyncio.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from job_queue import MODEL, JobQueue
from servers import RealServer
from tenuto_worker._redis import connect
from tenuto_worker._tickets import Tickets
from workers import poll_until


async def _until(condition: Callable[[], bool], what: str) -> None:
    # On a thread, so that the reader under test has the loop.
    await asyncio.to_thread(poll_until, condition, what, timeout=20)


@contextlib.asynccontextmanager
async def _reading(
    url: str, jobs: JobQueue, has_slot: Callable[[str], bool] = lambda model: True
) -> AsyncIterator[list[str]]:
    pokes: list[str] = []
    tickets = Tickets(url, jobs.keys, [MODEL], poke=lambda: pokes.append("poke"), has_slot=has_slot)
    task = asyncio.create_task(tickets.serve())
    try:
        yield pokes
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_arq_reads_a_ticket_and_pokes_the_claimer(jobs: JobQueue, redis_url: str) -> None:
    jobs.submit()
    async with _reading(redis_url, jobs) as pokes:
        await _until(lambda: bool(pokes), "a poke")
        await _until(lambda: not jobs.tickets(), "the ticket is used up")

    left = {key.decode() for key in jobs.client.scan_iter(match="arq:*")}
    assert not {key for key in left if key.startswith(("arq:retry", "arq:in-progress"))}


async def test_tickets_are_left_to_others_while_no_slot_is_free(
    jobs: JobQueue, redis_url: str
) -> None:
    free = [True]
    async with _reading(redis_url, jobs, lambda model: free[0]) as pokes:
        jobs.submit()
        await _until(lambda: not jobs.tickets(), "the first ticket is read")
        free[0] = False
        count = len(pokes)
        await asyncio.sleep(0)
        # Its next poll sees that there is no slot; from then on tickets stay.
        await _until(lambda: _stays(jobs), "a ticket stays")
        assert len(pokes) <= count + 3


def _stays(jobs: JobQueue) -> bool:
    """Whether a new ticket is still there after two polls of arq."""
    before = jobs.submit()
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        if f"{before}:1" not in jobs.tickets():
            return False
    return True


async def test_a_reader_survives_a_server_that_is_gone_for_a_while(server: RealServer) -> None:
    jobs = JobQueue(server.url, "tenuto:")
    async with _reading(server.url, jobs) as pokes:
        jobs.submit()
        await _until(lambda: bool(pokes), "a poke")
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(2)
        await asyncio.to_thread(server.start)
        pokes.clear()
        jobs.submit()
        await _until(lambda: bool(pokes), "a poke after the restart")
    jobs.close()


@pytest.mark.parametrize(
    ("url", "connection"),
    [
        ("redis://host:1/2", redis.asyncio.Connection),
        ("redis://host:1/2?decode_responses=true", redis.asyncio.Connection),
        ("rediss://user:p%40ss@host:1/2", redis.asyncio.SSLConnection),
        ("unix:///a/socket?db=2", redis.asyncio.UnixDomainSocketConnection),
        ("redis+sentinel://user:p%40ss@a,b/jobs/2", SentinelManagedConnection),
        ("rediss+sentinel://user:p%40ss@a,b/jobs/2", SentinelManagedSSLConnection),
    ],
)
async def test_every_kind_of_url_is_read_as_the_client_reads_it(
    jobs: JobQueue, url: str, connection: type
) -> None:
    tickets = Tickets(url, jobs.keys, [MODEL], poke=lambda: None, has_slot=lambda model: True)
    pool = tickets._reader(MODEL).pool.connection_pool

    assert issubclass(pool.connection_class, connection)
    assert pool.connection_kwargs["db"] == 2
    for each in (pool, connect(url).connection_pool):
        assert each.connection_kwargs.get("decode_responses") is False
    if "@" in url:
        assert pool.connection_kwargs["password"] == "p@ss"  # noqa: S105
