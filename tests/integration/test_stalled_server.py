"""A server that stands still for longer than a lease costs nobody a job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from job_queue import JobQueue
from servers import RealServer
from step_worker import StepWorker
from tenuto_worker._errors import RedisAway
from tiny_models import build_tiny_model
from workers import poll_until


def test_an_outage_that_only_another_thread_has_seen_puts_off_the_reaping(
    server: RealServer, tmp_path: Path
) -> None:
    jobs = JobQueue(server.url, "tenuto:")
    model = build_tiny_model(tmp_path / "model")
    job = jobs.submit()
    with StepWorker(server.url, "tenuto:", model, tmp_path / "d", lease_seconds=0.5) as worker:
        keeper = worker.rooms.housekeeper

        def after_a_round(found: Callable[[], bool]) -> bool:
            keeper.round()
            return found()

        poll_until(lambda: after_a_round(keeper._may_reap), "contact long enough")
        jobs.take()
        jobs.client.delete(jobs.keys.lease(job))
        with pytest.raises(RedisAway):
            worker.rooms._outage.attempt(_fail)
        keeper.round()
        assert jobs.state(job) == "running"
        poll_until(lambda: after_a_round(lambda: jobs.state(job) == "queued"), "the reaping")
    jobs.close()


def _fail() -> None:
    raise redis.ConnectionError("cut")


@pytest.mark.parametrize("stall", [1.0, 2.0])
def test_leases_that_ran_out_while_the_server_stood_still_are_not_reaped_at_once(
    stall: float, server: RealServer, tmp_path: Path
) -> None:
    jobs = JobQueue(server.url, "tenuto:")
    model = build_tiny_model(tmp_path / "model")
    job = jobs.submit()
    with StepWorker(server.url, "tenuto:", model, tmp_path / "d", lease_seconds=0.5) as worker:
        claim = jobs.take()
        keeper = worker.rooms.housekeeper

        def may_reap() -> bool:
            jobs.scripts.renew(
                claim.fence, holder="owner", lease_ms=500, phase="decode", done=0, total=0
            )
            keeper.round()
            return keeper._may_reap()

        def is_reaped() -> bool:
            keeper.round()
            return jobs.state(job) == "queued"

        poll_until(may_reap, "contact long enough")
        server.pause()
        waker = threading.Timer(stall, server.resume)
        waker.start()
        # The first thing that the server does when it goes on is to answer us.
        keeper.round()
        waker.join()
        assert not jobs.client.exists(jobs.keys.lease(job))
        assert jobs.state(job) == "running"
        # Nor is it lost: its owner is silent for one lease more.
        poll_until(is_reaped, "the reaping")
    jobs.close()
