"""The disk budget: never passed, never in the way, and told in words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenuto_engine import CheckpointWriteError, DiskBudget, _budget


def _write(path: Path, nbytes: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(nbytes))
    return path


def test_what_stands_there_at_the_start_counts(tmp_path: Path) -> None:
    _write(tmp_path / "job" / "a.log", 300)
    _write(tmp_path / "other" / "b.log", 200)
    budget = DiskBudget(tmp_path, limit=1000)

    assert budget.used() == 500
    budget.charge(500)
    with pytest.raises(CheckpointWriteError):
        budget.charge(1)
    assert budget.used() == 1000, "what was refused does not count"


def test_a_folder_that_is_not_there_takes_nothing(tmp_path: Path) -> None:
    assert DiskBudget(tmp_path / "nothing", limit=1).used() == 0


def test_the_refusal_says_how_much_the_budget_is(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path, limit=10 * 2**30)
    budget.charge(10 * 2**30)
    budget.advice = "ask for more"
    with pytest.raises(CheckpointWriteError) as caught:
        budget.charge(2048)
    assert caught.value.reason == "the disk budget of 10.0 GiB is used up"
    assert caught.value.hint == "10.0 GiB are taken, 2.0 KiB too little is left; ask for more"


def test_without_a_limit_all_is_counted_and_nothing_refused(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path)
    budget.charge(2**50)
    assert budget.used() == 2**50


def test_room_is_asked_for_only_when_it_is_missing_and_for_as_much(tmp_path: Path) -> None:
    asked: list[int] = []

    def make_room(nbytes: int) -> None:
        asked.append(nbytes)
        budget.refund(70)

    budget = DiskBudget(tmp_path, limit=100, make_room=make_room)
    budget.charge(90)
    assert asked == []
    budget.charge(30)
    assert asked == [20]
    assert budget.used() == 50
    with pytest.raises(CheckpointWriteError):
        budget.charge(150)
    assert budget.used() == 0


def test_what_others_did_is_known_after_the_next_measurement(tmp_path: Path) -> None:
    file = _write(tmp_path / "job" / "a.log", 300)
    budget = DiskBudget(tmp_path, limit=400)
    file.unlink()
    assert budget.measure() == 0
    budget.charge(400)


def test_what_is_charged_during_a_measurement_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "a.log", 10)
    budget = DiskBudget(tmp_path, limit=100)
    walk = _budget._sizes

    def walk_while_somebody_writes(folder: Path) -> Iterator[int]:
        yield from walk(folder)
        budget.charge(50)

    monkeypatch.setattr(_budget, "_sizes", walk_while_somebody_writes)
    assert budget.measure() == budget.used() == 60
    with pytest.raises(CheckpointWriteError):
        budget.charge(50)


def test_many_threads_never_pass_the_limit_together(tmp_path: Path) -> None:
    budget = DiskBudget(tmp_path, limit=1000)
    got: list[int] = []

    def take() -> None:
        try:
            while True:
                budget.charge(7)
                got.append(7)
        except CheckpointWriteError:
            return

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(got) == budget.used() == 994
