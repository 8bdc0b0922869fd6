"""The types of the public surface, as a type checker sees them. Never run, only checked."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

from tenuto_client import (
    Client,
    EndEvent,
    Event,
    FakeClient,
    Job,
    JobRecord,
    JobState,
    ModelInfo,
    ProgressEvent,
    Result,
    StateEvent,
    SyncClient,
    SyncJob,
    Token,
    WorkerInfo,
)


async def asynchronous() -> None:
    """The surface of `Client` and `Job`."""
    async with Client("redis://localhost", namespace="a", data_dir="/d", wait_replicas=1) as tenuto:
        assert_type(tenuto, Client)
        job = await tenuto.submit(
            "m", "hi", max_tokens=5, stop=["a"], deadline=timedelta(1), retention="forever"
        )
        assert_type(job, Job)
        await tenuto.submit("m", [{"role": "user", "content": "hi"}])
        await tenuto.submit("m", [1, 2, 3], seed=None, adapter="poet")
        await tenuto.submit("m", "hi", adapter=5)  # type: ignore[arg-type]
        await tenuto.submit("m", "hi", max_tokens="5")  # type: ignore[arg-type]
        await tenuto.submit("m", "hi", max_token=5)  # type: ignore[call-arg]
        assert_type(tenuto.job("x"), Job)
        assert_type(await tenuto.list(state=JobState.RUNNING, limit=5), list[JobRecord])
        assert_type(await tenuto.status("x"), JobRecord)
        assert_type(await tenuto.models(), tuple[ModelInfo, ...])
        assert_type(await tenuto.workers(), tuple[WorkerInfo, ...])
        assert_type(await tenuto.limits(), dict[str, dict[str, int]])
        await tenuto.set_limits({"max_queued": 5}, model="m")
        await tenuto.clear_limits("max_queued")
        await tenuto.forget_model("m")
    async for token in job.stream(after=3, reconnect_timeout=5):
        assert_type(token, Token)
        assert_type(token.text, str)
        assert_type(token.top_logprobs, tuple[tuple[int, float], ...])
    async for event in job.events():
        assert_type(event, Event)
        if isinstance(event, EndEvent):
            assert_type(event.usage.prompt_tokens, int)
        elif isinstance(event, StateEvent):
            assert_type(event.state, JobState)
        elif not isinstance(event, Token):
            assert_type(event, ProgressEvent)
    assert_type(job.id, str)
    assert_type(await job.result(timeout=5), Result)
    assert_type(await job.cancel(), JobRecord)
    assert_type(await job.resume(), JobRecord)
    assert_type(await job.status(), JobRecord)


def blocking() -> None:
    """The surface of `SyncClient` and `SyncJob`."""
    with SyncClient() as tenuto:
        job = tenuto.submit("m", "hi", temperature=0.5)
        assert_type(job, SyncJob)
        tenuto.submit("m", "hi", temprature=0.5)  # type: ignore[call-arg]
        for token in job.stream():
            assert_type(token, Token)
        for event in job.events():
            assert_type(event, Event)
        assert_type(job.result(), Result)
        assert_type(tenuto.list(), list[JobRecord])
    with SyncClient.over(FakeClient(["m"])) as fake:
        assert_type(fake, SyncClient)
