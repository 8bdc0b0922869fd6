"""What holds for the real client and for the fake one alike: the fake may stand in for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from raw_worker import Attempt, RawWorker
from tenuto_client import (
    Client,
    EndEvent,
    FakeClient,
    IdempotencyConflict,
    IllegalTransition,
    InvalidRequest,
    Job,
    JobCancelled,
    JobFailed,
    JobGone,
    JobState,
    ModelInfo,
    StateEvent,
    Token,
    UnknownModel,
    pack_tokens,
)
from tenuto_client._client import BaseClient

TEXTS = ("One", " two", " three", " four")


class Rig(Protocol):
    """A client, and something that runs its jobs."""

    @property
    def client(self) -> BaseClient:
        """The client under test."""

    async def submit(
        self, *, produce: int | None = None, error: str | None = None, unsaved: str = ""
    ) -> Job:
        """Submit a job that produces so many of TEXTS and then waits, or all and ends.

        `unsaved` is why its checkpoints cannot be saved.
        """

    async def go_on(self, job: Job) -> None:
        """Let it run to its end, which is a cancel where one was asked for."""


class FakeRig:
    """The fake client."""

    def __init__(self) -> None:
        self.client = FakeClient([ModelInfo("m", 1000, 500, "f", 0.0)])

    async def submit(
        self, *, produce: int | None = None, error: str | None = None, unsaved: str = ""
    ) -> Job:
        self.client.reply(TEXTS, error=error, pause_after=produce, checkpoint_error=unsaved or None)
        return await self.client.submit("m", "hi", max_tokens=len(TEXTS), idempotency_key="k")

    async def go_on(self, job: Job) -> None:
        self.client.proceed(job.id)


class RealRig:
    """The real client, with a worker that does what it is told."""

    def __init__(self, client: Client, worker: RawWorker) -> None:
        self.client = client
        self._worker = worker
        self._attempts: dict[str, Attempt] = {}

    async def submit(
        self, *, produce: int | None = None, error: str | None = None, unsaved: str = ""
    ) -> Job:
        job = await self.client.submit(
            "m", "hi", max_tokens=len(TEXTS), idempotency_key="k", metadata={}
        )
        self._attempts[job.id] = self._worker.claim()
        self._publish(job, 1, len(TEXTS) if produce is None else produce)
        if unsaved:
            self._attempts[job.id].renew("decode", 0, 0, unsaved)
        if produce is None:
            self._end(job, error)
        return job

    async def go_on(self, job: Job) -> None:
        record = await job.status()
        if record.state is JobState.QUEUED:
            self._attempts[job.id] = self._worker.claim()
        if record.cancelling:
            self._attempts[job.id].finish("cancelled", "")
        elif not record.state.is_over:
            self._publish(job, record.tokens + 1, len(TEXTS))
            self._end(job, None)

    def _publish(self, job: Job, first: int, last: int) -> None:
        for index in range(first, last + 1):
            token = Token(index, index, TEXTS[index - 1], 0.0)
            self._attempts[job.id].call("publish", 0, index, index, pack_tokens([token]))

    def _end(self, job: Job, error: str | None) -> None:
        if error is None:
            self._attempts[job.id].finish("completed", "length")
        else:
            self._attempts[job.id].finish("failed", "", error=error)


@pytest.fixture(params=["fake", "real"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """Both, one after the other."""
    if request.param == "fake":
        fake = FakeRig()
        async with fake.client:
            yield fake
        return
    namespace = request.getfixturevalue("namespace")
    worker = request.getfixturevalue("worker")
    worker.announce(context_length=1000, vocab_size=500)
    async with Client(request.getfixturevalue("redis_url"), namespace=namespace) as real:
        yield RealRig(real, worker)


async def texts(job: Job, after: int = 0) -> list[str]:
    """The texts of the tokens that come."""
    return [token.text async for token in job.stream(after)]


async def test_a_job_completes_and_its_stream_is_its_result(rig: Rig) -> None:
    job = await rig.submit()
    assert await texts(job) == list(TEXTS)
    assert await texts(job, after=3) == [" four"]
    result = await job.result()
    assert (result.text, result.finish_reason) == ("One two three four", "length")
    assert [token.index for token in result.tokens] == [1, 2, 3, 4]
    record = await job.status()
    assert (record.state, record.tokens, record.epoch) == (JobState.COMPLETED, 4, 1)


async def test_events_begin_with_queued_and_end_with_one_end(rig: Rig) -> None:
    events = [event async for event in (await rig.submit()).events()]
    assert [event.state for event in events if isinstance(event, StateEvent)] == [
        JobState.QUEUED,
        JobState.RUNNING,
    ]
    assert [isinstance(event, EndEvent) for event in events] == [False] * 6 + [True]


async def test_a_failure_comes_after_the_last_token(rig: Rig) -> None:
    job = await rig.submit(error="out of luck")
    with pytest.raises(JobFailed, match="out of luck") as caught:
        await texts(job)
    assert caught.value.result.text == "One two three four"
    assert (await job.status()).error == "out of luck"


async def test_tokens_are_at_risk_until_the_job_is_completed(rig: Rig) -> None:
    job = await rig.submit(produce=2)
    assert (await job.status()).tokens_at_risk == 2
    await job.cancel()
    await rig.go_on(job)
    assert (await job.status()).tokens_at_risk == 2
    await job.resume()
    await rig.go_on(job)
    record = await job.status()
    assert (record.state, record.tokens_at_risk) == (JobState.COMPLETED, None)


async def test_why_no_checkpoint_is_saved_is_told_until_another_attempt(rig: Rig) -> None:
    job = await rig.submit(produce=2, unsaved="disk full")
    assert (await job.status()).checkpoint_error == "disk full"
    await job.cancel()
    await rig.go_on(job)
    assert (await job.status()).checkpoint_error == "disk full"
    await job.resume()
    await rig.go_on(job)
    assert (await job.status()).checkpoint_error is None


async def test_a_completed_job_needs_no_checkpoint(rig: Rig) -> None:
    job = await rig.submit(produce=2, unsaved="disk full")
    await rig.go_on(job)
    assert (await job.status()).checkpoint_error is None


async def test_of_a_job_that_never_ran_nothing_is_at_risk(rig: Rig) -> None:
    if isinstance(rig.client, FakeClient):
        rig.client.reply(TEXTS, start=False)
    job = await rig.client.submit("m", "hi")
    assert (await job.status()).tokens_at_risk is None


async def test_a_cancelled_job_keeps_what_it_produced_and_resumes_to_the_same_end(
    rig: Rig,
) -> None:
    job = await rig.submit(produce=2)
    await job.cancel()
    await rig.go_on(job)
    with pytest.raises(JobCancelled) as caught:
        await job.result()
    assert caught.value.result.text == "One two"
    assert (await job.cancel()).state is JobState.CANCELLED
    assert (await job.resume()).epoch == 2
    await rig.go_on(job)
    assert (await job.result()).text == "One two three four"
    ends = [event async for event in job.events() if isinstance(event, EndEvent)]
    assert [(end.state, end.epoch) for end in ends] == [(JobState.COMPLETED, 2)]


async def test_a_reader_waits_for_what_comes_later(rig: Rig) -> None:
    job = await rig.submit(produce=1)
    reading = asyncio.create_task(texts(job))
    await asyncio.sleep(0)
    await rig.go_on(job)
    assert await asyncio.wait_for(reading, 10) == list(TEXTS)


async def test_a_completed_job_cannot_be_resumed(rig: Rig) -> None:
    job = await rig.submit()
    with pytest.raises(IllegalTransition):
        await job.resume()


async def test_a_deleted_job_is_gone_also_for_its_readers(rig: Rig) -> None:
    job = await rig.submit(produce=1)
    reading = asyncio.create_task(texts(job))
    await asyncio.sleep(0)
    await job.delete()
    with pytest.raises(JobGone):
        await asyncio.wait_for(reading, 10)
    for act in (job.status, job.cancel, job.resume, job.delete, job.result):
        with pytest.raises(JobGone):
            await act()


async def test_an_idempotency_key_is_one_job_and_frees_with_it(rig: Rig) -> None:
    job = await rig.submit(produce=1)
    with pytest.raises(IdempotencyConflict):
        await rig.client.submit("m", "other", idempotency_key="k")
    again = await rig.client.submit("m", "hi", max_tokens=len(TEXTS), idempotency_key="k")
    assert again.id == job.id
    await job.delete()
    other = await rig.client.submit("m", "other", idempotency_key="k")
    assert other.id != job.id


@pytest.mark.parametrize(
    ("model", "prompt", "options", "error"),
    [
        ("m", "", {}, InvalidRequest),
        ("m", "hi", {"temprature": 1}, InvalidRequest),
        ("m", "hi", {"max_tokens": 1000}, InvalidRequest),
        ("m", [500], {}, InvalidRequest),
        ("n", "hi", {}, UnknownModel),
    ],
)
async def test_bad_requests_are_refused(
    rig: Rig, model: str, prompt: Any, options: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await rig.client.submit(model, prompt, **options)
    assert await rig.client.list() == []


async def test_jobs_are_listed_in_pages(rig: Rig) -> None:
    jobs = [await rig.client.submit("m", "hi", metadata={"n": n}) for n in range(5)]
    await jobs[0].cancel()
    listed = await rig.client.list()
    assert {record.id for record in listed} == {job.id for job in jobs}
    assert await rig.client.list(limit=2) == listed[:2]
    assert await rig.client.list(before=listed[1]) == listed[2:]
    assert await rig.client.list(before=listed[1].id, limit=1) == listed[2:3]
    assert await rig.client.list(model="n") == []
    assert (await rig.client.status(listed[0].id)).metadata == listed[0].metadata


async def test_models_and_workers_are_told(rig: Rig) -> None:
    assert [model.name for model in await rig.client.models()] == ["m"]
    assert [worker.models for worker in await rig.client.workers()] == [("m",)]
