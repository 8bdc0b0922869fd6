"""The writer's thread: never in the way of decoding, never silent, never unbounded."""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disks import FailingDisk, Gate
from log_samples import image
from sample_rows import (
    SampleRow,
    assert_all_exact,
    assert_newest,
    names,
    newest,
    sample_store,
    whole,
)
from tenuto_engine import (
    CheckpointStore,
    CheckpointWriter,
    Durable,
)
from tenuto_engine._errors import CheckpointWriteError
from tenuto_engine._log import LogFile

PATIENCE = 20.0
SOON = 0.01


class Log:
    """What the callbacks of a writer were told."""

    def __init__(self) -> None:
        self.saved: list[tuple[str, int]] = []
        self.errors: list[tuple[str, str]] = []

    def on_saved(self, store: CheckpointStore, durable: Durable) -> None:
        assert store.durable == durable
        self.saved.append((store.folder.name, durable.position))

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


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open_up()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "j1"


def spans(store: CheckpointStore) -> list[tuple[int, int]]:
    """Start and stop of each record of the store's first log."""
    (path,) = store.folder.glob("*.log")
    return [(entry.span.start, entry.span.stop) for entry in LogFile.scan(path).spans]


# -- saving ----------------------------------------------------------------------------


def test_a_submitted_checkpoint_becomes_durable(
    folder: Path, writer: CheckpointWriter, log: Log
) -> None:
    row, store = SampleRow(), sample_store(folder)
    for stop in (10, 12):
        assert writer.submit(store, row.at(stop))
        assert writer.wait(store, PATIENCE)
        assert_newest(folder, row, stop)
    assert log.saved == [("j1", 10), ("j1", 12)]
    assert writer.pending_bytes == 0


def test_a_whole_checkpoint_may_be_submitted_too(folder: Path, writer: CheckpointWriter) -> None:
    store = sample_store(folder)
    assert writer.submit(store, whole(20))
    assert writer.wait(store, PATIENCE)
    assert image(newest(folder)) == SampleRow().image(20)


def test_what_is_submitted_is_taken_before_submit_returns(
    folder: Path, writer: CheckpointWriter, gate: Gate
) -> None:
    row, store = SampleRow(), sample_store(folder, fs=gate)
    live = row.at(20)
    assert writer.submit(store, live)
    live.close()
    gate.open_up()
    assert writer.wait(store, PATIENCE)
    assert_newest(folder, row, 20)


def test_parts_are_asked_for_one_by_one_and_the_last_is_the_checkpoint(
    folder: Path, writer: CheckpointWriter, log: Log
) -> None:
    row, store = SampleRow(), sample_store(folder, part_bytes=700)
    deferred = []
    for stop in range(20, 60):
        live = row.at(stop)
        assert writer.submit(store, live)
        durable = writer.wait(store, PATIENCE)
        deferred.append(live.deferred)
        assert durable == (not live.deferred)
        if durable:
            break
    assert deferred == [True] * (len(deferred) - 1) + [False]
    assert len(deferred) > 2
    assert log.saved == [("j1", stop)]
    assert_newest(folder, row, stop)


def test_waiting_for_a_job_that_submitted_nothing_is_in_vain(
    folder: Path, writer: CheckpointWriter
) -> None:
    assert not writer.wait(sample_store(folder), PATIENCE)


# -- bounds ----------------------------------------------------------------------------


def test_while_the_disk_hangs_one_delta_waits_and_the_next_covers_what_was_put_off(
    folder: Path, writer: CheckpointWriter, log: Log, gate: Gate
) -> None:
    row, store = SampleRow(), sample_store(folder, fs=gate)
    assert writer.submit(store, row.at(10))
    assert gate.reached.wait(PATIENCE)
    assert writer.submit(store, row.at(12))
    held = writer.pending_bytes
    for stop in range(13, 20):
        live = row.at(stop)
        assert not writer.submit(store, live)
        assert live.deferred
    assert writer.pending_bytes == held
    assert not writer.wait(store, SOON)
    assert not writer.flush(SOON)
    gate.open_up()
    assert writer.wait(store, PATIENCE)
    assert writer.submit(store, row.at(20))
    assert writer.wait(store, PATIENCE)
    assert spans(store) == [(0, 10), (10, 12), (12, 20)]
    assert log.saved == [("j1", 10), ("j1", 12), ("j1", 20)]
    assert_newest(folder, row, 20)


def test_all_stores_together_stay_below_the_limit_and_one_delta(
    tmp_path: Path, gate: Gate, log: Log
) -> None:
    row = SampleRow()
    taken = sample_store(tmp_path / "measured").take(row.at(10))
    assert taken is not None
    limit = 3 * taken.nbytes
    writer = CheckpointWriter(log.on_saved, max_pending_bytes=limit)
    stores = [sample_store(tmp_path / f"j{i}", fs=gate) for i in range(8)]
    accepted = [writer.submit(store, row.at(10)) for store in stores]
    assert accepted == [True] * 3 + [False] * 5
    assert writer.pending_bytes == limit
    gate.open_up()
    assert writer.flush(PATIENCE)
    assert writer.pending_bytes == 0
    assert writer.submit(stores[7], row.at(11))
    assert writer.close(PATIENCE)
    assert [name for name, _ in log.saved] == ["j0", "j1", "j2", "j7"]


def test_one_delta_larger_than_the_limit_is_accepted(folder: Path) -> None:
    writer = CheckpointWriter(max_pending_bytes=1)
    row, store = SampleRow(), sample_store(folder)
    assert writer.submit(store, row.at(20))
    assert writer.wait(store, PATIENCE)
    assert writer.close(PATIENCE)
    assert_newest(folder, row, 20)


def test_the_last_checkpoint_is_taken_whatever_waits(
    folder: Path, writer: CheckpointWriter, gate: Gate
) -> None:
    row, store = SampleRow(), sample_store(folder, fs=gate, part_bytes=700)
    for stop in (20, 21, 22):
        writer.submit(store, row.at(stop))
    assert not writer.submit(store, row.at(23))
    live = row.at(24)
    assert writer.submit(store, live, final=True)
    assert not live.deferred
    gate.open_up()
    assert writer.wait(store, PATIENCE)
    assert_newest(folder, row, 24)


def test_the_last_checkpoint_behind_one_that_fails_is_not_said_to_be_durable(
    folder: Path, writer: CheckpointWriter, gate: Gate
) -> None:
    row, store = SampleRow(), sample_store(folder, fs=gate)
    gate.open_up()
    store.save(row.at(10))
    gate.shut()
    gate.failing = True
    writer.submit(store, row.at(20))
    assert gate.reached.wait(PATIENCE)
    assert writer.submit(store, row.at(21), final=True)
    gate.open_up()
    assert not writer.wait(store, PATIENCE)
    assert_newest(folder, row, 10)


# -- errors ----------------------------------------------------------------------------


def test_an_error_is_reported_once_until_a_save_succeeds_again(
    folder: Path, writer: CheckpointWriter, log: Log
) -> None:
    disk = FailingDisk("sync", number=errno.ENOSPC)
    row, store = SampleRow(), sample_store(folder, fs=disk)

    def save(stop: int) -> bool:
        assert writer.submit(store, row.at(stop))
        return writer.wait(store, PATIENCE)

    assert [save(stop) for stop in (10, 11, 12)] == [False] * 3
    assert log.errors == [("j1", "No space left on device")]
    disk.number = errno.EROFS
    assert not save(13)
    disk.number = errno.ENOSPC
    assert not save(14)
    assert [reason for _, reason in log.errors[1:]] == ["Read-only file system"]
    disk.failing.clear()
    assert save(15)
    assert_newest(folder, row, 15)
    disk.failing.add("sync")
    assert not save(16)
    assert [reason for _, reason in log.errors[2:]] == ["No space left on device"]


def test_what_waits_behind_a_failure_is_dropped_silently_and_taken_again_later(
    folder: Path, writer: CheckpointWriter, log: Log, gate: Gate
) -> None:
    row, store = SampleRow("rings"), sample_store(folder, fs=gate)
    gate.failing = True
    writer.submit(store, row.at(10))
    assert gate.reached.wait(PATIENCE)
    writer.submit(store, row.at(12))
    gate.open_up()
    assert not writer.wait(store, PATIENCE)
    gate.failing = False
    assert log.errors == [("j1", "No space left on device")]
    assert store.durable == Durable()
    assert writer.submit(store, row.at(14))
    assert writer.wait(store, PATIENCE)
    assert log.saved == [("j1", 14)]
    assert assert_all_exact(folder, row) == [14]


def test_soon_after_a_failure_nothing_is_taken_and_the_row_is_told_to_ask_again(
    folder: Path, writer: CheckpointWriter
) -> None:
    row, store = SampleRow(), sample_store(folder, fs=FailingDisk("write_at"), retry_seconds=60.0)
    writer.submit(store, row.at(10))
    assert not writer.wait(store, PATIENCE)
    live = row.at(11)
    assert not writer.submit(store, live)
    assert live.deferred
    assert writer.pending_bytes == 0


def test_the_errors_of_one_job_are_not_those_of_another(
    tmp_path: Path, writer: CheckpointWriter, log: Log
) -> None:
    disk = FailingDisk("write_at")
    for name in ("j1", "j2"):
        store = sample_store(tmp_path / name, fs=disk)
        writer.submit(store, whole(10))
        writer.wait(store, PATIENCE)
    assert [name for name, _ in log.errors] == ["j1", "j2"]


def test_a_raising_callback_does_not_end_the_thread(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(*_: Any) -> None:
        raise RuntimeError("of the caller")

    writer = CheckpointWriter(raising, raising)
    disk = FailingDisk()
    row, store = SampleRow(), sample_store(folder, fs=disk)
    for stop in (10, 11, 12):
        writer.submit(store, row.at(stop))
        assert writer.wait(store, PATIENCE) == (stop != 11)
        disk.failing = {"sync"} if stop == 10 else set()
    assert writer.close(PATIENCE)
    assert caplog.text.count("of the caller") >= 3


def test_an_error_nobody_thought_of_is_reported_and_the_thread_goes_on(
    folder: Path, writer: CheckpointWriter, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, store = SampleRow(), sample_store(folder)
    with monkeypatch.context() as patch:
        patch.setattr("tenuto_engine._appender.span_blobs", lambda _: 1 // 0)
        writer.submit(store, row.at(10))
        assert not writer.wait(store, PATIENCE)
    assert "ZeroDivisionError" in log.errors[0][1]
    writer.submit(store, row.at(12))
    assert writer.wait(store, PATIENCE)
    assert_newest(folder, row, 12)


# -- the end ---------------------------------------------------------------------------


def test_the_end_is_written_after_all_that_was_submitted_before(
    folder: Path, writer: CheckpointWriter, log: Log, gate: Gate
) -> None:
    row, store = SampleRow(), sample_store(folder, fs=gate)
    writer.submit(store, row.at(10))
    writer.submit(store, row.at(20), final=True)
    writer.finish(store, {"state": "cancelled"}, row.run(20).tokens(), keep_caches=True)
    gate.open_up()
    assert writer.wait(store, PATIENCE)
    assert log.saved[:2] == [("j1", 10), ("j1", 20)]
    assert [end.end for end in store.ends()] == [{"state": "cancelled"}]
    assert_newest(folder, row, 20)
    assert not writer.submit(store, row.at(21))
    assert not writer.submit(store, row.at(21), final=True)


def test_the_end_of_a_completed_job_is_alone_even_if_deltas_waited(
    folder: Path, writer: CheckpointWriter, gate: Gate
) -> None:
    row, store = SampleRow(), sample_store(folder, fs=gate)
    writer.submit(store, row.at(10))
    writer.submit(store, row.at(20))
    writer.finish(store, {}, row.run(22).tokens(), keep_caches=False)
    gate.open_up()
    assert writer.wait(store, PATIENCE)
    assert names(folder) == ["00000001-n.end"]


def test_an_end_that_cannot_be_written_is_reported(
    folder: Path, writer: CheckpointWriter, log: Log
) -> None:
    disk = FailingDisk()
    row, store = SampleRow(), sample_store(folder, fs=disk)
    writer.submit(store, row.at(10))
    assert writer.wait(store, PATIENCE)
    disk.failing.add("rename")
    writer.finish(store, {}, (), keep_caches=False)
    assert not writer.wait(store, PATIENCE)
    assert log.errors == [("j1", "Input/output error")]
    assert_newest(folder, row, 10)


def test_close_writes_what_waits_and_accepts_nothing_more(tmp_path: Path, log: Log) -> None:
    writer = CheckpointWriter(log.on_saved, log.on_error)
    row = SampleRow()
    stores = [sample_store(tmp_path / f"j{i}") for i in range(2)]
    for store in stores:
        assert writer.submit(store, row.at(10))
    assert writer.close(PATIENCE)
    assert [name for name, _ in log.saved] == ["j0", "j1"]
    live = row.at(12)
    assert not writer.submit(stores[0], live)
    assert live.deferred
    assert not writer.submit(stores[0], row.at(12), final=True)


def test_an_end_that_comes_after_the_writer_was_closed_is_refused(folder: Path) -> None:
    writer = CheckpointWriter()
    row, store = SampleRow(), sample_store(folder)
    assert writer.submit(store, row.at(10))
    assert writer.close(PATIENCE)
    assert not writer.finish(store, {}, (), keep_caches=True)
    assert writer.flush(PATIENCE)
    assert store.ends() == []


def test_a_delta_that_was_taken_as_the_writer_closed_is_not_counted_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter()
    row, store = SampleRow(), sample_store(folder)
    assert writer.submit(store, row.at(10))
    take = store.take

    def take_slowly(*live: Any, **how: Any) -> Any:
        taken = take(*live, **how)
        assert writer.close(PATIENCE)
        return taken

    monkeypatch.setattr(store, "take", take_slowly)
    live = row.at(12)
    assert not writer.submit(store, live)
    assert live.deferred
    assert writer.pending_bytes == 0
    monkeypatch.undo()
    store.save(row.at(14))
    assert_newest(folder, row, 14)


def test_nothing_of_a_finished_job_is_kept_in_memory(
    tmp_path: Path, writer: CheckpointWriter
) -> None:
    store = sample_store(tmp_path / "j1")
    row = SampleRow()
    taken = weakref.ref(row)
    writer.submit(store, row.at(10))
    assert writer.wait(store, PATIENCE)
    assert writer.flush(PATIENCE)
    kept = weakref.ref(store)
    del store, row
    # The thread drops its own references just after it has said that it is done.
    other = sample_store(tmp_path / "j2")
    writer.submit(other, whole(10))
    writer.wait(other, PATIENCE)
    gc.collect()
    assert kept() is None
    assert taken() is None
