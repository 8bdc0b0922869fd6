"""Rows and their logs: what goes on from what, and that two never become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from disks import FailingDisk, WatchedDisk
from log_samples import PROMPT
from sample_rows import (
    SEED,
    SampleRow,
    assert_all_exact,
    assert_newest,
    names,
    newest,
    sample_store,
    whole,
)
from tenuto_engine import CheckpointStore, Durable
from tenuto_engine._errors import CheckpointWriteError
from tenuto_engine._log import LogFile
from tenuto_engine._store import Taken

T = TypeVar("T")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "j1"


def continued(folder: Path, log: str) -> str | None:
    """Name of the log that this one goes on from."""
    continues = LogFile.scan(folder / log).begin.continues
    return continues.file if continues else None


def spans(folder: Path, log: str) -> list[tuple[int, int, int]]:
    """Generation, start and stop of each record after the first."""
    return [
        (entry.span.generation, entry.span.start, entry.span.stop)
        for entry in LogFile.scan(folder / log).spans
    ]


def save(store: CheckpointStore, row: SampleRow, *stops: int) -> None:
    for stop in stops:
        store.save(row.at(stop))


# -- one row ---------------------------------------------------------------------------


def test_each_checkpoint_writes_only_what_is_new(folder: Path) -> None:
    store = sample_store(folder)
    save(store, SampleRow(), 2, 3, 20, 20, 21)
    assert spans(folder, "00000001-n.log") == [
        (0, 0, 2),
        (0, 2, 3),
        (0, 3, 20),
        (0, 20, 20),
        (0, 20, 21),
    ]
    assert_newest(folder, SampleRow(), 21)


def test_much_that_is_new_becomes_parts_and_the_last_one_is_the_checkpoint(folder: Path) -> None:
    row, store = SampleRow(), sample_store(folder, part_bytes=500)
    live = row.at(30)
    for _ in range(100):
        taken = store.take(live)
        assert taken is not None
        assert taken.nbytes <= 600
        assert live.deferred == (taken.delta.commit is None)
        if store.write(taken):
            break
        assert store.durable == Durable()
    assert len(spans(folder, "00000001-n.log")) > 2
    assert_newest(folder, row, 30)


def test_a_row_that_goes_on_between_parts_is_saved_as_it_is_at_the_last_one(folder: Path) -> None:
    row, store = SampleRow(), sample_store(folder, part_bytes=500)
    for stop in range(20, 60):
        taken = store.take(row.at(stop))
        assert taken is not None
        if store.write(taken):
            assert_newest(folder, row, stop)
            return
    pytest.fail("the parts never caught up")


def test_the_last_checkpoint_is_taken_at_once_however_much_is_new(folder: Path) -> None:
    row, store = SampleRow(), sample_store(folder, part_bytes=1)
    taken = store.take(row.at(30), final=True)
    assert taken is not None
    assert store.write(taken)
    assert_newest(folder, row, 30)


def test_a_row_that_changes_its_caches_begins_a_new_generation(folder: Path) -> None:
    row, store = SampleRow("rings"), sample_store(folder)
    save(store, row, 10, 20)
    row.model = "all"
    save(store, row, 22, 24)
    row.model = "rings"
    save(store, row, 25)
    assert spans(folder, "00000001-n.log") == [
        (0, 0, 10),
        (0, 10, 20),
        (1, 0, 22),
        (1, 22, 24),
        (2, 0, 25),
    ]
    assert_newest(folder, SampleRow("rings"), 25)
    assert assert_all_exact(folder, SampleRow("rings"), SampleRow("all")) == [25, 24, 22, 20, 10]


def test_a_row_that_goes_back_begins_a_new_generation(folder: Path) -> None:
    row, store = SampleRow("rings"), sample_store(folder)
    save(store, row, 20)
    save(store, row, 12, 14)
    assert store.durable == Durable(14, 11, pending=True)
    assert spans(folder, "00000001-n.log") == [(0, 0, 20), (1, 0, 12), (1, 12, 14)]
    assert assert_all_exact(folder, row) == [20, 14, 12]


@pytest.mark.parametrize("call", ["write_at", "sync"])
def test_a_new_generation_that_fails_is_begun_again(folder: Path, call: str) -> None:
    disk = FailingDisk()
    row, store = SampleRow("rings"), sample_store(folder, fs=disk, part_bytes=100)
    save(store, row, 10)
    row.model = "plain"
    taken = store.take(row.at(20))
    assert taken is not None
    assert store.write(taken) is False
    disk.failing.add(call)
    with pytest.raises(CheckpointWriteError):
        save(store, row, 22)
    disk.failing.clear()
    save(store, row, 23)
    assert_newest(folder, SampleRow("plain"), 23)
    found = assert_all_exact(folder, SampleRow("rings"), SampleRow("plain"))
    # One that was written but not synced is as good as any.
    assert found == ([23, 22, 10] if call == "sync" else [23, 10])


def test_a_delta_that_never_reached_the_disk_is_taken_again(folder: Path) -> None:
    row, store = SampleRow(), sample_store(folder)
    save(store, row, 10)
    lost = store.take(row.at(20))
    assert lost is not None
    behind = store.take(row.at(25))
    assert behind is not None
    assert store.write(behind) is False
    assert store.durable.position == 10
    save(store, row, 26)
    assert_newest(folder, row, 26)


# -- rows one after the other ----------------------------------------------------------


def test_another_row_of_the_same_store_is_written_whole(folder: Path) -> None:
    one, other, store = SampleRow(), SampleRow(salt=1), sample_store(folder)
    save(store, one, 10, 20)
    save(store, other, 12, 25)
    assert_newest(folder, other, 25)
    save(store, one, 30)
    assert_newest(folder, one, 30)
    assert_all_exact(folder, one, other)


@pytest.mark.parametrize("models", [("rings", "plain"), ("all", "rings"), ("plain", "all")])
def test_a_row_with_other_caches_of_the_same_prompt_spoils_nothing(
    folder: Path, models: tuple[str, str]
) -> None:
    rows = [SampleRow(model) for model in models]
    store = sample_store(folder)
    for stop in (10, 20, 30):
        for row in rows:
            save(store, row, stop)
            assert_newest(folder, row, stop)
    assert_all_exact(folder, *rows)


def test_whole_checkpoints_one_after_the_other_are_each_what_they_were(folder: Path) -> None:
    store = sample_store(folder)
    for stop, model, salt in ((20, "rings", 0), (10, "rings", 1), (25, "plain", 1), (24, "all", 0)):
        store.save(whole(stop, model, salt=salt))
    rows = [SampleRow(model, salt=salt) for model in ("rings", "plain", "all") for salt in (0, 1)]
    assert assert_all_exact(folder, *rows) == [25, 24, 20, 10]


def test_what_is_in_flight_of_the_row_before_is_void(folder: Path) -> None:
    one, other, store = SampleRow(), SampleRow(salt=1), sample_store(folder)
    save(store, one, 10)
    late = store.take(one.at(20))
    taken = store.take(other.at(15))
    assert late is not None
    assert taken is not None
    assert store.write(late) is False
    assert store.write(taken) is True
    save(store, other, 16)
    assert_newest(folder, other, 16)
    assert_all_exact(folder, one, other)


class Interrupting(WatchedDisk):
    """Calls back once, in the middle of a call."""

    def __init__(self) -> None:
        self.within: dict[str, Callable[[], object]] = {}
        self.failing: set[str] = set()

    def around(self, name: str, call: Callable[[], T]) -> T:
        if name in self.within:
            self.within.pop(name)()
        if name in self.failing:
            raise OSError(5, "Input/output error")
        return call()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("call", ["write_at", "sync"])
def test_a_row_that_begins_while_the_one_before_is_written_never_counts_on_it(
    folder: Path, call: str, fails: bool
) -> None:
    disk = Interrupting()
    one, other, store = SampleRow(), SampleRow(salt=1), sample_store(folder, fs=disk)
    save(store, one, 10)
    disk.within[call] = lambda: store.take(other.at(12))
    if fails:
        disk.failing.add(call)
        with pytest.raises(CheckpointWriteError):
            store.write(taken_of(store, one, 20))
    else:
        store.write(taken_of(store, one, 20))
    # The first delta of the other row fails, too.
    disk.failing.add("write_at")
    with pytest.raises(CheckpointWriteError):
        save(store, other, 13)
    disk.failing.clear()
    save(store, other, 22)
    assert_newest(folder, other, 22)
    assert_all_exact(folder, one, other)


def taken_of(store: CheckpointStore, row: SampleRow, stop: int) -> Taken:
    taken = store.take(row.at(stop))
    assert taken is not None
    return taken


# -- attempts one after the other ------------------------------------------------------


def test_a_row_that_was_resumed_goes_on_by_reference(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 10, 20)
    origin = newest(folder).origin
    assert origin is not None
    heir, store = SampleRow(origin=origin), sample_store(folder, 2)
    store.open(PROMPT, SEED, origin)
    save(store, heir, 21, 22)
    assert continued(folder, "00000002-n.log") == "00000001-n.log"
    assert spans(folder, "00000002-n.log") == [(0, 20, 21), (0, 21, 22)]
    assert names(folder)[:1] == ["00000001-n.log"]
    assert_newest(folder, heir, 22)


def test_before_its_first_checkpoint_a_resumed_row_has_that_of_its_origin(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 20)
    store = sample_store(folder, 2)
    store.take(SampleRow(origin=newest(folder).origin).at(25))
    assert store.durable == Durable(20, 17, pending=True)


def test_an_origin_inside_a_prefill_has_no_token(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 2)
    store = sample_store(folder, 2)
    store.take(SampleRow(origin=newest(folder).origin).at(3))
    assert store.durable == Durable(2, 0, pending=False)
    assert store.durable.tokens == 0


def test_a_row_that_replays_begins_a_log_of_its_own(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 20)
    save(sample_store(folder, 2), SampleRow(salt=1), 5, 30)
    assert continued(folder, "00000002-n.log") is None
    assert_newest(folder, SampleRow(salt=1), 30)


def test_a_chain_of_many_attempts_is_one_run(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 5)
    for epoch in range(2, 30):
        heir = SampleRow(origin=newest(folder).origin)
        save(sample_store(folder, epoch), heir, epoch + 4)
    assert len([name for name in names(folder) if name.endswith(".log")]) == 29
    assert_newest(folder, SampleRow(), 33)


def test_an_heir_of_an_older_checkpoint_takes_nothing_of_the_newer_ones(folder: Path) -> None:
    dead = SampleRow("rings")
    save(sample_store(folder, 1), dead, 10, 20)
    origin = next(each for each in sample_store(folder).candidates() if each.cache_length == 10)
    heir = SampleRow("rings", salt=0, origin=origin.load().origin)
    heir_salts = SampleRow("rings")
    store = sample_store(folder, 2)
    save(store, heir, 12, 14)
    # The dead one was a zombie after all.
    assert spans(folder, "00000002-n.log") == [(0, 10, 12), (0, 12, 14)]
    assert assert_all_exact(folder, heir_salts) == [20, 14, 12, 10]


def test_a_zombie_that_goes_on_in_its_log_changes_nothing_for_its_heir(folder: Path) -> None:
    zombie, row = sample_store(folder, 1), SampleRow("rings")
    save(zombie, row, 10)
    heir = SampleRow("rings", origin=newest(folder).origin)
    store = sample_store(folder, 2)
    for stop in (12, 14, 16):
        save(store, heir, stop)
        save(zombie, row, stop + 10)
        assert_all_exact(folder, row)
    lengths = [c.cache_length for c in store.candidates() if c.epoch == 2]
    assert lengths == [16, 14, 12]


def test_a_row_goes_on_in_the_store_that_it_was_loaded_from(folder: Path) -> None:
    store = sample_store(folder, 1)
    save(store, SampleRow(), 10, 20)
    heir = SampleRow(origin=newest(folder).origin)
    save(store, heir, 25)
    assert continued(folder, "00000001-n_2.log") == "00000001-n.log"
    assert_newest(folder, heir, 25)


def test_two_rows_from_one_origin_in_one_store_are_kept_apart(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow("rings"), 10)
    origin = newest(folder).origin
    store = sample_store(folder, 2)
    one, other = (SampleRow("rings", origin=origin) for _ in range(2))
    save(store, one, 20)
    save(store, other, 12, 15)
    save(store, one, 22)
    assert_newest(folder, SampleRow("rings"), 22)
    assert_all_exact(folder, SampleRow("rings"))


def test_an_origin_in_another_folder_is_not_gone_on_from(folder: Path) -> None:
    other = folder.parent / "another" / "j1"
    save(sample_store(other), SampleRow(), 20)
    heir, store = SampleRow(origin=newest(other).origin), sample_store(folder, 2)
    store.open(PROMPT, SEED, heir.origin)
    assert continued(folder, "00000002-n.log") is None
    save(store, heir, 25)
    assert [name for name in names(folder) if name.endswith(".log")] == ["00000002-n.log"]
    assert_newest(folder, heir, 25)


@pytest.mark.parametrize("opened", [False, True])
def test_an_origin_that_is_gone_by_the_first_save_is_done_without(
    folder: Path, opened: bool
) -> None:
    save(sample_store(folder, 1), SampleRow(), 20)
    heir, store = SampleRow(origin=newest(folder).origin), sample_store(folder, 2)
    if opened:
        store.open(PROMPT, SEED, heir.origin)
    (folder / "00000001-n.log").unlink()
    with pytest.raises(CheckpointWriteError):
        save(store, heir, 25)
    assert store.durable == Durable()
    save(store, heir, 26)
    assert_newest(folder, heir, 26)
    save(store, heir, 27)
    assert_newest(folder, heir, 27)


def test_a_log_far_back_in_the_chain_that_somebody_removed_is_missed_at_once(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 10)
    save(sample_store(folder, 2), SampleRow(origin=newest(folder).origin), 20)
    row, store = SampleRow(origin=newest(folder).origin), sample_store(folder, 3)
    save(store, row, 21, 22)
    (folder / "00000001-n.log").unlink()
    with pytest.raises(CheckpointWriteError, match="somebody removed"):
        save(store, row, 23)
    save(store, row, 24)
    assert_newest(folder, row, 24)


def test_an_open_whose_origin_is_gone_fails_and_the_first_save_is_whole(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow(), 20)
    heir, store = SampleRow(origin=newest(folder).origin), sample_store(folder, 2)
    (folder / "00000001-n.log").unlink()
    with pytest.raises(CheckpointWriteError):
        store.open(PROMPT, SEED, heir.origin)
    with pytest.raises(CheckpointWriteError):
        save(store, heir, 25)
    save(store, heir, 26)
    assert_newest(folder, heir, 26)


def test_a_damaged_origin_rules_out_all_that_build_on_it_and_nothing_else(folder: Path) -> None:
    save(sample_store(folder, 1), SampleRow("plain"), 10, 20)
    row = SampleRow("plain", origin=newest(folder).origin)
    save(sample_store(folder, 2), row, 30)
    path = folder / "00000001-n.log"
    second = LogFile.scan(path).spans[1].record
    content = bytearray(path.read_bytes())
    content[second.end - 1] ^= 1
    path.write_bytes(content)
    assert assert_all_exact(folder, SampleRow("plain")) == [10]
    assert_newest(folder, SampleRow("plain"), 10)


@pytest.mark.parametrize("change", ["digest", "offset", "generation", "position"])
def test_an_origin_that_is_not_there_is_never_taken_for_another(folder: Path, change: str) -> None:
    save(sample_store(folder, 1), SampleRow("plain"), 10, 20)
    origin = newest(folder).origin
    assert origin is not None
    wrong: dict[str, Any] = {
        "digest": b"\0" * 16,
        "offset": origin.offset - 1,
        "generation": 1,
        "position": 19,
    }
    row = SampleRow("rings", origin=replace(origin, **{change: wrong[change]}))
    save(sample_store(folder, 2), row, 30)
    assert 30 not in assert_all_exact(folder, SampleRow("plain"))


# -- two stores at once ----------------------------------------------------------------


def test_two_attempts_of_one_epoch_never_touch_each_others_files(folder: Path) -> None:
    rows = [SampleRow("rings", salt=salt) for salt in (0, 1)]
    stores = [sample_store(folder, 1, nonce=nonce) for nonce in "ab"]
    for stop in (5, 9, 20, 21):
        for store, row in zip(stores, rows, strict=True):
            save(store, row, stop)
    assert names(folder) == ["00000001-a.log", "00000001-b.log"]
    assert assert_all_exact(folder, *rows) == [21, 21, 20, 20, 9, 9, 5, 5]


def test_two_stores_of_one_attempt_never_write_into_one_file(folder: Path) -> None:
    rows = [SampleRow("all", salt=salt) for salt in (0, 1)]
    stores = [sample_store(folder) for _ in rows]
    for stop in (5, 9, 20, 21):
        for store, row in zip(stores, rows, strict=True):
            try:
                save(store, row, stop)
            except CheckpointWriteError:
                # Each takes the other's log for a former one of its own.
                save(store, row, stop)
            assert stop in assert_all_exact(folder, *rows)
