"""What somebody else damaged in Redis ends the job that it is of, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from structlog.testing import capture_logs

from job_queue import MODEL, JobQueue, story
from raw_worker import RawWorker
from step_worker import StepWorker
from tenuto_client import JobFailed, JobState, SyncClient
from tenuto_worker._answers import Swept
from tenuto_worker._calls import sweep_call
from tenuto_worker._housekeeper import Contact
from tenuto_worker._redis import Outage, Patience
from tenuto_worker._take_back import take_back
from workers import poll_until

Damage = Callable[[JobQueue, str], object]
LANE = "0:default"


@pytest.fixture
def worker(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path
) -> Iterator[StepWorker]:
    space = jobs.keys.namespace
    with StepWorker(redis_url, space, tiny_model, tmp_path, lease_seconds=0.5) as made:
        # As after a lease of contact.
        made.rooms.housekeeper._contact = Contact(0.0, 1000.0)
        yield made


@pytest.fixture
def client(redis_url: str, jobs: JobQueue) -> Iterator[SyncClient]:
    with SyncClient(redis_url, namespace=jobs.keys.namespace) as made:
        yield made


def execute(jobs: JobQueue, *command: Any) -> None:
    """Any command, with whatever bytes."""
    run: Any = jobs.client.execute_command
    run(*command)


def put(**fields: Any) -> Damage:
    """Fields of the hash have other values; None takes one out."""

    def damage(jobs: JobQueue, job: str) -> None:
        for name, value in fields.items():
            if value is None:
                jobs.client.hdel(jobs.keys.job(job), name)
            else:
                execute(jobs, "HSET", jobs.keys.job(job), name, value)

    return damage


def spec(**changes: Any) -> Damage:
    body = {"v": 1, "model": MODEL, "prompt": "x", "seed": 1, "max_tokens": 5}
    return put(spec=msgpack.packb(body | changes))


def no_hash(jobs: JobQueue, job: str) -> None:
    jobs.client.delete(jobs.keys.job(job))


def no_hash_but_a_string(jobs: JobQueue, job: str) -> None:
    jobs.client.delete(jobs.keys.job(job))
    jobs.client.set(jobs.keys.job(job), "x")


def a_string_for_a_stream(jobs: JobQueue, job: str) -> None:
    jobs.client.delete(jobs.keys.stream(job))
    jobs.client.set(jobs.keys.stream(job), "x")


def an_entry_ahead(jobs: JobQueue, job: str) -> None:
    jobs.client.xadd(jobs.keys.stream(job), {"e": b"x"}, id="999-0")


def an_entry_of_nothing(jobs: JobQueue, job: str) -> None:
    jobs.client.xadd(jobs.keys.stream(job), {"t": b"\xc1"}, id="2-0")
    execute(jobs, "HSET", jobs.keys.job(job), "tokens", 2)


OF_THE_JOB: dict[str, tuple[Damage, str]] = {
    # what is damaged: how, and the field that the job's error names
    "a spec that is no msgpack": (put(spec=b"\xc1garbage"), "spec"),
    "a spec too deep": (put(spec=b"\x91" * 5000 + b"\xc0"), "spec"),
    "a spec with a dict as a key": (put(spec=b"\x81\x81\xa1a\x01\x01"), "spec"),
    "an empty prompt": (spec(prompt=[]), "prompt"),
    "a prompt of no ids": (spec(prompt=[2**40, -5, "x"]), "prompt"),
    "a prompt over the vocabulary": (spec(prompt=[999999, 3]), "prompt"),
    "no prompt": (spec(prompt=None), "prompt"),
    "no seed": (spec(seed=None), "seed"),
    "max_tokens in words": (spec(max_tokens="many"), "max_tokens"),
    "a temperature that is NaN": (spec(temperature=float("nan")), "temperature"),
    "a bias in words": (spec(logit_bias=[[5, "a"]]), "logit_bias"),
    "metadata too deep": (spec(metadata="[" * 100_000), "metadata"),
    "prompt_ids no msgpack": (put(prompt_ids=b"\xc1\xc1"), "prompt_ids"),
    "prompt_ids of strings": (put(prompt_ids=msgpack.packb(["a", None])), "prompt_ids"),
    "prompt_ids empty": (put(prompt_ids=msgpack.packb([])), "prompt_ids"),
    "geometry": (put(geometry=b"\xc1", fingerprint="g", tokens=3, queued_at=1), "stream"),
    "tokens not a number": (put(tokens="nan"), "tokens"),
    "tokens that are not there": (put(tokens="50"), "stream"),
    "a bias that is no pair": (spec(logit_bias=[[5]]), "logit_bias"),
    "max_tokens not a number": (put(max_tokens="many"), "max_tokens"),
    "max_tokens gone": (put(max_tokens=None), "max_tokens"),
    "priority": (put(priority="high"), "priority"),
    "another priority": (put(priority="3"), "priority"),
    "deadline": (put(deadline="tomorrow"), "deadline"),
    "queued_at gone": (put(queued_at=None), "queued_at"),
    "created_at": (put(created_at="yesterday"), "created_at"),
    "epoch": (put(epoch="one"), "epoch"),
    "epoch gone": (put(epoch=None), "epoch"),
    "retention": (put(retention="a while"), "retention"),
    "tenant": (put(tenant=b"\xff\xfe"), "tenant"),
    "exactness": (put(exactness=b"\xff\xfe"), "exactness"),
    "exactness gone": (put(exactness=None), "exactness"),
    "traceparent": (put(traceparent=b"\xff\x00-zz"), "traceparent"),
    "spec gone": (put(spec=None), "spec"),
    "errors": (put(errors=b"\xc1", spec=b"\xc1"), "spec"),
    "a stream that is ahead": (an_entry_ahead, "stream"),
    "a stream with garbage": (an_entry_of_nothing, "stream"),
    "written": (put(written="much"), "written"),
    "held": (put(held="much"), "held"),
    "another model": (put(model="nomodel"), "model"),
    "max_runtime": (put(max_runtime="long"), "max_runtime"),
    "suspect": (put(suspect="yes"), "suspect"),
    "state": (put(state="asleep"), "state"),
    "id": (put(id="another"), "id"),
}


def _work(worker: StepWorker, jobs: JobQueue) -> None:
    """Claim and run all that there is, with a round of the chores before."""
    worker.rooms.housekeeper.round()
    for _ in range(8):
        worker.rooms.claimer.turn()
        while not worker.rooms.preparer._waiting.empty():
            worker.rooms.preparer.turn()
        worker.finish()
    worker.rooms.housekeeper._due = dict.fromkeys(worker.rooms.housekeeper._due, 0.0)
    _reap(worker, jobs)


def _reap(worker: StepWorker, jobs: JobQueue) -> None:
    """Until the server is old enough for that, and nothing stands there as running."""

    def is_done() -> bool:
        worker.rooms.housekeeper.round()
        return not jobs.client.exists(jobs.keys.running())

    poll_until(is_done, "nothing to run")


@pytest.mark.parametrize("name", OF_THE_JOB)
def test_a_job_that_is_damaged_fails_alone_and_names_the_field(
    jobs: JobQueue, worker: StepWorker, client: SyncClient, name: str
) -> None:
    damage, field = OF_THE_JOB[name]
    before = jobs.submit(max_tokens=5)
    bad = jobs.submit(max_tokens=5)
    damage(jobs, bad)
    after = jobs.submit(max_tokens=5)

    _work(worker, jobs)

    assert [jobs.state(job) for job in (before, after)] == ["completed"] * 2
    found = client.job(bad).status()
    assert found.state is JobState.FAILED
    assert field in (found.error or "")
    assert {job.id for job in client.list()} == {before, bad, after}
    assert not jobs.client.exists(jobs.keys.queue(MODEL), jobs.keys.running())
    assert not jobs.client.exists(jobs.keys.queued(MODEL))
    client.job(bad).delete()
    client.job(before).delete()
    client.job(after).delete()
    if name != "held":
        assert not jobs.client.exists(jobs.keys.usage())


@pytest.mark.parametrize("damage", [no_hash, no_hash_but_a_string])
def test_of_a_job_without_a_hash_the_entries_go_with_one_warning_and_the_others_run(
    jobs: JobQueue, worker: StepWorker, client: SyncClient, damage: Damage
) -> None:
    bad = jobs.submit(max_tokens=5, deadline="9999999999")
    damage(jobs, bad)
    good = jobs.submit(max_tokens=5)
    with capture_logs() as lines:
        _work(worker, jobs)

    assert jobs.state(good) == "completed"
    assert [line["log_level"] for line in lines if line["event"] == "job put aside"] == ["warning"]
    keys = (jobs.keys.queue(MODEL), jobs.keys.lane(MODEL, LANE), jobs.keys.due())
    assert not jobs.client.exists(*keys, jobs.keys.queued(MODEL))
    assert [job.id for job in client.list()] == [good]


def _odd_id(jobs: JobQueue) -> None:
    jobs.client.zadd(jobs.keys.lane(MODEL, LANE), {b"\xff\xfe": 1})
    fields = {"state": "queued", "model": MODEL, "epoch": 1, "priority": 0, "tenant": "default"}
    more = {"queued_at": 1, "tokens": 0, "max_tokens": 5, "id": b"\xff\xfe", "created_at": 1}
    key = jobs.keys.job("").encode() + b"\xff\xfe"
    all_of_it = {**fields, **more, "events": 0, "seq": 1, "stalls": 0}
    execute(jobs, "HSET", key, *(part for pair in all_of_it.items() for part in pair))


def _running_without_a_worker(jobs: JobQueue) -> None:
    fields = {"state": "running", "model": MODEL, "epoch": 1, "tokens": 0, "claimed_at": 1}
    jobs.client.hset(jobs.keys.job("g2"), mapping=fields)
    jobs.client.zadd(jobs.keys.running(), {"g2": 1})


def _odd_lane(jobs: JobQueue) -> None:
    job = jobs.submit()
    jobs.client.zadd(jobs.keys.queue(MODEL), {"nolane": 0})
    jobs.client.zadd(jobs.keys.lane(MODEL, "nolane"), {job: 0})


BESIDE: dict[str, Callable[[JobQueue], object]] = {
    "an id that is no text, queued": _odd_id,
    "a ghost that runs": lambda jobs: jobs.client.zadd(jobs.keys.running(), {"ghost": 1}),
    "an id that is no text, running": lambda jobs: jobs.client.zadd(
        jobs.keys.running(), {b"\xff\xfe": 1}
    ),
    "a job that runs nowhere": _running_without_a_worker,
    "a ghost that expires": lambda jobs: jobs.client.zadd(jobs.keys.expiry(), {b"\xff": 1}),
    "a ghost that is due": lambda jobs: jobs.client.zadd(jobs.keys.due(), {b"\xff": 1}),
    "a ghost that is suspect": lambda jobs: jobs.client.zadd(
        jobs.keys.suspects(MODEL), {"ghost": 1}
    ),
    "a lane without a priority": _odd_lane,
    "an empty lane": lambda jobs: jobs.client.zadd(jobs.keys.queue(MODEL), {"nolane": 0}),
    "usage": lambda jobs: jobs.client.hset(jobs.keys.usage(), "bytes", "x"),
    "counts of the queue": lambda jobs: jobs.client.hset(jobs.keys.queued(MODEL), "*", "x"),
    "the data set's id": lambda jobs: jobs.client.set(jobs.keys.namespace_id(), b"\xff/../x"),
    "an heir": lambda jobs: jobs.client.sadd(jobs.keys.heirs(), b"\xff"),
    "a worker's name": lambda jobs: execute(jobs, "HSET", jobs.keys.workers(), b"\xff", b"x"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_stands_in_an_index_and_is_nobodys_holds_nobody_up(
    jobs: JobQueue, worker: StepWorker, name: str
) -> None:
    BESIDE[name](jobs)
    good = [jobs.submit(max_tokens=5), jobs.submit(max_tokens=5)]
    take_back(jobs.client, jobs.keys, "host-dir-0", Patience(Outage()))
    _work(worker, jobs)
    assert [jobs.state(job) for job in good] == ["completed"] * 2
    keys = (jobs.keys.queue(MODEL), jobs.keys.running(), jobs.keys.due(), jobs.keys.queued(MODEL))
    assert not jobs.client.exists(*keys, jobs.keys.suspects(MODEL), jobs.keys.lane(MODEL, "nolane"))


@pytest.mark.parametrize(
    "damage", [put(tokens="x"), put(written="x"), no_hash, a_string_for_a_stream]
)
def test_a_job_that_is_damaged_while_it_runs_fails_alone(
    jobs: JobQueue, worker: StepWorker, damage: Damage
) -> None:
    bad, good = jobs.submit(max_tokens=20), jobs.submit(max_tokens=20)
    assert worker.claim()
    assert worker.claim()
    worker.decode(3)
    worker.publish()
    damage(jobs, bad)
    worker.rooms.lease.renew()
    worker.finish()
    _reap(worker, jobs)
    assert jobs.state(good) == "completed"
    assert len(jobs.tokens(good)) == 20
    assert jobs.state(bad) in ("failed", "gone")
    assert not jobs.client.exists(jobs.keys.running())


def test_a_key_of_another_type_in_the_place_of_a_stream_is_replaced(
    jobs: JobQueue, worker: StepWorker
) -> None:
    job = jobs.submit(max_tokens=5)
    a_string_for_a_stream(jobs, job)
    _work(worker, jobs)
    assert jobs.state(job) == "completed"
    assert len(jobs.tokens(job)) == 5


def test_a_publish_that_cannot_be_leaves_nothing_half_done(jobs: JobQueue) -> None:
    job = jobs.submit()
    claim = jobs.take()
    jobs.client.hset(jobs.keys.job(job), "written", "much")
    jobs.scripts.publish(claim.fence, story(1, 3))
    assert jobs.tokens(job) == []
    assert jobs.state(job) == "failed"
    assert "written: " in str(jobs.field(job, "error"))


def test_a_sweep_puts_aside_what_it_comes_upon(jobs: JobQueue) -> None:
    job = jobs.submit(deadline="9999999999")
    jobs.client.hset(jobs.keys.job(job), "max_runtime", "long")
    jobs.client.zadd(jobs.keys.due(), {job: 1})
    why = "max_runtime: is no number"
    assert jobs.scripts.run(sweep_call()) == [Swept(job, why)]
    assert jobs.field(job, "error") == why


@pytest.mark.parametrize("word", ["cancel", "delete"])
def test_a_damaged_job_can_be_cancelled_and_deleted(jobs: JobQueue, word: str) -> None:
    job, other = jobs.submit(), jobs.submit()
    put(priority=None, max_tokens="x", held="x")(jobs, job)
    assert getattr(jobs, word)(job) in ("over", "deleted")
    assert jobs.state(job) == ("failed" if word == "cancel" else "gone")
    # What is left of it in its lane goes when somebody comes upon it.
    while (claim := jobs.claim()) is None:
        pass
    assert claim.fence.job_id == other


SECRET = "MY-SECRET-PROMPT"  # noqa: S105 - a prompt


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": [SECRET, SECRET]},
        {"prompt": [[SECRET]]},
        {"prompt": [{"role": SECRET, "content": SECRET}]},
        {"prompt": [{"role": "user", "content": {"x": SECRET}}]},
        {"prompt": {"a": SECRET}},
        {"stop": SECRET},
        {"stop": [[SECRET]]},
        {"temperature": SECRET},
        {"metadata": SECRET},
        {"logit_bias": [[SECRET, 1]]},
        {"logit_bias": SECRET},
        {"stop_token_ids": [SECRET]},
        {"seed": SECRET},
        {"ignore_eos": SECRET},
        {"v": SECRET},
        {SECRET: 1},
        {"raw": SECRET},
    ],
    ids=str,
)
def test_what_a_user_wrote_is_in_no_error_and_no_log(
    jobs: JobQueue, worker: StepWorker, changes: dict[str, Any]
) -> None:
    bad = jobs.submit()
    spec(**changes)(jobs, bad)
    with capture_logs() as lines:
        _work(worker, jobs)
    assert SECRET not in str(lines)
    assert SECRET not in str(jobs.job(bad))


def test_a_job_that_was_put_aside_and_mended_can_be_resumed(jobs: JobQueue) -> None:
    job = jobs.submit()
    put(max_runtime="long")(jobs, job)
    assert jobs.claim() is None
    assert jobs.resume(job) == "resumed"
    assert jobs.take().fence.job_id == job


def test_those_who_follow_a_job_that_is_put_aside_see_its_end(
    jobs: JobQueue, client: SyncClient
) -> None:
    worker = RawWorker(jobs.client, jobs.keys.namespace, MODEL)
    job = client.submit(MODEL, "x", max_tokens=9)
    attempt = worker.claim()
    attempt.publish(1, 3)
    event = msgpack.packb({"v": 1, "type": "state", "state": "running", "epoch": 1})
    jobs.client.xadd(jobs.keys.stream(job.id), {"e": event}, id="7-0")
    attempt.publish(4, 6)
    with pytest.raises(JobFailed, match="stream: "):
        list(job.stream())
    assert "stream: " in str(job.status().error)
