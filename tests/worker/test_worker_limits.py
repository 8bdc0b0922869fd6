"""What one worker takes, what all announce together, and the time limits of a job that runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from job_queue import MODEL, JobQueue
from step_worker import StepWorker
from tenuto_client import ModelInfo, WorkerInfo, pack_announcement, unpack_model, unpack_worker
from tenuto_worker import WorkerSettings
from tenuto_worker._errors import ConfigError
from tenuto_worker._run import Stop

Start = Callable[..., StepWorker]
LONG = "Tell me a story. " * 20


@pytest.fixture
def start(jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts workers on one queue and one data dir."""
    workers = []

    def begin(name: str = "host-dir-0", **settings: Any) -> StepWorker:
        worker = StepWorker(
            redis_url, jobs.keys.namespace, tiny_model, tmp_path / "data", name=name, **settings
        )
        workers.append(worker)
        return worker

    yield begin
    for worker in workers:
        worker.rooms.writer.close(10)


def model(jobs: JobQueue) -> ModelInfo:
    """What stands in the registry."""
    packed: Any = jobs.client.hget(jobs.keys.models(), MODEL)
    return unpack_model(MODEL, packed)


def said(jobs: JobQueue, name: str) -> WorkerInfo:
    """What a worker said of itself."""
    packed: Any = jobs.client.hget(jobs.keys.workers(), name)
    return unpack_worker(name, packed)


def fall_silent(jobs: JobQueue, name: str) -> None:
    """As if the worker had last spoken a minute ago."""
    info = said(jobs, name)
    values = {n: getattr(info, n) for n in WorkerInfo.__dataclass_fields__}
    silent = WorkerInfo(**values | {"seen_at": time.time() - 60})
    jobs.client.hset(jobs.keys.workers(), mapping={name: pack_announcement(silent)})


# -- what is announced -------------------------------------------------------------------


def test_the_widest_limits_of_the_living_workers_are_announced(
    jobs: JobQueue, start: Start
) -> None:
    narrow = start("narrow", max_prompt=50, max_tokens=10)
    assert (model(jobs).max_prompt, model(jobs).max_tokens) == (50, 10)
    start("wide", max_prompt=40, max_tokens=30)
    assert (model(jobs).max_prompt, model(jobs).max_tokens) == (50, 30)
    assert said(jobs, "narrow").limits[MODEL] == {"max_prompt": 50, "max_tokens": 10}
    narrow.rooms.housekeeper.chores()
    assert (model(jobs).max_prompt, model(jobs).max_tokens) == (50, 30)
    fall_silent(jobs, "wide")
    narrow.rooms.housekeeper.chores()
    assert (model(jobs).max_prompt, model(jobs).max_tokens) == (50, 10)


def test_a_worker_without_a_limit_takes_it_away_for_all(jobs: JobQueue, start: Start) -> None:
    narrow = start("narrow", max_prompt=50, max_tokens=10)
    start("wide", max_tokens=30)
    narrow.rooms.housekeeper.chores()
    assert (model(jobs).max_prompt, model(jobs).max_tokens) == (None, 30)


def test_the_limits_of_a_worker_that_says_good_bye_are_forgotten(
    jobs: JobQueue, start: Start
) -> None:
    narrow, wide = start("narrow", max_tokens=10), start("wide", max_tokens=30)
    wide.rooms._announcer.retract()
    narrow.rooms.housekeeper.chores()
    assert model(jobs).max_tokens == 10


@pytest.mark.parametrize("flag", ["max_prompt", "max_tokens"])
def test_a_limit_below_one_is_refused_by_its_flag(tmp_path: Path, flag: str) -> None:
    values: dict[str, Any] = {flag: 0}
    with pytest.raises(ConfigError, match="--" + flag.replace("_", "-")):
        WorkerSettings(models={"a": "b"}, redis_url="", data_dir=tmp_path, **values)


# -- what is too long for this worker ------------------------------------------------------


def test_a_prompt_that_no_worker_takes_fails_with_the_limit_named(
    jobs: JobQueue, start: Start
) -> None:
    worker = start(max_prompt=20)
    job = jobs.submit(prompt=LONG)
    worker.claim()
    worker.settle()
    fields = jobs.job(job)
    assert fields["state"] == "failed"
    prompt_tokens = int(fields["prompt_tokens"])
    assert prompt_tokens > 20
    assert fields["error"].startswith(f"max_prompt: {prompt_tokens} tokens of prompt are over")
    assert "20" in fields["error"]


def test_a_prompt_that_another_worker_takes_is_handed_on_and_counts_nothing(
    jobs: JobQueue, start: Start
) -> None:
    wide, narrow = start("wide", max_prompt=4000), start("narrow", max_prompt=20)
    job = jobs.submit(prompt=LONG)
    assert narrow.claim()
    narrow.settle()
    assert not narrow.claim(), "its length is known now"
    fields = jobs.job(job)
    assert (fields["state"], fields["stalls"]) == ("queued", "0")
    assert wide.claim()
    wide.finish()
    assert jobs.state(job) == "completed"


def test_a_claim_leaves_what_is_too_long_and_takes_what_stands_behind_it(
    jobs: JobQueue, start: Start
) -> None:
    long = [jobs.submit(max_tokens=31) for _ in range(70)]
    short = jobs.submit(max_tokens=30)
    (first, *_), left = jobs.leave(max_tokens=10), jobs.leave(max_tokens=10)
    assert (first.job_id, first.seconds, first.why, len(left)) == (long[0], 0.0, "limits", 16)
    worker = start(max_tokens=30)
    assert worker.claim()
    assert worker.run.job_id == short
    assert not worker.claim()
    assert [jobs.state(job) for job in long] == ["queued"] * 70


def limit_prompts(jobs: JobQueue, **limits: int) -> None:
    """Set the queue's `max_prompt`: `own` of the model, `all` of every one; none are cleared."""
    jobs.client.delete(jobs.keys.limits())
    for name, model_name in (("own", MODEL), ("all", "*")):
        if name in limits:
            field = f"{model_name}|max_prompt"
            jobs.client.hset(jobs.keys.limits(), mapping={field: limits[name]})


@pytest.mark.parametrize("limits", [{"own": 100}, {"own": 100, "all": 4000}, {"all": 100}])
def test_a_text_is_judged_by_the_limit_that_held_at_its_submit(
    jobs: JobQueue, start: Start, limits: dict[str, int]
) -> None:
    worker = start()
    limit_prompts(jobs)
    before = jobs.submit(prompt=LONG)
    limit_prompts(jobs, **limits)
    over, short = jobs.submit(prompt=LONG), jobs.submit()
    limit_prompts(jobs, all=2)
    while worker.claim():
        worker.finish()
    limit_prompts(jobs)
    states = [jobs.state(job) for job in (before, over, short)]
    assert states == ["completed", "failed", "completed"]
    error = jobs.job(over)["error"]
    assert error.startswith("max_prompt: ")
    assert "over the 100 that tiny allowed when it was submitted" in error


def test_a_limit_that_is_cleared_lets_no_text_pass_that_was_submitted_under_it(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    limit_prompts(jobs, all=100)
    over = jobs.submit(prompt=LONG)
    limit_prompts(jobs)
    assert worker.claim()
    worker.settle()
    assert jobs.state(over) == "failed"


def test_a_text_stays_judged_until_it_has_begun_whatever_comes_between(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    limit_prompts(jobs, all=100)
    cancelled, over = jobs.submit(prompt=LONG), jobs.submit(prompt=LONG)
    jobs.cancel(cancelled)
    jobs.resume(cancelled)
    # As if a worker had died when it had counted the prompt, and not yet judged it.
    prompt: Any = msgpack.packb(list(range(200)))
    jobs.client.hset(jobs.keys.job(over), mapping={"prompt_ids": prompt, "prompt_tokens": 200})
    while worker.claim():
        worker.settle()
    assert [jobs.state(job) for job in (cancelled, over)] == ["failed", "failed"]


def test_a_resume_of_what_failed_by_its_limit_runs(jobs: JobQueue, start: Start) -> None:
    worker = start()
    limit_prompts(jobs, all=100)
    over = jobs.submit(prompt=LONG)
    worker.claim()
    worker.settle()
    assert jobs.state(over) == "failed"
    jobs.resume(over)
    worker.claim()
    worker.finish()
    assert jobs.state(over) == "completed"


@pytest.mark.parametrize("limit", ["context", "max_prompt"])
def test_what_is_far_too_long_fails_before_it_is_tokenized(
    jobs: JobQueue, start: Start, limit: str
) -> None:
    worker = start()
    if limit == "max_prompt":
        limit_prompts(jobs, all=100)
    context = worker.engine.context_length
    assert context is not None
    longest = worker.engine.longest_token
    assert longest is not None
    most = context if limit == "context" else 100
    chat = ({"role": "user", "content": "a " * most * longest},)
    text, messages = jobs.submit(prompt="a " * most * longest), jobs.submit(prompt=chat)
    while worker.claim():
        worker.settle()
    for job in (text, messages):
        fields = jobs.job(job)
        assert fields["state"] == "failed"
        assert "at least" in fields["error"]
        assert str(most) in fields["error"]
        assert "prompt_tokens" not in fields, "nobody counted it"


def test_a_worker_announces_its_longest_token(jobs: JobQueue, start: Start) -> None:
    worker = start()
    assert model(jobs).longest_token == worker.engine.longest_token is not None


def test_a_job_that_has_begun_waits_for_a_worker_that_takes_it(
    jobs: JobQueue, start: Start
) -> None:
    wide = start("wide")
    job = jobs.submit(prompt=LONG)
    wide.claim()
    wide.decode(5)
    wide.publish()
    wide.run.ask_to_stop(Stop.DRAIN)
    wide.settle()
    wide.rooms._announcer.retract()
    narrow = start("narrow", max_prompt=20)
    narrow.claim()
    narrow.settle()
    assert jobs.state(job) == "queued"


def test_what_is_in_memory_and_what_runs_of_each_model_is_announced(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    told = said(jobs, "host-dir-0")
    assert (told.loaded, told.busy, told.free_slots(MODEL)) == ((MODEL,), {}, 2)
    jobs.submit()
    worker.claim()
    worker.rooms._announcer.announce()
    told = said(jobs, "host-dir-0")
    assert (told.busy, told.free_slots(MODEL)) == ({MODEL: 1}, 1)


# -- time ---------------------------------------------------------------------------------


def test_the_chores_end_what_waited_too_long(jobs: JobQueue, start: Start) -> None:
    worker = start()
    job = jobs.submit(hash_fields={"queue_ttl": 100})
    worker.rooms.housekeeper.chores()
    assert jobs.state(job) == "queued"
    jobs.client.hset(jobs.keys.job(job), "queue_until", f"{time.time() - 1:.3f}")
    jobs.client.zadd(jobs.keys.due(), {job: time.time() - 1})
    worker.rooms.housekeeper.chores()
    assert jobs.job(job)["error"].startswith("queue_ttl: ")


def test_a_job_that_runs_too_long_fails_keeps_its_tokens_and_is_resumed_to_its_end(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    other = jobs.submit()
    worker.claim()
    worker.finish()
    job = jobs.submit(hash_fields={"max_runtime": 100})
    worker.claim()
    worker.decode(5)
    worker.publish()
    started = float(jobs.job(job)["claimed_at"])
    jobs.client.hset(jobs.keys.job(job), "claimed_at", f"{started - 101:.3f}")
    worker.rooms.lease.renew()
    worker.settle()
    fields = jobs.job(job)
    assert (fields["state"], fields["tokens"] >= "5") == ("failed", True)
    says = r"max_runtime: the job ran for [\d.]+ s in all, it may for 100 s"
    assert re.fullmatch(says, fields["error"])
    jobs.resume(job)
    worker.claim()
    worker.finish()
    assert jobs.state(job) == "completed"
    assert jobs.tokens(job) == jobs.tokens(other)


# -- workers that are started again ---------------------------------------------------------


def grow_older(jobs: JobQueue, seconds: float) -> None:
    """As if what is announced of the model had been so for longer."""
    info = model(jobs)
    assert info.wide_at is not None
    older = replace(info, wide_at=info.wide_at - seconds)
    jobs.client.hset(jobs.keys.models(), mapping={MODEL: pack_announcement(older)})


def test_a_text_waits_for_the_only_worker_that_takes_it_while_that_is_started_again(
    jobs: JobQueue, start: Start
) -> None:
    wide = start("wide", widest_seconds=300)
    narrow = start("narrow", max_prompt=20, widest_seconds=300)
    wide.rooms._announcer.retract()
    narrow.rooms.housekeeper.chores()
    job = jobs.submit(prompt=LONG)
    assert narrow.claim()
    narrow.settle()
    assert not narrow.claim(), "its length is known now"
    assert (jobs.state(job), jobs.job(job)["stalls"]) == ("queued", "0")
    again = start("wide", widest_seconds=300)
    assert again.claim()
    again.finish()
    assert jobs.state(job) == "completed"


def test_a_text_that_waited_in_vain_fails_with_the_limit_named(
    jobs: JobQueue, start: Start
) -> None:
    wide = start("wide", widest_seconds=300)
    narrow = start("narrow", max_prompt=20, widest_seconds=300)
    wide.rooms._announcer.retract()
    job = jobs.submit(prompt=LONG)
    narrow.claim()
    narrow.settle()
    grow_older(jobs, 299)
    narrow.rooms.housekeeper.chores()
    assert (model(jobs).max_prompt, narrow.claim()) == (None, False)
    grow_older(jobs, 2)
    narrow.rooms.housekeeper.chores()
    assert (model(jobs).max_prompt, narrow.claim()) == (20, True)
    narrow.settle()
    assert jobs.state(job) == "failed"
    assert jobs.job(job)["error"].startswith("max_prompt: ")


def test_time_in_which_no_worker_was_there_does_not_make_limits_narrower(
    jobs: JobQueue, start: Start
) -> None:
    wide = start("wide", max_tokens=30, widest_seconds=300)
    wide.rooms._announcer.retract()
    night = replace(model(jobs), announced_at=time.time() - 3600, wide_at=time.time() - 3600)
    jobs.client.hset(jobs.keys.models(), mapping={MODEL: pack_announcement(night)})
    narrow = start("narrow", max_tokens=10, widest_seconds=300)
    narrow.rooms.housekeeper.chores()
    assert model(jobs).max_tokens == 30
    grow_older(jobs, 301)
    narrow.rooms.housekeeper.chores()
    assert model(jobs).max_tokens == 10
