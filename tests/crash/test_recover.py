"""Workers die, and Redis loses everything: the data dir alone brings all jobs back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from exact_runs import (
    LENGTH,
    Case,
    Models,
    Outcome,
    Performance,
    References,
    Scene,
    assert_same,
    make_cases,
    outcome_of,
    prepared,
    worker_of,
)
from moves import Moves
from servers import RealServer
from tenuto_client import JobState, Keys
from tenuto_client._command import main
from tenuto_engine import Engine
from workers import poll_until

NAMESPACE = "tenuto:"
KEYS = Keys(NAMESPACE)


def test_jobs_in_every_state_survive_the_loss_of_redis_and_end_bit_for_bit(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    server: RealServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done, cancelled, failed, queued, *running = cases
    # That its time is over is seen when its lease is renewed; a short one would have ended by then.
    failed = next(
        each for each in make_cases(models, length=6 * LENGTH) if each.name == failed.name
    )
    outcome = outcome_of(failed, Engine.load(models[failed.model], slots=2))
    references = {**references, failed.name: outcome}
    cases = (done, cancelled, failed, queued, *running)
    with Scene(server.url, NAMESPACE, ()) as before:
        with worker_of(models, server.url, NAMESPACE, tmp_path) as worker:
            worker.wait_ready()
            ended = {
                done.name: before.submit_one(done),
                cancelled.name: _cancel(before, cancelled),
                failed.name: _fail(before, failed, server),
            }
            _wait_end(ended[done.name])
            going = {case.name: before.submit_one(case) for case in (queued, *running)}
            poll_until(
                lambda: all(each.count >= 35 for each in going.values()), "some tokens of each"
            )
            worker.kill()
        outcomes = {name: each.outcome() for name, each in ended.items()}
        had = {name: each.tokens for name, each in going.items()}
        jobs = {name: each.job.id for name, each in {**ended, **going}.items()}
        _requeue(server, jobs[queued.name])
    with server.client() as client:
        client.flushall()

    found = _recover(server, tmp_path, capsys)
    assert {name: found[job]["state"] for name, job in jobs.items()} == {
        **{name: outcome.state for name, outcome in outcomes.items()},
        **dict.fromkeys(going, JobState.QUEUED),
    }
    with Scene(server.url, NAMESPACE, ()) as after:
        for name, outcome in outcomes.items():
            assert_same(_follow(after, ended[name].case, jobs[name]).outcome(), outcome, name)
        with worker_of(models, server.url, NAMESPACE, tmp_path) as heir:
            heir.wait_ready()
            for case in (cancelled, failed):
                after.client.job(jobs[case.name]).resume()
            for case in cases:
                _assert_ends_as(references[case.name], after, case, jobs[case.name])
            for name in going:
                _assert_cursor(after, jobs[name], had[name], references[name])
            assert all(line["cached_tokens"] for line in prepared([heir]))


def _cancel(scene: Scene, case: Case) -> Performance:
    performance = scene.submit_one(case)
    poll_until(lambda: performance.count >= 1, "a token")
    performance.job.cancel()
    _wait_end(performance)
    return performance


def _fail(scene: Scene, case: Case, server: RealServer) -> Performance:
    performance = scene.submit_one(case)
    poll_until(lambda: performance.count >= 1, "a token")
    with server.client() as client:
        client.hset(KEYS.job(performance.job.id), "deadline", "1")
    _wait_end(performance)
    return performance


def _wait_end(performance: Performance) -> None:
    poll_until(performance.readings[-1].done.is_set, "the end")


def _requeue(server: RealServer, job: str) -> None:
    """As a reaper does with a job whose worker is dead."""
    with server.client() as client:
        client.delete(KEYS.lease(job))
        assert Moves(client, KEYS).reap(job) == "queued"


def _recover(
    server: RealServer, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> Mapping[str, dict[str, Any]]:
    capsys.readouterr()
    where = ["--redis", server.url, "--data-dir", str(data_dir)]
    assert main(["checkpoints", "recover", "--json", *where]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["type"] for line in lines} == {"recovered"}
    return {line["job"]: line for line in lines}


def _follow(scene: Scene, case: Case, job: str) -> Performance:
    performance = Performance(case, scene.client.job(job))
    assert scene.follow(performance).done.wait(90)
    return performance


def _assert_ends_as(expected: Outcome, scene: Scene, case: Case, job: str) -> None:
    assert_same(_follow(scene, case, job).outcome(), expected, case.name)
    record = scene.client.job(job).status()
    assert (record.state, record.tokens) == (expected.state, len(expected.tokens))
    assert (record.exactness, record.exactness_reason) == ("exact", None)


def _assert_cursor(scene: Scene, job: str, had: list[Any], expected: Outcome) -> None:
    """Who had read so far before the loss goes on from there without gap or duplicate."""
    reading = scene._readers.follow(job, len(had))
    assert reading.done.wait(90)
    reading.assert_gapless()
    assert tuple(had + reading.tokens) == expected.tokens
