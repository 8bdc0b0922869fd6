"""A worker that slept through the loss of its lease wakes up and goes on decoding."""

from __future__ import annotations

from pathlib import Path

from exact_runs import Case, Models, References, Scene, prepared, worker_of
from workers import WorkerProcess, poll_until


def test_a_worker_that_wakes_after_its_lease_is_gone_publishes_nothing(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
) -> None:
    with (
        worker_of(models, redis_url, namespace, tmp_path, lease=1.0) as zombie,
        Scene(redis_url, namespace, cases) as scene,
    ):
        zombie.wait_ready()
        scene.submit()
        with worker_of(models, redis_url, namespace, tmp_path, lease=1.0) as heir:
            # Asleep in the middle of whatever it was doing; the heir is not even there yet.
            scene.wait_tokens(75)
            zombie.stop()
            before = len(prepared([zombie]))
            asleep = [each.job.id for each in scene.unfinished]
            heir.wait_for("attempt prepared", count=len(asleep))
            scene.wait_more(30)
            zombie.cont()
            for job in asleep:
                assert_fenced(zombie, job)
            # What the zombie did to the disk must not have hurt the heir's checkpoints.
            heir.kill()
            # Readers may be a little behind.
            left = sum(not each.job.status().state.is_over for each in scene.jobs)
            scene.assert_exact(references)
            resumed = prepared([zombie])[before:]
            assert len(resumed) >= left
            assert all(line["cached_tokens"] for line in resumed)


def assert_fenced(zombie: WorkerProcess, job: str) -> None:
    poll_until(
        lambda: (
            any(line["job"] == job for line in zombie.lines("attempt fenced"))
            or any(
                line["job"] == job and line["why"] == "fenced"
                for line in zombie.lines("attempt asked to stop")
            )
        ),
        f"the zombie to lose {job}",
    )
    assert not any(line["job"] == job for line in zombie.lines("job ended"))
