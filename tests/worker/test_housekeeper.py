"""Leases, reaping, and the collection of checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from job_queue import JobQueue
from servers import RealServer
from step_worker import StepWorker
from tenuto_worker._housekeeper import Contact
from tenuto_worker._run import Phase
from workers import poll_until


@pytest.fixture
def worker(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path
) -> Iterator[StepWorker]:
    with StepWorker(
        redis_url, jobs.keys.namespace, tiny_model, tmp_path, lease_seconds=0.5
    ) as made:
        yield made


# -- leases ----------------------------------------------------------------------------


def test_a_lease_lives_as_long_as_it_is_renewed(jobs: JobQueue, worker: StepWorker) -> None:
    job = jobs.submit()
    worker.claim()
    for _ in range(3):
        time.sleep(0.25)
        worker.rooms.lease.renew()
    assert jobs.client.exists(jobs.keys.lease(job))
    poll_until(lambda: not jobs.client.exists(jobs.keys.lease(job)), "the lease to run out")

    worker.rooms.lease.renew()
    assert jobs.client.exists(jobs.keys.lease(job)), "its owner was not reaped"


def test_a_stuck_attempt_is_not_renewed_and_a_waiting_one_is(
    jobs: JobQueue, worker: StepWorker
) -> None:
    job = jobs.submit()
    worker.claim()
    run = worker.run
    run.beat = time.monotonic() - worker.settings.limit(Phase.PREFILL.value) - 1000
    jobs.lose_lease(job)
    worker.rooms.lease.renew()
    assert not jobs.client.exists(jobs.keys.lease(job))

    run.alive()
    worker.rooms.lease.renew()
    assert jobs.client.exists(jobs.keys.lease(job))


# -- reaping ---------------------------------------------------------------------------


def test_a_job_without_a_lease_is_reaped_after_one_lease_of_contact_and_not_before(
    jobs: JobQueue, worker: StepWorker
) -> None:
    job = jobs.submit()
    jobs.take()
    jobs.lose_lease(job)
    keeper = worker.rooms.housekeeper
    began = time.monotonic()
    while jobs.state(job) == "running":
        keeper.round()
        time.sleep(0.02)

    assert time.monotonic() - began >= 0.5
    assert jobs.state(job) == "queued"


def test_a_server_that_has_just_started_gives_owners_a_lease_of_time(
    server: RealServer, tiny_model: Path, tmp_path: Path
) -> None:
    jobs = JobQueue(server.url, "tenuto:")
    job = jobs.submit()
    with StepWorker(server.url, "tenuto:", tiny_model, tmp_path, lease_seconds=2.0) as worker:
        jobs.take()
        jobs.lose_lease(job)
        server.restart()
        keeper = worker.rooms.housekeeper
        # Contact as if it had never been broken: the server's own age alone must hold it back.
        keeper._contact = Contact(0.0, 1000.0)
        keeper.round()
        keeper.round()
        assert jobs.state(job) == "running"
        deadline = time.monotonic() + 20
        while jobs.state(job) == "running" and time.monotonic() < deadline:
            keeper.round()
            time.sleep(0.1)
        assert jobs.state(job) == "queued"
    jobs.close()


def test_contact_begins_anew_after_a_failure_and_after_a_long_silence() -> None:
    contact = Contact(needed=10, longest_gap=5)
    contact.answered(100)
    contact.answered(104)
    assert not contact.is_long_enough(109)
    contact.answered(108)
    assert contact.is_long_enough(110)

    contact.answered(120)
    assert not contact.is_long_enough(121), "we slept ourselves"
    contact.answered(124)
    contact.answered(129)
    assert contact.is_long_enough(130)
    contact.broke()
    assert not contact.is_long_enough(131)


def test_an_outage_only_delays_the_chores(
    server: RealServer, tiny_model: Path, tmp_path: Path
) -> None:
    with StepWorker(server.url, "tenuto:", tiny_model, tmp_path) as worker:
        server.kill()
        worker.rooms.housekeeper.round()
        server.start()
        worker.rooms.housekeeper.round()


# -- checkpoints -----------------------------------------------------------------------


def _stopped_job(jobs: JobQueue, worker: StepWorker) -> tuple[str, Path]:
    """A cancelled job with checkpoints."""
    job = jobs.submit()
    worker.claim()
    worker.decode(9)
    jobs.cancel(job)
    worker.publish()
    worker.settle()
    worker.save()
    folder = worker.settings.checkpoints_dir / job
    assert list(folder.glob("*.log"))
    return job, folder


def test_gc_keeps_what_can_be_resumed_and_removes_what_is_gone(
    jobs: JobQueue, worker: StepWorker
) -> None:
    kept, kept_folder = _stopped_job(jobs, worker)
    gone, gone_folder = _stopped_job(jobs, worker)
    jobs.delete(gone)
    worker.rooms.collector.collect()

    assert jobs.state(kept) == "cancelled"
    assert kept_folder.exists()
    assert not gone_folder.exists()


def test_gc_keeps_the_result_of_a_completed_job_until_the_job_is_gone(
    jobs: JobQueue, worker: StepWorker
) -> None:
    job = jobs.submit()
    worker.claim()
    worker.finish()
    worker.save()
    folder = worker.settings.checkpoints_dir / job
    worker.rooms.collector.collect()
    assert [path.suffix for path in folder.iterdir()] == [".end"]

    jobs.delete(job)
    worker.rooms.collector.collect()
    assert not folder.exists()


@pytest.mark.parametrize("now", [None, "another"])
def test_gc_removes_nothing_when_redis_is_empty_or_another(
    jobs: JobQueue, worker: StepWorker, now: str | None
) -> None:
    job, folder = _stopped_job(jobs, worker)
    jobs.delete(job)
    if now is None:
        jobs.client.delete(jobs.keys.namespace_id())
    else:
        jobs.client.set(jobs.keys.namespace_id(), now)
    worker.rooms.collector.collect()

    assert folder.exists()


def test_gc_takes_what_was_put_back_as_a_whole_for_its_own(
    jobs: JobQueue, worker: StepWorker
) -> None:
    job, folder = _stopped_job(jobs, worker)
    jobs.delete(job)
    earlier = jobs.client.getset(jobs.keys.namespace_id(), "fresh")
    jobs.client.sadd(jobs.keys.heirs(), earlier)  # type: ignore[arg-type]
    worker.rooms.collector.collect()
    jobs.client.sadd(jobs.keys.collectable(), f"{earlier.decode()}@another")  # type: ignore[union-attr]
    worker.rooms.collector.collect()
    assert folder.exists(), "perhaps this job is one of those that are still to be put back"

    jobs.client.sadd(jobs.keys.collectable(), f"{earlier.decode()}@dir")  # type: ignore[union-attr]
    worker.rooms.collector.collect()
    assert not folder.exists()


def test_gc_never_touches_a_job_that_runs_here(jobs: JobQueue, worker: StepWorker) -> None:
    job = jobs.submit()
    worker.claim()
    worker.decode(9)
    worker.save()
    jobs.delete(job)
    worker.rooms.collector.collect()

    assert (worker.settings.checkpoints_dir / job).exists()


def test_gc_leaves_alone_what_it_cannot_read(jobs: JobQueue, worker: StepWorker) -> None:
    job, folder = _stopped_job(jobs, worker)
    jobs.client.delete(jobs.keys.job(job))
    for path in folder.iterdir():
        path.write_bytes(b"not a checkpoint")
    worker.rooms.collector.collect()
    assert list(folder.glob("*.log"))

    jobs.client.zadd(jobs.keys.removed(), {job: time.time()})
    worker.rooms.collector.collect()
    assert not folder.exists(), "Redis remembers that it removed the job"


def test_a_checkpoint_folder_that_cannot_be_listed_only_delays_gc(
    jobs: JobQueue, worker: StepWorker
) -> None:
    worker.settings.checkpoints_dir.write_text("a file where the folder should be")
    worker.rooms.collector.collect()


# -- announcements ---------------------------------------------------------------------


def test_more_jobs_than_one_script_takes_expire_in_one_round(
    jobs: JobQueue, worker: StepWorker
) -> None:
    for _ in range(120):
        jobs.submit(retention="0.0")
        jobs.scripts.finish(jobs.take().fence, state="completed")
    worker.rooms.housekeeper.chores()

    assert jobs.client.zcard(jobs.keys.jobs()) == 0


def test_workers_that_have_been_silent_for_a_day_are_forgotten(
    jobs: JobQueue, worker: StepWorker
) -> None:
    from tenuto_client import WorkerInfo, pack_announcement, unpack_worker

    now = float(jobs.client.time()[0])  # type: ignore[index]
    for name, age in (("old", 90_000), ("young", 80_000)):
        info = WorkerInfo(name, ("tiny",), 1, 0, started_at=0.0, seen_at=now - age)
        jobs.client.hset(jobs.keys.workers(), mapping={name: pack_announcement(info)})
    worker.rooms.housekeeper.chores()
    known = jobs.client.hgetall(jobs.keys.workers())

    assert set(known) == {b"young", b"host-dir-0"}  # type: ignore[arg-type]
    me = unpack_worker("host-dir-0", known[b"host-dir-0"])  # type: ignore[index]
    assert (me.models, me.slots, me.running) == (("tiny",), 2, 0)
    assert abs(me.seen_at - now) < 60


def test_an_emptied_redis_gets_a_new_namespace_id_and_the_models_again(
    jobs: JobQueue, worker: StepWorker
) -> None:
    seen = {jobs.client.get(jobs.keys.namespace_id())}
    for _ in range(3):
        jobs.client.delete(jobs.keys.models(), jobs.keys.namespace_id())
        worker.rooms.housekeeper.chores()
        seen.add(jobs.client.get(jobs.keys.namespace_id()))

    assert len(seen) == 4, "with an id from before, what was lost would pass for deleted"
    assert jobs.client.get(jobs.keys.namespace_id()).decode() == worker.rooms._namespace.id  # type: ignore[union-attr]
    assert jobs.client.hexists(jobs.keys.models(), "tiny")


def test_a_worker_keeps_the_jobs_that_its_emptied_redis_lost_and_says_so(
    jobs: JobQueue, worker: StepWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = _stopped_job(jobs, worker)
    for key in jobs.client.scan_iter(f"{jobs.keys.namespace}*"):
        jobs.client.delete(key)
    worker.rooms.housekeeper.chores()
    for _ in range(2):
        worker.rooms.collector.collect()

    assert list(folder.glob("*.log"))
    assert capsys.readouterr().out.count("redis lost jobs that are on disk") == 1


def test_a_job_that_redis_lost_but_never_removed_is_kept_for_a_day(
    jobs: JobQueue, worker: StepWorker
) -> None:
    """A server that was put back to an earlier state has the same namespace id."""
    job, folder = _stopped_job(jobs, worker)
    jobs.client.delete(jobs.keys.job(job), jobs.keys.stream(job))
    worker.rooms.collector.collect()
    assert list(folder.glob("*.log"))

    yesterday = time.time() - 25 * 3600
    for path in (*folder.iterdir(), folder):
        os.utime(path, (yesterday, yesterday))
    worker.rooms.collector.collect()
    assert not folder.exists()
