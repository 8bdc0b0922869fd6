"""The server is well but cannot be reached, or stands still: everybody waits, nothing changes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from exact_runs import Case, Models, References, Scene, worker_of
from proxies import CutProxy
from servers import RealServer
from workers import WorkerProcess, poll_until


def _assert_undisturbed(scene: Scene, *workers: WorkerProcess) -> None:
    """No job changed hands, and nothing died of it."""
    claims = [line for worker in workers for line in worker.lines("job claimed")]
    assert len(claims) == len(scene.jobs)
    assert all(each.job.status().epoch == 1 for each in scene.jobs)
    for worker in workers:
        assert not worker.lines("job reaped")
        assert len(worker.lines("child started")) == 1


def test_connections_cut_in_mid_word_change_no_bit_and_take_no_job_over(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    server: RealServer,
    namespace: str,
    tmp_path: Path,
) -> None:
    total = sum(len(outcome.tokens) for outcome in references.values())
    steps = sorted(random.Random(11).sample(range(1, total - 30), 8))
    with (
        CutProxy(server.socket) as proxy,
        worker_of(models, proxy.url, namespace, tmp_path, slots=3) as worker,
        Scene(proxy.url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        scene.submit()
        for step in steps:
            scene.wait_tokens(step)
            proxy.cut()
        scene.assert_exact(references)
        _assert_undisturbed(scene, worker)


@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_server_that_stands_still_for_longer_than_a_lease_changes_no_bit_and_no_owner(
    seconds: int,
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    server: RealServer,
    namespace: str,
    tmp_path: Path,
) -> None:
    with (
        worker_of(models, server.url, namespace, tmp_path, slots=3, lease=1.0) as worker,
        # Somebody who would take the jobs over.
        worker_of(models, server.url, namespace, tmp_path / "other", lease=1.0) as idle,
        Scene(server.url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        idle.wait_ready()
        scene.submit()
        scene.wait_tokens(75)
        server.pause()
        began = scene.tokens
        # Not a wait for something to happen, but the outage itself.
        with pytest.raises(AssertionError, match="waited"):
            poll_until(lambda: scene.tokens > began + 1000, "nothing", timeout=seconds)
        server.resume()
        scene.assert_exact(references)
        _assert_undisturbed(scene, worker, idle)


def test_decoding_goes_on_while_the_server_cannot_be_reached_and_pauses_where_the_buffer_ends(
    models: Models, server: RealServer, namespace: str, tmp_path: Path
) -> None:
    model = next(iter(models))
    with (
        CutProxy(server.socket) as proxy,
        worker_of(
            models, proxy.url, namespace, tmp_path, "--max-unsent-tokens", "300", lease=1.0
        ) as worker,
        Scene(server.url, namespace, ()) as scene,
    ):
        worker.wait_ready()
        job = scene.client.submit(model, "hi", max_tokens=2000, ignore_eos=True, seed=1)
        poll_until(lambda: job.status().tokens >= 20, "tokens")
        proxy.refuse()
        before = job.status().tokens
        poll_until(lambda: worker.lines("decoding paused"), "a full buffer")
        # It was decoded, but not published; and it is all there.
        assert job.status().tokens - before < 300
        proxy.admit()
        poll_until(lambda: job.status().tokens >= before + 300, "what was in the buffer")
        assert job.result(timeout=60).usage.completion_tokens == 2000
        assert job.status().epoch == 1
