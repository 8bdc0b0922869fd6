"""A long prompt whose reading is interrupted goes on from the last chunk that was saved."""

from __future__ import annotations

from pathlib import Path

import redis

from exact_runs import GREEDY, Case, Models, Scene, perform, prepared, worker_of
from tenuto_client import Keys, SubmitOptions
from tenuto_engine import read_job
from workers import WorkerProcess, poll_until

LONG = 3000
"""Tokens of the prompts: some ninety chunks."""


def test_a_prompt_killed_halfway_is_read_on_exactly(
    models: Models, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    options = GREEDY | SubmitOptions(max_tokens=40)
    long = [
        Case(kind, kind, tuple(5 + (7 * place) % 250 for place in range(LONG)), options)
        for kind in models
    ]

    def begin() -> WorkerProcess:
        # A checkpoint at every border of a chunk, and nothing known from the undisturbed runs.
        flags = ("--checkpoint-seconds", "0.01", "--prefix-memory", "0", "--prefix-disk", "0")
        return worker_of(models, redis_url, namespace, tmp_path, *flags)

    with Scene(redis_url, namespace, long) as scene:
        with begin() as first:
            first.wait_ready()
            references = perform(redis_url, namespace, long)
            scene.submit()
            jobs = [each.job.id for each in scene.jobs]
            wait_new_checkpoints(tmp_path, jobs)
            wait_progress(redis_url, namespace, jobs)
            first.kill()
        with begin() as second:
            wait_new_checkpoints(tmp_path, jobs)
            wait_progress(redis_url, namespace, jobs)
            second.kill()
        assert scene.tokens == 0
        with begin() as third:
            scene.assert_exact(references)
            resumed = prepared([second, third])
    assert len(resumed) == 2 * len(long)
    assert all(0 < line["cached_tokens"] < LONG for line in resumed)


def wait_new_checkpoints(data_dir: Path, jobs: list[str]) -> None:
    """Wait until each job has a newer one than now."""
    folders = [data_dir / "checkpoints" / job for job in jobs]
    before = [newest(folder) for folder in folders]
    poll_until(
        lambda: all(newest(folder) > old for folder, old in zip(folders, before, strict=True)),
        "a chunk of each prompt to be saved",
        every=0.005,
    )


def wait_progress(redis_url: str, namespace: str, jobs: list[str]) -> None:
    """Wait until Redis has heard of a chunk of each; else they would run apart after a death."""
    keys = Keys(namespace)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        poll_until(
            lambda: all(client.hget(keys.job(job), "moved") == "1" for job in jobs),
            "the progress of each prompt",
            every=0.005,
        )


def newest(folder: Path) -> int:
    """Tokens that the longest checkpoint covers."""
    return max((each.cache_length for each in read_job(folder).checkpoints), default=0)
