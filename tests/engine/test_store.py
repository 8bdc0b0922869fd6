"""The folder of a job: what counts as saved can be loaded again, whatever happened since."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint_samples import (
    CrashingDisk,
    FailingDisk,
    FullDisk,
    PowerCut,
    image,
    sample_checkpoint,
)
from tenuto_engine._checkpoint import Checkpoint, to_header
from tenuto_engine._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointWriteError,
    InvalidOption,
)
from tenuto_engine._format import write_file
from tenuto_engine._store import CheckpointStore, job_folder, list_jobs, verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "j1"


def newest(folder: Path) -> Checkpoint:
    checkpoint = CheckpointStore(folder).newest_valid()
    assert checkpoint is not None
    return checkpoint


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def damage(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


# -- saving and finding ----------------------------------------------------------------


def test_what_is_saved_is_loaded_as_it_was(folder: Path) -> None:
    checkpoint = sample_checkpoint()
    path = CheckpointStore(folder, epoch=3, nonce="abc").save(checkpoint)
    assert path == folder / "00000003-00000001-abc.ckpt"
    assert image(newest(folder)) == image(checkpoint)


def test_the_meta_of_the_store_is_added_beneath_that_of_the_checkpoint(folder: Path) -> None:
    checkpoint = replace(sample_checkpoint(), meta={"job": "own"})
    CheckpointStore(folder, meta={"job": "store", "epoch": 4}).save(checkpoint)
    assert dict(newest(folder).meta) == {"job": "own", "epoch": 4}


def test_the_newest_two_are_kept(folder: Path) -> None:
    store = CheckpointStore(folder, nonce="a")
    for generated in range(5):
        store.save(sample_checkpoint(generated))
    assert names(folder) == ["00000000-00000004-a.ckpt", "00000000-00000005-a.ckpt"]
    assert newest(folder).generated_tokens == 4


def test_candidates_come_longest_first_and_only_their_headers_are_read(folder: Path) -> None:
    store = CheckpointStore(folder, keep=9, epoch=2)
    for generated in (3, 9, 6):
        store.save(sample_checkpoint(generated))
    for path in folder.iterdir():
        damage(path)
    found = list(store.candidates())
    assert [each.generated_tokens for each in found] == [9, 6, 3]
    assert [each.cache_length for each in found] == [12, 9, 6]
    assert {each.epoch for each in found} == {2}
    assert all(each.damage is None and each.nbytes == each.path.stat().st_size for each in found)
    with pytest.raises(CheckpointCorrupt):
        found[0].load()


@pytest.mark.parametrize("position", [30, 70, -1])
def test_a_damaged_newest_one_is_skipped_and_reported(folder: Path, position: int) -> None:
    store = CheckpointStore(folder)
    store.save(sample_checkpoint(4))
    damaged = store.save(sample_checkpoint(8))
    damage(damaged, position)
    skipped: list[CheckpointCorrupt] = []
    checkpoint = store.newest_valid(skipped.append)
    assert checkpoint is not None
    assert checkpoint.generated_tokens == 4
    assert [error.path for error in skipped] == [damaged]


def test_no_folder_and_nothing_but_damage_give_none(folder: Path) -> None:
    store = CheckpointStore(folder)
    assert store.newest_valid() is None
    damage(store.save(sample_checkpoint()))
    assert store.newest_valid() is None


def test_foreign_files_in_the_folder_are_left_alone(folder: Path) -> None:
    folder.mkdir(parents=True)
    foreign = ["notes.txt", "1-1-a.ckpt", "00000000-00000001-a.ckpt.bak", "x.ckpt.tmp"]
    for name in foreign:
        (folder / name).write_text("mine")
    store = CheckpointStore(folder)
    for generated in range(4):
        store.save(sample_checkpoint(generated))
    store.delete()
    assert names(folder) == sorted(foreign)


def test_delete_removes_the_job_and_is_idempotent(folder: Path) -> None:
    CheckpointStore(folder, epoch=1).save(sample_checkpoint())
    store = CheckpointStore(folder, epoch=2)
    store.save(sample_checkpoint())
    store.delete()
    store.delete()
    assert not folder.exists()


def test_a_deleted_folder_is_not_brought_back_by_a_late_save(folder: Path) -> None:
    store = CheckpointStore(folder)
    store.save(sample_checkpoint())
    store.delete()
    with pytest.raises(CheckpointWriteError):
        store.save(sample_checkpoint())
    assert not folder.exists()


def test_files_and_folders_are_for_their_owner_only(folder: Path) -> None:
    before = os.umask(0)
    try:
        path = CheckpointStore(folder).save(sample_checkpoint())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_an_existing_folder_that_others_may_read_is_closed_to_them(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o755)
    CheckpointStore(folder).save(sample_checkpoint())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("job_id", ["", ".", "..", "a/b", "a b", "é", "x" * 65, "a\n", "../../etc"])
def test_foreign_job_ids_are_refused(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(InvalidOption, match="job_id"):
        job_folder(tmp_path, job_id)


def test_a_store_is_not_opened_in_a_folder_that_is_no_jobs(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="job_id"):
        CheckpointStore(tmp_path / "not a job")


@pytest.mark.parametrize("options", [{"nonce": "a-b"}, {"nonce": ""}, {"nonce": "a/b"}])
def test_a_nonce_that_would_confuse_a_file_name_is_refused(
    folder: Path, options: dict[str, str]
) -> None:
    with pytest.raises(InvalidOption, match="nonce"):
        CheckpointStore(folder, nonce=options["nonce"])


@pytest.mark.parametrize(("epoch", "keep"), [(-1, 2), (0, 0)])
def test_an_epoch_below_0_and_a_keep_below_1_are_refused(
    folder: Path, epoch: int, keep: int
) -> None:
    with pytest.raises(InvalidOption):
        CheckpointStore(folder, epoch=epoch, keep=keep)


def test_jobs_are_listed_by_headers_and_foreign_folders_are_left_out(tmp_path: Path) -> None:
    for job_id, generated in (("b", 4), ("a-1_Z", 2)):
        CheckpointStore(tmp_path / job_id).save(sample_checkpoint(generated))
    (tmp_path / "not a job").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    jobs = list_jobs(tmp_path)
    assert [job.job_id for job in jobs] == ["a-1_Z", "b"]
    assert [job.checkpoints[0].generated_tokens for job in jobs] == [2, 4]
    assert jobs[0].nbytes == sum(path.stat().st_size for path in jobs[0].folder.iterdir())
    assert list_jobs(tmp_path / "none") == []


@pytest.mark.parametrize("meta", [["a", "list"], 3, None])
def test_a_file_whose_meta_is_no_map_is_listed_as_damaged(folder: Path, meta: object) -> None:
    store = CheckpointStore(folder)
    header, arrays = to_header(sample_checkpoint(4))
    path = store.save(sample_checkpoint(4))
    parts: list[bytes | memoryview] = []
    write_file(header | {"created_at": 0.0, "meta": meta}, arrays, parts.append)
    path.write_bytes(b"".join(parts))
    (stored,) = store.candidates()
    assert stored.meta is None
    assert stored.damage is not None


def test_verify_says_what_is_wrong(folder: Path) -> None:
    path = CheckpointStore(folder).save(sample_checkpoint(4))
    good = verify(path)
    assert (good.ok, good.reason, good.generated_tokens) == (True, None, 4)
    damage(path)
    bad = verify(path)
    assert not bad.ok
    assert bad.reason is not None
    assert "damaged" in bad.reason


# -- two attempts ----------------------------------------------------------------------


def test_a_later_attempt_takes_over_and_prunes_the_earlier_ones(folder: Path) -> None:
    first = CheckpointStore(folder, epoch=1, nonce="a")
    for generated in (1, 2):
        first.save(sample_checkpoint(generated))
    second = CheckpointStore(folder, epoch=2, nonce="b")
    second.save(sample_checkpoint(3))
    assert names(folder) == ["00000001-00000002-a.ckpt", "00000002-00000003-b.ckpt"]
    second.save(sample_checkpoint(4))
    assert names(folder) == ["00000002-00000003-b.ckpt", "00000002-00000004-b.ckpt"]


def test_a_zombie_removes_nothing_but_its_own(folder: Path) -> None:
    CheckpointStore(folder, epoch=1, nonce="a").save(sample_checkpoint(1))
    zombie = CheckpointStore(folder, epoch=2, nonce="b")
    zombie.save(sample_checkpoint(2))
    owner = CheckpointStore(folder, epoch=3, nonce="c", keep=9)
    owner.save(sample_checkpoint(3))
    others = [name for name in names(folder) if "-b." not in name]
    for generated in range(4, 9):
        zombie.save(sample_checkpoint(generated))
    left = names(folder)
    assert [name for name in left if "-b." not in name] == others
    assert len(left) == len(others) + 2


def test_two_attempts_of_one_epoch_never_touch_each_others_files(folder: Path) -> None:
    stores = [CheckpointStore(folder, epoch=1, nonce=nonce) for nonce in "ab"]
    for generated in range(4):
        for store in stores:
            store.save(sample_checkpoint(generated))
    assert len([name for name in names(folder) if "-a." in name]) == 2
    assert len([name for name in names(folder) if "-b." in name]) == 2


def test_an_attempt_that_began_anew_keeps_its_short_files_beside_longer_damaged_ones(
    folder: Path,
) -> None:
    first = CheckpointStore(folder, epoch=1)
    for generated in (50, 60):
        damage(first.save(sample_checkpoint(generated)))
    second = CheckpointStore(folder, epoch=2)
    saved = second.save(sample_checkpoint(1))
    assert saved.exists()
    assert newest(folder).generated_tokens == 1


def test_a_file_that_a_live_zombie_replaces_while_it_is_looked_for_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie = CheckpointStore(folder, epoch=1, keep=1)
    zombie.save(sample_checkpoint(3))
    store = CheckpointStore(folder, epoch=2)
    listed = store.candidates

    def candidates_then_replaced() -> object:
        found = list(listed())
        monkeypatch.undo()
        zombie.save(sample_checkpoint(5))
        return iter(found)

    monkeypatch.setattr(store, "candidates", candidates_then_replaced)
    skipped: list[CheckpointCorrupt] = []
    checkpoint = store.newest_valid(skipped.append)
    assert checkpoint is not None
    assert checkpoint.generated_tokens == 5
    assert skipped == []


def test_leftovers_of_dead_attempts_are_removed_and_those_of_live_ones_are_not(
    folder: Path,
) -> None:
    folder.mkdir(parents=True)
    dead = folder / "00000001-00000007-a.ckpt.tmp"
    same = folder / "00000002-00000007-b.ckpt.tmp"
    later = folder / "00000003-00000007-c.ckpt.tmp"
    dead.write_bytes(b"half")
    same.write_bytes(b"half")
    CheckpointStore(folder, epoch=2, nonce="d").save(sample_checkpoint())
    assert not dead.exists()
    dead.write_bytes(b"half")
    later.write_bytes(b"half")
    CheckpointStore(folder, epoch=2, nonce="e").save(sample_checkpoint())
    assert dead.exists()
    assert same.exists()
    assert later.exists()


# -- a disk that fails -----------------------------------------------------------------


def test_a_full_disk_leaves_the_last_good_one_and_nothing_else(folder: Path) -> None:
    good = CheckpointStore(folder, epoch=1).save(sample_checkpoint(3))
    whole = good.stat().st_size
    for room in [*range(0, whole, 37), whole - 1]:
        store = CheckpointStore(folder, epoch=2, fs=FullDisk(room))
        with pytest.raises(CheckpointWriteError, match="No space left"):
            store.save(sample_checkpoint(3))
        assert names(folder) == [good.name]
    assert image(newest(folder)) == image(sample_checkpoint(3))


def test_a_save_works_again_once_there_is_room(folder: Path) -> None:
    disk = FullDisk(100)
    store = CheckpointStore(folder, fs=disk)
    with pytest.raises(CheckpointWriteError):
        store.save(sample_checkpoint(3))
    disk.room = 10**6
    store.save(sample_checkpoint(4))
    assert newest(folder).generated_tokens == 4


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", ["create", "write", "sync", "close", "rename", "sync_folder"])
def test_whatever_call_fails_the_save_fails_and_the_last_good_one_stays(
    folder: Path, call: str, after: bool
) -> None:
    CheckpointStore(folder, nonce="a").save(sample_checkpoint(3))
    disk = FailingDisk(call, after=after)
    store = CheckpointStore(folder, nonce="b", fs=disk)
    for _ in range(3):
        with pytest.raises(CheckpointWriteError) as caught:
            store.save(sample_checkpoint(9))
    assert caught.value.reason == os.strerror(errno.EIO)
    finished = [name for name in names(folder) if name.endswith(".ckpt")]
    if call == "rename" and after:
        # It took place although it was said to have failed: not counted on, not harmful.
        assert verify(folder / finished[-1]).ok
    else:
        assert finished == ["00000000-00000001-a.ckpt"]
        assert newest(folder).generated_tokens == 3
    disk.failing.clear()
    store.save(sample_checkpoint(10))
    assert newest(folder).generated_tokens == 10


def test_a_checkpoint_whose_folder_entry_is_not_durable_does_not_supersede_any(
    folder: Path,
) -> None:
    disk = FailingDisk()
    store = CheckpointStore(folder, fs=disk)
    for generated in (1, 2):
        store.save(sample_checkpoint(generated))
    durable = names(folder)
    disk.failing.add("sync_folder")
    for generated in (3, 4, 5):
        with pytest.raises(CheckpointWriteError):
            store.save(sample_checkpoint(generated))
    assert names(folder) == durable


def test_a_disk_that_cannot_remove_files_does_not_fail_the_save(folder: Path) -> None:
    store = CheckpointStore(folder, fs=FailingDisk("unlink"))
    for generated in range(4):
        store.save(sample_checkpoint(generated))
    assert newest(folder).generated_tokens == 3


def test_a_folder_that_cannot_be_made_is_a_write_error(folder: Path) -> None:
    store = CheckpointStore(folder, fs=FailingDisk("make_folder", number=errno.EROFS))
    with pytest.raises(CheckpointWriteError, match="Read-only"):
        store.save(sample_checkpoint())


def test_a_file_where_the_folder_should_be_is_an_error_of_ours(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    store = CheckpointStore(folder)
    with pytest.raises(CheckpointWriteError):
        store.save(sample_checkpoint())
    with pytest.raises(CheckpointError):
        store.newest_valid()


@pytest.mark.parametrize("meta", [{"no": object()}, {"much": 2**70}, {5: {"a": {1, 2}}}])
def test_a_meta_that_msgpack_cannot_hold_is_refused_and_leaves_no_file(
    folder: Path, meta: dict[str, object]
) -> None:
    with pytest.raises(CheckpointWriteError, match="packed"):
        CheckpointStore(folder, meta=meta).save(sample_checkpoint())
    assert names(folder) == []


def test_a_power_cut_between_any_two_calls_loses_no_durable_checkpoint(folder: Path) -> None:
    calls = 0
    finished = False
    while not finished:
        root = folder.parent / f"cut{calls}"
        job = root / "j1"
        disk = CrashingDisk(calls)
        store = CheckpointStore(job, fs=disk)
        durable = -1
        try:
            for generated in range(4):
                store.save(sample_checkpoint(generated))
                durable = generated
            finished = True
        except PowerCut:
            pass
        disk.lose_power()
        if durable >= 0:
            # The folder's last entry may have become durable just before the cut.
            assert newest(job).generated_tokens in (durable, durable + 1)
            assert image(newest(job)) == image(sample_checkpoint(newest(job).generated_tokens))
        CheckpointStore(job, epoch=1).save(sample_checkpoint(7))
        assert newest(job).generated_tokens == 7
        calls += 1
    assert calls > 20


# -- a process that is killed ----------------------------------------------------------

# Imports take longer than saves, so one process imports and forks those to be killed.
NURSERY = """
import os, sys
from pathlib import Path
from checkpoint_samples import sample_checkpoint
from tenuto_engine._store import CheckpointStore

for line in sys.stdin:
    epoch, start = map(int, line.split())
    child = os.fork()
    if child == 0:
        print("child", os.getpid(), flush=True)
        store = CheckpointStore(Path(sys.argv[1]), epoch=epoch)
        for generated in range(start, 10**6):
            store.save(sample_checkpoint(generated, width=512))
            print("saved", generated, flush=True)
    os.waitpid(child, 0)
    print("dead", child, flush=True)
"""


class Nursery:
    """Starts processes that save without end, and tells what they said they had saved."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
            text=True,
        )

    def save_and_die(self, epoch: int, start: int, saves: int, then: float) -> int | None:
        """The last checkpoint that a child had saved when it was killed."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{epoch} {start}\n")
        self.process.stdin.flush()
        _, child = self._line()
        last = None
        for _ in range(saves):
            _, last = self._line()
        # A moment longer, so that kills fall into any part of a save.
        deadline = time.monotonic() + then
        while time.monotonic() < deadline:
            pass
        os.kill(child, signal.SIGKILL)
        while (said := self._line())[0] == "saved":
            last = said[1]
        return last

    def _line(self) -> tuple[str, int]:
        assert self.process.stdout is not None
        word, number = self.process.stdout.readline().split()
        return word, int(number)

    def close(self) -> None:
        self.process.communicate(timeout=10)


def test_a_killed_process_leaves_its_newest_durable_checkpoint(folder: Path) -> None:
    drawn = random.Random(11)
    nursery = Nursery(folder)
    newest_saved = 0
    for epoch in range(1, 16):
        said = nursery.save_and_die(
            epoch, newest_saved + 1, drawn.randrange(1, 6), drawn.random() * 0.004
        )
        assert said is not None
        found = newest(folder)
        # The last one may be durable and its line not yet printed.
        assert found.generated_tokens in (said, said + 1)
        assert image(found) == image(sample_checkpoint(found.generated_tokens, width=512))
        newest_saved = found.generated_tokens
    nursery.close()
    assert len([name for name in names(folder) if name.endswith(".ckpt")]) <= 3
