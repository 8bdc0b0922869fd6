"""Readers of one job in one process share the waiting for its next token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from raw_worker import Attempt, RawWorker, story
from servers import RealServer
from tenuto_client import Client, Job, Token

READERS = 20


@pytest.fixture
async def private(server: RealServer) -> AsyncIterator[tuple[Job, Attempt]]:
    """A running job on a server of this test alone, whose counters nobody else moves."""
    with server.client() as redis:
        worker = RawWorker(redis, "tenuto:")
        worker.announce()
        async with Client(server.url) as client:
            job = await client.submit("m", "hi")
            yield job, worker.claim()


async def _follow(job: Job, into: list[Token]) -> None:
    async for token in job.stream():
        into.append(token)  # noqa: PERF401  each is to be seen as it comes


async def _until(condition: Callable[[], bool], within: float = 20) -> None:
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110  what is waited for is elsewhere
            await asyncio.sleep(0.002)


def _reads(server: RealServer) -> int:
    with server.client() as redis:
        stats: Any = redis.info("commandstats")
        return int(stats["cmdstat_xread"]["calls"])


async def test_a_token_costs_the_server_one_read_however_many_readers_wait_for_it(
    server: RealServer, private: tuple[Job, Attempt]
) -> None:
    job, attempt = private
    got: list[list[Token]] = [[] for _ in range(READERS)]
    tasks = [asyncio.create_task(_follow(job, into)) for into in got]
    attempt.publish(1, 1)
    await _until(lambda: all(len(each) == 1 for each in got))
    before = _reads(server)
    for index in range(2, 32):
        attempt.publish(index, index)
        await _until(lambda: {len(each) for each in got} == {index})  # noqa: B023  awaited here
    assert _reads(server) - before < 30 * 3, f"{READERS} readers read each for itself"

    attempt.finish()
    await asyncio.gather(*tasks)
    assert got == [story(1, 31)] * READERS


async def test_a_reader_that_leaves_takes_nothing_from_those_that_stay(
    private: tuple[Job, Attempt],
) -> None:
    job, attempt = private
    stays: list[Token] = []
    leaves: list[Token] = []
    kept, first = (asyncio.create_task(_follow(job, into)) for into in (stays, leaves))
    attempt.publish(1, 1)
    await _until(lambda: len(stays) == len(leaves) == 1)
    first.cancel()
    await asyncio.wait([first])
    attempt.publish(2, 3)
    attempt.finish()
    await kept
    assert (stays, leaves) == (story(1, 3), story(1, 1))


async def test_nothing_goes_on_reading_when_the_last_reader_has_left(
    private: tuple[Job, Attempt],
) -> None:
    job, attempt = private
    before = asyncio.all_tasks()
    got: list[list[Token]] = [[], []]
    tasks = [asyncio.create_task(_follow(job, into)) for into in got]
    attempt.publish(1, 1)
    await _until(lambda: all(len(each) == 1 for each in got))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    # A read that nobody stops ends by itself after a second.
    await _until(lambda: asyncio.all_tasks() == before, within=0.5)


async def test_all_readers_go_on_when_the_server_they_waited_for_is_killed(
    server: RealServer, private: tuple[Job, Attempt]
) -> None:
    job, attempt = private
    got: list[list[Token]] = [[] for _ in range(READERS)]
    tasks = [asyncio.create_task(_follow(job, into)) for into in got]
    attempt.publish(1, 2)
    await _until(lambda: all(len(each) == 2 for each in got))
    await asyncio.to_thread(server.restart)
    await asyncio.to_thread(attempt.publish, 3, 9)
    await asyncio.to_thread(attempt.finish)
    await asyncio.gather(*tasks)
    assert got == [story(1, 9)] * READERS
