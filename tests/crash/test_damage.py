"""Checkpoints are damaged between a crash and the restart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from exact_runs import Case, Models, References, Scene, prepared, worker_of
from tenuto_engine import StoredCheckpoint, read_job
from workers import poll_until


def test_with_the_newest_checkpoint_damaged_an_older_serves_and_with_all_the_prompt(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkpoints"
    with Scene(redis_url, namespace, cases) as scene:
        with worker_of(models, redis_url, namespace, tmp_path) as first:
            first.wait_ready()
            scene.submit()
            poll_until(
                lambda: all(len(saved(root / job)) >= 2 for job in unfinished(scene)), "two of each"
            )
            first.kill()
        hurt = unfinished(scene)
        assert len(hurt) >= len(cases) // 2
        flip_newest([root / job for job in hurt])
        with worker_of(models, redis_url, namespace, tmp_path) as second:
            second.wait_for("attempt prepared", count=len(hurt))
            second.kill()
            passed_over = [each["job"] for each in second.lines("checkpoint passed over")]
            assert sorted(passed_over) == sorted(hurt)
            assert all(each["cached_tokens"] for each in prepared([second]))
        destroy_all([root / job for job in hurt])
        with worker_of(models, redis_url, namespace, tmp_path) as third:
            scene.assert_exact(references)
            # Those that had got nowhere run apart first; later they go on from what they have then.
            again = {each["job"]: each for each in reversed(prepared([third]))}
            assert again
            assert all(
                each["published"] and each["cached_tokens"] is None for each in again.values()
            )


def unfinished(scene: Scene) -> list[str]:
    """Their ids."""
    return [each.job.id for each in scene.unfinished]


def saved(folder: Path) -> list[StoredCheckpoint]:
    """The job's checkpoints, newest first."""
    return [each for each in read_job(folder).checkpoints if each.damage is None]


def flip_newest(folders: Iterable[Path]) -> None:
    """One bit each: in the preamble, the header or the arrays of the newest one's record."""
    for number, folder in enumerate(folders):
        newest = saved(folder)[0]
        assert newest.commit is not None
        record = newest.commit.entry.record
        content = bytearray(newest.path.read_bytes())
        content[(record.offset + 20, record.offset + 60, record.end - 1)[number % 3]] ^= (
            1 << number % 8
        )
        newest.path.write_bytes(content)


def destroy_all(folders: Iterable[Path]) -> None:
    """Emptied, cut within its first record, overwritten, or gone."""
    for number, folder in enumerate(folders):
        for path in sorted(folder.iterdir()):
            if number % 4 == 3:
                path.unlink()
                continue
            content = path.read_bytes()
            path.write_bytes((b"", content[:100], bytes(len(content)))[number % 4])
