"""The server dies, comes back, or comes back as it was a while ago."""

from __future__ import annotations

import random
from pathlib import Path

from exact_runs import Case, Models, Past, References, Scene, worker_of
from servers import RealServer


def test_a_server_killed_in_mid_run_changes_no_bit(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    server: RealServer,
    namespace: str,
    tmp_path: Path,
) -> None:
    total = sum(len(outcome.tokens) for outcome in references.values())
    steps = sorted(random.Random(5).sample(range(1, total - 30), 3))
    with (
        worker_of(models, server.url, namespace, tmp_path) as worker,
        Scene(server.url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        scene.submit()
        for step in steps:
            scene.wait_tokens(step)
            server.restart()
        scene.assert_exact(references)
        # The worker waited for it: nothing was handed on, nothing began anew.
        assert len(worker.lines("job claimed")) == len(cases)
        assert all(each.job.status().epoch == 1 for each in scene.jobs)


def test_a_worker_sends_again_what_the_server_lost(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    server: RealServer,
    namespace: str,
    tmp_path: Path,
) -> None:
    past = Past(server)
    with (
        worker_of(models, server.url, namespace, tmp_path) as worker,
        Scene(server.url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        scene.submit()
        scene.wait_tokens(100)
        past.take()
        scene.wait_more(100)
        past.bring_back()
        scene.assert_exact(references)
        assert worker.lines("redis lost tokens, sent again")


def test_a_checkpoint_ahead_of_the_stream_has_its_tokens_published_first(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    server: RealServer,
    namespace: str,
    tmp_path: Path,
) -> None:
    past = Past(server)
    with Scene(server.url, namespace, cases) as scene:
        with worker_of(models, server.url, namespace, tmp_path) as one:
            one.wait_ready()
            scene.submit()
            scene.wait_tokens(75)
            past.take()
            scene.wait_more(200)
            one.kill()
        past.bring_back()
        with worker_of(models, server.url, namespace, tmp_path) as two:
            scene.assert_exact(references)
            ahead = [
                line
                for line in two.lines("attempt prepared")
                if (line["cached_tokens"] or 0) > line["prompt_tokens"] + line["published"]
            ]
            assert ahead


def test_a_job_that_ended_after_what_the_server_remembers_ends_the_same_again(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    server: RealServer,
    namespace: str,
    tmp_path: Path,
) -> None:
    past = Past(server)
    with (
        worker_of(models, server.url, namespace, tmp_path) as worker,
        Scene(server.url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        scene.submit()
        scene.wait_tokens(150)
        past.take()
        # Their checkpoints go with their ends, so it is all done again from the prompt.
        scene.assert_exact(references)
        past.bring_back()
        with Scene(server.url, namespace, ()) as afterwards:
            for performance in scene.jobs:
                performance.readings.clear()
                afterwards.jobs.append(performance)
                afterwards.follow(performance)
            afterwards.assert_exact(references)
        assert worker.lines("job reaped")
