"""Tokens reach the stream once, in order, whatever happens to Redis meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from job_queue import JobQueue, story
from servers import RealServer
from tenuto_worker._publisher import Publisher
from tenuto_worker._redis import Outage, connect
from tenuto_worker._run import End, EndKind, Run, Runs
from tenuto_worker._scripts import JobScripts
from tenuto_worker._settings import WorkerSettings
from workers import poll_until


class Threaded:
    """A publisher on its thread, with runs of its own."""

    def __init__(self, url: str, jobs: JobQueue, **settings: float) -> None:
        self.jobs = jobs
        self.runs = Runs()
        self.completed: list[str] = []
        self._over = threading.Event()
        values = WorkerSettings(
            models={"tiny": "x"},
            redis_url=url,
            data_dir=Path("x"),
            **settings,  # type: ignore[arg-type]
        )
        self.publisher = Publisher(
            JobScripts(connect(url), jobs.keys),
            self.runs,
            values,
            Outage(),
            on_stop=lambda run: None,
            on_ended=lambda run, state: self.completed.append(run.job_id),
            on_trusted=lambda run: None,
        )
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._over.is_set():
            self.publisher.turn()

    def begin(self) -> Run:
        run = Run(self.jobs.take())
        self.runs.add(run)
        return run

    def append(self, run: Run, first: int, last: int) -> None:
        for token in story(first, last):
            run.tokens.append(token)
            self.publisher.appended(run)

    def wait_sent(self, run: Run) -> None:
        poll_until(lambda: run.unsent == 0, "tokens sent", every=0.002)

    def close(self) -> None:
        self._over.set()
        self.publisher.wake()
        self._thread.join(20)


@pytest.fixture
def private(server: RealServer) -> Iterator[JobQueue]:
    """A queue on a server that may be killed."""
    queue = JobQueue(server.url, "tenuto:")
    yield queue
    queue.close()


def test_a_server_killed_in_mid_run_loses_and_doubles_nothing(
    server: RealServer, private: JobQueue
) -> None:
    job = private.submit()
    threaded = Threaded(server.url, private)
    run = threaded.begin()
    for first in range(1, 601, 100):
        threaded.append(run, first, first + 99)
        server.kill()
        server.start()
    threaded.publisher.end(run, End(EndKind.COMPLETED, "length", text="!"))
    poll_until(lambda: not threaded.runs.all(), "the end")
    threaded.close()

    assert private.tokens(job) == story(1, 600)
    assert threaded.completed == [job]
    assert private.state(job) == "completed"


def test_the_first_token_is_sent_at_once_and_then_tokens_are_packed(jobs: JobQueue) -> None:
    job = jobs.submit()
    url = f"unix://{jobs.client.connection_pool.connection_kwargs['path']}"
    threaded = Threaded(url, jobs, publish_seconds=30.0, publish_tokens=4)
    run = threaded.begin()
    threaded.append(run, 1, 1)
    threaded.wait_sent(run)
    threaded.append(run, 2, 5)
    threaded.wait_sent(run)
    threaded.append(run, 6, 7)
    threaded.publisher.end(run, End(EndKind.COMPLETED, "stop"))
    poll_until(lambda: not threaded.runs.all(), "the end")
    threaded.close()

    sizes = [len(fields) for fields in _entries(jobs, job)]
    assert sizes == [1, 4, 2]
    assert jobs.tokens(job) == story(1, 7)


def _entries(jobs: JobQueue, job: str) -> list[list[int]]:
    from tenuto_client import unpack_tokens

    found = jobs.client.xrange(jobs.keys.stream(job))
    return [
        [token.index for token in unpack_tokens(fields[b"t"])]
        for _, fields in found  # type: ignore[union-attr]
        if b"t" in fields
    ]


def test_many_runs_share_the_round_and_keep_their_own_order(jobs: JobQueue) -> None:
    ids = [jobs.submit() for _ in range(8)]
    url = f"unix://{jobs.client.connection_pool.connection_kwargs['path']}"
    threaded = Threaded(url, jobs)
    runs = [threaded.begin() for _ in ids]
    for index in range(1, 101):
        for run in runs:
            threaded.append(run, index, index)
    for run in runs:
        threaded.publisher.end(run, End(EndKind.COMPLETED, "length"))
    poll_until(lambda: not threaded.runs.all(), "the ends")
    threaded.close()

    assert all(jobs.tokens(job) == story(1, 100) for job in ids)
