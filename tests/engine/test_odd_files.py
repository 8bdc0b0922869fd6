"""Things that are no files of ours but are named like them, and files that are missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sample_rows import SampleRow, assert_newest, sample_store
from tenuto_engine import CheckpointStore, DiskBudget, bytes_on_disk, verify_job
from tenuto_engine._errors import CheckpointError, CheckpointWriteError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "j1"


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/null")


odd = pytest.mark.parametrize("put", [pipe, directory, link])


@odd
def test_a_state_file_that_is_no_file_fails_the_save_and_stops_no_thread(
    folder: Path, put: Callable[[Path], None]
) -> None:
    store, row = sample_store(folder), SampleRow()
    store.save(row.at(10))
    put(folder / "00000001-n.1.state")
    with pytest.raises(CheckpointWriteError):
        store.save(row.at(14))
    assert_newest(folder, row, 10)


@odd
def test_an_heir_goes_on_whatever_stands_in_the_place_of_a_state_that_it_does_not_need(
    folder: Path, put: Callable[[Path], None]
) -> None:
    sample_store(folder).save(SampleRow().at(10))
    put(folder / "00000001-n.1.state")
    found = CheckpointStore(folder).newest_valid()
    assert found is not None
    heir = SampleRow(origin=found.origin)
    sample_store(folder, 2).save(heir.at(20))
    assert_newest(folder, heir, 20)


def test_a_base_that_cannot_be_synced_is_built_on_no_more(folder: Path) -> None:
    sample_store(folder).save(SampleRow().at(10))
    found = CheckpointStore(folder).newest_valid()
    assert found is not None
    base = folder / "00000001-n.log"
    pipe(base)
    heir, store = SampleRow(origin=found.origin), sample_store(folder, 2)
    with pytest.raises(CheckpointWriteError, match="not a regular file"):
        store.save(heir.at(14))
    store.save(heir.at(20))
    assert_newest(folder, heir, 20)


@pytest.mark.parametrize("lost", ["all states", "what the newest log continues"])
def test_verify_says_so_when_the_newest_checkpoint_lacks_what_it_builds_on(
    folder: Path, lost: str
) -> None:
    sample_store(folder).save(SampleRow().at(10))
    found = CheckpointStore(folder).newest_valid()
    assert found is not None
    heir = SampleRow(origin=found.origin)
    sample_store(folder, 2).save(heir.at(20))
    assert all(report.ok for report in verify_job(folder))
    for path in folder.glob("*.state" if lost == "all states" else "00000001-n.*"):
        path.unlink()
    reports = {report.path.name: report for report in verify_job(folder)}
    assert not reports["00000002-n.log"].ok


def test_states_swapped_between_jobs_are_noticed_by_verify(tmp_path: Path) -> None:
    for job, salt in (("j1", 0), ("j2", 5)):
        sample_store(tmp_path / job).save(SampleRow(salt=salt).at(10))
    one, other = (tmp_path / job / "00000001-n.0.state" for job in ("j1", "j2"))
    mine, theirs = one.read_bytes(), other.read_bytes()
    one.write_bytes(theirs)
    other.write_bytes(mine)
    for job in ("j1", "j2"):
        (report,) = [each for each in verify_job(tmp_path / job) if not each.ok]
        assert "another commit" in str(report.reason)


def test_a_sparse_file_counts_for_what_it_takes(tmp_path: Path) -> None:
    path = tmp_path / "j1" / "00000001-n.log"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(2**40)
    assert bytes_on_disk(path.stat()) <= 2**20
    assert DiskBudget(tmp_path).used() <= 2**20


def test_a_folder_is_emptied_of_all_that_can_be_removed(folder: Path) -> None:
    store = sample_store(folder)
    store.save(SampleRow().at(10))
    store.close()
    directory(folder / "00000000-a.log")
    with pytest.raises(CheckpointError, match="cannot be deleted"):
        store.delete()
    assert [path.name for path in folder.iterdir()] == ["00000000-a.log"]


def test_a_live_checkpoint_that_was_kept_can_be_saved_later(folder: Path) -> None:
    row = SampleRow()
    kept = row.at(10)
    kept.close()
    sample_store(folder).save(kept)
    assert_newest(folder, row, 10)
