"""Published tokens that no durable checkpoint covers: told in the job's hash and by the worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from job_queue import JobQueue
from step_worker import StepWorker
from tenuto_client import unpack_worker


@pytest.fixture
def worker(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path
) -> Iterator[StepWorker]:
    with StepWorker(redis_url, jobs.keys.namespace, tiny_model, tmp_path) as made:
        yield made


def _durable(jobs: JobQueue, job: str) -> int:
    return int(jobs.job(job)["durable"])


def _told(jobs: JobQueue) -> int | None:
    packed: Any = jobs.client.hget(jobs.keys.workers(), "host-dir-0")
    return unpack_worker("host-dir-0", packed).tokens_at_risk


def test_what_the_last_durable_checkpoint_covers_stands_in_the_jobs_hash(
    jobs: JobQueue, worker: StepWorker
) -> None:
    job = jobs.submit()
    assert "durable" not in jobs.job(job)
    worker.claim()
    assert _durable(jobs, job) == 0
    worker.decode(5)
    worker.save()
    worker.publish()
    assert _durable(jobs, job) == 1, "the first token waits in the checkpoint after the prompt"
    worker.rooms.housekeeper.chores()
    assert _told(jobs) == 4

    worker.decode(7)
    worker.save()
    worker.rooms.lease.renew()
    assert 8 <= _durable(jobs, job) <= 9, "one every 8 tokens, and a token that waits"
    worker.publish()
    worker.rooms.housekeeper.chores()
    assert _told(jobs) == 12 - _durable(jobs, job)


def test_after_a_cancel_nothing_is_at_risk(jobs: JobQueue, worker: StepWorker) -> None:
    job = jobs.submit()
    worker.claim()
    worker.decode(12)
    worker.publish()
    jobs.cancel(job)
    worker.rooms.lease.renew()
    worker.settle()

    assert jobs.state(job) == "cancelled"
    assert _durable(jobs, job) >= int(jobs.job(job)["tokens"]) == 12


def test_after_a_drain_nothing_is_at_risk(jobs: JobQueue, worker: StepWorker) -> None:
    job = jobs.submit()
    worker.claim()
    worker.decode(12)
    worker.publish()
    worker.rooms._stop_all()
    worker.settle()

    assert jobs.state(job) == "queued"
    assert _durable(jobs, job) >= int(jobs.job(job)["tokens"]) == 12


@pytest.mark.parametrize("reachable", [True, False])
def test_an_heir_counts_what_its_own_checkpoint_covers(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path, reachable: bool
) -> None:
    def start(data: str) -> StepWorker:
        return StepWorker(redis_url, jobs.keys.namespace, tiny_model, tmp_path / data)

    job = jobs.submit()
    with start("one") as dead:
        dead.claim()
        dead.decode(12)
        dead.save()
        dead.publish()
    had = _durable(jobs, job)
    assert had >= 8
    jobs.scripts.take_back(job, "host-dir-0")
    assert _durable(jobs, job) == had
    with start("one" if reachable else "another") as heir:
        heir.claim()
        heir.rooms.lease.renew()
        assert _durable(jobs, job) == (had if reachable else 0)
