"""The power goes at any call to the disk, and with it anything that was never synced."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from disks import CrashingDisk, PowerCut
from log_samples import PROMPT
from sample_rows import SEED, SampleRow, assert_all_exact, assert_newest, sample_store
from tenuto_engine import CheckpointStore
from tenuto_engine._errors import CheckpointWriteError

T = TypeVar("T")

PART_BYTES = 700
"""A few positions."""


@pytest.fixture(autouse=True)
def quick_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What survives is for the fake disk to say, so that the real one need not be waited for."""
    monkeypatch.setattr("tenuto_engine._fs._sync", lambda handle: None)


class ShakyDisk(CrashingDisk):
    """Fails in the calls of one name when asked to, until the power goes."""

    def __init__(self, calls: int | None = None, seed: int = 0) -> None:
        super().__init__(calls, seed)
        self._failing: str | None = None
        self._skipped = 0

    def around(self, name: str, call: Callable[[], T]) -> T:
        if name == self._failing:
            self._skipped -= 1
            if self._skipped < 0:
                self._require_power()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().around(name, call)

    def lose_power(self) -> None:
        super().lose_power()
        # As the end of the process does.
        for handle in self._handles:
            with suppress(OSError):
                os.close(handle)

    def close(self, handle: int) -> None:
        super().close(handle)
        # The number is soon that of another file.
        del self._handles[handle]

    @contextmanager
    def fails(self, name: str, skipped: int = 0) -> Iterator[None]:
        """The call fails after so many more, as do those who make it."""
        self._failing, self._skipped = name, skipped
        with suppress(CheckpointWriteError):
            yield
        self._failing = None


class Life:
    """What one job does to the disk, and what it was told is durable."""

    def __init__(self, folder: Path, disk: ShakyDisk, row: SampleRow) -> None:
        self.folder = folder
        self.disk = disk
        self.row = row
        self.reported = 0
        self.opened = self.ended = False

    def store(self, epoch: int) -> CheckpointStore:
        return sample_store(self.folder, epoch, fs=self.disk, part_bytes=PART_BYTES)

    def save(self, store: CheckpointStore, row: SampleRow, *stops: int) -> None:
        for stop in stops:
            self.reported = max(self.reported, store.save(row.at(stop)).position)

    def whole(self) -> None:
        self.first()
        self.second()

    def first(self) -> None:
        """An attempt that has some trouble."""
        row, store = self.row, self.store(1)
        store.open(PROMPT, SEED)
        self.opened = True
        with self.disk.fails("write_at"):
            # Its state file is created, and no more.
            self.save(store, row, 2)
        self.save(store, row, 3, 5, 14)
        with self.disk.fails("write_at"):
            self.save(store, row, 15)
        self.save(store, row, 16)
        with self.disk.fails("sync"):
            # Of the state file; then of the log, which is given up.
            self.save(store, row, 17)
        with self.disk.fails("sync", skipped=1):
            self.save(store, row, 18)
        self.save(store, row, 19, 20)
        store.close()

    def second(self) -> None:
        """One that goes on from what the first left, and completes the job."""
        store = self.store(2)
        found = store.newest_valid()
        assert found is not None
        row = SampleRow(self.row.model, origin=found.origin)
        store.open(PROMPT, SEED, found.origin)
        self.save(store, row, 22, 23, 24)
        store.finish({"state": "cancelled"}, self.row.run(24).tokens(), keep_caches=True)
        last = self.store(3)
        self.save(last, SampleRow(self.row.model, origin=found.origin), 25)
        last.finish({"state": "done"}, self.row.run(26).tokens(), keep_caches=False)
        self.ended = True


def check(folder: Path, life: Life) -> None:
    """Nothing that was reported is lost, and nothing else than what was saved loads."""
    reader = CheckpointStore(folder)
    ends = [end for end in reader.ends() if end.damage is None]
    lengths = assert_all_exact(folder, life.row)
    assert life.opened <= folder.exists()
    if life.ended or any(end.end["state"] == "done" for end in ends):
        assert ends[0].tokens == life.row.run(26).tokens()
        return
    assert max(lengths, default=0) >= life.reported
    if lengths:
        assert_newest(folder, life.row, lengths[0])


def go_on(folder: Path, life: Life) -> None:
    """Another attempt goes on from whatever is there."""
    store = sample_store(folder, 9)
    found = store.newest_valid()
    row = SampleRow(life.row.model, origin=found.origin if found else None)
    for stop in (30, 31, 32):
        store.save(row.at(stop))
        assert_newest(folder, row, stop)
    store.finish({}, (), keep_caches=False)
    assert [entry.name for entry in folder.iterdir()] == ["00000009-n.end"]


def calls_of(folder: Path) -> int:
    """How many calls a whole life makes."""
    folder.parent.mkdir()
    disk = ShakyDisk()
    life = Life(folder, disk, SampleRow())
    life.whole()
    assert sorted(entry.name for entry in folder.iterdir()) == ["00000003-n.end"]
    return len(disk.made)


def test_a_power_cut_at_any_call_leaves_what_was_reported_and_never_anything_else(
    tmp_path: Path,
) -> None:
    total = calls_of(tmp_path / "whole" / "j1")
    assert total > 100
    drawn = random.Random(5)
    for calls in range(total):
        folder = tmp_path / f"cut{calls}" / "j1"
        folder.parent.mkdir()
        disk = ShakyDisk(calls, seed=drawn.randrange(2**32))
        life = Life(folder, disk, SampleRow())
        with pytest.raises(PowerCut):
            life.whole()
        disk.lose_power()
        check(folder, life)
        go_on(folder, life)


def test_power_cuts_one_after_the_other_lose_nothing_that_was_reported(tmp_path: Path) -> None:
    drawn = random.Random(6)
    for number in range(25):
        folder = tmp_path / str(number) / "j1"
        folder.parent.mkdir()
        life = Life(folder, ShakyDisk(), SampleRow("all"))
        stop = 3
        for epoch in range(1, 6):
            life.disk = ShakyDisk(drawn.randrange(5, 40), seed=drawn.randrange(2**32))
            store = life.store(epoch)
            found = store.newest_valid()
            row = SampleRow("all", origin=found.origin if found else None)
            stop = len(found.cache_tokens) if found else 2
            with suppress(PowerCut):
                while True:
                    stop += drawn.randint(0, 3)
                    if drawn.random() < 0.3:
                        call = drawn.choice(["write_at", "sync", "truncate"])
                        with life.disk.fails(call, skipped=drawn.randrange(3)):
                            life.save(store, row, stop)
                    else:
                        life.save(store, row, stop)
            life.disk.lose_power()
            check(folder, life)
        go_on_from = max(stop, 30)
        store = sample_store(folder, 9)
        found = store.newest_valid()
        row = SampleRow("all", origin=found.origin if found else None)
        store.save(row.at(go_on_from))
        assert_newest(folder, row, go_on_from)
