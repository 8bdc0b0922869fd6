"""Counts, memory account and time limits stay right over every move of a job."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from job_queue import HOLDER, MODEL, JobQueue, story
from tenuto_worker._answers import Fence, Renewed, Yield
from tenuto_worker._calls import preempt_call


def counts(jobs: JobQueue, model: str = MODEL) -> dict[str, int]:
    """What `queued:<model>` says."""
    found: Any = jobs.client.hgetall(jobs.keys.queued(model))
    return {field.decode(): int(count) for field, count in found.items()}


def used(jobs: JobQueue) -> int:
    found: Any = jobs.client.hget(jobs.keys.usage(), "bytes")
    return int(found or 0)


def due(jobs: JobQueue) -> dict[str, float]:
    found: Any = jobs.client.zrange(jobs.keys.due(), 0, -1, withscores=True)
    return {job.decode(): at for job, at in found}


def move_clock(jobs: JobQueue, job: str, seconds: float, *fields: str) -> None:
    """As if so many seconds had passed since these fields were written."""
    for field in fields:
        value = float(jobs.job(job)[field])
        jobs.client.hset(jobs.keys.job(job), field, f"{value - seconds:.3f}")


def renew(jobs: JobQueue, fence: Fence) -> Renewed:
    return jobs.scripts.renew(
        fence, holder=HOLDER, lease_ms=60_000, phase="decode", done=0, total=1
    )


def check(jobs: JobQueue, ids: list[str]) -> None:
    """Counts equal the lanes, usage the sum of what is held, and only queued jobs are due."""
    found = {job: jobs.job(job) for job in ids}
    tenants = Counter(
        fields["tenant"] for fields in found.values() if fields.get("state") == "queued"
    )
    assert counts(jobs) == ({"*": tenants.total(), **tenants} if tenants else {})
    lanes: Any = jobs.client.zrange(jobs.keys.queue(MODEL), 0, -1)
    client: Any = jobs.client
    in_lanes = [client.zcard(jobs.keys.lane(MODEL, lane.decode())) for lane in lanes]
    assert sum(in_lanes) == tenants.total()
    assert used(jobs) == sum(int(fields.get("held", 0)) for fields in found.values())
    assert all(int(fields["held"]) > 0 for fields in found.values() if fields)
    assert set(due(jobs)) == {
        job
        for job, fields in found.items()
        if fields.get("state") == "queued" and ("deadline" in fields or "queue_until" in fields)
    }


def moves(jobs: JobQueue, fences: list[Fence], ids: list[str]) -> list[Callable[[], object]]:
    """Every move there is, each of a random job or attempt."""
    draw = random.choice
    scripts = jobs.scripts

    def of_attempt(act: Callable[[Fence], object]) -> Callable[[], object]:
        return lambda: act(draw(fences)) if fences else None

    def claim() -> None:
        if (claim := jobs.claim()) is not None:
            fences.append(claim.fence)

    def publish(fence: Fence) -> None:
        at = int(jobs.job(fence.job_id).get("tokens", 0))
        scripts.publish(fence, story(at + 1, at + 2))

    def bind(fence: Fence) -> None:
        scripts.bind(
            fence,
            prompt_ids=b"\x91" * random.randrange(1, 99),
            prompt_tokens=1,
            fingerprint="f",
            geometry=b"\x80",
            reach="dir",
            exactness="exact",
            exactness_reason=None,
        )

    def new() -> None:
        far = str(time.time() + 1e6)
        options: dict[str, Any] = draw([{}, {"deadline": far}, {"tenant": "b"}, {"priority": 5}])
        ids.append(jobs.submit(max_tokens=random.randrange(1, 50), **options))

    return [
        new,
        claim,
        claim,
        of_attempt(publish),
        of_attempt(bind),
        of_attempt(lambda fence: scripts.release(fence, draw(["drain", "preempt", "error"]), "x")),
        of_attempt(lambda fence: scripts.finish(fence, state=draw(["completed", "failed"]))),
        of_attempt(lambda fence: scripts.finish(fence, state="cancelled")),
        of_attempt(lambda fence: jobs.lose_lease(fence.job_id)),
        lambda: scripts.reap(draw(ids)) if ids else None,
        lambda: scripts.take_back(draw(ids), HOLDER) if ids else None,
        lambda: jobs.cancel(draw(ids)) if ids else None,
        lambda: jobs.resume(draw(ids)) if ids else None,
        lambda: jobs.delete(draw(ids)) if ids else None,
        lambda: scripts.mend_tickets(MODEL),
        lambda: scripts.sweep(),
        lambda: scripts.expire(),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_counts_and_account_are_right_after_any_moves(jobs: JobQueue, seed: int) -> None:
    random.seed(seed)
    fences: list[Fence] = []
    ids: list[str] = []
    every = moves(jobs, fences, ids)
    for _ in range(120):
        random.choice(every)()
        check(jobs, ids)
    for job in ids:
        jobs.delete(job)
    assert (counts(jobs), used(jobs), due(jobs)) == ({}, 0, {})
    assert not jobs.client.exists(jobs.keys.usage(), jobs.keys.due(), jobs.keys.queued(MODEL))


def test_wrong_counts_are_put_right_with_the_tickets(jobs: JobQueue) -> None:
    for tenant in ("a", "a", "b"):
        jobs.submit(tenant=tenant)
    jobs.client.delete(jobs.keys.queued(MODEL))
    jobs.client.hset(jobs.keys.queued(MODEL), "gone", "7")
    jobs.scripts.mend_tickets(MODEL)
    assert counts(jobs) == {"*": 3, "a": 2, "b": 1}


def test_an_ended_job_holds_what_it_wrote_and_a_resumed_one_what_it_may_come_to(
    jobs: JobQueue,
) -> None:
    job = jobs.submit(max_tokens=1000)
    at_first = used(jobs)
    fence = jobs.take().fence
    jobs.scripts.publish(fence, story(1, 3))
    assert used(jobs) == at_first
    jobs.cancel(job)
    jobs.scripts.finish(fence, state="cancelled")
    ended = used(jobs)
    assert ended < at_first - 50 * 1000
    written = int(jobs.job(job)["written"])
    assert written > 3 * 10
    jobs.resume(job)
    assert used(jobs) > ended + 50 * 1000
    assert int(jobs.job(job)["held"]) == used(jobs)


def test_a_job_holds_the_ids_of_its_prompt_once_they_are_known(jobs: JobQueue) -> None:
    jobs.submit()
    before = used(jobs)
    fence = jobs.take().fence
    jobs.scripts.bind(
        fence,
        prompt_ids=b"\x91" * 50_000,
        prompt_tokens=50_000,
        fingerprint="f",
        geometry=b"\x80",
        reach="dir",
        exactness="exact",
        exactness_reason=None,
    )
    assert used(jobs) > before + 49_000
    jobs.scripts.release(fence, "drain")
    assert used(jobs) > before + 49_000


# -- time in the queue -------------------------------------------------------------------


def queue_for(jobs: JobQueue, seconds: float, **options: Any) -> str:
    """A job that may wait so long, as submit makes it."""
    job = jobs.submit(hash_fields={"queue_ttl": seconds}, **options)
    assert due(jobs)[job] == pytest.approx(time.time() + seconds, abs=5)
    return job


def let_it_pass(jobs: JobQueue, job: str) -> None:
    """As if its time in the queue were over."""
    jobs.client.hset(jobs.keys.job(job), "queue_until", f"{time.time() - 1:.3f}")
    jobs.client.zadd(jobs.keys.due(), {job: time.time() - 1})


@pytest.mark.parametrize("who", ["sweep", "claim"])
def test_a_job_that_waited_too_long_fails_and_says_so(jobs: JobQueue, who: str) -> None:
    job = queue_for(jobs, 100)
    assert jobs.scripts.sweep() == []
    let_it_pass(jobs, job)
    if who == "sweep":
        assert jobs.scripts.sweep() == [job]
    else:
        assert jobs.claim() is None
    fields = jobs.job(job)
    assert (fields["state"], jobs.tickets()) == ("failed", [])
    assert fields["error"] == "queue_ttl: no worker had started the job after 100 s"
    assert (counts(jobs), due(jobs)) == ({}, {})


def test_the_sweep_ends_jobs_of_models_that_nobody_serves(jobs: JobQueue) -> None:
    other = JobQueue.__new__(JobQueue)
    other.__dict__.update(jobs.__dict__, model="nobody-serves-it")
    jobs.client.hset(jobs.keys.models(), "nobody-serves-it", "")
    late = [other.submit(deadline=str(time.time() + 100)) for _ in range(3)]
    kept = other.submit(deadline=str(time.time() + 100))
    for job in late:
        jobs.client.hset(jobs.keys.job(job), "deadline", f"{time.time() - 1:.3f}")
        jobs.client.zadd(jobs.keys.due(), {job: time.time() - 1})
    assert sorted(jobs.scripts.sweep(2) + jobs.scripts.sweep(2)) == sorted(late)
    assert [jobs.state(job) for job in (*late, kept)] == ["failed"] * 3 + ["queued"]
    assert counts(jobs, "nobody-serves-it") == {"*": 1, "default": 1}
    says = r"deadline: the job was not done [\d.]+ s after it was submitted"
    assert re.fullmatch(says, jobs.job(late[0])["error"])


def to_make_way(jobs: JobQueue) -> Yield | None:
    """What this worker is told when it asks."""
    call = preempt_call(
        MODEL,
        holder=HOLDER,
        fingerprint="f",
        reach="dir",
        exact_wait_s=30.0,
        patience_s=2.0,
        hold_s=5.0,
    )
    return jobs.scripts.run(call)


@pytest.mark.parametrize("is_late", [True, False])
def test_nothing_makes_way_for_what_is_too_late(jobs: JobQueue, is_late: bool) -> None:
    low = jobs.submit()
    jobs.scripts.publish(run_for(jobs, 6), story(1, 1))
    high = queue_for(jobs, 100, priority=1)
    move_clock(jobs, high, 3, "queued_at")
    move_clock(jobs, high, 101 if is_late else 3, "queue_until")
    assert to_make_way(jobs) == (None if is_late else Yield(low, high))


@pytest.mark.parametrize("is_late", [True, False])
def test_no_worker_empties_itself_for_a_suspect_that_is_too_late(
    jobs: JobQueue, is_late: bool
) -> None:
    suspect = jobs.submit(deadline=f"{time.time() + 100:.3f}")
    jobs.take()
    assert jobs.scripts.take_back(suspect, HOLDER, crashed=True) == "queued"
    move_clock(jobs, suspect, 31, "queued_at")
    move_clock(jobs, suspect, 101 if is_late else 31, "deadline")
    assert to_make_way(jobs) == (None if is_late else Yield(None, suspect))


def test_once_started_a_job_may_wait_as_long_as_it_must(jobs: JobQueue) -> None:
    job = queue_for(jobs, 100)
    fence = jobs.take().fence
    assert due(jobs) == {}
    jobs.scripts.release(fence, "drain")
    assert "queue_until" not in jobs.job(job)
    assert (jobs.state(job), due(jobs)) == ("queued", {})


def test_a_resume_after_the_time_in_the_queue_drops_it_and_before_keeps_it(jobs: JobQueue) -> None:
    late, early = queue_for(jobs, 100), queue_for(jobs, 100)
    let_it_pass(jobs, late)
    jobs.scripts.sweep()
    jobs.cancel(early)
    assert due(jobs) == {}
    assert (jobs.resume(late), jobs.resume(early)) == ("resumed", "resumed")
    assert (jobs.state(late), jobs.state(early)) == ("queued", "queued")
    assert set(due(jobs)) == {early}


def test_what_is_due_is_the_earlier_of_deadline_and_time_in_the_queue(jobs: JobQueue) -> None:
    at = time.time()
    sooner = jobs.submit(hash_fields={"queue_ttl": 50}, deadline=str(at + 100))
    later = jobs.submit(hash_fields={"queue_ttl": 200}, deadline=str(at + 100))
    assert due(jobs)[sooner] == pytest.approx(at + 50, abs=5)
    assert due(jobs)[later] == pytest.approx(at + 100, abs=0.01)


# -- run time ----------------------------------------------------------------------------


def run_for(jobs: JobQueue, seconds: float) -> Fence:
    """An attempt that was claimed so long ago."""
    fence = jobs.take().fence
    move_clock(jobs, fence.job_id, seconds, "claimed_at")
    return fence


def test_run_time_is_that_of_all_attempts(jobs: JobQueue) -> None:
    job = jobs.submit(hash_fields={"max_runtime": 100})
    for spent in (30, 60):
        fence = run_for(jobs, 30)
        assert not renew(jobs, fence).runtime_over
        jobs.scripts.release(fence, "drain")
        assert float(jobs.job(job)["ran"]) == pytest.approx(spent, abs=2)
    fence = run_for(jobs, 39)
    assert not renew(jobs, fence).runtime_over
    move_clock(jobs, job, 2, "claimed_at")
    assert renew(jobs, fence).runtime_over
    assert not renew(jobs, fence).deadline_passed


@pytest.mark.parametrize("how", ["drain", "error", "reap", "take_back"])
def test_an_attempt_that_ends_after_the_run_time_ends_the_job(jobs: JobQueue, how: str) -> None:
    job = jobs.submit(hash_fields={"max_runtime": 100})
    fence = run_for(jobs, 101)
    if how == "reap":
        jobs.lose_lease(job)
        assert jobs.scripts.reap(job) == "failed"
    elif how == "take_back":
        assert jobs.scripts.take_back(job, HOLDER) == "failed"
    else:
        assert jobs.scripts.release(fence, how, "x") == "failed"
    says = r"max_runtime: the job ran for 10[12](\.\d)? s in all, it may for 100 s"
    assert re.fullmatch(says, jobs.job(job)["error"])
    assert (jobs.claim(), counts(jobs)) == (None, {})


def test_a_resume_gives_all_the_run_time_anew_when_it_was_used_up(jobs: JobQueue) -> None:
    job = jobs.submit(hash_fields={"max_runtime": 100})
    jobs.scripts.finish(run_for(jobs, 101), state="failed", error="max_runtime: x")
    assert jobs.resume(job) == "resumed"
    assert (jobs.state(job), jobs.job(job)["ran"]) == ("queued", "0")
    assert not renew(jobs, run_for(jobs, 90)).runtime_over


def test_a_resume_leaves_the_run_time_that_is_left(jobs: JobQueue) -> None:
    job = jobs.submit(hash_fields={"max_runtime": 100})
    fence = run_for(jobs, 60)
    jobs.cancel(job)
    jobs.scripts.finish(fence, state="cancelled")
    jobs.resume(job)
    assert renew(jobs, run_for(jobs, 50)).runtime_over


def test_waiting_is_no_run_time(jobs: JobQueue) -> None:
    job = jobs.submit(hash_fields={"max_runtime": 100})
    jobs.scripts.release(run_for(jobs, 10), "drain")
    move_clock(jobs, job, 1000, "queued_at", "claimed_at")
    jobs.cancel(job)
    jobs.resume(job)
    assert float(jobs.job(job)["ran"]) == pytest.approx(10, abs=2)
    assert not renew(jobs, jobs.take().fence).runtime_over
