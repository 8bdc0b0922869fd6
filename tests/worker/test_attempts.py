"""One attempt after another: crashes, zombies, cancels and drains do not change a bit."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import structlog

from job_queue import JobQueue, story
from step_worker import StepWorker
from tenuto_client import ModelInfo, Token, pack_announcement
from tenuto_client._records import EndEvent
from tenuto_engine import GenerationOptions, list_jobs
from tenuto_worker._run import Phase, Stop
from tiny_models import KINDS, build_tiny_model

MODEL_INFO = pack_announcement(ModelInfo("tiny", 4096, 400, "f", 0.0))
Start = Callable[..., StepWorker]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "logprobs": 2}
CONSTRAINED: dict[str, Any] = {
    "temperature": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.02,
    "min_tokens": 32,
    "stop_token_ids": tuple(range(0, 400, 2)),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: build_tiny_model(root / kind, kind) for kind in KINDS}


@pytest.fixture
def start(
    jobs: JobQueue, redis_url: str, folders: dict[str, Path], tmp_path: Path
) -> Iterator[Start]:
    """Starts workers on one queue and, unless told otherwise, on one data dir."""
    workers = []

    def begin(kind: str = "llama", data: str = "data", **settings: Any) -> StepWorker:
        worker = StepWorker(
            redis_url, jobs.keys.namespace, folders[kind], tmp_path / data, **settings
        )
        workers.append(worker)
        return worker

    yield begin
    for worker in workers:
        worker.rooms.writer.close(10)


def alone(worker: StepWorker, prompt: str = "Tell me.", **options: Any) -> list[Token]:
    """The tokens of a run by the engine alone, without queue or interruption."""
    options = {"max_tokens": 20, "seed": 7, "ignore_eos": True} | options
    generation = worker.engine.generate(
        worker.engine.encode_prompt(prompt), GenerationOptions(**options)
    )
    return [Token(t.token, t.index, t.text, t.logprob, t.top_logprobs) for t in generation]


def end_of(jobs: JobQueue, job: str) -> EndEvent:
    last = jobs.stream(job)[1][-1]
    assert isinstance(last, EndEvent)
    return last


@pytest.mark.parametrize(
    "options", [{}, SAMPLED, CONSTRAINED], ids=["greedy", "sampled", "constrained"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [3, 29])
def test_what_a_dead_worker_began_another_ends_bit_for_bit(
    jobs: JobQueue, start: Start, kind: str, options: dict[str, Any], tokens: int
) -> None:
    job = jobs.submit(max_tokens=40, **options)
    dead = start(kind)
    expected = alone(dead, max_tokens=40, **options)
    dead.claim()
    dead.decode(tokens)
    dead.publish()
    dead.save()
    jobs.scripts.take_back(job, "host-dir-0")
    heir = start(kind, name="host-dir-1")
    heir.claim()
    heir.finish()

    assert jobs.tokens(job) == expected
    end = end_of(jobs, job)
    assert (end.state, end.exactness, end.epoch) == ("completed", "exact", 2)


def test_a_zombie_publishes_and_finishes_nothing(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=30)
    zombie = start()
    expected = alone(zombie, max_tokens=30)
    zombie.claim()
    zombie.decode(10)
    zombie.publish()
    jobs.lose_lease(job)
    jobs.scripts.reap(job)
    heir = start(name="host-dir-1")
    heir.claim()
    zombie.finish()
    heir.finish()

    assert zombie.engine.free_slots == zombie.settings.slots
    assert jobs.tokens(job) == expected
    assert [event.epoch for event in jobs.stream(job)[1] if isinstance(event, EndEvent)] == [2]


def test_a_fenced_run_writes_no_end_even_if_it_is_over(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit()
    zombie = start()
    zombie.claim()
    zombie.decode(20)
    assert zombie.run.phase is Phase.ENDING
    jobs.scripts.take_back(job, "host-dir-0")
    zombie.finish()

    assert jobs.state(job) == "queued"
    assert jobs.tokens(job) == []


def test_tokens_that_redis_lost_are_sent_again(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=30)
    worker = start()
    expected = alone(worker, max_tokens=30)
    worker.claim()
    worker.decode(5)
    worker.publish()
    keys = [jobs.keys.job(job), jobs.keys.stream(job)]
    earlier = [jobs.client.dump(key) for key in keys]
    worker.decode(10)
    worker.publish()
    for key, value in zip(keys, earlier, strict=True):
        jobs.client.restore(key, 0, value, replace=True)  # type: ignore[arg-type]
    worker.finish()

    assert jobs.tokens(job) == expected
    assert end_of(jobs, job).usage.completion_tokens == 30


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_end_does_not_stand_in_front_of_tokens_that_redis_lost_since(
    jobs: JobQueue, start: Start, is_cancelled: bool
) -> None:
    job = jobs.submit(max_tokens=30)
    worker = start()
    expected = alone(worker, max_tokens=30)
    worker.claim()
    worker.decode(5)
    worker.publish()
    if is_cancelled:
        jobs.cancel(job)
    keys = [jobs.keys.job(job), jobs.keys.stream(job)]
    earlier = [jobs.client.dump(key) for key in keys]
    worker.decode(15 if is_cancelled else 25)
    if is_cancelled:
        worker.run.ask_to_stop(Stop.CANCEL)
        worker.rooms.decoder.turn()
        worker.wait_final()
    while worker.run.unsent:
        worker.rooms.publisher.turn()
    known, read = worker.run.sent, jobs.tokens(job)
    for key, value in zip(keys, earlier, strict=True):
        jobs.client.restore(key, 0, value, replace=True)  # type: ignore[arg-type]
    worker.publish()

    assert not worker.runs
    assert jobs.tokens(job) == read == expected[:known]
    assert end_of(jobs, job).usage.completion_tokens == known > 5


def test_a_checkpoint_ahead_of_the_stream_has_its_tokens_published_first(
    jobs: JobQueue, start: Start
) -> None:
    job = jobs.submit(max_tokens=30)
    dead = start()
    expected = alone(dead, max_tokens=30)
    dead.claim()
    dead.decode(5)
    dead.publish()
    dead.decode(20)
    dead.save()
    jobs.scripts.take_back(job, "host-dir-0")
    heir = start(name="host-dir-1")
    heir.claim()
    heir.rooms.decoder.turn()

    assert heir.run.phase is Phase.DECODE
    assert len(heir.run.tokens) > 16
    heir.finish()
    assert jobs.tokens(job) == expected
    assert end_of(jobs, job).exactness == "exact"


def test_a_job_that_died_between_its_last_token_and_its_end_gets_the_same_end(
    jobs: JobQueue, start: Start
) -> None:
    job, reference = jobs.submit(max_tokens=13), jobs.submit(max_tokens=13)
    dead = start()
    dead.claim()
    dead.decode(13)
    dead.run.end = None
    while dead.run.unsent:
        dead.rooms.publisher.turn()
    jobs.scripts.take_back(job, "host-dir-0")
    heir = start(name="host-dir-1")
    heir.claim()
    heir.claim()
    heir.finish()

    assert jobs.tokens(job) == jobs.tokens(reference)
    ends = end_of(jobs, job), end_of(jobs, reference)
    assert ends[0].text == ends[1].text
    assert ends[0].finish_reason == ends[1].finish_reason == "length"


# -- cancel, drain, deadline -----------------------------------------------------------


def test_a_cancelled_job_resumes_exactly_where_it_was(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=30, **SAMPLED)
    worker = start(checkpoint_every_tokens=1000)
    expected = alone(worker, max_tokens=30, **SAMPLED)
    worker.claim()
    worker.decode(11)
    jobs.cancel(job)
    worker.rooms.lease.renew()
    worker.settle()
    assert (jobs.state(job), jobs.tokens(job)) == ("cancelled", expected[:11])
    assert not worker.runs
    assert end_of(jobs, job).state == "cancelled"

    jobs.resume(job)
    worker.claim()
    worker.rooms.decoder.turn()
    assert worker.run.phase is Phase.DECODE, "the final checkpoint spares the catch-up"
    worker.finish()
    assert jobs.tokens(job) == expected
    assert end_of(jobs, job).exactness == "exact"


def test_a_publish_brings_the_cancel_too(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=30)
    worker = start()
    worker.claim()
    worker.decode(3)
    jobs.cancel(job)
    worker.publish()
    worker.settle()

    assert jobs.state(job) == "cancelled"


def test_a_cancel_before_the_first_step_ends_the_job_without_a_token(
    jobs: JobQueue, start: Start
) -> None:
    job = jobs.submit()
    worker = start()
    worker.rooms.claimer.claim_one("tiny")
    jobs.cancel(job)
    worker.rooms.lease.renew()
    worker.rooms.preparer.turn()
    worker.finish()

    assert jobs.state(job) == "cancelled"
    assert jobs.tokens(job) == []


def test_a_drain_hands_every_job_back_with_all_its_tokens(jobs: JobQueue, start: Start) -> None:
    ids = [jobs.submit(max_tokens=30, seed=seed, **SAMPLED) for seed in (1, 2)]
    worker = start()
    expected = [alone(worker, max_tokens=30, seed=seed, **SAMPLED) for seed in (1, 2)]
    worker.claim()
    worker.claim()
    worker.decode(9)
    for run in worker.runs:
        run.ask_to_stop(Stop.DRAIN)
    worker.settle()
    assert [jobs.state(job) for job in ids] == ["queued", "queued"]
    assert [jobs.job(job).get("stalls") for job in ids] == ["0", "0"]

    heir = start(name="host-dir-1")
    heir.claim()
    heir.claim()
    heir.finish()
    assert [jobs.tokens(job) for job in ids] == expected


def test_a_deadline_ends_a_running_job_failed(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=30, deadline=f"{time.time() + 100:.3f}")
    worker = start()
    worker.claim()
    worker.decode(3)
    jobs.client.hset(jobs.keys.job(job), "deadline", "1.0")
    worker.rooms.lease.renew()
    worker.settle()

    assert jobs.state(job) == "failed"
    says = r"deadline: the job was not done (99(\.\d)?|100) s after it was submitted"
    assert re.fullmatch(says, jobs.job(job)["error"])
    assert len(jobs.tokens(job)) == 3


# -- bad input and failing rows --------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 4096}, "max_tokens: 4096 do not fit"),
        ({"prompt": (5,) * 4096}, "prompt: its 4096 tokens leave no room"),
        ({"prompt": (5, 10**6)}, "prompt[1]: token id 1000000"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias: token 1000000"),
        ({"spec": b"\x81\xa1v\x63"}, "spec: the job's has version 99"),
        ({"spec": b"\xc1"}, "spec: the job's is not msgpack"),
    ],
)
def test_bad_input_fails_by_name_and_the_worker_goes_on(
    jobs: JobQueue, start: Start, options: dict[str, Any], reason: str
) -> None:
    bad = jobs.submit(**options)
    good = jobs.submit()
    worker = start()
    worker.claim()
    worker.finish()
    worker.claim()
    worker.finish()

    assert jobs.state(bad) == "failed"
    assert reason in jobs.job(bad)["error"]
    assert reason in (end_of(jobs, bad).error or "")
    assert jobs.state(good) == "completed"


def test_a_row_that_raises_is_handed_back_and_its_neighbour_goes_on(
    jobs: JobQueue, start: Start
) -> None:
    broken = jobs.submit(max_tokens=30)
    good = jobs.submit(max_tokens=30, seed=3, **SAMPLED)
    worker = start()
    expected = alone(worker, max_tokens=30, seed=3, **SAMPLED)
    worker.claim()
    worker.claim()
    worker.decode(4)
    row = worker.engine._slots.rows[0]
    row.caches.clear()
    worker.finish()

    assert jobs.tokens(good) == expected
    assert jobs.state(broken) == "queued"
    # It had tokens, so this attempt does not count.
    assert jobs.job(broken)["stalls"] == "0"


# -- exactness -------------------------------------------------------------------------


def test_a_job_that_waits_for_its_geometry_is_named_once_by_a_worker_with_a_free_slot(
    jobs: JobQueue, start: Start
) -> None:
    job = jobs.submit(max_tokens=30)
    first = start()
    first.claim()
    first.decode(9)
    first.publish()
    jobs.client.hset(jobs.keys.job(job), "fingerprint", "another")
    jobs.scripts.take_back(job, "host-dir-0")
    heir = start(name="host-dir-1")
    with structlog.testing.capture_logs() as lines:
        assert not heir.claim()
        assert not heir.claim()
        heir.rooms.housekeeper.chores()

    (line,) = [line for line in lines if line["event"] == "job waits for its own geometry"]
    assert line["job"] == job
    assert 20 < line["seconds"] <= 30
    assert "another geometry" in line["why"]


def test_another_geometry_is_named_and_what_was_published_stands(
    jobs: JobQueue, start: Start
) -> None:
    job = jobs.submit(max_tokens=30)
    first = start()
    first.claim()
    first.decode(9)
    first.publish()
    published = jobs.tokens(job)
    jobs.scripts.take_back(job, "host-dir-0")
    other = start(name="host-dir-1", chunk_size=16, exact_wait_seconds=0.0)
    other.claim()
    other.finish()

    assert jobs.tokens(job)[:9] == published
    end = end_of(jobs, job)
    assert end.exactness == "recomputed"
    assert "chunk_size: 16 here, 32 there" in (end.exactness_reason or "")


def test_a_geometry_of_a_version_with_other_fields_costs_no_job(
    jobs: JobQueue, start: Start
) -> None:
    """What a worker of an earlier version left, its checkpoint included, is replayed."""
    job = jobs.submit(max_tokens=30)
    first = start()
    expected = alone(first, max_tokens=30)
    first.claim()
    first.decode(9)
    first.publish()
    first.save()
    run = first.run
    store = first.rooms.preparer._checkpoints.store(run, run.label)
    earlier = {"fingerprint": "earlier", "geometry": {"device_kind": "cpu"}}
    found = store.newest_valid()
    assert found is not None
    store.save(replace(found, meta={**found.meta, **earlier}))
    left: Any = {"fingerprint": "earlier", "geometry": msgpack.packb(earlier["geometry"])}
    jobs.client.hset(jobs.keys.job(job), mapping=left)
    jobs.scripts.take_back(job, "host-dir-0")
    heir = start(name="host-dir-1", exact_wait_seconds=0.0)
    heir.claim()
    heir.finish()

    assert jobs.tokens(job) == expected
    assert end_of(jobs, job).exactness == "recomputed"
    assert "another version" in (end_of(jobs, job).exactness_reason or "")


def test_a_job_without_tokens_stays_exact_in_another_geometry(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=20)
    first = start()
    first.claim()
    jobs.scripts.take_back(job, "host-dir-0")
    other = start(name="host-dir-1", chunk_size=16, exact_wait_seconds=0.0)
    other.claim()
    other.finish()

    assert end_of(jobs, job).exactness == "exact"
    assert jobs.tokens(job) == alone(other)


def test_published_tokens_that_come_out_differently_stand_and_are_counted(
    jobs: JobQueue, start: Start
) -> None:
    job = jobs.submit(max_tokens=20)
    claim = jobs.take()
    jobs.scripts.publish(claim.fence, story(1, 5))
    jobs.scripts.release(claim.fence, "drain")
    worker = start()
    worker.claim()
    worker.finish()

    assert jobs.tokens(job)[:5] == story(1, 5)
    end = end_of(jobs, job)
    assert end.exactness == "recomputed"
    assert "5 published tokens came out differently" in (end.exactness_reason or "")
    assert "the first of them token 1" in (end.exactness_reason or "")
    assert jobs.job(job)["exactness"] == "recomputed"


# -- checkpoints -----------------------------------------------------------------------


def _folder(worker: StepWorker, job: str) -> Path:
    return worker.settings.checkpoints_dir / job


def test_a_completed_job_leaves_no_checkpoint_and_a_cancelled_one_keeps_its(
    jobs: JobQueue, start: Start
) -> None:
    done, stopped = jobs.submit(), jobs.submit()
    worker = start()
    worker.claim()
    worker.finish()
    worker.claim()
    worker.decode(9)
    jobs.cancel(stopped)
    worker.publish()
    worker.settle()
    worker.save()

    assert [path.suffix for path in _folder(worker, done).iterdir()] == [".end"]
    assert {path.suffix for path in _folder(worker, stopped).iterdir()} == {".end", ".log"}


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=40, **SAMPLED)
    dead = start()
    expected = alone(dead, max_tokens=40, **SAMPLED)
    dead.claim()
    dead.decode(15)
    dead.save()
    dead.decode(15)
    dead.publish()
    dead.save()
    (log,) = _folder(dead, job).glob("*.log")
    data = bytearray(log.read_bytes())
    data[-1] ^= 1
    log.write_bytes(data)
    jobs.scripts.take_back(job, "host-dir-0")
    heir = start(name="host-dir-1")
    heir.claim()
    heir.rooms.decoder.turn()
    assert heir.run.phase is Phase.CATCH_UP
    assert heir.run.total < 30, "an older checkpoint was used, not the prompt"
    heir.finish()

    assert jobs.tokens(job) == expected


def test_a_checkpoint_of_another_data_set_is_not_used(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=40)
    dead = start()
    expected = alone(dead, max_tokens=40)
    dead.claim()
    dead.decode(20)
    dead.publish()
    dead.save()
    jobs.scripts.take_back(job, "host-dir-0")
    jobs.client.set(jobs.keys.namespace_id(), "another")
    heir = start(name="host-dir-1")
    heir.claim()
    heir.rooms.decoder.turn()
    assert (heir.run.phase, heir.run.total) == (Phase.CATCH_UP, 20), "from the prompt"
    heir.finish()

    assert jobs.tokens(job) == expected


def test_a_checkpoint_of_a_data_set_that_this_one_inherited_is_used(
    jobs: JobQueue, start: Start
) -> None:
    job = jobs.submit(max_tokens=40)
    dead = start()
    dead.claim()
    dead.decode(20)
    dead.publish()
    dead.save()
    jobs.scripts.take_back(job, "host-dir-0")
    earlier = jobs.client.getset(jobs.keys.namespace_id(), "another")
    jobs.client.sadd(jobs.keys.heirs(), earlier)  # type: ignore[arg-type]
    heir = start(name="host-dir-1")
    heir.claim()
    heir.rooms.decoder.turn()

    assert heir.run.total < 20, "of the catch-up: a checkpoint covers the rest"


def test_a_job_claimed_right_after_redis_was_emptied_saves_under_the_new_id(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    earlier = jobs.client.get(jobs.keys.namespace_id())
    jobs.client.delete(*jobs.client.scan_iter(f"{jobs.keys.namespace}*"))
    jobs.client.hset(jobs.keys.models(), mapping={"tiny": MODEL_INFO})
    job = jobs.submit()
    worker.claim()
    worker.decode(9)
    worker.save()
    (stored,) = list_jobs(worker.settings.checkpoints_dir)

    assert stored.job_id == job
    now = jobs.client.get(jobs.keys.namespace_id())
    assert now != earlier
    meta = stored.checkpoints[0].meta
    assert meta is not None
    assert str(meta["namespace"]).encode() == now


def test_a_difference_is_not_forgotten_by_a_crash_after_the_checkpoint_that_covers_it(
    jobs: JobQueue, start: Start
) -> None:
    """The label had not reached Redis when the worker died; the checkpoint knows."""
    job = jobs.submit(max_tokens=40)
    claim = jobs.take()
    jobs.scripts.publish(claim.fence, story(1, 5))
    jobs.scripts.release(claim.fence, "drain")
    lost = start()
    lost.claim()
    lost.decode(12)
    lost.save()
    assert jobs.job(job)["exactness"] == "exact"
    jobs.scripts.take_back(job, "host-dir-0")
    heir = start(name="host-dir-1")
    heir.claim()
    assert len(heir.run.tokens) == 5
    heir.finish()

    end = end_of(jobs, job)
    assert end.exactness == "recomputed"
    assert "published tokens came out differently" in (end.exactness_reason or "")
    assert jobs.tokens(job)[:5] == story(1, 5)


def test_fast_recovery_prefills_what_is_published_and_says_so(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=60, recovery="fast")
    lost = start(checkpoint_every_tokens=1000)
    lost.claim()
    lost.decode(40)
    lost.publish()
    published = jobs.tokens(job)
    jobs.scripts.take_back(job, "host-dir-0")
    heir = start(name="host-dir-1")
    heir.claim()
    heir.rooms.decoder.turn()
    assert heir.run.phase is Phase.PREFILL
    assert heir.run.total > 40, "the prompt and 40 tokens"
    heir.finish()

    assert jobs.tokens(job)[:40] == published
    assert [token.index for token in jobs.tokens(job)] == list(range(1, 61))
    end = end_of(jobs, job)
    assert (end.state, end.exactness) == ("completed", "recomputed")
    assert "recovery=fast" in (end.exactness_reason or "")


def test_fast_recovery_is_exact_where_a_checkpoint_is_quicker(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=40, recovery="fast")
    lost = start(checkpoint_every_tokens=4)
    expected = alone(lost, max_tokens=40)
    lost.claim()
    lost.decode(27)
    lost.save()
    # A checkpoint that was put off while others were written is taken now.
    lost.decode(2)
    lost.publish()
    lost.save()
    jobs.scripts.take_back(job, "host-dir-0")
    heir = start(name="host-dir-1")
    heir.claim()
    heir.finish()

    assert jobs.tokens(job) == expected
    assert end_of(jobs, job).exactness == "exact"


def test_a_checkpoint_that_contradicts_the_stream_is_not_used(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=20)
    lost = start()
    lost.claim()
    lost.decode(18)
    lost.save()
    jobs.scripts.take_back(job, "host-dir-0")
    claim = jobs.take(exact_wait_s=0.0)
    jobs.scripts.publish(claim.fence, story(1, 5))
    jobs.scripts.release(claim.fence, "drain")
    heir = start(name="host-dir-1")
    heir.claim()
    heir.finish()

    assert jobs.tokens(job)[:5] == story(1, 5)
    assert len(jobs.tokens(job)) == 20
    assert end_of(jobs, job).exactness == "recomputed"


def test_decoding_pauses_while_redis_lacks_too_many_tokens(jobs: JobQueue, start: Start) -> None:
    job = jobs.submit(max_tokens=60)
    worker = start(max_unsent_tokens=16)
    expected = alone(worker, max_tokens=60)
    worker.claim()
    for _ in range(40):
        worker.rooms.decoder.wake()
        worker.rooms.decoder.turn()
    assert len(worker.run.tokens) == 16
    assert not worker.run.end
    worker.finish()

    assert jobs.tokens(job) == expected


def test_the_prompt_ids_of_the_first_claim_are_used_by_later_ones(
    jobs: JobQueue, start: Start
) -> None:
    job = jobs.submit()
    claim = jobs.take()
    jobs.scripts.bind(
        claim.fence,
        prompt_ids=b"\x93\x05\x06\x07",
        prompt_tokens=3,
        fingerprint="f",
        geometry=b"\x80",
        reach="dir",
        exactness="exact",
        exactness_reason=None,
    )
    jobs.scripts.release(claim.fence, "drain")
    worker = start(exact_wait_seconds=0.0)
    worker.claim()
    worker.finish()

    assert end_of(jobs, job).usage.prompt_tokens == 3
