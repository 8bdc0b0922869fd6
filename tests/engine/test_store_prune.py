"""What a store removes: what nobody needs any more, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from disks import FailingDisk
from log_samples import PROMPT
from sample_rows import (
    SEED,
    SampleRow,
    assert_all_exact,
    assert_newest,
    damage,
    names,
    newest,
    sample_store,
)
from tenuto_engine import CheckpointStore
from tenuto_engine._errors import CheckpointWriteError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "j1"


def save(store: CheckpointStore, row: SampleRow, *stops: int) -> None:
    for stop in stops:
        store.save(row.at(stop))


def logs(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.endswith(".log")]


def heir(folder: Path, model: str = "all") -> SampleRow:
    """A row that goes on from the newest checkpoint."""
    return SampleRow(model, origin=newest(folder).origin)


# -- earlier attempts ------------------------------------------------------------------


def test_an_earlier_attempt_goes_once_a_later_one_covers_as_much(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 10, 20)
    before = names(folder)
    store, row = sample_store(folder, 2), SampleRow(salt=1)
    save(store, row, 5, 19)
    assert set(before) < set(names(folder))
    save(store, row, 20)
    assert logs(folder) == ["00000002-n.log"]
    assert assert_all_exact(folder, row) == [20, 19]


def test_what_a_log_goes_on_from_stays_but_its_states_go_after_the_second_checkpoint(
    folder: Path,
) -> None:
    save(sample_store(folder, 1), SampleRow(), 10, 20)
    save(sample_store(folder, 2), heir(folder), 22)
    store, row = sample_store(folder, 3), heir(folder)
    save(store, row, 30)
    assert "00000001-n.0.state" in names(folder)
    save(store, row, 31)
    assert logs(folder) == ["00000001-n.log", "00000002-n.log", "00000003-n.log"]
    assert [name for name in names(folder) if name.endswith(".state")] == [
        "00000003-n.0.state",
        "00000003-n.1.state",
    ]
    assert assert_all_exact(folder, row) == [31, 30]


def test_an_attempt_that_was_passed_over_goes_and_what_both_build_on_stays(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 20)
    row = heir(folder)
    save(sample_store(folder, 2), heir(folder), 22)
    save(sample_store(folder, 3), row, 30)
    assert logs(folder) == ["00000001-n.log", "00000003-n.log"]
    assert_newest(folder, row, 30)


def test_what_a_longer_attempt_builds_on_stays_as_long_as_that_does(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 10)
    save(sample_store(folder, 2), heir(folder), 30)
    store, row = sample_store(folder, 3), SampleRow(salt=1)
    save(store, row, 20)
    assert_newest(folder, SampleRow(), 30)
    save(store, row, 30)
    assert logs(folder) == ["00000003-n.log"]
    assert_newest(folder, row, 30)


def test_a_log_without_a_checkpoint_or_with_a_damaged_beginning_goes(folder: Path) -> None:
    sample_store(folder, 1).open(PROMPT, SEED)
    save(sample_store(folder, 2), SampleRow(), 30)
    damage(folder / "00000002-n.log", 40)
    save(sample_store(folder, 3), SampleRow(), 5)
    assert logs(folder) == ["00000003-n.log"]


def test_the_end_of_an_earlier_attempt_goes_once_it_is_outdone(folder: Path) -> None:
    first = sample_store(folder, 1)
    save(first, SampleRow(), 10)
    first.finish({"state": "cancelled"}, SampleRow().run(12).tokens(), keep_caches=True)
    store, row = sample_store(folder, 2), heir(folder)
    save(store, row, 11)
    assert [end.epoch for end in store.ends()] == [1]
    save(store, row, 12)
    save(store, row, 13)
    assert store.ends() == []


@pytest.mark.parametrize("keep_caches", [True, False])
def test_files_of_an_older_format_go(folder: Path, keep_caches: bool) -> None:
    folder.mkdir(parents=True)
    old = ["00000001-00000001-a.ckpt", "00000001-00000002-a.ckpt.tmp"]
    later = "00000009-00000001-a.ckpt"
    for name in [*old, later]:
        (folder / name).write_bytes(b"old")
    store = sample_store(folder, 2)
    assert [each.damage is not None for each in store.candidates()] == [True] * 3
    if keep_caches:
        save(store, SampleRow(), 5)
        assert [name for name in names(folder) if "ckpt" in name] == [later]
    else:
        store.open(PROMPT, SEED)
        store.finish({}, (), keep_caches=False)
        assert names(folder) == ["00000002-n.end", later]


def test_foreign_files_stay_whatever_happens(folder: Path) -> None:
    folder.mkdir(parents=True)
    foreign = ["notes.txt", "1-a.log", "00000001-a.log.bak", "x.tmp", "00000001-a.2.state"]
    for name in foreign:
        (folder / name).write_text("mine")
    save(sample_store(folder, 1), SampleRow(), 10)
    store = sample_store(folder, 2)
    save(store, SampleRow(salt=1), 20, 21, 22)
    store.finish({}, (), keep_caches=False)
    assert names(folder) == sorted([*foreign, "00000002-n.end"])


# -- zombies ---------------------------------------------------------------------------


def test_an_attempt_with_a_later_one_beside_it_removes_nothing(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 5)
    zombie = sample_store(folder, 2)
    save(zombie, SampleRow(salt=1), 4)
    save(sample_store(folder, 3, nonce="c"), SampleRow(), 3)
    before = set(names(folder))
    save(zombie, SampleRow(salt=1), 10, 20, 21)
    assert before <= set(names(folder))
    zombie.finish({"state": "done"}, (), keep_caches=False)
    assert {name for name in before if "00000002" not in name} <= set(names(folder))
    assert_all_exact(folder, SampleRow(), SampleRow(salt=1))
    assert_newest(folder, SampleRow(), 5)


def test_another_attempt_of_the_same_epoch_is_left_alone(folder: Path) -> None:
    save(sample_store(folder, 1, nonce="a"), SampleRow(), 5)
    store = sample_store(folder, 1, nonce="b")
    save(store, SampleRow(salt=1), 20, 21)
    assert_all_exact(folder, SampleRow(), SampleRow(salt=1))
    assert logs(folder) == ["00000001-a.log", "00000001-b.log"]


def test_one_that_goes_on_from_another_of_the_same_epoch_leaves_its_states(folder: Path) -> None:
    other = sample_store(folder, 1, nonce="a")
    save(other, SampleRow(), 10, 20)
    store, row = sample_store(folder, 1, nonce="b"), heir(folder)
    save(store, row, 21, 22, 23)
    assert assert_all_exact(folder, row) == [23, 22, 20, 10]


def test_the_end_of_a_completed_job_takes_the_other_attempts_of_its_epoch_along(
    folder: Path,
) -> None:
    save(sample_store(folder, 1, nonce="a"), SampleRow(), 5)
    store = sample_store(folder, 1, nonce="b")
    save(store, SampleRow(), 20)
    store.finish({}, (), keep_caches=False)
    assert names(folder) == ["00000001-b.end"]


# -- its own former logs ---------------------------------------------------------------


def test_of_an_attempts_own_former_logs_all_but_the_last_go(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow("plain"), 10, 20, 30)
    found = sample_store(folder).candidates()
    store = sample_store(folder, 2)
    for stored in reversed(found):
        row = SampleRow("plain", origin=stored.load().origin)
        save(store, row, stored.cache_length + 1)
    assert logs(folder) == ["00000001-n.log", "00000002-n_2.log", "00000002-n_3.log"]
    assert assert_all_exact(folder, SampleRow("plain")) == [31, 30, 21, 20, 10]


def test_former_logs_that_the_newest_builds_on_stay(folder: Path) -> None:
    disk = FailingDisk()
    store, row = sample_store(folder, fs=disk), SampleRow("rings")
    save(store, row, 5)
    for stop in (10, 20, 30):
        disk.failing.add("sync")
        with pytest.raises(CheckpointWriteError):
            save(store, row, stop)
        disk.failing.clear()
        save(store, row, stop + 1, stop + 2, stop + 3)
    assert len(logs(folder)) == 4
    assert_newest(folder, row, 33)


def test_logs_that_could_not_be_begun_do_not_pile_up(folder: Path) -> None:
    disk = FailingDisk("sync")
    store, row = sample_store(folder, fs=disk), SampleRow()
    for stop in range(5, 15):
        with pytest.raises(CheckpointWriteError):
            save(store, row, stop)
    assert len(logs(folder)) == 10
    disk.failing.clear()
    save(store, row, 20)
    assert len(logs(folder)) <= 2
    assert_newest(folder, row, 20)


# -- a disk that cannot remove ---------------------------------------------------------


def test_a_disk_that_cannot_remove_files_does_not_fail_the_save(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 10)
    disk = FailingDisk("unlink")
    store, row = sample_store(folder, 2, fs=disk), SampleRow(salt=1)
    save(store, row, 20, 21)
    assert_newest(folder, row, 21)
    assert len(logs(folder)) == 2
    disk.failing.clear()
    save(store, row, 22)
    assert logs(folder) == ["00000002-n.log"]


@pytest.mark.parametrize("call", ["write_at", "sync"])
def test_a_checkpoint_that_is_not_durable_supersedes_nothing(folder: Path, call: str) -> None:
    save(sample_store(folder, 1), SampleRow(), 10)
    before = names(folder)
    disk = FailingDisk()
    store = sample_store(folder, 2, fs=disk)
    store.open(PROMPT, SEED)
    disk.failing.add(call)
    with pytest.raises(CheckpointWriteError):
        save(store, SampleRow(salt=1), 20)
    assert set(before) <= set(names(folder))
    with pytest.raises(CheckpointWriteError):
        store.finish({}, (), keep_caches=False)
    assert set(before) <= set(names(folder))
