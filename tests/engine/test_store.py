"""The folder of a job: what counts as saved can be loaded again, whatever happened since."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from disks import FailingDisk, FullDisk
from log_samples import META, PROMPT, image
from sample_rows import (
    SampleRow,
    assert_all_exact,
    assert_newest,
    damage,
    names,
    newest,
    sample_store,
    whole,
)
from tenuto_engine import CheckpointStore, Durable, job_folder, list_jobs, verify_job
from tenuto_engine._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointWriteError,
    InvalidOption,
)

CALLS = ["make_folder", "create", "open", "write_at", "truncate", "sync", "close", "sync_folder"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "j1"


# -- saving and finding ----------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, len(PROMPT), 30])
def test_a_whole_checkpoint_is_loaded_as_it_was(folder: Path, stop: int) -> None:
    saved = whole(stop)
    durable = sample_store(folder, 3, nonce="abc").save(saved)
    assert durable == Durable(stop, max(0, stop - len(PROMPT)), stop >= len(PROMPT))
    assert image(newest(folder)) == (*image(saved)[:-1], META)
    assert names(folder) == ["00000003-abc.0.state", "00000003-abc.log"]


def test_every_checkpoint_of_a_row_is_loaded_as_it_was(folder: Path) -> None:
    row, store = SampleRow(), sample_store(folder)
    for stop in (1, 2, 3, 4, 9, 10, 25):
        store.save(row.at(stop))
        assert store.durable.position == stop
        assert_newest(folder, row, stop)
    assert all(report.ok for report in verify_job(folder))


def test_a_row_without_recurrent_state_can_go_back_to_all_of_its_checkpoints(folder: Path) -> None:
    row, store = SampleRow("plain"), sample_store(folder)
    for stop in (2, 3, 10, 25):
        store.save(row.at(stop))
    assert assert_all_exact(folder, row) == [25, 10, 3, 2]


def test_of_one_with_recurrent_state_the_last_two_can_be_loaded(folder: Path) -> None:
    row, store = SampleRow("all"), sample_store(folder)
    for stop in (2, 3, 10, 25):
        store.save(row.at(stop))
    assert assert_all_exact(folder, row) == [25, 10]


def test_candidates_come_longest_first_and_only_their_headers_are_read(folder: Path) -> None:
    store, row = sample_store(folder, 2), SampleRow()
    for stop in (10, 20, 30):
        store.save(row.at(stop))
    damage(folder / "00000002-n.log")
    found = store.candidates()
    assert [each.cache_length for each in found] == [30, 20, 10]
    assert [each.generated_tokens for each in found] == [27, 17, 7]
    assert {(each.epoch, each.nonce, each.damage) for each in found} == {(2, "n", None)}
    assert [each.seq for each in found] == [3, 2, 1]
    assert found[1].tokens() == list(row.run(20).tokens())
    with pytest.raises(CheckpointCorrupt):
        found[0].load()


@pytest.mark.parametrize("position", [-1, -700])
def test_a_damaged_newest_one_is_skipped_and_reported(folder: Path, position: int) -> None:
    row = SampleRow()
    store = sample_store(folder)
    for stop in (10, 20, 30):
        store.save(row.at(stop))
    damage(folder / "00000001-n.log", position)
    skipped: list[CheckpointCorrupt] = []
    found = store.newest_valid(skipped.append)
    assert found is not None
    assert image(found) == row.image(20)
    assert [error.path.name for error in skipped] == ["00000001-n.log"]


def test_no_folder_and_nothing_but_damage_give_none(folder: Path) -> None:
    store = sample_store(folder)
    assert store.newest_valid() is None
    assert store.candidates() == []
    assert store.ends() == []
    store.save(whole(20))
    damage(folder / "00000001-n.log", 100)
    assert store.newest_valid() is None


def test_a_log_is_there_from_open_on_without_a_checkpoint(folder: Path) -> None:
    row, store = SampleRow(), sample_store(folder)
    store.open(PROMPT, 2**64 - 1)
    assert names(folder) == ["00000001-n.log"]
    assert store.candidates() == []
    store.save(row.at(20))
    assert names(folder) == ["00000001-n.0.state", "00000001-n.log"]
    assert_newest(folder, row, 20)


def test_files_and_folders_are_for_their_owner_only(folder: Path) -> None:
    before = os.umask(0)
    try:
        store = sample_store(folder)
        store.save(whole(20))
        store.finish({}, (), keep_caches=True)
    finally:
        os.umask(before)
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in folder.iterdir()}
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_an_existing_folder_that_others_may_read_is_closed_to_them(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o755)
    sample_store(folder).save(whole(20))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("job_id", ["", ".", "..", "a/b", "a b", "é", "x" * 65, "a\n", "../../etc"])
def test_foreign_job_ids_are_refused(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(InvalidOption, match="job_id"):
        job_folder(tmp_path, job_id)


def test_a_store_is_not_opened_in_a_folder_that_is_no_jobs(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="job_id"):
        CheckpointStore(tmp_path / "not a job")


@pytest.mark.parametrize("nonce", ["a-b", "", "a/b", "x" * 65])
def test_a_nonce_that_would_confuse_a_file_name_is_refused(folder: Path, nonce: str) -> None:
    with pytest.raises(InvalidOption, match="nonce"):
        CheckpointStore(folder, nonce=nonce)


@pytest.mark.parametrize("epoch", [-1, 10**10])
def test_an_epoch_that_no_file_name_holds_is_refused(folder: Path, epoch: int) -> None:
    with pytest.raises(InvalidOption, match="epoch"):
        CheckpointStore(folder, epoch=epoch)


def test_jobs_are_listed_by_headers_and_foreign_folders_are_left_out(tmp_path: Path) -> None:
    for job_id, stop in (("b", 14), ("a-1_Z", 12)):
        sample_store(tmp_path / job_id).save(whole(stop))
    (tmp_path / "not a job").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    jobs = list_jobs(tmp_path)
    assert [job.job_id for job in jobs] == ["a-1_Z", "b"]
    assert [job.checkpoints[0].cache_length for job in jobs] == [12, 14]
    assert jobs[0].nbytes == sum(path.stat().st_size for path in jobs[0].folder.iterdir())
    assert list_jobs(tmp_path / "none") == []


# -- a store that is closed ------------------------------------------------------------


def test_delete_removes_the_job_and_is_idempotent(folder: Path) -> None:
    sample_store(folder, 1).save(whole(20))
    store = sample_store(folder, 2)
    store.save(whole(10))
    store.delete()
    store.delete()
    assert not folder.exists()
    assert folder.parent.exists()


def test_delete_leaves_foreign_files_and_the_folder_with_them(folder: Path) -> None:
    folder.mkdir(parents=True)
    foreign = ["notes.txt", "1-a.log", "00000001-a.log.bak", "x.tmp", "00000001-a.2.state"]
    for name in foreign:
        (folder / name).write_text("mine")
    store = sample_store(folder)
    store.save(whole(20))
    store.delete()
    assert names(folder) == sorted(foreign)


def test_a_closed_store_takes_and_writes_nothing_and_brings_no_folder_back(folder: Path) -> None:
    row, store = SampleRow(), sample_store(folder)
    store.save(row.at(10))
    taken = store.take(row.at(20))
    assert taken is not None
    store.delete()
    assert store.write(taken) is False
    assert store.take(row.at(30)) is None
    with pytest.raises(CheckpointWriteError, match="closed"):
        store.save(row.at(30))
    assert not folder.exists()


# -- the end ---------------------------------------------------------------------------


def test_the_end_of_a_completed_job_is_all_that_is_left(folder: Path) -> None:
    row, store = SampleRow(), sample_store(folder)
    for stop in (10, 20, 30):
        store.save(row.at(stop))
    tokens = row.run(33).tokens()
    store.finish({"state": "done", "deep": [1, None]}, tokens, keep_caches=False)
    assert names(folder) == ["00000001-n.end"]
    (end,) = store.ends()
    assert (end.end, end.tokens, end.damage) == (
        {"state": "done", "deep": [1, None]},
        tokens,
        None,
    )
    assert (end.prompt, end.epoch, end.nonce, end.meta) == (PROMPT, 1, "n", META)
    assert store.candidates() == []


def test_the_end_of_a_cancelled_job_stands_beside_what_it_can_be_resumed_from(folder: Path) -> None:
    row, store = SampleRow(), sample_store(folder)
    for stop in (10, 20):
        store.save(row.at(stop))
    store.finish({"state": "cancelled"}, row.run(20).tokens(), keep_caches=True)
    assert [end.end["state"] for end in store.ends()] == ["cancelled"]
    assert_newest(folder, row, 20)


def test_what_is_in_flight_at_the_end_is_not_written_after_it(folder: Path) -> None:
    row, store = SampleRow(), sample_store(folder)
    store.save(row.at(10))
    taken = store.take(row.at(20))
    assert taken is not None
    store.finish({}, (), keep_caches=False)
    assert store.write(taken) is False
    assert names(folder) == ["00000001-n.end"]


def test_a_job_that_ends_before_its_first_checkpoint_has_an_end_too(folder: Path) -> None:
    store = sample_store(folder)
    store.open(PROMPT, 5)
    store.finish({"state": "failed"}, (), keep_caches=False)
    assert names(folder) == ["00000001-n.end"]
    assert store.ends()[0].seed == 5


def test_an_end_of_nothing_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(CheckpointWriteError, match="not begun"):
        sample_store(folder).finish({}, (), keep_caches=True)


@pytest.mark.parametrize("call", ["create", "write_at", "sync", "close", "rename", "sync_folder"])
def test_an_end_that_cannot_be_written_removes_nothing_and_can_be_tried_again(
    folder: Path, call: str
) -> None:
    disk = FailingDisk()
    row, store = SampleRow(), sample_store(folder, fs=disk)
    store.save(row.at(20))
    disk.failing.add(call)
    with pytest.raises(CheckpointWriteError, match=os.strerror(errno.EIO)):
        store.finish({}, (), keep_caches=False)
    assert_newest(folder, row, 20)
    disk.failing.clear()
    store.finish({"second": True}, (), keep_caches=False)
    assert names(folder) == ["00000001-n.end"]
    assert store.ends()[0].end == {"second": True}


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
