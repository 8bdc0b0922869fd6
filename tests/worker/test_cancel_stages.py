"""A cancel at every stage of an attempt: one round trip and one step later the slot is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from job_queue import JobQueue
from step_worker import MODEL, StepWorker
from tenuto_client import Token
from tenuto_engine import GenerationOptions
from tenuto_worker._run import Phase, Run

Start = Callable[..., StepWorker]
PROMPT = "Tell me of the sea, of its shore and of all who live there, at length."


@pytest.fixture
def start(jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts workers of one slot on one queue and one data dir; they read 8 tokens a chunk."""
    workers = []

    def begin(**settings: Any) -> StepWorker:
        values = {"slots": 1, "chunk_size": 8, **settings}
        worker = StepWorker(redis_url, jobs.keys.namespace, tiny_model, tmp_path / "data", **values)
        workers.append(worker)
        return worker

    yield begin
    for worker in workers:
        worker.rooms.writer.close(10)


def alone(worker: StepWorker) -> list[Token]:
    """The tokens of a run by the engine alone."""
    options = GenerationOptions(max_tokens=40, seed=7, ignore_eos=True)
    generation = worker.engine.generate(worker.engine.encode_prompt(PROMPT), options)
    return [Token(t.token, t.index, t.text, t.logprob, t.top_logprobs) for t in generation]


def submit(jobs: JobQueue) -> str:
    return jobs.submit(prompt=PROMPT, max_tokens=40)


def step_into(worker: StepWorker, phase: Phase) -> Run:
    """Steps until the run is in the midst of a phase."""
    run = worker.run
    while not (run.phase is phase and run.done > 0):
        assert run.end is None, f"it ended before {phase}"
        worker.rooms.decoder.turn()
    return run


def cancel(jobs: JobQueue, worker: StepWorker, job: str) -> None:
    """As the nudge has it: the worker asks Redis once, and its decode thread takes one step."""
    assert jobs.cancel(job) == "flagged"
    worker.rooms.lease.renew()
    worker.rooms.decoder.turn()


def resume_and_compare(jobs: JobQueue, worker: StepWorker, job: str) -> None:
    assert jobs.resume(job) == "resumed"
    assert worker.claim()
    worker.finish()
    assert jobs.state(job) == "completed"
    assert jobs.tokens(job) == alone(worker)
    assert jobs.field(job, "exactness") == "exact"


def test_a_queued_job_is_cancelled_at_once_though_all_slots_are_busy(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    running = submit(jobs)
    assert worker.claim()
    waiting = submit(jobs)
    assert jobs.cancel(waiting) == "cancelled"
    assert jobs.state(waiting) == "cancelled"
    worker.finish()
    assert jobs.state(running) == "completed"
    resume_and_compare(jobs, worker, waiting)


def test_a_claimed_job_that_nobody_has_prepared_yet(jobs: JobQueue, start: Start) -> None:
    worker = start()
    job = submit(jobs)
    assert worker.rooms.claimer.claim_one(MODEL)
    assert worker.run.phase is Phase.LOADING
    assert jobs.cancel(job) == "flagged"
    worker.rooms.lease.renew()
    worker.rooms.preparer.turn()
    worker.publish()
    assert jobs.state(job) == "cancelled"
    assert worker.runs == []
    resume_and_compare(jobs, worker, job)


def test_a_prepared_job_that_has_no_row_yet(jobs: JobQueue, start: Start) -> None:
    worker = start()
    job = submit(jobs)
    assert worker.claim()
    assert worker.run.phase is Phase.RESTORE
    cancel(jobs, worker, job)
    worker.publish()
    assert jobs.state(job) == "cancelled"
    resume_and_compare(jobs, worker, job)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_a_job_whose_row_works(jobs: JobQueue, start: Start, phase: Phase) -> None:
    worker = start()
    job = submit(jobs)
    assert worker.claim()
    run = step_into(worker, phase)
    assert phase is not Phase.PREFILL or run.done < run.total
    before = len(run.tokens)
    cancel(jobs, worker, job)
    # The row is closed, and that step made no token.
    assert not worker.rooms.decoder.hosts
    assert len(run.tokens) == before
    worker.settle()
    assert jobs.state(job) == "cancelled"
    assert worker.rooms.claimer.has_slot(MODEL)
    resume_and_compare(jobs, worker, job)


def test_a_job_that_catches_up(jobs: JobQueue, start: Start) -> None:
    first = start(checkpoint_every_tokens=100)
    job = submit(jobs)
    assert first.claim()
    first.decode(30)
    first.publish()
    jobs.lose_lease(job)
    assert jobs.scripts.reap(job) == "queued"
    second = start()
    assert second.claim()
    run = step_into(second, Phase.CATCH_UP)
    assert run.done < run.total
    cancel(jobs, second, job)
    assert not second.rooms.decoder.hosts
    second.settle()
    assert jobs.state(job) == "cancelled"
    assert len(jobs.tokens(job)) == 30
    resume_and_compare(jobs, second, job)


def test_a_job_that_has_made_its_last_token_ends_as_it_would_have(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    job = submit(jobs)
    assert worker.claim()
    while worker.run.end is None:
        worker.rooms.decoder.turn()
    cancel(jobs, worker, job)
    worker.publish()
    assert jobs.state(job) == "completed"
    assert jobs.tokens(job) == alone(worker)


def test_twice_and_after_the_end_changes_nothing(jobs: JobQueue, start: Start) -> None:
    worker = start()
    job = submit(jobs)
    assert worker.claim()
    worker.decode(3)
    worker.publish()
    assert jobs.cancel(job) == "flagged"
    cancel(jobs, worker, job)
    worker.settle()
    before = jobs.job(job), jobs.stream(job)
    assert jobs.cancel(job) == "over"
    assert (jobs.job(job), jobs.stream(job)) == before
    resume_and_compare(jobs, worker, job)
    assert jobs.cancel(job) == "over"
    assert jobs.state(job) == "completed"
