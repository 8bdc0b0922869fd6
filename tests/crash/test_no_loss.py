"""A job that was accepted is run to an end, whatever dies at the worst moment."""

from __future__ import annotations

from pathlib import Path

from exact_runs import Case, Models, References, Scene, worker_of
from servers import RealServer
from tenuto_client import JobState
from workers import poll_until


def test_an_acknowledged_submit_outlives_server_and_workers_at_every_point_of_its_life(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    server: RealServer,
    namespace: str,
    tmp_path: Path,
) -> None:
    with Scene(server.url, namespace, ()) as scene:
        with worker_of(models, server.url, namespace, tmp_path) as worker:
            # Its models stay announced when it is dead, before it claims anything.
            worker.wait_ready()
            worker.kill()
        for case in cases:
            scene.submit_one(case)
            server.restart()
        assert all(each.job.status().state is JobState.QUEUED for each in scene.jobs)
        with worker_of(models, server.url, namespace, tmp_path) as worker:
            # Right after a claim.
            worker.wait_for("job claimed", count=2)
            worker.kill_child()
            # Right before an end: all or nearly all tokens of one job are there.
            lengths = {name: len(outcome.tokens) for name, outcome in references.items()}
            poll_until(
                lambda: any(each.count >= lengths[each.case.name] - 1 for each in scene.jobs),
                "the last tokens of a job",
                every=0.001,
            )
            worker.kill_child()
            scene.assert_exact(references)
