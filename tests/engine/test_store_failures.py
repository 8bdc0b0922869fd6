"""A disk that fails, fills up or is tidied by somebody costs time, and never a checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from disks import FailingDisk, FullDisk
from log_samples import PROMPT
from sample_rows import (
    SampleRow,
    assert_all_exact,
    assert_newest,
    names,
    sample_store,
    whole,
)
from tenuto_engine import Durable
from tenuto_engine._errors import (
    CheckpointError,
    CheckpointWriteError,
)

CALLS = ["make_folder", "create", "open", "write_at", "truncate", "sync", "close", "sync_folder"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "j1"


# -- a disk that fails -----------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["instead", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_whatever_call_fails_the_last_good_one_stays_and_nothing_is_lost_later(
    folder: Path, call: str, after: bool
) -> None:
    disk = FailingDisk(after=after)
    row, store = SampleRow(), sample_store(folder, fs=disk)
    for stop in (2, 10, 20):
        store.save(row.at(stop))
    disk.failing.add(call)
    failed = False
    for stop in (22, 24, 26):
        try:
            store.save(row.at(stop))
        except CheckpointWriteError as error:
            failed = error.reason == os.strerror(errno.EIO)
        assert assert_all_exact(folder, row)[0] >= store.durable.position
    # Neither a folder nor a file is made once it is there.
    assert failed == (call not in ("make_folder", "create", "sync_folder"))
    disk.failing.clear()
    store.save(row.at(40))
    assert_newest(folder, row, 40)
    store.save(row.at(41))
    assert assert_all_exact(folder, row)[:2] == [41, 40]


@pytest.mark.parametrize("after", [False, True], ids=["instead", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_whatever_call_fails_at_the_first_save_a_later_one_is_whole(
    folder: Path, call: str, after: bool
) -> None:
    disk = FailingDisk(call, after=after)
    row, store = SampleRow(), sample_store(folder, fs=disk)
    for stop in (5, 10):
        try:
            store.save(row.at(stop))
        except CheckpointWriteError:
            assert store.durable == Durable()
    disk.failing.clear()
    store.save(row.at(20))
    assert_newest(folder, row, 20)


@pytest.mark.parametrize("call", ["write_at", "sync"])
def test_parts_before_a_failure_are_neither_lost_nor_counted_twice(folder: Path, call: str) -> None:
    disk = FailingDisk()
    row, store = SampleRow(), sample_store(folder, fs=disk, part_bytes=500)
    store.save(row.at(4))
    parts = [store.take(row.at(20)) for _ in range(3)]
    for taken in parts:
        assert taken is not None
        assert taken.delta.commit is None
        assert store.write(taken) is False
    last, behind = store.take(row.at(21), final=True), store.take(row.at(31))
    assert last is not None
    assert behind is not None
    disk.failing.add(call)
    with pytest.raises(CheckpointWriteError):
        store.write(last)
    disk.failing.clear()
    # Taken before the failure, so what it counted on is not there.
    assert store.write(behind) is False
    store.save(row.at(32))
    assert_newest(folder, row, 32)
    assert assert_all_exact(folder, row)[-1] == 4


def test_a_full_disk_leaves_the_last_good_one_whatever_fits(folder: Path) -> None:
    row = SampleRow()
    for room in range(0, 9000, 211):
        shutil.rmtree(folder, ignore_errors=True)
        disk = FullDisk(20_000)
        store = sample_store(folder, fs=disk)
        store.save(row.at(20))
        disk.room = room
        try:
            store.save(row.at(30))
        except CheckpointWriteError as error:
            assert error.reason == os.strerror(errno.ENOSPC)  # noqa: PT017
            assert_newest(folder, row, 20)
        disk.room = 10**6
        store.save(row.at(31))
        assert_newest(folder, row, 31)


def test_nothing_is_taken_soon_after_a_failure_and_ever_later_after_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("tenuto_engine._store.time.monotonic", lambda: now)
    disk = FailingDisk("write_at")
    row, store = SampleRow(), sample_store(folder, fs=disk, retry_seconds=1.0)
    for wait in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        taken = store.take(row.at(20))
        assert taken is not None
        with pytest.raises(CheckpointWriteError):
            store.write(taken)
        now += wait - 0.01
        assert store.take(row.at(20)) is None
        with pytest.raises(CheckpointWriteError, match="a moment ago"):
            store.save(row.at(20))
        now += 0.01
    disk.failing.clear()
    store.save(row.at(20))
    disk.failing.add("write_at")
    with pytest.raises(CheckpointWriteError):
        store.save(row.at(21))
    now += 1.0
    disk.failing.clear()
    store.save(row.at(21))


def test_the_last_checkpoint_is_taken_even_soon_after_a_failure(folder: Path) -> None:
    disk = FailingDisk("write_at")
    row, store = SampleRow(), sample_store(folder, fs=disk, retry_seconds=60.0)
    with pytest.raises(CheckpointWriteError):
        store.save(row.at(20))
    disk.failing.clear()
    assert store.take(row.at(21)) is None
    taken = store.take(row.at(21), final=True)
    assert taken is not None
    assert store.write(taken)
    assert_newest(folder, row, 21)


def test_a_file_where_the_folder_should_be_is_an_error_of_ours(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    store = sample_store(folder)
    with pytest.raises(CheckpointWriteError):
        store.save(whole(20))
    with pytest.raises(CheckpointWriteError):
        store.open(PROMPT, 1)
    with pytest.raises(CheckpointError):
        store.newest_valid()


@pytest.mark.parametrize("meta", [{"no": object()}, {"much": 2**70}, {5: {"a": {1, 2}}}])
def test_a_meta_that_msgpack_cannot_hold_is_refused_and_leaves_no_file(
    folder: Path, meta: dict[str, object]
) -> None:
    with pytest.raises(CheckpointWriteError, match="packed"):
        sample_store(folder, meta=meta).save(whole(20))
    assert names(folder) == []


class Budget:
    """Room for so many bytes."""

    def __init__(self, folder: Path, room: int) -> None:
        self.folder = folder
        self.room = room

    def charge(self, nbytes: int) -> None:
        if nbytes > self.room:
            raise CheckpointWriteError(self.folder, "the budget is used up")
        self.room -= nbytes


def test_a_budget_that_is_used_up_refuses_and_the_log_goes_on_when_there_is_room(
    folder: Path,
) -> None:
    budget = Budget(folder, 40_000)
    row, store = SampleRow(), sample_store(folder, budget=budget)
    store.save(row.at(20))
    budget.room = 0
    with pytest.raises(CheckpointWriteError, match="budget"):
        store.save(row.at(25))
    assert_newest(folder, row, 20)
    budget.room = 40_000
    store.save(row.at(26))
    assert_newest(folder, row, 26)
    assert [name for name in names(folder) if name.endswith(".log")] == ["00000001-n.log"]


# -- somebody else's hands in the folder -----------------------------------------------


@pytest.mark.parametrize("what", ["folder", "log"])
def test_a_log_that_somebody_removed_is_begun_anew_with_everything(folder: Path, what: str) -> None:
    row, store = SampleRow(), sample_store(folder)
    store.save(row.at(20))
    if what == "folder":
        shutil.rmtree(folder)
    else:
        (folder / "00000001-n.log").unlink()
    with pytest.raises(CheckpointWriteError):
        store.save(row.at(25))
    assert store.durable == Durable()
    store.save(row.at(26))
    assert_newest(folder, row, 26)
    store.save(row.at(27))
    assert_newest(folder, row, 27)


def test_a_log_that_was_removed_before_a_failing_sync_is_begun_anew(folder: Path) -> None:
    disk = FailingDisk()
    row, store = SampleRow(), sample_store(folder, fs=disk)
    store.save(row.at(20))
    disk.failing.add("sync")
    with pytest.raises(CheckpointWriteError):
        store.save(row.at(25))
    disk.failing.clear()
    # The new log would continue it.
    shutil.rmtree(folder)
    with pytest.raises(CheckpointWriteError):
        store.save(row.at(26))
    store.save(row.at(27))
    assert_newest(folder, row, 27)


def test_state_files_that_somebody_removed_are_written_again(folder: Path) -> None:
    row, store = SampleRow(), sample_store(folder)
    store.save(row.at(20))
    for path in folder.glob("*.state"):
        path.unlink()
    for stop in (21, 22):
        store.save(row.at(stop))
        assert_newest(folder, row, stop)
