"""Reading a stream: no gap, no duplicate, and one end, whatever happens in between."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from raw_worker import Attempt, RawWorker, poll, story
from servers import RealServer
from tenuto_client import (
    Client,
    EndEvent,
    Event,
    InvalidRequest,
    Job,
    JobCancelled,
    JobFailed,
    JobGone,
    JobState,
    Keys,
    ProgressEvent,
    ProtocolError,
    ResultTimeout,
    ServerUnavailable,
    StateEvent,
    Token,
)
from tenuto_client._reader import StreamReader
from tenuto_client._redis import Connection
from tenuto_client._tails import Tails


async def take(job: Job, after: int, count: int) -> list[Token]:
    """The next `count` tokens."""
    tokens: list[Token] = []
    async with aclosing(job.stream(after)) as stream:
        async for token in stream:
            tokens.append(token)
            if len(tokens) == count:
                break
    return tokens


async def drain(
    source: AsyncIterator[Any], into: list[Any], then: dict[int, Callable[[], Any]] | None = None
) -> None:
    """Gather what comes; `then` says what to do when something of that index has come."""
    async for each in source:
        into.append(each)
        if then and each.index in then:
            done = then[each.index]()
            if done is not None:
                await done


async def all_events(job: Job, after: int = 0) -> list[Event]:
    """Everything to the end."""
    return [event async for event in job.events(after)]


@pytest.fixture
async def running(client: Client, worker: RawWorker) -> tuple[Job, Attempt]:
    """A job that the worker has claimed."""
    job = await client.submit("m", "hi")
    return job, worker.claim()


async def test_tokens_come_back_with_the_same_bits(running: tuple[Job, Attempt]) -> None:
    job, attempt = running
    attempt.publish(1, 1)
    attempt.publish(2, 20)
    attempt.finish()
    assert [token async for token in job.stream()] == story(1, 20)


async def test_events_are_states_then_tokens_then_one_end(running: tuple[Job, Attempt]) -> None:
    job, attempt = running
    attempt.publish(1, 2)
    attempt.finish(text="tail")
    events = await all_events(job)
    assert events[:2] == [
        StateEvent(JobState.QUEUED, 1, 0),
        StateEvent(JobState.RUNNING, 1, 0, worker="raw-1"),
    ]
    assert events[2:4] == story(1, 2)
    (end,) = events[4:]
    assert isinstance(end, EndEvent)
    assert (end.index, end.state, end.text) == (2, JobState.COMPLETED, "tail")
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 2)


async def test_the_result_is_the_text_of_all_tokens_and_of_the_end(
    running: tuple[Job, Attempt],
) -> None:
    job, attempt = running
    attempt.publish(1, 3)
    attempt.finish(reason="length", text="!")
    result = await job.result()
    assert result.text == " w1 w2 w3!"
    assert result.tokens == tuple(story(1, 3))
    assert (result.finish_reason, result.exactness) == ("length", "exact")


@pytest.mark.parametrize("after", range(11))
async def test_after_slices_packed_entries(running: tuple[Job, Attempt], after: int) -> None:
    job, attempt = running
    attempt.publish(1, 1)
    attempt.publish(2, 7)
    attempt.publish(8, 10)
    attempt.finish()
    assert [token async for token in job.stream(after)] == story(after + 1, 10)


async def test_after_more_than_there_is_waits_for_it(running: tuple[Job, Attempt]) -> None:
    job, attempt = running
    attempt.publish(1, 3)
    waiting = asyncio.create_task(take(job, 6, 1))
    await asyncio.sleep(0)
    attempt.publish(4, 9)
    assert await waiting == story(7, 7)


async def test_after_more_than_there_will_be_gets_the_end(running: tuple[Job, Attempt]) -> None:
    job, attempt = running
    attempt.publish(1, 3)
    attempt.finish()
    (end,) = await all_events(job, after=100)
    assert isinstance(end, EndEvent)
    assert end.index == 3


@pytest.mark.parametrize("after", [-1, 1.0, True, "3"])
async def test_after_must_be_an_index(client: Client, after: Any) -> None:
    with pytest.raises(InvalidRequest, match="after"):
        client.job("x").stream(after)


async def test_a_reader_that_comes_back_with_its_cursor_misses_and_repeats_nothing(
    running: tuple[Job, Attempt],
) -> None:
    job, attempt = running
    chance = random.Random(7)

    def publish() -> None:
        first = 1
        while first <= 400:
            last = min(first + chance.randint(0, 20), 400)
            attempt.publish(first, last)
            first = last + 1
        attempt.finish()

    publishing = threading.Thread(target=publish)
    publishing.start()
    got: list[Token] = []
    while len(got) < 400:
        got += await take(job, len(got), chance.randint(1, 40))
    publishing.join()
    assert got == story(1, 400)


async def test_a_resumed_jobs_earlier_end_is_a_state(
    running: tuple[Job, Attempt], worker: RawWorker
) -> None:
    job, attempt = running
    attempt.publish(1, 2)
    await job.cancel()
    attempt.finish("cancelled", "")
    assert isinstance((await all_events(job))[-1], EndEvent)
    await job.resume()
    second = worker.claim()
    second.publish(3, 4)
    second.finish()

    events = await all_events(job)
    ends = [event for event in events if isinstance(event, EndEvent)]
    assert ends == [events[-1]]
    assert ends[0].epoch == 2
    assert StateEvent(JobState.CANCELLED, 1, 2) in events
    assert [event for event in events if isinstance(event, Token)] == story(1, 4)


async def test_an_end_is_the_last_line_also_where_a_read_ends_with_it(
    client: Client, worker: RawWorker
) -> None:
    job = await client.submit("m", "hi")
    # queued, then for each round: cancelled, queued. The 500th entry of a read is an end.
    for _ in range(260):
        await job.cancel()
        await job.resume()
    await job.cancel()
    events = await all_events(job)
    assert len(events) == 1 + 2 * 260 + 1
    assert [isinstance(event, EndEvent) for event in events] == [False] * 521 + [True]


async def test_a_failed_job_raises_after_its_last_token(running: tuple[Job, Attempt]) -> None:
    job, attempt = running
    attempt.publish(1, 3)
    attempt.finish("failed", "", error="out of luck")
    got: list[Token] = []
    with pytest.raises(JobFailed, match="out of luck") as caught:
        await drain(job.stream(after=1), got)
    assert got == story(2, 3)
    assert caught.value.result.tokens == tuple(story(1, 3))
    assert caught.value.result.text == " w1 w2 w3"
    with pytest.raises(JobFailed):
        await job.result()


async def test_a_cancelled_job_raises_and_carries_what_there_is(
    running: tuple[Job, Attempt],
) -> None:
    job, attempt = running
    attempt.publish(1, 2)
    await job.cancel()
    attempt.finish("cancelled", "")
    with pytest.raises(JobCancelled) as caught:
        await job.result()
    assert caught.value.result.tokens == tuple(story(1, 2))


async def test_a_job_that_never_was_is_gone(client: Client) -> None:
    with pytest.raises(JobGone):
        await take(client.job("nobody"), 0, 1)
    with pytest.raises(JobGone):
        await client.job("nobody").result()


async def test_a_job_deleted_while_it_is_read_is_gone(running: tuple[Job, Attempt]) -> None:
    job, attempt = running
    attempt.publish(1, 2)
    got: list[Token] = []
    with pytest.raises(JobGone):
        await drain(job.stream(), got, then={2: job.delete})
    assert got == story(1, 2)


async def test_progress_is_told_while_no_token_comes(running: tuple[Job, Attempt]) -> None:
    job, attempt = running
    attempt.renew("prefill", 32, 100)
    async with aclosing(job.events()) as events:
        async for event in events:
            if isinstance(event, ProgressEvent):
                break
    assert event == ProgressEvent("prefill", 32, 100)


async def test_result_gives_up_after_its_timeout_and_the_job_goes_on(
    running: tuple[Job, Attempt],
) -> None:
    job, attempt = running
    with pytest.raises(ResultTimeout) as caught:
        await job.result(timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    attempt.finish()
    assert (await job.result(timeout=10)).state is JobState.COMPLETED


async def test_a_gap_in_a_stream_is_told_not_hidden(
    running: tuple[Job, Attempt], raw: Any, keys: Keys
) -> None:
    job, attempt = running
    attempt.publish(1, 1)
    attempt.publish(2, 2)
    attempt.publish(3, 3)
    raw.xdel(keys.stream(job.id), "2-0")
    with pytest.raises(ProtocolError, match="token 3 follows 1"):
        await take(job, 0, 3)


async def test_a_missing_stream_of_an_ended_job_is_told_not_waited_for(
    running: tuple[Job, Attempt], raw: Any, keys: Keys
) -> None:
    job, attempt = running
    attempt.finish()
    raw.delete(keys.stream(job.id))
    with pytest.raises(ProtocolError, match="its stream is missing"):
        await all_events(job)


async def test_an_entry_of_a_later_version_is_a_protocol_error(
    running: tuple[Job, Attempt], raw: Any, keys: Keys
) -> None:
    job, _ = running
    raw.xadd(keys.stream(job.id), {"t": b"\x81\xa1v\x09"}, id="1-0")
    with pytest.raises(ProtocolError, match="upgrade tenuto-client"):
        await take(job, 0, 1)


async def test_a_reader_survives_killed_servers_without_gap_or_duplicate(
    server: RealServer,
) -> None:
    with server.client() as raw:
        worker = RawWorker(raw, "tenuto:")
        worker.announce()
        async with Client(server.url) as client:
            job = await client.submit("m", "hi")
            attempt = worker.claim()
            got: list[Event] = []
            reading = asyncio.create_task(drain(job.events(), got))
            for first in range(1, 100, 20):
                attempt.publish(first, first + 19)
                await _until(lambda first=first: _count(got) >= first + 10)
                await asyncio.to_thread(server.restart)
                raw.connection_pool.disconnect()
            attempt.finish()
            await asyncio.wait_for(reading, 30)
    assert [event for event in got if isinstance(event, Token)] == story(1, 100)
    # Events that were shown are not shown again after a reconnect.
    assert [event.state for event in got if isinstance(event, StateEvent)] == [
        JobState.QUEUED,
        JobState.RUNNING,
    ]
    assert isinstance(got[-1], EndEvent)


async def test_a_reader_does_not_repeat_events_after_a_cut_connection(server: RealServer) -> None:
    with server.client() as raw:
        worker = RawWorker(raw, "tenuto:")
        worker.announce()
        async with Client(server.url) as client:
            job = await client.submit("m", "hi")
            attempt = worker.claim()
            got: list[Event] = []
            reading = asyncio.create_task(drain(job.events(), got))
            for _ in range(3):
                await _until(lambda: len(got) == 2 and raw.info("clients")["blocked_clients"])
                known = raw.info("stats")["total_connections_received"]
                raw.execute_command("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")
                await _until(
                    lambda known=known: raw.info("stats")["total_connections_received"] > known
                )
            attempt.finish()
            await asyncio.wait_for(reading, 10)
    assert [event.state for event in got if isinstance(event, StateEvent | EndEvent)] == [
        JobState.QUEUED,
        JobState.RUNNING,
        JobState.COMPLETED,
    ]


async def test_a_reader_survives_connections_cut_at_random(server: RealServer) -> None:
    with server.client() as raw:
        worker = RawWorker(raw, "tenuto:")
        worker.announce()
        async with Client(server.url) as client:
            job = await client.submit("m", "hi")
            attempt = worker.claim()

            def publish() -> None:
                chance = random.Random(11)
                for first in range(1, 601, 3):
                    attempt.publish(first, first + 2)
                    if chance.random() < 0.2:
                        raw.execute_command("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")
                attempt.finish()

            publishing = asyncio.create_task(asyncio.to_thread(publish))
            assert [token async for token in job.stream()] == story(1, 600)
            await publishing


async def test_a_reader_ahead_of_a_server_that_lost_its_tail_gets_the_rest_once(
    running: tuple[Job, Attempt], worker: RawWorker, raw: Any, keys: Keys
) -> None:
    job, attempt = running
    attempt.publish(1, 5)
    got: list[Event] = []
    reading = asyncio.create_task(drain(job.events(), got))
    await _until(lambda: _count(got) == 5)
    # As after a restart without an append-only file: tokens 4 and 5 never were.
    raw.delete(keys.stream(job.id))
    raw.hset(keys.job(job.id), "tokens", 0)
    attempt.publish(1, 3)
    attempt.publish(4, 7)
    attempt.finish()
    await asyncio.wait_for(reading, 10)
    assert [event for event in got if isinstance(event, Token)] == story(1, 7)
    assert isinstance(got[-1], EndEvent)


async def test_a_reader_of_a_stalled_server_goes_on_when_it_wakes(server: RealServer) -> None:
    with server.client() as raw:
        worker = RawWorker(raw, "tenuto:")
        worker.announce()
        async with Client(server.url) as client:
            job = await client.submit("m", "hi")
            attempt = worker.claim()
            attempt.publish(1, 1)
            got: list[Event] = []
            reading = asyncio.create_task(drain(job.events(), got))
            await _until(lambda: _count(got) == 1)
            server.pause()
            server.resume()
            attempt.publish(2, 2)
            attempt.finish()
            await asyncio.wait_for(reading, 10)
    assert _count(got) == 2


async def test_reconnect_timeout_limits_the_wait_for_a_lost_server(server: RealServer) -> None:
    with server.client() as raw:
        worker = RawWorker(raw, "tenuto:")
        worker.announce()
    async with Client(server.url) as client:
        job = await client.submit("m", "hi")
        got: list[Event] = []
        with pytest.raises(ServerUnavailable):
            await drain(job.events(reconnect_timeout=0.1), got, then={0: server.kill})
        assert got == [StateEvent(JobState.QUEUED, 1, 0)]


async def test_many_readers_of_one_stream_get_the_same(running: tuple[Job, Attempt]) -> None:
    job, attempt = running
    reading = [asyncio.create_task(take(job, 0, 50)) for _ in range(20)]
    await asyncio.sleep(0)
    for first in range(1, 50, 5):
        attempt.publish(first, first + 4)
    assert all(tokens == story(1, 50) for tokens in await asyncio.gather(*reading))


async def test_a_reader_cancelled_in_its_own_turn_stops(running: tuple[Job, Attempt]) -> None:
    job, attempt = running
    attempt.publish(1, 1)

    async def read() -> None:
        async for _ in job.stream():
            # As a signal handler does, which runs in the middle of the task.
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    for _ in range(2):
        reading = asyncio.create_task(read())
        await asyncio.wait([reading], timeout=5)
        assert reading.cancelled()


async def test_a_reader_that_stops_leaves_no_connection_reading(
    running: tuple[Job, Attempt], raw: Any, keys: Keys
) -> None:
    job, attempt = running
    attempt.publish(1, 1)
    assert await take(job, 0, 1) == story(1, 1)
    reading = asyncio.create_task(take(job, 1, 1))
    await _until(lambda: raw.info("clients")["blocked_clients"])
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    attempt.publish(2, 2)
    assert await take(job, 0, 2) == story(1, 2)


def _count(events: list[Event]) -> int:
    return sum(isinstance(event, Token) for event in events)


async def _until(condition: Any) -> None:
    await asyncio.to_thread(poll, condition)


async def test_a_phase_before_the_first_token_is_not_told_after_it(
    running: tuple[Job, Attempt], redis_url: str, keys: Keys, tmp_path: Path
) -> None:
    job, attempt = running
    connection = Connection(redis_url, tmp_path, retry_for=0)
    try:
        reader = StreamReader(connection, Tails(connection), keys, job.id, 0, None)
        await reader._next()
        attempt.renew("prefill", 1, 33)
        assert await reader._next() == [ProgressEvent("prefill", 1, 33)]
        attempt.publish(1, 2)
        attempt.renew("prefill", 2, 33)
        assert await reader._next() == story(1, 2)
        assert await reader._next() == []
        again = StreamReader(connection, Tails(connection), keys, job.id, 2, None)
        assert await again._next() == []
    finally:
        await connection.close()
