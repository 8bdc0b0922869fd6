"""What the queue's scripts cost by how many jobs are queued: time of a call, and of Redis in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from job_queue import JobQueue
from servers import RealServer

_TENANTS = 20
_CALLS = 50


@dataclass(frozen=True, slots=True)
class QueueCost:
    """At one depth; milliseconds.

    Attributes:
        queued: how many jobs were queued.
        submit, claim, mend: median time of a call, as its caller sees it.
        claim_redis, mend_redis, mend_empty_redis: time that Redis does nothing else for in one
            call; `mend_empty` is the longest there is, where all tickets are lost.
        bytes: memory of Redis for each queued job.
    """

    queued: int
    submit: float
    claim: float
    claim_redis: float
    mend: float
    mend_redis: float
    mend_empty_redis: float
    bytes: float


def measure_queue(depths: list[int]) -> list[QueueCost]:
    """Fill a queue of its own, 20 tenants and 3 priorities, and measure at each depth."""
    with RealServer() as server:
        jobs = JobQueue(server.url, "tenuto:")
        try:
            empty, costs, queued = _memory(jobs), [], 0
            for depth in depths:
                submit = [_submit(jobs, number) for number in range(queued, depth)]
                bytes_each = (_memory(jobs) - empty) / depth
                costs.append(_cost(jobs, depth, submit[-500:], bytes_each))
                queued = depth - _CALLS - 1
            return costs
        finally:
            jobs.close()


def _submit(jobs: JobQueue, number: int) -> float:
    began = time.perf_counter()
    jobs.submit(tenant=f"tenant-{number % _TENANTS}", priority=number % 3 - 1)
    return 1000 * (time.perf_counter() - began)


def _cost(jobs: JobQueue, depth: int, submits: list[float], bytes_each: float) -> QueueCost:
    jobs.scripts.mend_tickets(jobs.model)  # brings the script, too
    mend, mend_redis = _timed(jobs, lambda: jobs.scripts.mend_tickets(jobs.model), 10)
    jobs.client.delete(jobs.keys.tickets(jobs.model))
    _, mend_empty = _timed(jobs, lambda: jobs.scripts.mend_tickets(jobs.model), 1)
    while jobs.scripts.mend_tickets(jobs.model):
        pass
    jobs.take()
    claim, claim_redis = _timed(jobs, jobs.take, _CALLS)
    return QueueCost(
        queued=depth,
        submit=statistics.median(submits),
        claim=claim,
        claim_redis=claim_redis,
        mend=mend,
        mend_redis=mend_redis,
        mend_empty_redis=mend_empty,
        bytes=bytes_each,
    )


def _timed(jobs: JobQueue, call: Callable[[], object], times: int) -> tuple[float, float]:
    """Median of a call, and of Redis in it; milliseconds."""
    jobs.client.config_resetstat()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(1000 * (time.perf_counter() - began))
    stats: Any = jobs.client.info("commandstats")
    return statistics.median(taken), stats["cmdstat_evalsha"]["usec"] / times / 1000


def _memory(jobs: JobQueue) -> int:
    facts: Any = jobs.client.info("memory")
    return int(facts["used_memory"])
