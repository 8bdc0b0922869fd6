"""The folder of a job: what counts as saved can be loaded again, whatever happened since."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from disks import FailingDisk
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
from tenuto_engine import (
    CheckpointStore,
    DiskBudget,
    Durable,
    job_folder,
    job_ids,
    list_jobs,
    read_job,
    stored_attempts,
    verify,
    verify_job,
)
from tenuto_engine._errors import (
    CheckpointCorrupt,
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
    with pytest.raises(InvalidOption, match="folder: the name 'not a job' is not"):
        CheckpointStore(tmp_path / "not a job")


def test_a_path_may_be_a_string(folder: Path) -> None:
    store = CheckpointStore(str(folder))
    store.save(whole(20))
    assert store.folder == folder
    assert job_folder(str(folder.parent), "j1") == folder
    assert job_ids(str(folder.parent)) == ["j1"]
    (found,) = list_jobs(str(folder.parent))
    assert found.folder == folder
    assert [each.cache_length for each in read_job(str(folder)).checkpoints] == [20]
    assert [each.path.parent for each in stored_attempts(str(folder))] == [folder]
    reports = list(verify_job(str(folder)))
    assert reports == [verify(str(report.path)) for report in reports]
    assert all(report.ok for report in reports)
    assert DiskBudget(str(folder)).used() == read_job(folder).nbytes


@pytest.mark.parametrize("nonce", ["a-b", "", "a/b", "x" * 65])
def test_a_nonce_that_would_confuse_a_file_name_is_refused(folder: Path, nonce: str) -> None:
    with pytest.raises(InvalidOption, match="nonce"):
        CheckpointStore(folder, nonce=nonce)


@pytest.mark.parametrize("epoch", [-1, 10**10])
def test_an_epoch_that_no_file_name_holds_is_refused(folder: Path, epoch: int) -> None:
    with pytest.raises(InvalidOption, match="epoch"):
        CheckpointStore(folder, epoch=epoch)


def test_an_epoch_that_is_not_given_is_one_above_the_highest_in_the_folder(folder: Path) -> None:
    assert CheckpointStore(folder).epoch == 0
    for epoch in range(3):
        store = CheckpointStore(folder)
        assert store.epoch == epoch
        store.save(whole(20 + epoch))
    CheckpointStore(folder, epoch=7).open(PROMPT, 1)
    assert CheckpointStore(folder).epoch == 8
    (folder / "00000011-00000001-abc.ckpt").write_text("of an older format")
    assert CheckpointStore(folder).epoch == 12
    assert CheckpointStore(folder, epoch=0).epoch == 0


def test_the_highest_epoch_of_all_does_not_keep_anyone_from_reading(folder: Path) -> None:
    sample_store(folder, 10**10 - 1).save(whole(20))
    store = CheckpointStore(folder)
    assert store.epoch == 10**10 - 1
    assert len(store.candidates()) == 1


def test_a_new_store_has_nothing_durable_until_a_row_goes_on_from_its_folder(folder: Path) -> None:
    sample_store(folder, 1).save(whole(20))
    store = sample_store(folder, 2)
    assert store.durable == Durable()
    assert store.candidates()[0].cache_length == 20
    heir = SampleRow(origin=newest(folder).origin)
    assert store.take(heir.at(21)) is not None
    assert store.durable == Durable(20, 17, pending=True)
    another = SampleRow()
    assert store.take(another.at(5)) is not None
    assert store.durable == Durable()


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
