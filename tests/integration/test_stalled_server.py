"""A server that stands still for longer than a lease costs nobody a job."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from job_queue import JobQueue
from servers import RealServer
from step_worker import StepWorker
from tiny_models import build_tiny_model
from workers import poll_until


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
