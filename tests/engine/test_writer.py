"""The writer's thread: never in the way of decoding, never silent, never unbounded."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint_samples import FailingDisk, sample_checkpoint
from tenuto_engine._checkpoint import Checkpoint
from tenuto_engine._errors import CheckpointWriteError
from tenuto_engine._fs import FileSystem
from tenuto_engine._store import CheckpointStore
from tenuto_engine._writer import CheckpointWriter

PATIENCE = 10.0


class Gate(FileSystem):
    """A disk whose first ``create`` waits until the gate is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def create(self, path: Path) -> int:
        self.reached.set()
        assert self.opened.wait(PATIENCE)
        return super().create(path)


class Log:
    """What the callbacks of a writer were told."""

    def __init__(self) -> None:
        self.saved: list[tuple[str, int]] = []
        self.errors: list[tuple[str, str]] = []

    def on_saved(self, store: CheckpointStore, checkpoint: Checkpoint, path: Path) -> None:
        assert path.exists()
        self.saved.append((store.folder.name, checkpoint.generated_tokens))

    def on_error(self, store: CheckpointStore, error: CheckpointWriteError) -> None:
        self.errors.append((store.folder.name, error.reason))


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def writer(log: Log) -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(log.on_saved, log.on_error)
    yield made
    assert made.close(PATIENCE)


def test_a_submitted_checkpoint_becomes_durable(
    tmp_path: Path, writer: CheckpointWriter, log: Log
) -> None:
    store = CheckpointStore(tmp_path / "j1")
    assert writer.submit(store, sample_checkpoint(4))
    path = writer.wait(store, PATIENCE)
    assert path is not None
    assert path.exists()
    newest = store.newest_valid()
    assert newest is not None
    assert newest.generated_tokens == 4
    assert log.saved == [("j1", 4)]


def test_submit_returns_while_the_disk_hangs_and_only_the_newest_waits(
    tmp_path: Path, writer: CheckpointWriter, log: Log
) -> None:
    gate = Gate()
    store = CheckpointStore(tmp_path / "j1", fs=gate)
    writer.submit(store, sample_checkpoint(0))
    assert gate.reached.wait(PATIENCE)
    for generated in range(1, 6):
        assert writer.submit(store, sample_checkpoint(generated))
    assert writer.wait(store, 0.01) is None
    assert not writer.flush(0.01)
    gate.opened.set()
    assert writer.wait(store, PATIENCE) is not None
    assert log.saved == [("j1", 0), ("j1", 5)]


def test_more_jobs_than_may_wait_are_refused_until_there_is_room(
    tmp_path: Path, writer: CheckpointWriter, log: Log
) -> None:
    gate = Gate()
    stores = [CheckpointStore(tmp_path / f"j{i}", fs=gate) for i in range(4)]
    writer.submit(stores[0], sample_checkpoint(1))
    assert gate.reached.wait(PATIENCE)
    accepted = [writer.submit(store, sample_checkpoint(1)) for store in stores[1:]]
    assert accepted == [True, True, False]
    assert writer.submit(stores[1], sample_checkpoint(2))
    gate.opened.set()
    assert writer.flush(PATIENCE)
    assert writer.submit(stores[3], sample_checkpoint(3))
    assert writer.flush(PATIENCE)
    assert log.saved == [("j0", 1), ("j1", 2), ("j2", 1), ("j3", 3)]


def test_a_last_checkpoint_waits_for_room_instead_of_being_refused(
    tmp_path: Path, writer: CheckpointWriter
) -> None:
    gate = Gate()
    stores = [CheckpointStore(tmp_path / f"j{i}", fs=gate) for i in range(4)]
    for store in stores[:3]:
        writer.submit(store, sample_checkpoint(1))
        assert gate.reached.wait(PATIENCE)
    assert writer.save(stores[3], sample_checkpoint(9), timeout=0.01) is None
    opener = threading.Timer(0.05, gate.opened.set)
    opener.start()
    path = writer.save(stores[3], sample_checkpoint(9), timeout=PATIENCE)
    opener.join()
    assert path is not None
    assert path.exists()


def test_an_error_is_reported_once_until_a_save_succeeds_again(
    tmp_path: Path, writer: CheckpointWriter, log: Log
) -> None:
    disk = FailingDisk("sync", number=errno.ENOSPC)
    store = CheckpointStore(tmp_path / "j1", fs=disk)

    def save(generated: int) -> Path | None:
        assert writer.submit(store, sample_checkpoint(generated))
        return writer.wait(store, PATIENCE)

    assert [save(i) for i in range(3)] == [None, None, None]
    assert log.errors == [("j1", "No space left on device")]
    disk.number = errno.EROFS
    assert save(3) is None
    disk.number = errno.ENOSPC
    assert save(4) is None
    assert [reason for _, reason in log.errors[1:]] == ["Read-only file system"]
    disk.failing.clear()
    assert save(5) is not None
    disk.failing.add("sync")
    assert save(6) is None
    assert [reason for _, reason in log.errors[2:]] == ["No space left on device"]


def test_the_errors_of_one_job_are_not_those_of_another(
    tmp_path: Path, writer: CheckpointWriter, log: Log
) -> None:
    disk = FailingDisk("write")
    for name in ("j1", "j2"):
        store = CheckpointStore(tmp_path / name, fs=disk)
        writer.submit(store, sample_checkpoint())
        writer.wait(store, PATIENCE)
    assert [name for name, _ in log.errors] == ["j1", "j2"]


def test_a_raising_callback_does_not_end_the_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(*_: Any) -> None:
        raise RuntimeError("of the caller")

    writer = CheckpointWriter(raising, raising)
    store = CheckpointStore(tmp_path / "j1")
    for generated in range(3):
        writer.submit(store, sample_checkpoint(generated))
        assert writer.wait(store, PATIENCE) is not None
    assert writer.close(PATIENCE)
    assert "of the caller" in caplog.text


def test_an_error_nobody_thought_of_is_reported_and_the_thread_goes_on(
    tmp_path: Path, writer: CheckpointWriter, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "j1")
    with monkeypatch.context() as patch:
        patch.setattr(store, "save", lambda _: 1 // 0)
        writer.submit(store, sample_checkpoint(1))
        assert writer.wait(store, PATIENCE) is None
    assert "ZeroDivisionError" in log.errors[0][1]
    writer.submit(store, sample_checkpoint(2))
    assert writer.wait(store, PATIENCE) is not None


def test_close_writes_what_waits_and_accepts_nothing_more(tmp_path: Path, log: Log) -> None:
    writer = CheckpointWriter(log.on_saved)
    stores = [CheckpointStore(tmp_path / f"j{i}") for i in range(2)]
    for store in stores:
        assert writer.submit(store, sample_checkpoint(1))
    assert writer.close(PATIENCE)
    assert [name for name, _ in log.saved] == ["j0", "j1"]
    assert not writer.submit(stores[0], sample_checkpoint(2))
    assert writer.save(stores[0], sample_checkpoint(2), PATIENCE) is None


def test_waiting_for_a_job_that_submitted_nothing_gives_none(
    tmp_path: Path, writer: CheckpointWriter
) -> None:
    assert writer.wait(CheckpointStore(tmp_path / "j1"), PATIENCE) is None


def test_nothing_of_a_finished_job_is_kept_in_memory(
    tmp_path: Path, writer: CheckpointWriter, log: Log
) -> None:
    store = CheckpointStore(tmp_path / "j1")
    checkpoint = sample_checkpoint(4)
    state = weakref.ref(checkpoint.caches[0].arrays[0].data)
    writer.submit(store, checkpoint)
    assert writer.wait(store, PATIENCE) is not None
    assert writer.flush(PATIENCE)
    kept = weakref.ref(store)
    del store, checkpoint
    # The thread drops its own references just after it has said that it is done.
    other = CheckpointStore(tmp_path / "j2")
    writer.submit(other, sample_checkpoint(1))
    writer.wait(other, PATIENCE)
    gc.collect()
    assert state() is None
    assert kept() is None
