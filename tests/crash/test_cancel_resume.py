"""A cancelled job that is resumed ends as one that never was, wherever the cancel found it."""

from __future__ import annotations

import random
from pathlib import Path

from exact_runs import (
    GREEDY,
    Case,
    Models,
    Performance,
    References,
    Scene,
    perform,
    prepared,
    worker_of,
)
from tenuto_client import JobState, SubmitOptions
from workers import poll_until


def test_jobs_cancelled_again_and_again_while_queued_and_while_running_end_the_same(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
) -> None:
    chance = random.Random(3)
    with (
        # Half as many slots as jobs: the other half waits.
        worker_of(models, redis_url, namespace, tmp_path, slots=1) as worker,
        Scene(redis_url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        scene.submit()
        for performance in scene.jobs:
            if performance.job.status().state is JobState.QUEUED:
                interrupt(scene, performance)
        for _ in range(5):
            scene.wait_more(chance.randrange(10, 50))
            for performance in chance.sample(scene.jobs, 3):
                interrupt(scene, performance)
        scene.assert_exact(references)
        ends = [reading.end for each in scene.jobs for reading in each.readings[:-1]]
        assert len(ends) > 5
        assert any(end.index == 0 for end in ends), "none was cancelled in the queue"
        # One that was cancelled while its prompt was read has a checkpoint of a part of that.
        resumed = [
            line for line in prepared([worker]) if line["cached_tokens"] and line["published"]
        ]
        # A cancel leaves a checkpoint of the last token, so there is nothing to catch up: it is the
        # pending one, or in the cache where the loop ran ahead.
        assert resumed
        assert {
            line["cached_tokens"] - line["prompt_tokens"] - line["published"] for line in resumed
        } <= {-1, 0}


def test_a_cancelled_job_goes_on_exactly_on_a_worker_started_afterwards(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with Scene(redis_url, namespace, cases) as scene:
        with worker_of(models, redis_url, namespace, here) as one:
            one.wait_ready()
            scene.submit()
            scene.wait_tokens(150)
            for performance in scene.unfinished:
                performance.job.cancel()
            scene.wait_ends()
            one.kill()
        for performance in cancelled_of(scene.jobs):
            performance.job.resume()
            scene.follow(performance)
        # Without the checkpoints, so all that was published is computed again and compared.
        with worker_of(models, redis_url, namespace, there):
            scene.assert_exact(references)


def test_a_cancel_while_the_prompt_is_read_and_a_resume_at_once_change_no_bit(
    models: Models, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    options = GREEDY | SubmitOptions(max_tokens=40)
    prompt = tuple(5 + (3 * place) % 250 for place in range(3000))
    long = [Case(kind, kind, prompt, options) for kind in models]
    # The prompts are read whole each time.
    flags = ("--prefix-memory", "0", "--prefix-disk", "0")
    with worker_of(models, redis_url, namespace, tmp_path, *flags, lease=0.5) as worker:
        worker.wait_ready()
        references = perform(redis_url, namespace, long)
        with Scene(redis_url, namespace, long) as scene:
            scene.submit()
            for performance in scene.jobs:
                poll_until(
                    lambda performance=performance: performance.job.status().phase == "prefill",  # type: ignore[misc]
                    "the prompt to be read",
                    every=0.005,
                )
                interrupt(scene, performance)
                # This one may be taken back before the worker has seen it.
                performance.job.cancel()
                performance.job.resume()
            for performance in scene.jobs:
                assert performance.readings[0].end.state is JobState.CANCELLED
            poll_until(lambda: all_completed(scene), "the ends")
            scene.assert_exact(references)


def interrupt(scene: Scene, performance: Performance) -> None:
    """Cancel, wait for the end, resume, read on; nothing if it ends before."""
    performance.job.cancel()
    reading = performance.readings[-1]
    poll_until(reading.done.is_set, "the cancel")
    if reading.end.state is JobState.CANCELLED:
        performance.job.resume()
        scene.follow(performance)


def cancelled_of(ended: list[Performance]) -> list[Performance]:
    return [each for each in ended if each.readings[-1].end.state is JobState.CANCELLED]


def all_completed(scene: Scene) -> bool:
    """Whether they are; a reader that saw a cancel's end before the resume goes on."""
    ended = [each for each in scene.jobs if each.readings[-1].done.is_set()]
    for performance in cancelled_of(ended):
        scene.follow(performance)
    return not scene.unfinished
