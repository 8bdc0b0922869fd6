"""The blocking surface over the asynchronous client."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Iterator

import pytest

from raw_worker import RawWorker, poll, story
from tenuto_client import (
    Client,
    FakeClient,
    InvalidRequest,
    Job,
    JobCancelled,
    JobState,
    SyncClient,
    SyncJob,
    Token,
)


@pytest.fixture
def tenuto(redis_url: str, namespace: str, worker: RawWorker) -> Iterator[SyncClient]:
    """A blocking client of the test's namespace."""
    with SyncClient(redis_url, namespace=namespace) as client:
        yield client


def test_a_job_is_submitted_streamed_cancelled_resumed_and_deleted(
    tenuto: SyncClient, worker: RawWorker
) -> None:
    job = tenuto.submit("m", "hi")
    attempt = worker.claim()
    attempt.publish(1, 3)
    assert job.cancel().cancelling
    attempt.finish("cancelled", "")
    with pytest.raises(JobCancelled):
        list(job.stream())
    assert job.resume().state is JobState.QUEUED
    second = worker.claim()
    second.publish(4, 5)
    second.finish()
    assert list(job.stream(after=1)) == story(2, 5)
    assert job.result(timeout=10).tokens == tuple(story(1, 5))
    assert [record.id for record in tenuto.list()] == [job.id]
    assert tenuto.status(job.id) == tenuto.job(job.id).status()
    assert [model.name for model in tenuto.models()] == ["m"]
    assert [worker.name for worker in tenuto.workers()] == ["raw-1"]
    job.delete()
    assert tenuto.list() == []


def test_errors_are_those_of_the_asynchronous_client(tenuto: SyncClient) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        tenuto.submit("m", "hi", max_tokens=0)


def test_breaking_out_of_a_stream_leaves_nothing_behind(
    tenuto: SyncClient, worker: RawWorker
) -> None:
    job = tenuto.submit("m", "hi")
    worker.claim().publish(1, 3)
    for _ in range(50):
        for token in job.stream():
            if token.index == 2:
                break
    assert next(job.stream(after=2)) == story(3, 3)[0]


def test_an_interrupted_wait_leaves_the_client_usable(
    tenuto: SyncClient, worker: RawWorker
) -> None:
    job = tenuto.submit("m", "hi")
    worker.claim().publish(1, 1)
    stream = job.stream()
    assert next(stream) == story(1, 1)[0]
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert list(stream) == []
    assert job.status().tokens == 1
    assert next(job.stream()) == story(1, 1)[0]


def test_threads_share_one_client(tenuto: SyncClient, worker: RawWorker) -> None:
    job = tenuto.submit("m", "hi")
    got: dict[int, list[Token]] = {n: [] for n in range(8)}
    threads = [
        threading.Thread(target=lambda n=n: got[n].extend(job.stream()), daemon=True) for n in got
    ]
    for thread in threads:
        thread.start()
    attempt = worker.claim()
    for first in range(1, 100, 10):
        attempt.publish(first, first + 9)
    attempt.finish()
    for thread in threads:
        thread.join(20)
    assert all(tokens == story(1, 100) for tokens in got.values())


def test_a_closed_client_says_so_and_its_thread_has_ended(redis_url: str) -> None:
    before = threading.active_count()
    client = SyncClient(redis_url)
    stream = client.job("x").stream()
    client.close()
    client.close()
    poll(lambda: threading.active_count() == before)
    with pytest.raises(RuntimeError, match="closed"):
        client.list()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


def test_a_fake_client_can_be_used_without_asyncio() -> None:
    fake = FakeClient()
    with SyncClient.over(fake) as tenuto:
        fake.reply(["Hel", "lo"])
        job = tenuto.submit("any", "hi")
        assert "".join(token.text for token in job.stream()) == "Hello"


@pytest.mark.parametrize(("blocking", "asynchronous"), [(SyncClient, Client), (SyncJob, Job)])
def test_the_surface_is_that_of_the_asynchronous_class(blocking: type, asynchronous: type) -> None:
    def surface(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters) if callable(member) else []
            for name, member in inspect.getmembers(kind)
            if not name.startswith("_")
        }

    expected = surface(asynchronous)
    found = surface(blocking)
    found.pop("over", None)
    assert found == expected
