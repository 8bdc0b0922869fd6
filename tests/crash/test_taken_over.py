"""A worker goes, with or without a word, and another one goes on."""

from __future__ import annotations

from pathlib import Path

from exact_runs import Case, Models, References, Scene, prepared, worker_of
from workers import child_is_alive, poll_until


def test_what_a_dead_neighbour_had_goes_on_exactly_without_waiting_for_its_lease(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
) -> None:
    with (
        worker_of(models, redis_url, namespace, tmp_path, slots=1, lease=600.0) as one,
        worker_of(models, redis_url, namespace, tmp_path, slots=1, lease=600.0) as two,
        Scene(redis_url, namespace, cases) as scene,
    ):
        one.wait_ready()
        two.wait_ready()
        scene.submit()
        # As many slots as jobs, so each of them has its share.
        half = len(cases) // 2
        one.wait_for("job claimed", count=half)
        two.wait_for("job claimed", count=half)
        scene.wait_tokens(150)
        one.kill()
        scene.assert_exact(references)
        assert two.lines("job taken back")
        taken = prepared([two])[half:]
        # How far each had come is the machine's affair: one may have ended, one not have begun.
        assert 0 < len({line["job"] for line in taken}) <= half
        assert any(line["published"] for line in taken)
        # It shares the data dir, so what the dead one saved is of use.
        assert any(line["cached_tokens"] for line in taken)


def test_a_drain_hands_over_to_a_machine_without_the_checkpoints_and_back(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with Scene(redis_url, namespace, cases) as scene:
        with (
            worker_of(models, redis_url, namespace, here) as one,
            worker_of(models, redis_url, namespace, there) as two,
        ):
            one.wait_ready()
            two.wait_ready()
            # Asleep, so that the first one gets all jobs.
            two.stop()
            scene.submit()
            scene.wait_tokens(100)
            two.cont()
            assert one.term() == 0
            handed = len(one.lines("job handed back"))
            # One that was quick may have ended.
            assert handed >= len(cases) // 2
            two.wait_for("attempt prepared", count=handed)
            assert all(line["cached_tokens"] is None for line in prepared([two]))
            scene.wait_more(30)
            two.kill()
        with worker_of(models, redis_url, namespace, here) as three:
            scene.assert_exact(references)
            assert any(line["cached_tokens"] for line in prepared([three]))


def test_a_dead_supervisor_makes_its_child_hand_the_jobs_on(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
) -> None:
    with (
        Scene(redis_url, namespace, cases) as scene,
        worker_of(models, redis_url, namespace, tmp_path) as one,
    ):
        one.wait_ready()
        scene.submit()
        scene.wait_tokens(125)
        one.kill_supervisor()
        child = one.child_pid
        poll_until(lambda: not child_is_alive(child), "the child's end")
        assert one.lines("job handed back")
        with worker_of(models, redis_url, namespace, tmp_path) as two:
            scene.assert_exact(references)
            assert all(line["cached_tokens"] for line in prepared([two]))
