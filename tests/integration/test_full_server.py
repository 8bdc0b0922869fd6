"""A server without memory: what makes room is not refused, and then all goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from job_queue import JobQueue, story
from servers import RealServer
from step_worker import StepWorker
from tiny_models import build_tiny_model


@pytest.fixture
def jobs() -> Iterator[JobQueue]:
    with RealServer(appendfsync="no") as server:
        queue = JobQueue(server.url, "t:")
        queue.url = server.url  # type: ignore[attr-defined]
        yield queue
        queue.close()


def fill(jobs: JobQueue) -> None:
    """From now on the server refuses whatever may take memory."""
    info: Any = jobs.client.info("memory")
    jobs.client.config_set("maxmemory", info["used_memory"] - 200_000)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        jobs.client.set("t:more", "x")


def _ended(jobs: JobQueue, **options: Any) -> str:
    job = jobs.submit(**options)
    claim = jobs.take()
    jobs.scripts.publish(claim.fence, story(1, 3))
    jobs.scripts.finish(claim.fence, state="completed", finish_reason="stop")
    return job


def test_what_makes_room_on_a_full_server_is_not_refused(jobs: JobQueue) -> None:
    ended, expired = _ended(jobs), _ended(jobs, retention="0.001")
    jobs.submit(priority=1)
    running = jobs.take()
    flagged = jobs.submit(priority=1)
    assert jobs.take().fence.job_id == flagged
    queued, cancelled = jobs.submit(), jobs.submit()
    fill(jobs)

    assert jobs.cancel(cancelled) == "cancelled"
    assert jobs.delete(cancelled) == "deleted"
    assert jobs.delete(queued) == "deleted"
    assert jobs.delete(ended) == "deleted"
    assert jobs.scripts.expire() == [expired]
    assert jobs.scripts.finish(running.fence, state="completed", finish_reason="stop") == "ok"
    assert jobs.cancel(flagged) == "flagged"
    assert jobs.delete(flagged) == "deleted"
    found: Any = jobs.client.hgetall(jobs.keys.job(running.fence.job_id))
    assert jobs.client.hget(jobs.keys.usage(), "bytes") == found[b"held"]


def test_a_worker_makes_room_by_what_has_expired_and_goes_on(
    jobs: JobQueue, tmp_path: Path
) -> None:
    model = build_tiny_model(tmp_path / "model")
    url = jobs.url  # type: ignore[attr-defined]
    with StepWorker(url, "t:", model, tmp_path / "data") as worker:
        gone = [_ended(jobs, retention="0.001", prompt="x" * 10_000) for _ in range(60)]
        job = jobs.submit(max_tokens=5)
        fill(jobs)
        worker.rooms.housekeeper.round()
        assert {jobs.state(each) for each in gone} == {"gone"}
        assert worker.claim()
        worker.finish()
        assert jobs.state(job) == "completed"
