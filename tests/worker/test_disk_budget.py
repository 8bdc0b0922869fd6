"""What goes when the disk budget is used up, in which order, and what never goes."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from job_queue import JobQueue
from step_worker import StepWorker
from tenuto_client import Settings
from tenuto_engine import CheckpointWriteError
from tenuto_worker import WorkerSettings, _collector
from tenuto_worker._commands.worker import _values, configure
from tenuto_worker._doctor import check
from tenuto_worker._errors import ConfigError
from tenuto_worker._identity import take_identity
from tenuto_worker._settings import disk_budget, size
from workers import poll_until


@pytest.fixture
def worker(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path
) -> Iterator[StepWorker]:
    with StepWorker(redis_url, jobs.keys.namespace, tiny_model, tmp_path) as made:
        yield made


def _cancelled(jobs: JobQueue, worker: StepWorker, age: float) -> str:
    """A job with checkpoints, last written so many seconds ago."""
    job = jobs.submit()
    worker.claim()
    worker.decode(9)
    jobs.cancel(job)
    worker.publish()
    worker.settle()
    worker.save()
    _age(worker, job, age)
    return job


def _age(worker: StepWorker, job: str, age: float) -> None:
    folder = worker.settings.checkpoints_dir / job
    for path in (*folder.iterdir(), folder):
        at = path.stat().st_mtime - age
        os.utime(path, (at, at))


def _completed(jobs: JobQueue, worker: StepWorker, age: float) -> str:
    """A job that is completed and takes too much for a small result."""
    job = _cancelled(jobs, worker, age)
    jobs.client.hset(jobs.keys.job(job), "state", "completed")
    for path in (worker.settings.checkpoints_dir / job).glob("*.log"):
        with path.open("ab") as file:
            file.write(bytes(_collector._SMALL_RESULT))
    _age(worker, job, age)
    return job


def _small_result(jobs: JobQueue, worker: StepWorker, age: float) -> str:
    job = jobs.submit(max_tokens=3)
    worker.claim()
    worker.finish()
    worker.save()
    _age(worker, job, age)
    assert 0 < _bytes_of(worker, job) < _collector._SMALL_RESULT
    return job


def _bytes_of(worker: StepWorker, job: str) -> int:
    folder = worker.settings.checkpoints_dir / job
    return sum(file.stat().st_size for file in folder.iterdir())


def _there(worker: StepWorker) -> set[str]:
    return {path.name for path in worker.settings.checkpoints_dir.iterdir()}


def test_the_least_worth_goes_first_and_of_equals_the_oldest(
    jobs: JobQueue, worker: StepWorker
) -> None:
    old, young = (_cancelled(jobs, worker, age) for age in (900, 0))
    old_done, young_done = (_completed(jobs, worker, age) for age in (100, 50))
    gone = _cancelled(jobs, worker, 0)
    jobs.delete(gone)
    running = jobs.submit()
    worker.claim()
    worker.decode(9)
    worker.save()
    _age(worker, running, 9000)

    left = {old, young, old_done, young_done, gone, running}
    for next_to_go in (gone, old_done, young_done, old, young):
        assert _there(worker) == left
        worker.rooms.collector.budget.measure()
        worker.rooms.collector.make_room(1)
        left.remove(next_to_go)
    worker.rooms.collector.make_room(1)
    assert _there(worker) == left == {running}


def test_only_so_much_goes_as_is_missing(jobs: JobQueue, worker: StepWorker) -> None:
    done = [_completed(jobs, worker, age) for age in (300, 200, 100)]
    budget = worker.rooms.collector.budget
    used = budget.measure()
    first = _bytes_of(worker, done[0])
    worker.rooms.collector.set_limit(used)
    budget.charge(first + 1)

    assert _there(worker) == {done[2]}
    assert budget.used() == budget.measure() + first + 1


def test_a_small_result_stays_though_room_is_wanted(jobs: JobQueue, worker: StepWorker) -> None:
    small = _small_result(jobs, worker, 900)
    stopped = _cancelled(jobs, worker, 0)
    worker.rooms.collector.budget.measure()
    worker.rooms.collector.make_room(1)
    assert _there(worker) == {small} != {small, stopped}


def test_small_results_go_where_they_fill_the_budget(jobs: JobQueue, worker: StepWorker) -> None:
    old, young = (_small_result(jobs, worker, age) for age in (900, 10))
    budget = worker.rooms.collector.budget
    worker.rooms.collector.set_limit(budget.measure())
    with structlog.testing.capture_logs() as logs:
        budget.charge(1)
    assert _there(worker) == {young}
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert line["job"] == old
    assert "can no longer be recovered if Redis loses it" in line["what_it_means"]


def test_where_there_cannot_be_room_enough_only_what_is_gone_goes(
    jobs: JobQueue, worker: StepWorker
) -> None:
    done, stopped = _completed(jobs, worker, 900), _cancelled(jobs, worker, 900)
    gone = _cancelled(jobs, worker, 0)
    jobs.delete(gone)
    budget = worker.rooms.collector.budget
    worker.rooms.collector.set_limit(budget.measure())
    with pytest.raises(CheckpointWriteError, match="disk budget of"):
        budget.charge(2 * budget.used())
    assert _there(worker) == {done, stopped}


def test_what_can_still_be_resumed_goes_loudly(jobs: JobQueue, worker: StepWorker) -> None:
    job = _cancelled(jobs, worker, 0)
    worker.rooms.collector.budget.measure()
    with structlog.testing.capture_logs() as logs:
        worker.rooms.collector.make_room(1)

    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert line["job"] == job
    assert "disk budget is used up" in line["event"]
    assert "replays from its prompt" in line["what_it_means"]


def test_of_running_jobs_and_other_data_sets_nothing_goes(
    jobs: JobQueue, worker: StepWorker
) -> None:
    foreign, foreign_and_gone = (_cancelled(jobs, worker, 500) for _ in range(2))
    jobs.delete(foreign_and_gone)
    jobs.client.set(jobs.keys.namespace_id(), "another")
    running = jobs.submit()
    worker.claim()
    worker.decode(9)
    worker.save()
    budget = worker.rooms.collector.budget
    worker.rooms.collector.set_limit(budget.measure())
    with pytest.raises(CheckpointWriteError, match="disk budget of"):
        budget.charge(1)

    assert _there(worker) == {foreign, foreign_and_gone, running}


def test_room_that_cannot_be_made_is_not_looked_for_at_every_checkpoint(
    jobs: JobQueue, worker: StepWorker
) -> None:
    worker.rooms.collector.make_room(1)
    job = _cancelled(jobs, worker, 0)
    worker.rooms.collector.make_room(1)
    assert job in _there(worker)


def test_without_redis_nothing_goes_and_nothing_breaks(jobs: JobQueue, worker: StepWorker) -> None:
    job = _cancelled(jobs, worker, 0)
    judge = worker.rooms.collector._judge
    judge._client = type(judge._client).from_url("unix:///nobody")
    worker.rooms.collector.make_room(1)
    assert job in _there(worker)


def test_a_week_old_folder_without_anything_readable_that_redis_does_not_know_goes(
    jobs: JobQueue, worker: StepWorker
) -> None:
    known, young, old = (_cancelled(jobs, worker, 0) for _ in range(3))
    for job in (known, young, old):
        for path in (worker.settings.checkpoints_dir / job).iterdir():
            path.write_bytes(b"not a checkpoint")
        _age(worker, job, 6 * 24 * 3600 if job == young else 8 * 24 * 3600)
    for job in (young, old):
        jobs.client.delete(jobs.keys.job(job))
    worker.rooms.collector.collect()

    assert _there(worker) == {known, young}


def test_a_job_whose_checkpoints_find_no_room_goes_on_and_is_told_once(
    jobs: JobQueue, worker: StepWorker
) -> None:
    job = jobs.submit(max_tokens=120)
    worker.rooms.collector.set_limit(1)
    worker.claim()
    with structlog.testing.capture_logs() as logs:
        worker.decode(40)
        worker.publish()
        worker.save()
    said = [line for line in logs if line["event"] == "checkpoint not saved"]
    assert [line["job"] for line in said] == [job]
    assert "the disk budget of 1 byte is used up" in said[0]["error"]
    assert " by 1 job running or unknown to Redis, of which nothing goes" in said[0]["error"]
    assert "jobs go on, but without new checkpoints; a larger --disk-budget" in said[0]["error"]
    assert int(jobs.job(job)["durable"]) == 0
    worker.rooms.lease.renew()
    assert jobs.job(job)["checkpoint_error"] == "the disk budget of 1 byte is used up"

    worker.rooms.collector.set_limit(float("inf"))

    def is_saved_after_one_more() -> bool:
        worker.decode(1)
        worker.save()
        worker.publish()
        return int(jobs.job(job)["durable"]) >= 40

    poll_until(is_saved_after_one_more, "a store that failed to be tried again", every=0.1)
    worker.rooms.lease.renew()
    assert "checkpoint_error" not in jobs.job(job)
    worker.finish()
    assert (jobs.state(job), len(jobs.tokens(job))) == ("completed", 120)


# -- the setting -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20GiB", 20 * 2**30),
        ("500MB", 500e6),
        ("1.5 GB", 1.5e9),
        ("4096", 4096),
        ("2k", 2000),
        ("none", math.inf),
    ],
)
def test_sizes_are_written_as_people_write_them(text: str, count: float) -> None:
    assert size(text) == count


@pytest.mark.parametrize("text", ["0", "-5", "5XB", "lots", "", "15MiB", "16MB", "nan", "inf"])
def test_what_is_no_budget_is_refused_with_one_message_wherever_it_stands(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    said = f"{text!r} is not a size of at least 16MiB, such as 20GiB or 500MB (KB, MB,"
    with pytest.raises(SystemExit):
        parser.parse_args(["--disk-budget", text])
    assert f"argument --disk-budget: {said}" in capsys.readouterr().err
    if text:
        args = parser.parse_args(["--model", "a=b"])
        with pytest.raises(ConfigError, match=re.escape(f"TENUTO_DISK_BUDGET: {said}")):
            _values(args, {"TENUTO_DISK_BUDGET": text})


def test_the_least_budget_and_none_are_taken() -> None:
    assert disk_budget("16MiB") == 16 * 2**20
    assert disk_budget("None") == math.inf


def test_the_budget_reaches_the_child(tmp_path: Path) -> None:
    for budget in (None, math.inf, 5e9):
        settings = WorkerSettings(
            models={"m": "p"}, redis_url="", data_dir=tmp_path, disk_budget=budget
        )
        assert WorkerSettings.from_json(settings.to_json()).disk_budget == budget
    with pytest.raises(ConfigError, match="--disk-budget"):
        WorkerSettings(models={"m": "p"}, redis_url="", data_dir=tmp_path, disk_budget=0.0)


def test_the_default_holds_before_anything_is_written(worker: StepWorker) -> None:
    assert not worker.settings.checkpoints_dir.exists()
    assert worker.rooms.collector.budget.limit is not None


def test_by_default_four_fifths_of_the_free_disk_may_be_used(
    jobs: JobQueue, worker: StepWorker
) -> None:
    _cancelled(jobs, worker, 0)
    worker.rooms.collector.collect()
    budget = worker.rooms.collector.budget
    stat = os.statvfs(worker.settings.data_dir)
    free = stat.f_bavail * stat.f_frsize

    assert budget.limit is not None
    assert budget.limit == pytest.approx(budget.used() + 0.8 * free, rel=0.1)


def test_where_nothing_was_set_a_disk_that_got_room_again_is_noticed_at_once(
    jobs: JobQueue, worker: StepWorker
) -> None:
    _cancelled(jobs, worker, 0)
    budget = worker.rooms.collector.budget
    budget.limit = 1  # as it was when the disk was full
    budget.charge(1000)
    assert budget.limit > 1000


# -- doctor ----------------------------------------------------------------------------


def test_without_a_worker_doctor_says_what_would_hold_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    settings = Settings.load(data_dir=tmp_path)
    assert _budgets(settings)[0].startswith("no worker runs; by default one would have ")
    monkeypatch.setenv("TENUTO_DISK_BUDGET", "3GiB")
    assert _budgets(settings) == [
        "no worker runs; by TENUTO_DISK_BUDGET one would have 3.0 GiB; 0 bytes taken"
    ]
    monkeypatch.setenv("TENUTO_DISK_BUDGET", "plenty")
    assert "'plenty' is not a size" in _budgets(settings)[0]


def test_doctor_says_what_each_worker_of_the_data_dir_announced(
    jobs: JobQueue, worker: StepWorker, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = worker.settings.data_dir
    assert not worker.settings.checkpoints_dir.exists()
    (data_dir / "id").write_text("dir")
    settings = Settings.load(redis_url=redis_url, namespace=jobs.keys.namespace, data_dir=data_dir)
    # Its own environment says nothing of what a worker was started with.
    monkeypatch.setenv("TENUTO_DISK_BUDGET", "3GiB")
    worker.rooms.collector.budget.limit = 5 * 2**30
    worker.rooms.housekeeper.chores()
    assert _budgets(settings) == ["host-dir-0: 0 bytes of 5.0 GiB taken"]
    worker.rooms.collector.budget.limit = None
    worker.rooms.housekeeper.chores()
    assert _budgets(settings) == ["host-dir-0: 0 bytes taken, no limit (--disk-budget none)"]
    worker.settings.checkpoints_dir.mkdir()
    (data_dir / "id").write_text("another")
    assert _budgets(settings)[0].startswith("no worker runs; by TENUTO_DISK_BUDGET ")


def _budgets(settings: Settings) -> list[str]:
    return [each.says for each in check(settings) if each.subject == "disk budget"]


def test_doctor_does_not_say_that_no_worker_runs_where_one_does(tmp_path: Path) -> None:
    """Redis cannot tell it when it is down; the lock can."""
    identity = take_identity(tmp_path)
    nowhere = Settings.load(redis_url="redis://localhost:1", data_dir=tmp_path)
    assert _budgets(nowhere) == [
        "1 worker of this data dir runs; Redis, where it says what it keeps to, does not answer"
    ]
    os.close(identity.lock)
    assert _budgets(nowhere)[0].startswith("no worker runs; by default")


def test_doctor_says_that_a_worker_has_not_told_this_redis_of_itself(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    identity = take_identity(tmp_path)
    settings = Settings.load(redis_url=redis_url, namespace=namespace, data_dir=tmp_path)
    (said,) = _budgets(settings)
    assert "has not told this Redis of itself" in said
    os.close(identity.lock)
