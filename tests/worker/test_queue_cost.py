"""What a look at a long queue costs Redis, which does nothing else meanwhile: commands counted."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from job_queue import DEFAULTS, HOLDER, MODEL, JobQueue, story
from servers import RealServer
from tenuto_client import JobSpec, pack_spec, script_source, ticket_payload
from tenuto_worker._answers import Yield
from tenuto_worker._calls import depth_call, head_call, preempt_call

TENANTS = 3000
MOST = 3000
"""Commands within one call: a few for each of 400 jobs."""


@pytest.fixture(scope="module")
def queue() -> Iterator[JobQueue]:
    """A job of low priority runs here, and each of very many tenants has one that waits."""
    with RealServer(appendfsync="no") as server:
        jobs = JobQueue(server.url, "t:")
        low = jobs.submit(priority=-1)
        jobs.scripts.publish(jobs.take().fence, story(1, 1))
        jobs.backdate(low, "claimed_at", 100)
        submit: Any = jobs.client.script_load(script_source("tenuto_client", "submit"))
        spec = pack_spec(JobSpec(MODEL, **DEFAULTS))
        with jobs.client.pipeline(transaction=False) as pipe:
            for n in range(TENANTS):
                words: list[Any] = [
                    "t:",
                    ticket_payload(0),
                    secrets.token_hex(8),
                    MODEL,
                    f"t{n}",
                    n % 3,
                    spec,
                    "100",
                ]
                words += ["", "", "hash", DEFAULTS["max_tokens"], "{}", 0]
                pipe.evalsha(submit, 0, *words)
            pipe.execute()
        yield jobs
        jobs.close()


def to_make_way(jobs: JobQueue, **terms: Any) -> Yield | None:
    """What this worker is told, to which all that waits is too much."""
    values: dict[str, Any] = {"holder": HOLDER, "fingerprint": "f", "reach": "dir", "hold_s": 5.0}
    values |= {"exact_wait_s": 30.0, "patience_s": 0.0, "max_tokens": 1}
    return jobs.scripts.run(preempt_call(MODEL, **values | terms))


def head(jobs: JobQueue) -> object:
    own: dict[str, Any] = {"fingerprint": "f", "reach": "dir", "exact_wait_s": 30.0}
    return jobs.scripts.run(head_call(MODEL, **own, max_tokens=1))


CALLS: dict[str, Callable[[JobQueue], object]] = {
    "preempt": to_make_way,
    "claim": lambda jobs: jobs.claim(max_tokens=1, alone=False),
    "head": head,
    "depth": lambda jobs: jobs.scripts.run(depth_call(MODEL)),
    "mend_tickets": lambda jobs: jobs.scripts.mend_tickets(MODEL),
}


def commands(jobs: JobQueue) -> int:
    stats: Any = jobs.client.info("commandstats")
    return sum(each["calls"] for each in stats.values())


@pytest.mark.parametrize("call", CALLS)
def test_a_call_looks_at_some_hundred_jobs_however_many_tenants_wait(
    queue: JobQueue, call: str
) -> None:
    for _ in range(10):  # further down each time
        before = commands(queue)
        CALLS[call](queue)
        assert commands(queue) - before < MOST


def test_the_depth_is_that_of_all_priorities(queue: JobQueue) -> None:
    assert queue.scripts.run(depth_call(MODEL)).jobs == TENANTS
    oldest = queue.submit(priority=-9)
    queue.backdate(oldest, "queued_at", 500)
    assert queue.scripts.run(depth_call(MODEL)).oldest_seconds > 499
    queue.delete(oldest)


def test_a_job_behind_very_many_others_gets_its_slot_in_the_end(queue: JobQueue) -> None:
    running: Any = queue.client.zrange(queue.keys.running(), 0, -1)
    (low,) = running
    small = queue.submit(priority=0, tenant="last", max_tokens=1)
    asked = [to_make_way(queue) for _ in range(TENANTS // 200 + 2)]
    assert [each for each in asked if each] == [Yield(low.decode(), small)]
    queue.delete(small)


def test_jobs_of_one_tenant_that_this_worker_must_leave_hide_no_other(jobs: JobQueue) -> None:
    low = jobs.submit(priority=-1)
    jobs.scripts.publish(jobs.take().fence, story(1, 1))
    jobs.backdate(low, "claimed_at", 100)
    for _ in range(250):
        jobs.submit()
    small = jobs.submit(max_tokens=1)
    asked = [to_make_way(jobs) for _ in range(2)]
    assert [each for each in asked if each] == [Yield(low, small)]
