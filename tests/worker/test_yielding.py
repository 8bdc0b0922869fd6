"""Jobs of a higher priority, and jobs on which a worker died: what makes way for them, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from job_queue import JobQueue
from step_worker import MODEL, StepWorker
from tenuto_client import Token
from tenuto_engine import GenerationOptions
from tenuto_worker._run import Run, Stop

Start = Callable[..., StepWorker]
NOW: dict[str, Any] = {"preempt_wait_seconds": 0.0, "preempt_hold_seconds": 0.0}


@pytest.fixture
def start(jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts workers on one queue and one data dir; they have one slot unless told otherwise."""
    workers = []

    def begin(name: str = "w0", **settings: Any) -> StepWorker:
        values = {"slots": 1, **NOW, **settings}
        worker = StepWorker(
            redis_url, jobs.keys.namespace, tiny_model, tmp_path / "data", name=name, **values
        )
        workers.append(worker)
        return worker

    yield begin
    for worker in workers:
        worker.rooms.writer.close(10)


def alone(worker: StepWorker, **options: Any) -> list[Token]:
    """The tokens of a run by the engine alone."""
    options = {"max_tokens": 20, "seed": 7, "ignore_eos": True} | options
    prompt = worker.engine.encode_prompt("Tell me.")
    generation = worker.engine.generate(prompt, GenerationOptions(**options))
    return [Token(t.token, t.index, t.text, t.logprob, t.top_logprobs) for t in generation]


def turn(worker: StepWorker) -> None:
    """One round of the claimer, and of the preparer for what it took."""
    before = set(worker.runs)
    worker.rooms.claimer.turn()
    for _ in set(worker.runs) - before:
        worker.rooms.preparer.turn()


def begin(worker: StepWorker, tokens: int = 1) -> Run:
    """Take a job, and publish so many tokens of it."""
    turn(worker)
    worker.decode(tokens)
    worker.publish()
    return worker.run


def asked(worker: StepWorker) -> list[str]:
    """The jobs that are to make way."""
    return [run.job_id for run in worker.runs if run.stop is Stop.PREEMPT]


def is_apart(run: Run) -> bool:
    return run.apart


def kill(jobs: JobQueue, worker: StepWorker) -> None:
    """The worker died by itself, and its next incarnation took its jobs back."""
    for run in worker.runs:
        holder = jobs.job(run.job_id)["worker"]
        assert jobs.scripts.take_back(run.job_id, holder, crashed=True) == "queued"


# -- priorities ------------------------------------------------------------------------


def test_a_running_job_makes_way_for_a_higher_priority_and_goes_on_exactly(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    low = jobs.submit()
    begin(worker, 5)
    high = jobs.submit(priority=1)
    turn(worker)
    assert asked(worker) == [low]
    worker.settle()
    assert jobs.field(low, "state") == "queued"
    assert jobs.field(low, "preemptions") == "1"
    turn(worker)
    assert worker.run.job_id == high
    worker.finish()
    turn(worker)
    # From its last checkpoint: nothing is computed again.
    assert worker.run.durable >= 5
    worker.finish()
    for job in (low, high):
        assert jobs.tokens(job) == alone(worker)
        assert jobs.field(job, "state") == "completed"
    assert jobs.field(low, "stalls") == "0"


@pytest.mark.parametrize("priority", [-1, 0])
def test_nothing_makes_way_for_the_same_or_a_lower_priority(
    jobs: JobQueue, start: Start, priority: int
) -> None:
    worker = start()
    jobs.submit()
    begin(worker)
    jobs.submit(priority=priority)
    turn(worker)
    assert asked(worker) == []


def test_the_least_important_makes_way_and_of_these_the_latest(
    jobs: JobQueue, start: Start
) -> None:
    worker = start(slots=3)
    for priority in (0, -5, -5):
        jobs.submit(priority=priority)
        begin_one_more(worker)
    jobs.submit(priority=1)
    turn(worker)
    latest = max(
        (run for run in worker.runs if jobs.field(run.job_id, "priority") == "-5"),
        key=lambda run: float(jobs.job(run.job_id)["claimed_at"]),
    )
    assert asked(worker) == [latest.job_id]


def begin_one_more(worker: StepWorker) -> None:
    turn(worker)
    while any(not run.tokens for run in worker.runs):
        worker.rooms.decoder.turn()
    worker.publish()


def test_one_job_makes_way_for_one_job_over_all_workers(jobs: JobQueue, start: Start) -> None:
    first, second = start("w0"), start("w1")
    jobs.submit(priority=-1)
    begin(first)
    lowest = jobs.submit(priority=-2)
    begin(second)
    jobs.submit(priority=5)
    turn(first)  # not the one with the lowest
    assert asked(first) == []
    turn(second)
    turn(first)
    turn(second)
    assert asked(first) == []
    assert asked(second) == [lowest]


def test_what_may_not_make_way_yet_gives_no_slot_of_the_same_priority(
    jobs: JobQueue, start: Start
) -> None:
    worker = start(slots=2)
    jobs.submit(priority=5)
    begin_one_more(worker)
    jobs.submit(priority=-1)
    turn(worker)  # it has no token yet
    jobs.submit(priority=5)
    turn(worker)
    assert asked(worker) == []


def test_where_the_worker_of_the_lowest_does_not_act_another_makes_way(
    jobs: JobQueue, start: Start
) -> None:
    first, absent = start("w0"), start("w1")
    job = jobs.submit(priority=-1)
    begin(first)
    jobs.submit(priority=-2)
    begin(absent)
    high = jobs.submit(priority=5)
    jobs.backdate(high, "queued_at", 3.5)
    turn(first)
    assert asked(first) == [job]


def test_each_waiting_job_gets_one_slot(jobs: JobQueue, start: Start) -> None:
    worker = start(slots=3)
    for _ in range(3):
        jobs.submit()
        begin_one_more(worker)
    for _ in range(2):
        jobs.submit(priority=9)
    turn(worker)
    turn(worker)
    assert len(asked(worker)) == 2


def test_a_job_waits_a_while_before_anything_makes_way(jobs: JobQueue, start: Start) -> None:
    worker = start(preempt_wait_seconds=2.0)
    low = jobs.submit()
    begin(worker)
    high = jobs.submit(priority=1)
    turn(worker)
    assert asked(worker) == []
    jobs.backdate(high, "queued_at", 2.5)
    turn(worker)
    assert asked(worker) == [low]


def test_an_attempt_goes_on_for_a_while_and_longer_each_time_it_made_way(
    jobs: JobQueue, start: Start
) -> None:
    worker = start(preempt_hold_seconds=5.0)
    low = jobs.submit(max_tokens=200)
    begin(worker)
    jobs.client.hset(jobs.keys.job(low), "preemptions", "2")
    jobs.submit(priority=1)
    jobs.backdate(low, "claimed_at", 19)
    turn(worker)
    assert asked(worker) == []
    jobs.backdate(low, "claimed_at", 2)
    turn(worker)
    assert asked(worker) == [low]


def test_what_got_nowhere_yet_does_not_make_way(jobs: JobQueue, start: Start) -> None:
    worker = start()
    jobs.submit()
    turn(worker)
    jobs.submit(priority=1)
    turn(worker)
    assert asked(worker) == []


def test_with_a_free_slot_nothing_makes_way(jobs: JobQueue, start: Start) -> None:
    worker = start(slots=2)
    jobs.submit()
    begin(worker)
    jobs.submit(priority=1)
    turn(worker)
    assert len(worker.runs) == 2
    assert asked(worker) == []


def test_nothing_makes_way_for_what_this_worker_may_not_take(jobs: JobQueue, start: Start) -> None:
    worker = start(max_tokens=50)
    jobs.submit()
    begin(worker)
    jobs.submit(priority=1, max_tokens=100)
    turn(worker)
    assert asked(worker) == []


def test_jobs_that_alternate_do_not_thrash(jobs: JobQueue, start: Start) -> None:
    """Many short jobs of a higher priority, one after the other: the low one gets its time."""
    worker = start(preempt_hold_seconds=5.0)
    low = jobs.submit(max_tokens=400)
    begin(worker)
    for _ in range(60):  # as many seconds, of which each brings another important job
        jobs.backdate(jobs.submit(priority=1, max_tokens=2), "queued_at", 3)
        jobs.backdate(low, "claimed_at", 1)
        turn(worker)
        if asked(worker):
            worker.settle()
            turn(worker)
        while worker.run.job_id != low:
            worker.finish()
            turn(worker)
        worker.decode(1)
        worker.publish()
    # After 5 seconds, 10, 20 and 40: no more often than that.
    assert jobs.field(low, "preemptions") in ("2", "3")


# -- suspects --------------------------------------------------------------------------


def test_after_a_crash_the_jobs_run_one_by_one_until_trusted_and_then_together(
    jobs: JobQueue, start: Start
) -> None:
    worker = start(slots=2)
    ids = {jobs.submit(max_tokens=120) for _ in range(2)}
    begin_one_more(worker)
    begin_one_more(worker)
    kill(jobs, worker)
    again = start("w2", slots=2)
    seen = []
    for _ in range(2):
        turn(again)
        run = again.run
        assert is_apart(run)
        seen.append(run.job_id)
        assert not again.rooms.claimer.has_slot(MODEL)
        again.decode(40)
        again.publish()
        assert not is_apart(run)
        turn(again)
        again.settle()
        if len(seen) == 1:
            assert jobs.field(run.job_id, "state") == "queued"
    assert set(seen) == ids
    turn(again)
    turn(again)
    assert {run.job_id for run in again.runs} == ids
    again.finish()
    for job in ids:
        assert jobs.tokens(job) == alone(again, max_tokens=120)
        assert jobs.field(job, "exactness") == "exact"


def test_a_suspect_is_left_by_a_worker_that_runs_something(jobs: JobQueue, start: Start) -> None:
    worker, other = start("w0"), start("w1", slots=2)
    suspect = jobs.submit()
    begin(worker)
    jobs.submit(max_tokens=100)
    begin(other)
    kill(jobs, worker)
    turn(other)
    assert suspect not in {run.job_id for run in other.runs}
    assert asked(other) == []


def test_a_suspect_that_waits_for_long_empties_one_busy_worker(
    jobs: JobQueue, start: Start
) -> None:
    worker, second, third = start("w0"), start("w1", slots=2), start("w2", slots=2)
    suspect = jobs.submit()
    begin(worker)
    for busy in (second, third):
        jobs.submit(max_tokens=100)
        begin(busy)
    kill(jobs, worker)
    jobs.backdate(suspect, "queued_at", 31)
    turn(second)
    turn(third)
    assert len(asked(second)) == 1
    assert asked(third) == []
    # Nothing is taken meanwhile, though a slot is free.
    jobs.submit()
    turn(second)
    assert len(second.runs) == 1
    second.settle()
    turn(second)
    assert second.run.job_id == suspect


def test_a_worker_empties_itself_only_when_its_attempts_had_their_time_or_a_suspect_waits_too_long(
    jobs: JobQueue, start: Start
) -> None:
    worker, busy = start("w0"), start("w1", preempt_hold_seconds=5.0)
    suspect = jobs.submit()
    begin(worker)
    low = jobs.submit(max_tokens=100)
    begin(busy)
    kill(jobs, worker)
    jobs.backdate(suspect, "queued_at", 31)
    turn(busy)
    assert asked(busy) == []
    jobs.backdate(low, "claimed_at", 6)
    jobs.client.hset(jobs.keys.job(low), "preemptions", "1")
    turn(busy)
    assert asked(busy) == []
    # Nobody's time is longer than this: where something young runs always, it goes in the end.
    jobs.backdate(suspect, "queued_at", 80)
    turn(busy)
    assert asked(busy) == [low]


def test_a_worker_whose_attempts_had_their_time_empties_itself(
    jobs: JobQueue, start: Start
) -> None:
    worker, busy = start("w0"), start("w1", preempt_hold_seconds=5.0)
    suspect = jobs.submit()
    begin(worker)
    low = jobs.submit(max_tokens=100)
    begin(busy)
    kill(jobs, worker)
    jobs.backdate(suspect, "queued_at", 31)
    jobs.backdate(low, "claimed_at", 6)
    turn(busy)
    assert asked(busy) == [low]


def test_a_trusted_job_makes_no_way_for_a_suspect_that_this_worker_may_not_take(
    jobs: JobQueue, start: Start
) -> None:
    worker, other = start("w0", slots=2), start("w1", max_tokens=200)
    jobs.submit(max_tokens=150)
    begin_one_more(worker)
    jobs.submit(max_tokens=300)
    begin_one_more(worker)
    kill(jobs, worker)
    run = begin(other, 40)
    assert not is_apart(run)
    turn(other)
    assert asked(other) == []


def test_a_job_that_was_on_two_crashes_is_trusted_later(jobs: JobQueue, start: Start) -> None:
    worker = start()
    jobs.submit(max_tokens=300)
    for crashes in (1, 2):
        begin(worker, 3)
        run = worker.run
        kill(jobs, worker)
        assert jobs.field(run.job_id, "crashes") == str(crashes)
        worker = start(f"w{crashes}")
    run = begin(worker, 40)
    assert is_apart(run)
    worker.decode(100)
    worker.publish()
    assert not is_apart(run)


def test_a_lost_lease_makes_a_suspect_only_of_what_had_got_nowhere(
    jobs: JobQueue, start: Start
) -> None:
    worker = start(slots=2)
    moved = jobs.submit()
    begin(worker)
    stuck = jobs.submit()
    turn(worker)
    for job in (moved, stuck):
        jobs.client.delete(jobs.keys.lease(job))
        assert jobs.scripts.reap(job) == "queued"
    assert jobs.field(moved, "suspect") is None
    assert jobs.field(stuck, "suspect") == "0"


def test_a_worker_that_died_as_a_whole_makes_a_suspect_only_of_what_had_got_nowhere(
    jobs: JobQueue, start: Start
) -> None:
    worker = start(slots=2)
    moved = jobs.submit()
    begin(worker)
    stuck = jobs.submit()
    turn(worker)
    for job in (moved, stuck):
        assert jobs.scripts.take_back(job, "w0", crashed=False) == "queued"
    assert jobs.field(moved, "suspect") is None
    assert jobs.field(stuck, "suspect") == "0"


def test_three_times_with_an_error_each_ends_a_job_and_nothing_else_counts(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    job = jobs.submit()
    for reason in ("drain", "preempt", "memory", "limits") * 2:
        turn(worker)
        jobs.scripts.release(worker.run.fence, reason)
        worker.rooms.runs.remove(worker.run)
    assert jobs.field(job, "stalls") == "0"
    for number in range(3):
        turn(worker)
        jobs.scripts.release(worker.run.fence, "error", f"error {number}")
        worker.rooms.runs.remove(worker.run)
    assert jobs.field(job, "state") == "failed"
    error = jobs.field(job, "error")
    assert error is not None
    assert all(f"error {number}" in error for number in range(3))


# -- memory ----------------------------------------------------------------------------


def test_what_needs_much_memory_gets_its_turn_before_what_came_later(jobs: JobQueue) -> None:
    large = jobs.submit(max_tokens=500)
    small = jobs.submit(max_tokens=50)
    terms: dict[str, Any] = {"room": 100, "room_alone": 600, "alone": False, "memory_wait_s": 30.0}
    jobs.backdate(large, "queued_at", 31)
    assert [(left.job_id, left.why) for left in jobs.leave(**terms)] == [(large, "memory")]
    # Where it could never fit, it keeps nobody waiting; nor does it before its time.
    assert jobs.take(**terms | {"room_alone": 400}).fence.job_id == small
    later = jobs.submit(max_tokens=50)
    assert jobs.take(**terms | {"memory_wait_s": 60.0}).fence.job_id == later
    assert jobs.take(room=600, room_alone=600, alone=True).fence.job_id == large
