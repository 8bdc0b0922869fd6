"""An ended job goes whole when its time is over, and a deleted one at once: no key, no file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import redis

from servers import RealServer
from step_worker import MODEL, StepWorker
from tenuto_client import Client, Job, JobGone, JobState, Keys
from tenuto_worker._calls import finish_call
from tiny_models import build_tiny_model
from workers import poll_until

# The shortest that there is.
SHORT = 1.0
Retention = float | Literal["forever"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def worker(redis_url: str, namespace: str, model: Path, tmp_path: Path) -> Iterator[StepWorker]:
    with StepWorker(redis_url, namespace, model, tmp_path, lease_seconds=0.5) as made:
        # Whatever a worker announces, before there is a job.
        made.rooms.housekeeper.chores()
        yield made


@pytest.fixture
async def client(redis_url: str, namespace: str, worker: StepWorker) -> AsyncIterator[Client]:
    async with Client(redis_url, namespace=namespace) as made:
        yield made


@pytest.fixture
def raw(shared_server: RealServer) -> Iterator[redis.Redis]:
    with shared_server.client() as made:
        yield made


def traces(raw: redis.Redis, namespace: str, job: Job) -> set[str]:
    """Every key that has the job's id in its name or in what it holds, but for the note that it
    was removed."""
    found = set()
    keys: Any = raw.scan_iter(count=1000)
    for key in keys:
        name = key.decode()
        if job.id in name or (name.startswith(namespace) and job.id.encode() in _content(raw, key)):
            found.add(name)
    return found - {Keys(namespace).removed()}


def _content(raw: Any, key: bytes) -> bytes:
    reads: dict[bytes, Callable[[], Any]] = {
        b"string": lambda: raw.get(key),
        b"hash": lambda: raw.hgetall(key),
        b"set": lambda: raw.smembers(key),
        b"zset": lambda: raw.zrange(key, 0, -1),
        b"stream": lambda: raw.xrange(key),
        b"none": lambda: b"",
    }
    return repr(reads[raw.type(key)]()).encode()


def totals(raw: Any, namespace: str) -> dict[str, Any]:
    """What is counted over all jobs."""
    keys = Keys(namespace)
    return {
        "queued": raw.hgetall(keys.queued(MODEL)),
        "usage": raw.hgetall(keys.usage()),
        "due": raw.zcard(keys.due()),
        "expiry": raw.zcard(keys.expiry()),
        "running": raw.zcard(keys.running()),
        "jobs": raw.zcard(keys.jobs()),
    }


async def submit(client: Client, retention: Retention = SHORT, **options: Any) -> Job:
    return await client.submit(
        MODEL, "Tell me.", max_tokens=20, seed=7, ignore_eos=True, retention=retention,
        idempotency_key="once", queue_ttl=600, deadline=timedelta(hours=1), max_runtime=600,
        tenant="ours", **options,
    )  # fmt: skip


async def to_completed(client: Client, worker: StepWorker, job: Job) -> None:
    worker.claim()
    worker.finish()
    worker.save()


async def to_cancelled(client: Client, worker: StepWorker, job: Job) -> None:
    worker.claim()
    worker.decode(9)
    await job.cancel()
    worker.publish()
    worker.settle()
    worker.save()


async def to_failed(client: Client, worker: StepWorker, job: Job) -> None:
    worker.claim()
    worker.decode(9)
    worker.save()
    rooms = worker.rooms
    end = finish_call(worker.run.fence, durable=0, state="failed", error="for this test")
    rooms.publisher._scripts.run(end)
    worker.publish()
    worker.settle()


async def to_queued(client: Client, worker: StepWorker, job: Job) -> None:
    pass


async def to_running(client: Client, worker: StepWorker, job: Job) -> None:
    worker.claim()
    worker.decode(9)
    worker.publish()
    worker.rooms.lease.renew()
    worker.save()


async def to_queued_again(client: Client, worker: StepWorker, job: Job) -> None:
    await to_cancelled(client, worker, job)
    await job.resume()


async def to_mended(client: Client, worker: StepWorker, job: Job) -> None:
    """Queued again, and with a ticket in the place of one that was lost."""
    await to_queued_again(client, worker, job)
    connection: Any = worker.rooms.housekeeper._client
    keys = Keys(worker.settings.namespace)
    for ticket in connection.zrange(keys.tickets(MODEL), 0, -1):
        connection.delete(keys.ticket_payload(ticket.decode()))
    worker.rooms.housekeeper.chores()


ENDED = [to_completed, to_cancelled, to_failed]
STATES = [*ENDED, to_queued, to_running, to_queued_again, to_mended]


def folder(worker: StepWorker, job: Job) -> Path:
    return worker.settings.checkpoints_dir / job.id


async def gone(client: Client, job: Job) -> bool:
    try:
        await job.status()
    except JobGone:
        return True
    return False


async def keep_house_until_gone(client: Client, worker: StepWorker, job: Job) -> None:
    async with asyncio.timeout(20):
        while not await gone(client, job):
            worker.rooms.housekeeper.chores()
            await asyncio.sleep(0.02)


async def assert_nothing_is_left(
    client: Client, worker: StepWorker, raw: redis.Redis, job: Job, before: dict[str, Any]
) -> None:
    namespace = worker.settings.namespace
    assert traces(raw, namespace, job) == set()
    assert totals(raw, namespace) == before
    worker.rooms.collector.collect()
    assert not folder(worker, job).exists()
    with pytest.raises(JobGone):
        await anext(job.stream())
    another = await submit(client)
    assert another.id != job.id, "its idempotency key outlived it"


@pytest.mark.parametrize("end", ENDED)
async def test_an_expired_job_leaves_nothing(
    client: Client, worker: StepWorker, raw: redis.Redis, end: Callable[..., Any]
) -> None:
    before = totals(raw, worker.settings.namespace)
    job = await submit(client)
    await end(client, worker, job)
    assert len(traces(raw, worker.settings.namespace, job)) >= 4, "job, stream, idem, expiry"
    assert folder(worker, job).exists()

    await keep_house_until_gone(client, worker, job)
    await assert_nothing_is_left(client, worker, raw, job, before)


@pytest.mark.parametrize("state", STATES)
async def test_a_deleted_job_leaves_nothing_whatever_its_state(
    client: Client, worker: StepWorker, raw: redis.Redis, state: Callable[..., Any]
) -> None:
    before = totals(raw, worker.settings.namespace)
    job = await submit(client, 3600)
    await state(client, worker, job)
    await job.delete()
    # Whoever ran it goes on for a moment, and must bring nothing of it back.
    for _ in range(3):
        worker.rooms.lease.renew()
        worker.rooms.decoder.wake()
        worker.rooms.decoder.turn()
        for run in worker.runs:
            run.sent_at = 0.0
        if worker.runs:
            worker.rooms.publisher.turn()
    worker.settle()
    worker.rooms.housekeeper.chores()
    assert worker.runs == []
    await assert_nothing_is_left(client, worker, raw, job, before)


async def test_a_job_kept_forever_never_expires(
    client: Client, worker: StepWorker, raw: redis.Redis
) -> None:
    kept = await submit(client, "forever")
    await to_completed(client, worker, kept)
    other = await client.submit(MODEL, "And?", max_tokens=2, retention=SHORT)
    await to_completed(client, worker, other)
    await keep_house_until_gone(client, worker, other)

    assert len((await kept.result()).tokens) == 20
    assert raw.zcard(Keys(worker.settings.namespace).expiry()) == 0
    worker.rooms.collector.collect()
    assert folder(worker, kept).exists()


async def test_a_resumed_job_does_not_expire_and_its_time_begins_anew_at_its_end(
    client: Client, worker: StepWorker, raw: redis.Redis
) -> None:
    job = await submit(client)
    await to_cancelled(client, worker, job)
    ended_at = (await job.status()).finished_at
    assert ended_at is not None
    await job.resume()
    _wait_until_past(raw, ended_at + SHORT)
    worker.rooms.housekeeper.chores()
    assert (await job.status()).state is JobState.QUEUED

    await to_completed(client, worker, job)
    worker.rooms.housekeeper.chores()
    assert (await job.result()).exactness == "exact"
    await keep_house_until_gone(client, worker, job)


async def test_a_running_job_does_not_expire_however_long_it_runs(
    client: Client, worker: StepWorker, raw: redis.Redis
) -> None:
    job = await submit(client)
    await to_running(client, worker, job)
    _wait_until_past(raw, (await job.status()).created_at + 1.2 * SHORT)
    worker.rooms.housekeeper.chores()
    assert (await job.status()).state is JobState.RUNNING


def _wait_until_past(raw: Any, at: float) -> None:
    poll_until(lambda: raw.time()[0] + raw.time()[1] / 1e6 > at, "time to pass by Redis's clock")
