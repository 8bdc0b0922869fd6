"""What a worker counts: each metric moves as it should when what it counts happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from job_queue import JobQueue, story
from scrapes import Scrape, scrape_collector
from servers import RealServer
from step_worker import StepWorker
from tenuto_worker import _metrics as metrics
from tenuto_worker._gauges import Gauges
from tenuto_worker._health import Health, Stage
from tenuto_worker._redis import Outage
from tenuto_worker._run import End, EndKind, Phase

TINY = {"model": "tiny"}
Start = Callable[..., "Watched"]


class Watched(StepWorker):
    """A worker whose metrics are looked at. Counters are of the whole test process."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        outage = Outage()
        health = Health(outage)
        health.stage = Stage.SERVING
        self._gauges = Gauges(self.settings, health, outage)
        self._gauges.rooms = self.rooms
        metrics.begin_at_zero(self.settings.models)

    def look(self) -> Scrape:
        return scrape_collector(self._gauges, metrics.REGISTRY)


@pytest.fixture
def start(jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    workers: list[Watched] = []

    def begin(**settings: Any) -> Watched:
        worker = Watched(redis_url, jobs.keys.namespace, tiny_model, tmp_path / "data", **settings)
        workers.append(worker)
        return worker

    yield begin
    for worker in workers:
        worker.rooms.writer.close(10)


class Rise:
    """How much samples rose since it was made."""

    def __init__(self, worker: Watched) -> None:
        self._worker = worker
        self._before = worker.look()

    def __call__(self, sample: str, **labels: str) -> float:
        return self._worker.look().total(sample, **labels) - self._before.total(sample, **labels)


# -- a job -----------------------------------------------------------------------------


def test_the_tokens_of_a_job_are_counted_once_each_and_timed_from_one_to_the_next(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    rise = Rise(worker)
    job = jobs.submit(max_tokens=20)
    worker.claim()
    worker.finish()

    assert rise("tenuto_tokens_total", **TINY) == 20
    assert rise("tenuto_inter_token_seconds_count", **TINY) == 19
    assert rise("tenuto_inter_token_seconds_sum", **TINY) > 0
    assert rise("tenuto_time_to_first_token_seconds_count", **TINY) == 1
    assert rise("tenuto_prefill_tokens_total", **TINY) == int(jobs.job(job)["prompt_tokens"])
    assert rise("tenuto_jobs_claimed_total", **TINY) == 1
    assert rise("tenuto_queue_wait_seconds_count", **TINY) == 1
    assert rise("tenuto_jobs_ended_total", **TINY, state="completed") == 1
    assert rise("tenuto_jobs_ended_total") == 1
    assert rise("tenuto_publish_seconds_count") > 0
    for nothing in (
        "recoveries",
        "jobs_released",
        "fenced_writes",
        "divergences",
        "catch_up_tokens",
    ):
        assert rise(f"tenuto_{nothing}_total") == 0, nothing


def test_time_to_first_token_has_the_time_in_the_queue_and_counts_once_a_job(
    jobs: JobQueue, start: Start
) -> None:
    job = jobs.submit(max_tokens=20)
    jobs.client.hincrbyfloat(jobs.keys.job(job), "created_at", -100)
    jobs.client.hincrbyfloat(jobs.keys.job(job), "queued_at", -50)
    first = start()
    rise = Rise(first)
    first.claim()
    first.decode(5)
    first.publish()
    jobs.scripts.take_back(job, "host-dir-0")
    heir = start(name="host-dir-1")
    at_heir = Rise(heir)
    heir.claim()
    heir.finish()

    assert 100 <= rise("tenuto_time_to_first_token_seconds_sum") < 120
    assert 50 <= rise("tenuto_queue_wait_seconds_sum") < 70
    assert at_heir("tenuto_time_to_first_token_seconds_count") == 0
    assert at_heir("tenuto_tokens_total") == 15, "not those that the first one decoded"


def test_slots_and_running_jobs_are_told_by_phase(jobs: JobQueue, start: Start) -> None:
    worker = start(slots=3)
    jobs.submit()
    jobs.submit()
    worker.claim()
    worker.claim()
    worker.decode(3)
    seen = worker.look()

    assert seen.value("tenuto_slots", **TINY) == 3
    assert seen.total("tenuto_running_jobs", **TINY) == 2
    assert seen.total("tenuto_running_jobs", phase="decode") >= 1
    worker.finish()
    assert worker.look().total("tenuto_running_jobs") == 0


def test_unsent_tokens_and_the_pause_that_they_cause_are_told(jobs: JobQueue, start: Start) -> None:
    worker = start(max_unsent_tokens=16)
    jobs.submit(max_tokens=60)
    worker.claim()
    for _ in range(30):
        worker.rooms.decoder.wake()
        worker.rooms.decoder.turn()
    paused = worker.look()
    worker.publish()
    worker.rooms.decoder.wake()
    worker.rooms.decoder.turn()

    assert paused.value("tenuto_unsent_tokens", **TINY) == 16
    assert paused.value("tenuto_decoding_paused") == 1
    assert worker.look().value("tenuto_decoding_paused") == 0
    worker.finish()


def test_the_queue_is_told_by_model_with_the_wait_of_its_oldest_job(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    assert not worker.look().has("tenuto_queued_jobs"), "not looked yet, so nothing is known"
    for tenant in ("a", "a", "b"):
        job = jobs.submit(tenant=tenant)
    jobs.client.hincrbyfloat(jobs.keys.job(job), "queued_at", -100)
    worker.rooms.depths.look()
    seen = worker.look()

    assert seen.value("tenuto_queued_jobs", **TINY) == 3
    assert 100 <= seen.value("tenuto_queue_oldest_seconds", **TINY) < 120
    worker.claim()
    worker.rooms.depths.look()
    assert worker.look().value("tenuto_queued_jobs", **TINY) == 2


def test_what_is_known_of_the_queue_is_not_told_when_it_is_old(start: Start) -> None:
    worker = start(depth_seconds=0.0)
    worker.rooms.depths.look()

    assert not worker.look().has("tenuto_queued_jobs")


# -- checkpoints -----------------------------------------------------------------------


def test_checkpoints_are_counted_with_their_bytes_and_what_no_checkpoint_covers_is_told(
    jobs: JobQueue, start: Start
) -> None:
    worker = start()
    jobs.submit(max_tokens=40)
    worker.claim()
    worker.decode(5)
    worker.save()
    first = worker.look()
    worker.decode(12)
    worker.publish()
    worker.save()
    second = worker.look()

    assert first.value("tenuto_checkpoint_seconds_count") >= 1
    assert second.value("tenuto_checkpoint_seconds_count") > first.value(
        "tenuto_checkpoint_seconds_count"
    )
    assert second.value("tenuto_checkpoint_bytes_total") > first.value(
        "tenuto_checkpoint_bytes_total"
    )
    assert second.value("tenuto_checkpoint_seconds_sum") > 0
    assert second.value("tenuto_tokens_at_risk", **TINY) == worker.run.at_risk
    assert second.value("tenuto_checkpoint_disk_bytes") > 0
    assert worker.run.durable_at > worker.run.claimed_at
    worker.decode(2)
    assert len(worker.run.tokens) > worker.run.durable
    worker.run.durable_at -= 60
    lag = worker.look().value("tenuto_checkpoint_lag_seconds")
    assert 60 <= lag < 80
    worker.finish()
    assert worker.look().value("tenuto_checkpoint_lag_seconds") == 0


def test_a_checkpoint_that_cannot_be_saved_is_counted(jobs: JobQueue, start: Start) -> None:
    worker = start()
    rise = Rise(worker)
    job = jobs.submit(max_tokens=20)
    worker.settings.checkpoints_dir.mkdir(exist_ok=True)
    (worker.settings.checkpoints_dir / job).write_text("a file where the folder should be")
    worker.claim()
    worker.finish()
    worker.save()

    assert jobs.state(job) == "completed"
    assert rise("tenuto_checkpoint_errors_total") >= 1


# -- attempts after the first ----------------------------------------------------------


def _begun(jobs: JobQueue, worker: Watched, tokens: int, **options: Any) -> str:
    """A job that a worker began and lost."""
    job = jobs.submit(max_tokens=60, **options)
    worker.claim()
    worker.decode(tokens)
    worker.publish()
    worker.save()
    jobs.scripts.take_back(job, "host-dir-0")
    return job


def _go_on(worker: Watched) -> Rise:
    rise = Rise(worker)
    worker.claim()
    worker.finish()
    return rise


def test_a_recovery_from_the_newest_checkpoint_is_told_as_such(
    jobs: JobQueue, start: Start
) -> None:
    _begun(jobs, start(), 30)
    rise = _go_on(start(name="host-dir-1"))

    assert rise("tenuto_recoveries_total", **TINY, kind="checkpoint") == 1
    assert rise("tenuto_recoveries_total") == 1
    assert rise("tenuto_tokens_total") == 30
    assert 0 < rise("tenuto_catch_up_tokens_total") < 30, "those after the checkpoint"


def test_a_recovery_from_an_older_checkpoint_is_told_as_such(jobs: JobQueue, start: Start) -> None:
    dead = start()
    job = _begun(jobs, dead, 30)
    (log,) = (dead.settings.checkpoints_dir / job).glob("*.log")
    data = bytearray(log.read_bytes())
    data[-1] ^= 1
    log.write_bytes(data)
    rise = _go_on(start(name="host-dir-1"))

    assert rise("tenuto_recoveries_total", **TINY, kind="older") == 1


def test_a_recovery_from_the_prompt_is_told_as_such_and_feeds_every_published_token_again(
    jobs: JobQueue, start: Start
) -> None:
    dead = start()
    job = _begun(jobs, dead, 30)
    for log in (dead.settings.checkpoints_dir / job).iterdir():
        log.unlink()
    rise = _go_on(start(name="host-dir-1"))

    assert rise("tenuto_recoveries_total", **TINY, kind="replay") == 1
    assert rise("tenuto_catch_up_tokens_total") == 30


def test_a_fast_recovery_is_told_as_such_and_as_recomputed(jobs: JobQueue, start: Start) -> None:
    _begun(jobs, start(checkpoint_every_tokens=1000), 50, recovery="fast")
    rise = _go_on(start(name="host-dir-1"))

    assert rise("tenuto_recoveries_total", **TINY, kind="prefill") == 1
    assert rise("tenuto_jobs_recomputed_total", **TINY) == 1


def test_published_tokens_that_come_out_differently_are_counted(
    jobs: JobQueue, start: Start
) -> None:
    jobs.submit(max_tokens=20)
    claim = jobs.take()
    jobs.scripts.publish(claim.fence, story(1, 5))
    jobs.scripts.release(claim.fence, "drain")
    rise = _go_on(start())

    assert rise("tenuto_divergences_total", **TINY) == 5
    assert rise("tenuto_jobs_recomputed_total", **TINY) == 1


def test_the_refused_writes_of_a_zombie_are_counted_once_an_attempt(
    jobs: JobQueue, start: Start
) -> None:
    zombie = start()
    rise = Rise(zombie)
    job = jobs.submit(max_tokens=30)
    zombie.claim()
    zombie.decode(10)
    jobs.lose_lease(job)
    jobs.scripts.reap(job)
    zombie.finish()

    assert rise("tenuto_fenced_writes_total", **TINY) == 1
    assert rise("tenuto_jobs_ended_total") == 0


def test_what_is_reaped_and_what_redis_lost_is_counted(jobs: JobQueue, start: Start) -> None:
    worker = start(lease_seconds=0.5)
    rise = Rise(worker)
    job = jobs.submit(max_tokens=30)
    jobs.take()
    jobs.lose_lease(job)
    worker.rooms.housekeeper.reap()
    worker.rooms.housekeeper._contact.since = 0.0
    worker.rooms.housekeeper.reap()
    assert rise("tenuto_reaped_total") == 1

    worker.claim()
    worker.decode(10)
    worker.publish()
    jobs.client.delete(jobs.keys.stream(job))
    jobs.client.hset(jobs.keys.job(job), "tokens", "0")
    worker.decode(1)
    worker.publish()
    assert rise("tenuto_redis_lost_tokens_total") == 10


@pytest.mark.parametrize("reason", metrics.RELEASES)
def test_a_job_that_is_handed_back_is_counted_by_its_reason(
    jobs: JobQueue, start: Start, reason: str
) -> None:
    worker = start()
    rise = Rise(worker)
    jobs.submit(max_tokens=30)
    worker.claim()
    worker.rooms.publisher.end(worker.run, End(EndKind.RELEASED, reason))
    worker.publish()

    assert rise("tenuto_jobs_released_total", **TINY, reason=reason) == 1
    assert rise("tenuto_preemptions_total", **TINY) == (reason == "preempt")
    assert rise("tenuto_jobs_ended_total") == 0


def test_a_cancelled_and_a_failed_job_end_by_their_states(jobs: JobQueue, start: Start) -> None:
    worker = start()
    rise = Rise(worker)
    job = jobs.submit(max_tokens=30)
    worker.claim()
    worker.decode(5)
    jobs.cancel(job)
    worker.publish()
    worker.settle()
    jobs.submit(max_tokens=1_000_000)
    worker.claim()
    worker.publish()

    assert rise("tenuto_jobs_ended_total", **TINY, state="cancelled") == 1
    assert rise("tenuto_jobs_ended_total", **TINY, state="failed") == 1


def test_an_attempt_without_progress_is_counted_once(jobs: JobQueue, start: Start) -> None:
    worker = start(phase_limits={"prefill": 0.0, "decode": 0.0, "restore": 0.0})
    rise = Rise(worker)
    jobs.submit()
    worker.claim()
    worker.run.beat -= 1
    worker.rooms.lease.renew()
    worker.rooms.lease.renew()

    assert rise("tenuto_stuck_attempts_total") == 1


# -- the service -----------------------------------------------------------------------


def test_outages_are_counted_and_timed_with_the_one_that_lasts(
    server: RealServer, tiny_model: Path, tmp_path: Path
) -> None:
    with StepWorker(server.url, "t:", tiny_model, tmp_path) as worker:
        outage = worker.rooms._outage
        gauges = Gauges(worker.settings, Health(outage), outage)
        server.kill()
        worker.rooms.depths.look()
        away = scrape_collector(gauges)
        assert away.value("tenuto_redis_up") == 0
        assert away.value("tenuto_redis_outages_total") == 1
        assert scrape_collector(gauges).value("tenuto_redis_outage_seconds_total") > away.value(
            "tenuto_redis_outage_seconds_total"
        )
        server.start()
        worker.rooms.depths.look()
        back = scrape_collector(gauges)

    assert back.value("tenuto_redis_up") == 1
    assert back.value("tenuto_redis_outages_total") == 1
    seconds = "tenuto_redis_outage_seconds_total"
    assert back.value(seconds) > away.value(seconds) > 0
    after = scrape_collector(gauges)
    assert after.value(seconds) == back.value(seconds)


def test_memory_and_models_are_told(jobs: JobQueue, start: Start) -> None:
    worker = start(memory_budget=2**30)
    seen = worker.look()

    assert seen.value("tenuto_memory_budget_bytes") == 2**30
    assert 0 < seen.value("tenuto_memory_active_bytes") <= seen.value("tenuto_memory_peak_bytes")
    assert seen.value("tenuto_model_state", **TINY, state="warm") == 1
    assert seen.value("tenuto_model_state", **TINY, state="cold") == 0
    assert seen.value("tenuto_model_loads_total", **TINY, result="loaded") >= 1


def test_all_series_of_a_model_are_there_before_anything_has_happened(start: Start) -> None:
    seen = start().look()

    for kind in metrics.RECOVERIES:
        seen.value("tenuto_recoveries_total", **TINY, kind=kind)
    for state in metrics.ENDS:
        seen.value("tenuto_jobs_ended_total", **TINY, state=state)
    for reason in metrics.RELEASES:
        seen.value("tenuto_jobs_released_total", **TINY, reason=reason)
    for phase in Phase:
        seen.value("tenuto_running_jobs", **TINY, phase=phase.value)


OPS = Path(__file__).parents[2] / "ops"


def test_every_metric_is_explained_in_ops_and_nothing_else_is(start: Start) -> None:
    worker = start()
    worker.rooms.depths.look()
    rows = [line for line in (OPS / "metrics.md").read_text().splitlines() if line[:3] == "| `"]
    explained = {name for row in rows for name in re.findall(r"`(tenuto_\w+)`", row.split("|")[1])}
    families = worker.look().families.values()
    told = {each.name + "_total" * (each.type == "counter") for each in families}

    assert explained == {name for name in told if name.startswith("tenuto_")}


def test_the_example_of_a_scrape_is_one() -> None:
    yaml: Any = pytest.importorskip("yaml")
    config = yaml.safe_load((OPS / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]

    assert set(job) == {"job_name", "scrape_interval", "static_configs"}
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9464"]}]
