"""What cancel, resume and delete do in every state of a job."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from raw_worker import RawWorker
from tenuto_client import Client, IllegalTransition, Job, JobGone, JobState, Keys

STATES = list(JobState)


async def bring_to(state: JobState, client: Client, worker: RawWorker) -> Job:
    """A job in that state."""
    job = await client.submit("m", "hi")
    if state is JobState.QUEUED:
        return job
    attempt = worker.claim()
    attempt.publish(1, 2)
    if state is JobState.CANCELLED:
        await job.cancel()
    if state is not JobState.RUNNING:
        attempt.finish(state, error="broken" if state is JobState.FAILED else "")
    return job


@pytest.mark.parametrize(
    ("before", "after", "cancelling"),
    [
        (JobState.QUEUED, JobState.CANCELLED, False),
        (JobState.RUNNING, JobState.RUNNING, True),
        (JobState.COMPLETED, JobState.COMPLETED, False),
        (JobState.CANCELLED, JobState.CANCELLED, False),
        (JobState.FAILED, JobState.FAILED, False),
    ],
)
async def test_cancel_stops_what_runs_and_is_idempotent(
    before: JobState, after: JobState, cancelling: bool, client: Client, worker: RawWorker
) -> None:
    job = await bring_to(before, client, worker)
    first = await job.cancel()
    assert (first.state, first.cancelling) == (after, cancelling)
    assert await job.cancel() == first


@pytest.mark.parametrize(
    ("before", "after", "epoch"),
    [
        (JobState.QUEUED, JobState.QUEUED, 1),
        (JobState.RUNNING, JobState.RUNNING, 1),
        (JobState.CANCELLED, JobState.QUEUED, 2),
        (JobState.FAILED, JobState.QUEUED, 2),
    ],
)
async def test_resume_requeues_what_has_ended_under_a_new_epoch(
    before: JobState, after: JobState, epoch: int, client: Client, worker: RawWorker
) -> None:
    job = await bring_to(before, client, worker)
    record = await job.resume()
    assert (record.state, record.epoch) == (after, epoch)
    assert (record.error, record.finished_at, record.finish_reason) == (None, None, None)
    assert record.tokens == (0 if before is JobState.QUEUED else 2)
    assert (await job.resume()).epoch == epoch


async def test_a_completed_job_cannot_be_resumed(client: Client, worker: RawWorker) -> None:
    job = await bring_to(JobState.COMPLETED, client, worker)
    with pytest.raises(IllegalTransition, match="completed"):
        await job.resume()
    assert (await job.status()).state is JobState.COMPLETED


async def test_resume_takes_back_a_cancel_that_was_not_carried_out(
    client: Client, worker: RawWorker
) -> None:
    job = await client.submit("m", "hi")
    attempt = worker.claim()
    await job.cancel()
    assert attempt.wants_cancel()
    assert not (await job.resume()).cancelling
    assert not attempt.wants_cancel()


async def test_a_resumed_job_can_be_claimed_again_and_the_old_attempt_cannot_write(
    client: Client, worker: RawWorker
) -> None:
    job = await client.submit("m", "hi")
    old = worker.claim()
    old.publish(1, 2)
    await job.cancel()
    old.finish("cancelled", "")
    await job.resume()
    new = worker.claim()
    assert (new.job_id, new.epoch) == (job.id, 2)
    assert old.publish(3, 3)[0] == b"fenced"
    assert new.publish(3, 3)[0] == b"ok"


@pytest.mark.parametrize("state", STATES)
async def test_delete_leaves_no_key_of_the_job_and_fences_its_worker(
    state: JobState, client: Client, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    job = await bring_to(state, client, worker)
    await job.delete()
    found = [key for key in raw.scan_iter(match=f"{keys.namespace}*") if job.id.encode() in key]
    assert found == []
    indexes = (keys.jobs(), keys.running(), keys.expiry(), keys.tickets("m"))
    assert [raw.zrange(index, 0, -1) for index in indexes] == [[], [], [], []]
    assert raw.zcard(keys.queue("m")) == 0
    for act in (job.status, job.cancel, job.resume, job.delete):
        with pytest.raises(JobGone):
            await act()


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED])
async def test_an_ended_job_is_kept_for_its_retention(
    state: JobState, client: Client, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    job = await bring_to(state, client, worker)
    finished_at = (await job.status()).finished_at
    assert finished_at is not None
    assert raw.zscore(keys.expiry(), job.id) == pytest.approx(finished_at + 86400, abs=1)


async def test_a_job_kept_forever_never_expires_and_resume_clears_an_expiry(
    client: Client, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    kept = await client.submit("m", "hi", retention="forever")
    await kept.cancel()
    assert raw.zcard(keys.expiry()) == 0
    other = await client.submit("m", "hi", retention=60)
    await other.cancel()
    assert raw.zcard(keys.expiry()) == 1
    await other.resume()
    assert raw.zcard(keys.expiry()) == 0


async def test_cancels_and_resumes_at_once_leave_a_job_whole(
    client: Client, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    job = await client.submit("m", "hi")
    await asyncio.gather(*(act() for _ in range(30) for act in (job.cancel, job.resume)))
    record = await job.resume()
    assert record.state is JobState.QUEUED
    assert raw.zrange(keys.lane("m", "0:default"), 0, -1) == [job.id.encode()]
    assert raw.zrange(keys.tickets("m"), 0, -1) == [f"{job.id}:{record.epoch}".encode()]
