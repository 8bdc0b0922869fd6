"""What a job's end says of what it took."""

from __future__ import annotations

from pathlib import Path

from job_queue import JobQueue
from step_worker import StepWorker
from tenuto_client import EndEvent, JobStats
from tenuto_worker._run import Stop


def end_of(jobs: JobQueue, job: str) -> EndEvent:
    last = jobs.stream(job)[1][-1]
    assert isinstance(last, EndEvent)
    return last


def stats_of(jobs: JobQueue, job: str) -> JobStats:
    stats = end_of(jobs, job).stats
    assert stats is not None
    return stats


def test_a_job_of_one_attempt_tells_what_it_took(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    job = jobs.submit(max_tokens=20)
    with StepWorker(redis_url, jobs.keys.namespace, tiny_model, tmp_path) as worker:
        worker.claim()
        worker.finish()
        weights = worker.engine.weight_bytes
    end, stats = end_of(jobs, job), stats_of(jobs, job)
    assert (end.usage.completion_tokens, end.usage.cached_tokens) == (20, 0)
    assert (stats.cached_tokens, stats.prefill_tokens) == (0, end.usage.prompt_tokens)
    assert (stats.decode_tokens, stats.attempts) == (19, 1)
    assert min(stats.prefill_seconds, stats.decode_seconds) > 0
    assert stats.prefill_seconds + stats.decode_seconds < stats.seconds + 0.001
    assert stats.peak_memory > weights


def test_the_last_attempt_tells_of_itself_and_the_totals_are_of_all(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    job = jobs.submit(max_tokens=30)
    with StepWorker(redis_url, jobs.keys.namespace, tiny_model, tmp_path) as worker:
        worker.claim()
        worker.decode(11)
        worker.run.ask_to_stop(Stop.CANCEL)
        jobs.cancel(job)
        worker.settle()
        cancelled = end_of(jobs, job)
        assert cancelled.state == "cancelled"
        first = stats_of(jobs, job)
        known = cancelled.index
        # The decode thread may have had one more in flight.
        assert known - 1 <= first.decode_tokens <= known
        assert (first.cached_tokens, first.attempts) == (0, 1)

        jobs.resume(job)
        assert jobs.field(job, "stats") is None
        worker.claim()
        worker.finish()
    end, last = end_of(jobs, job), stats_of(jobs, job)
    prompt = end.usage.prompt_tokens
    assert (end.state, end.exactness) == ("completed", "exact")
    assert (end.usage.cached_tokens, last.cached_tokens) == (prompt, prompt)
    assert (last.prefill_tokens, last.prefill_seconds) == (0, 0)
    assert 30 - known - 1 <= last.decode_tokens <= 30 - known
    assert last.attempts == 2
    assert last.seconds >= first.seconds + last.decode_seconds - 0.001


def test_a_job_that_ended_in_the_queue_has_none(jobs: JobQueue) -> None:
    job = jobs.submit()
    jobs.cancel(job)
    assert end_of(jobs, job).stats is None
    assert end_of(jobs, job).usage.cached_tokens is None
