"""`tenuto checkpoints recover`: what Redis lost comes back from the data dir alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from job_queue import JobQueue, story
from step_worker import StepWorker
from tenuto_client import (
    EndEvent,
    IdempotencyConflict,
    ModelInfo,
    StateEvent,
    SyncClient,
    Token,
    pack_announcement,
)
from tenuto_client._command import main
from tenuto_engine import CheckpointStore
from tenuto_worker._checkpoints import engine_tokens
from tenuto_worker._identity import reach_of
from tenuto_worker._judge import folders
from tenuto_worker._late_ends import LateEnds
from tenuto_worker._recovery import Recovery
from tenuto_worker._run import Phase

Start = Callable[..., StepWorker]
Say = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def start(jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts workers on one queue and one data dir, under its real id."""
    workers = []

    def begin(**settings: Any) -> StepWorker:
        data_dir = tmp_path / "data"
        data_dir.mkdir(exist_ok=True)
        settings.setdefault("reach", reach_of(data_dir))
        worker = StepWorker(redis_url, jobs.keys.namespace, tiny_model, data_dir, **settings)
        workers.append(worker)
        return worker

    yield begin
    for worker in workers:
        worker.rooms.writer.close(10)


@pytest.fixture
def say(jobs: JobQueue, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs `tenuto checkpoints recover --json` and returns its exit code and lines."""

    def run(*words: str) -> tuple[int, list[dict[str, Any]]]:
        capsys.readouterr()
        where = ["--redis", redis_url, "--namespace", jobs.keys.namespace]
        data_dir = ["--data-dir", str(tmp_path / "data")]
        code = main(["checkpoints", "recover", "--json", *where, *data_dir, *words])
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def lose_everything(jobs: JobQueue) -> None:
    """As FLUSHALL does; but the server has other tests' namespaces, too."""
    jobs.client.delete(*jobs.client.scan_iter(f"{jobs.keys.namespace}*"))


def end_of(jobs: JobQueue, job: str) -> EndEvent:
    last = jobs.stream(job)[1][-1]
    assert isinstance(last, EndEvent)
    return last


def cancelled(jobs: JobQueue, worker: StepWorker, tokens: int = 12, **options: Any) -> str:
    job = jobs.submit(**options)
    worker.claim()
    worker.decode(tokens)
    jobs.cancel(job)
    worker.publish()
    worker.settle()
    worker.save()
    return job


def undisturbed(jobs: JobQueue, worker: StepWorker, **options: Any) -> list[Token]:
    job = jobs.submit(**options)
    worker.claim()
    worker.finish()
    tokens = jobs.tokens(job)
    jobs.delete(job)
    worker.save()
    worker.rooms.collector.collect()
    return tokens


# -- states ----------------------------------------------------------------------------


def test_a_running_job_goes_on_from_its_checkpoint_and_ends_bit_for_bit(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "logprobs": 2}
    dead = start()
    expected = undisturbed(jobs, dead, **options)
    job = jobs.submit(**options)
    dead.claim()
    dead.decode(15)
    dead.save()
    # A checkpoint that was put off while others were written is taken now.
    dead.decode(5)
    dead.publish()
    dead.save()
    lose_everything(jobs)
    code, (line,) = say()

    assert code == 0
    assert (line["type"], line["job"], line["state"]) == ("recovered", job, "queued")
    assert 15 <= line["tokens"] <= 20
    assert jobs.tokens(job) == expected[: line["tokens"]]
    heir = start(name="host-dir-1")
    heir.claim()
    heir.rooms.decoder.turn()
    assert heir.run.phase is Phase.DECODE, "nothing to catch up: a checkpoint has it all"
    heir.finish()
    assert jobs.tokens(job) == expected
    end = end_of(jobs, job)
    assert (end.state, end.exactness, end.epoch) == ("completed", "exact", 2)


def test_what_makes_the_masks_of_a_grammar_is_known_after_a_recover(
    jobs: JobQueue, start: Start, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs.submit(max_tokens=40, ignore_eos=False, grammar={"regex": "[a-z]{30,40}"})
    dead = start()
    dead.claim()
    dead.decode(9)
    dead.publish()
    dead.save()
    lose_everything(jobs)
    say()
    monkeypatch.setattr("tenuto_worker._geometry_of_run.version", lambda name: "0.0.1")
    heir = start(name="host-dir-1")
    heir.claim()
    heir.finish()
    end = end_of(jobs, job)
    assert end.exactness == "recomputed"
    assert "llguidance_version: 0.0.1 here, 1." in (end.exactness_reason or "")


def test_a_job_that_has_only_begun_comes_back_with_its_prompt(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    dead = start()
    job = jobs.submit()
    dead.claim()
    before = jobs.client.hget(jobs.keys.job(job), "prompt_ids")
    lose_everything(jobs)
    assert say()[1][0]["tokens"] == 0
    assert jobs.client.hget(jobs.keys.job(job), "prompt_ids") == before
    assert [event.reason for event in jobs.stream(job)[1] if isinstance(event, StateEvent)] == [
        "recover"
    ]
    start(name="host-dir-1").claim()
    heir = start(name="host-dir-2")
    assert not heir.claim(), "it runs already"


def test_the_limit_that_a_text_was_submitted_under_comes_back_with_it(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    jobs.client.hset(jobs.keys.limits(), mapping={"*|max_prompt": 500})
    job = jobs.submit()
    start().claim()
    lose_everything(jobs)
    assert say()[1][0]["job"] == job
    assert jobs.job(job)["max_prompt"] == "500"


def timeless(end: EndEvent) -> EndEvent:
    """For how long a job ran is counted by Redis, and by its worker for what is on disk."""
    return replace(end, stats=end.stats and replace(end.stats, seconds=0.0))


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_a_job_that_has_ended_comes_back_as_it_ended(
    jobs: JobQueue, start: Start, say: Say, state: str
) -> None:
    worker = start()
    if state == "cancelled":
        job = cancelled(jobs, worker, logprobs=2)
    else:
        job = jobs.submit(logprobs=2, max_tokens=12)
        worker.claim()
        if state == "completed":
            worker.finish()
        else:
            worker.decode(7)
            worker.run.relabel("it was another machine")
            worker.publish()
            jobs.client.hset(jobs.keys.job(job), "deadline", "1")
            worker.rooms.lease.renew()
            worker.settle()
    worker.save()
    tokens, events = jobs.stream(job)
    record = jobs.job(job)
    lose_everything(jobs)
    code, (line,) = say()

    assert (code, line["state"], line["tokens"]) == (0, state, len(tokens))
    assert jobs.tokens(job) == tokens
    whole = events[-1]
    assert isinstance(whole, EndEvent)
    assert timeless(end_of(jobs, job)) == timeless(whole)
    assert whole.stats is not None
    after = jobs.job(job)
    assert float(after["ran"]) == pytest.approx(float(record["ran"]), abs=5)
    assert int(after.pop("held")) == pytest.approx(int(record.pop("held")), abs=1000)
    assert int(after.pop("written")) == pytest.approx(int(record.pop("written")), abs=1000)
    of_attempts = ("worker", "queued_at", "claimed_at", "moved", "seq", "events", "durable", "ran")
    for name in (*of_attempts, "told"):
        record.pop(name, None)
        after.pop(name, None)
    assert float(after.pop("finished_at")) == pytest.approx(float(record.pop("finished_at")), abs=5)
    record.pop("deadline", None)
    assert after == record
    assert jobs.client.zscore(jobs.keys.expiry(), job) is not None
    assert jobs.client.zcard(jobs.keys.tickets("tiny")) == 0


def test_a_cancelled_job_that_came_back_is_resumed_bit_for_bit(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    worker = start()
    expected = undisturbed(jobs, worker)
    job = cancelled(jobs, worker)
    lose_everything(jobs)
    assert say()[0] == 0
    assert jobs.resume(job) == "resumed"
    worker.claim()
    worker.finish()

    assert jobs.tokens(job) == expected
    assert end_of(jobs, job).exactness == "exact"


def test_a_job_that_was_resumed_after_its_end_comes_back_queued(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    worker = start()
    job = cancelled(jobs, worker)
    jobs.resume(job)
    worker.claim()
    lose_everything(jobs)
    (line,) = say()[1]

    assert (line["state"], line["tokens"]) == ("queued", 12)
    assert int(jobs.job(job)["epoch"]) == 3


def test_the_label_of_what_was_computed_comes_back(jobs: JobQueue, start: Start, say: Say) -> None:
    job = jobs.submit(max_tokens=30)
    claim = jobs.take()
    jobs.scripts.publish(claim.fence, story(1, 5))
    fields = {"fingerprint": "earlier", "geometry": msgpack.packb({"device_kind": "cpu"})}
    jobs.client.hset(jobs.keys.job(job), mapping=fields)
    jobs.scripts.release(claim.fence, "drain")
    worker = start(exact_wait_seconds=0.0)
    worker.claim()
    worker.decode(5)
    worker.save()
    reason = jobs.job(job)["exactness_reason"]
    lose_everything(jobs)
    say()

    assert jobs.job(job)["exactness"] == "recomputed"
    assert jobs.job(job)["exactness_reason"] == reason


# -- ends that no worker noted -------------------------------------------------------------


def note_late_ends(jobs: JobQueue, worker: StepWorker) -> None:
    judge = worker.rooms.collector._judge
    late = LateEnds(jobs.client, jobs.keys, judge, quiet_s=0.0)
    late.note(folders(worker.settings.checkpoints_dir))


def test_a_job_cancelled_in_the_queue_comes_back_cancelled(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    worker = start()
    expected = undisturbed(jobs, worker)
    job = jobs.submit()
    worker.claim()
    worker.decode(9)
    worker.rooms._stop_all()
    worker.settle()
    worker.save()
    assert jobs.cancel(job) == "cancelled"
    note_late_ends(jobs, worker)
    end = end_of(jobs, job)
    lose_everything(jobs)
    (line,) = say()[1]

    assert (line["state"], line["tokens"]) == ("cancelled", 9)
    assert end_of(jobs, job) == end
    jobs.resume(job)
    worker.claim()
    worker.rooms.decoder.turn()
    assert worker.run.phase is Phase.DECODE, "its caches are still there"
    worker.finish()
    assert jobs.tokens(job) == expected


def test_the_end_of_a_completed_job_whose_worker_died_over_its_note_is_noted(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    worker = start()
    job = jobs.submit()
    worker.claim()
    worker.rooms.publisher._on_ended = lambda run, state: None
    worker.finish()
    worker.save()
    folder = worker.settings.checkpoints_dir / job
    assert not list(folder.glob("*.end"))
    tokens, events = jobs.stream(job)
    note_late_ends(jobs, worker)

    assert [path.suffix for path in folder.iterdir()] == [".end"]
    lose_everything(jobs)
    assert say()[1][0]["state"] == "completed"
    assert jobs.tokens(job) == tokens
    assert end_of(jobs, job) == events[-1]
    assert end_of(jobs, job).stats is not None


def test_an_end_elsewhere_after_a_resume_takes_the_place_of_the_end_that_was_noted_here(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    job = cancelled(jobs, worker)
    folder = worker.settings.checkpoints_dir / job
    late = LateEnds(jobs.client, jobs.keys, worker.rooms.collector._judge, quiet_s=0.0)
    late.note(folders(worker.settings.checkpoints_dir))
    assert {path.suffix for path in folder.iterdir()} > {".end"}
    jobs.resume(job)
    claim = jobs.take(exact_wait_s=0, reach="another data dir")
    jobs.scripts.publish(claim.fence, [Token(5, claim.tokens + 1, "x", -1.0)])
    jobs.scripts.finish(claim.fence, state="completed", finish_reason="stop")
    late.note(folders(worker.settings.checkpoints_dir))
    assert {path.suffix for path in folder.iterdir()} == {".end"}


def test_an_end_is_noted_once_and_not_while_its_writer_may_be_about_to(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    job = cancelled(jobs, worker)
    folder = worker.settings.checkpoints_dir / job
    before = {path.name for path in folder.iterdir()}
    note_late_ends(jobs, worker)
    assert {path.name for path in folder.iterdir()} == before
    (end,) = folder.glob("*.end")
    end.unlink()
    worker.rooms.collector.collect()
    assert not list(folder.glob("*.end")), "it changed a moment ago"


def test_the_end_of_a_job_of_another_data_set_is_not_noted(jobs: JobQueue, start: Start) -> None:
    worker = start()
    job = cancelled(jobs, worker)
    (end,) = (worker.settings.checkpoints_dir / job).glob("*.end")
    end.unlink()
    jobs.client.set(jobs.keys.namespace_id(), "another")
    note_late_ends(jobs, worker)
    assert not end.exists()
    assert not list(end.parent.glob("*.end"))


# -- what belongs to a job -------------------------------------------------------------


def test_all_that_was_asked_for_comes_back_with_the_idempotency_key(
    jobs: JobQueue, redis_url: str, start: Start, say: Say
) -> None:
    worker = start()
    asked: Any = {
        "max_tokens": 30, "seed": 3, "ignore_eos": True, "priority": -4, "tenant": "them",
        "metadata": {"a": [1]}, "retention": "forever", "idempotency_key": "k",
    }  # fmt: skip
    with SyncClient(redis_url, namespace=jobs.keys.namespace) as client:
        job = client.submit("tiny", "Tell me.", **asked)
        worker.claim()
        worker.decode(9)
        worker.publish()
        worker.save()
        before = job.status()
        lose_everything(jobs)
        say()
        after = job.status()
        for name in ("id", "model", "created_at", "started_at", "priority", "metadata", "tenant",
                     "max_tokens", "prompt_tokens", "attempts"):  # fmt: skip
            assert getattr(after, name) == getattr(before, name), name
        info = ModelInfo("tiny", 4096, 400, "f", 0.0)
        jobs.client.hset(jobs.keys.models(), mapping={"tiny": pack_announcement(info)})
        assert client.submit("tiny", "Tell me.", **asked).id == job.id
        with pytest.raises(IdempotencyConflict):
            client.submit("tiny", "Something else.", **asked)
        assert [record.id for record in client.list()] == [job.id]


def test_jobs_queue_up_again_by_age(jobs: JobQueue, start: Start, say: Say) -> None:
    worker = start(slots=3)
    made = [jobs.submit() for _ in range(3)]
    for _ in made:
        worker.claim()
    lose_everything(jobs)
    lines = say()[1]

    assert [line["job"] for line in lines] == made
    assert [jobs.take(reach="x", exact_wait_s=0.0).fence.job_id for _ in made] == made


def test_jobs_made_in_the_same_millisecond_keep_their_order(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    worker = start(slots=8)
    made = [jobs.submit() for _ in range(8)]
    for job in made:
        jobs.client.hset(jobs.keys.job(job), "created_at", "1000.000")
    for _ in made:
        worker.claim()
    lose_everything(jobs)

    assert [line["job"] for line in say()[1]] == made


def test_a_long_stream_comes_back_whole_and_in_order(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    worker = start()
    job = cancelled(jobs, worker)
    folder = worker.settings.checkpoints_dir / job
    meta = CheckpointStore(folder).ends()[0].meta
    long = [Token(i, i, f" {i}", -i / 8, ((i, -1.0),), i % 3 == 0) for i in range(1, 10_001)]
    store = CheckpointStore(folder, epoch=5, meta=meta)
    store.open([1, 2], 7)
    store.finish({"state": "failed", "error": "x"}, engine_tokens(long), keep_caches=True)
    lose_everything(jobs)
    (line,) = say()[1]

    assert (line["state"], line["tokens"]) == ("failed", 10_000)
    assert jobs.tokens(job) == long


# -- what is left alone ----------------------------------------------------------------


def test_only_what_is_missing_is_put_back(jobs: JobQueue, start: Start, say: Say) -> None:
    worker = start()
    kept, lost = cancelled(jobs, worker), cancelled(jobs, worker)
    deleted = cancelled(jobs, worker)
    before = jobs.client.dump(jobs.keys.stream(kept)), jobs.job(kept)
    jobs.client.delete(jobs.keys.job(lost), jobs.keys.stream(lost))
    jobs.delete(deleted)
    code, lines = say()

    assert code == 0
    # The files of the deleted one wait for gc.
    assert {line["job"]: line["type"] for line in lines} == {kept: "present", lost: "recovered"}
    assert (jobs.client.dump(jobs.keys.stream(kept)), jobs.job(kept)) == before
    assert {line["type"] for line in say()[1]} == {"present"}


def test_jobs_of_another_namespace_are_left_to_it(jobs: JobQueue, start: Start, say: Say) -> None:
    """They may run there, and would run twice; and gc would take their checkpoints for its own."""
    job = cancelled(jobs, start())
    mine = jobs.client.get(jobs.keys.namespace_id())
    code, (line,) = say("--namespace", "another:")

    assert (code, line["type"], line["job"]) == (1, "lost", job)
    assert f"recover it with --namespace {jobs.keys.namespace}" in line["reason"]
    assert not list(jobs.client.scan_iter("another:*"))
    assert jobs.client.get(jobs.keys.namespace_id()) == mine


def test_a_dry_run_writes_nothing(jobs: JobQueue, start: Start, say: Say) -> None:
    job = cancelled(jobs, start())
    lose_everything(jobs)
    (line,) = say("--dry-run")[1]

    assert (line["job"], line["state"], line["dry_run"]) == (job, "cancelled", True)
    assert not list(jobs.client.scan_iter(f"{jobs.keys.namespace}*"))


def test_one_job_can_be_put_back_alone(jobs: JobQueue, start: Start, say: Say) -> None:
    worker = start()
    one, other = cancelled(jobs, worker), cancelled(jobs, worker)
    lose_everything(jobs)
    assert [line["job"] for line in say(one)[1]] == [one]
    assert jobs.state(other) == "gone"
    assert not jobs.client.exists(jobs.keys.collectable()), "the other is still to be put back"
    code, (line,) = say("nobody")
    assert (code, line["type"]) == (1, "lost")


# -- damage ----------------------------------------------------------------------------


def test_a_folder_that_cannot_be_read_is_named_and_the_others_are_put_back(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    worker = start()
    good, bad = cancelled(jobs, worker), cancelled(jobs, worker)
    for path in (worker.settings.checkpoints_dir / bad).iterdir():
        path.write_bytes(b"not a checkpoint at all, but longer than a head")
    (worker.settings.checkpoints_dir / "empty").mkdir()
    lose_everything(jobs)
    code, lines = say()

    assert code == 1
    found = {line["job"]: line for line in lines}
    assert found.keys() == {good, bad}
    assert found[good]["type"] == "recovered"
    assert found[bad]["type"] == "lost"
    assert ".end: " in found[bad]["reason"]


def test_where_the_newest_is_damaged_an_older_copy_comes_back_and_the_damage_is_told(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    worker = start()
    job = cancelled(jobs, worker)
    (end,) = (worker.settings.checkpoints_dir / job).glob("*.end")
    data = bytearray(end.read_bytes())
    data[-1] ^= 1
    end.write_bytes(data)
    lose_everything(jobs)
    code, (line,) = say()

    assert (code, line["type"], line["state"]) == (0, "recovered", "queued")
    assert line["tokens"] >= 11
    assert end.name in line["reason"]


def test_a_longer_copy_that_says_something_else_than_the_newest_is_not_taken(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    worker = start()
    job = cancelled(jobs, worker, tokens=5)
    folder = worker.settings.checkpoints_dir / job
    meta = CheckpointStore(folder).ends()[0].meta
    for epoch, count, shift in ((2, 9, 0), (3, 7, 1)):
        tokens = [Token(i + shift, i, "", -1.0) for i in range(1, count + 1)]
        store = CheckpointStore(folder, epoch=epoch, meta=meta)
        store.open([1, 2], 7)
        store.finish({"state": "failed"}, engine_tokens(tokens), keep_caches=True)
    lose_everything(jobs)
    (line,) = say()[1]

    assert (line["tokens"], line["state"]) == (7, "failed")
    assert [token.token for token in jobs.tokens(job)] == list(range(2, 9))


@pytest.mark.parametrize(
    "change",
    [
        {"v": 1},
        {"job": "another"},
        {"fields": None},
        {"fields": {}},
        {"more": {"nonce": b"x"}},
        {"more": {"created_at": b"long ago"}},
        {"more": {"spec": b"nothing"}},
    ],
    ids=lambda change: str(change)[:30],
)
def test_what_no_worker_of_this_version_writes_is_named_and_not_put_back(
    jobs: JobQueue, start: Start, say: Say, change: dict[str, Any]
) -> None:
    worker = start()
    job = cancelled(jobs, worker)
    folder = worker.settings.checkpoints_dir / job
    meta: Any = CheckpointStore(folder).ends()[0].meta
    CheckpointStore(folder).delete()
    more = change.pop("more", None)
    meta = {**meta, **change} if more is None else {**meta, "fields": {**meta["fields"], **more}}
    store = CheckpointStore(folder, epoch=1, meta=meta)
    store.open([1, 2], 7)
    store.close()
    lose_everything(jobs)
    code, (line,) = say()

    assert (code, line["type"], line["job"]) == (1, "lost", job)
    assert not list(jobs.client.scan_iter(f"{jobs.keys.namespace}*"))


def test_what_the_stream_did_not_keep_of_an_earlier_attempt_does_not_come_back(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    job = jobs.submit(max_tokens=40)
    lost = start()
    lost.claim()
    for _ in range(3):
        lost.decode(9)
        lost.save()
    jobs.scripts.take_back(job, "host-dir-0")
    claim = jobs.take(exact_wait_s=0.0)
    jobs.scripts.publish(claim.fence, story(1, 5))
    jobs.scripts.release(claim.fence, "drain")
    heir = start(name="host-dir-1")
    heir.claim()
    heir.decode(9)
    heir.save()
    heir.publish()
    tokens = jobs.tokens(job)
    logs = (heir.settings.checkpoints_dir / job).glob("*.log")
    assert sorted(int(log.name.partition("-")[0]) for log in logs) == [1, 3]
    lose_everything(jobs)
    (line,) = say()[1]

    assert 5 < line["tokens"] <= len(tokens)
    assert jobs.tokens(job) == tokens[: line["tokens"]]


# -- in the middle of it ---------------------------------------------------------------


def test_a_crash_while_a_stream_is_built_shows_nothing_and_the_next_run_puts_it_back(
    jobs: JobQueue, start: Start, say: Say, tmp_path: Path
) -> None:
    worker = start()
    job = cancelled(jobs, worker)
    tokens = jobs.tokens(job)
    lose_everything(jobs)
    data_dir = tmp_path / "data"
    recovery = Recovery(data_dir / "checkpoints", reach_of(data_dir), jobs.client, jobs.keys)
    built = recovery._build(job, tokens)

    half = jobs.keys.half(job, built)
    assert 0 < jobs.client.ttl(half) <= 3600  # type: ignore[operator]
    assert jobs.state(job) == "gone"
    assert jobs.tokens(job) == []
    assert say()[0] == 0
    assert jobs.tokens(job) == tokens
    assert jobs.client.ttl(jobs.keys.stream(job)) == -1


def test_two_at_once_put_a_job_back_once(
    jobs: JobQueue, start: Start, say: Say, tmp_path: Path
) -> None:
    worker = start()
    job = cancelled(jobs, worker)
    lose_everything(jobs)
    data_dir = tmp_path / "data"
    recovery = Recovery(data_dir / "checkpoints", reach_of(data_dir), jobs.client, jobs.keys)
    build = recovery._build

    def build_while_another_is_quicker(job_id: str, tokens: Any) -> str:
        assert say()[0] == 0
        return build(job_id, tokens)

    recovery._build = build_while_another_is_quicker  # type: ignore[method-assign]
    (outcome,) = recovery.recover()

    assert outcome.was_there
    assert len(jobs.tokens(job)) == 12
    assert len([each for each in jobs.stream(job)[1] if isinstance(each, EndEvent)]) == 1
    assert not list(jobs.client.scan_iter(jobs.keys.half(job, "*")))


# -- afterwards ------------------------------------------------------------------------


def test_gc_takes_the_data_set_for_its_own_in_this_data_dir_only(
    jobs: JobQueue, start: Start, say: Say
) -> None:
    worker = start()
    kept, gone = cancelled(jobs, worker), cancelled(jobs, worker)
    lose_everything(jobs)
    say()
    jobs.delete(gone)
    start(reach="other", name="host-other-0").rooms.collector.collect()
    assert (worker.settings.checkpoints_dir / gone).exists()

    worker.rooms.collector.collect()
    assert not (worker.settings.checkpoints_dir / gone).exists()
    assert (worker.settings.checkpoints_dir / kept).exists()


def test_without_redis_it_is_exit_code_3(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody"
    arguments = ["--redis", url, "--data-dir", str(tmp_path)]
    assert main(["checkpoints", "recover", *arguments]) == 3


def test_people_are_told_in_words(
    jobs: JobQueue, redis_url: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = start()
    job = cancelled(jobs, worker)
    lose_everything(jobs)
    where = ["--redis", redis_url, "--namespace", jobs.keys.namespace]
    where += ["--data-dir", str(worker.settings.data_dir)]
    capsys.readouterr()
    assert main(["checkpoints", "recover", *where]) == 0
    first, second, note = capsys.readouterr().out.splitlines()
    assert (first, second) == (f"{job}  cancelled  12 tokens", "1 job put back")
    assert "jobs that no worker had begun are not on disk" in note
    assert main(["checkpoints", "recover", *where]) == 0
    assert capsys.readouterr().out == f"{job}  is there, left as it is\n0 jobs put back\n"
