"""The master dies or is replaced, and its replica goes on with what it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from exact_runs import Case, Models, References, Scene, worker_of
from failover import Group, role
from raw_worker import RawWorker
from tenuto_client import JobGone, Keys, ServerUnavailable, SyncClient


@pytest.fixture
def group() -> Iterator[Group]:
    """A master, its replica and three sentinels of this test alone."""
    with Group() as group:
        yield group


def test_a_failover_that_loses_a_tail_changes_no_bit_and_takes_no_job_over(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    group: Group,
    namespace: str,
    tmp_path: Path,
) -> None:
    with (
        worker_of(models, group.url, namespace, tmp_path, slots=len(cases)) as worker,
        Scene(group.url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        scene.submit()
        scene.wait_tokens(75)
        group.cut_replication()
        # Readers get these from the master that dies; the new one never heard of them.
        scene.wait_more(75)
        master = group.master
        master.kill()
        scene.assert_exact(references)
        assert role(group.other(master)) == "master"
        assert worker.lines("redis lost tokens, sent again")
        assert len(worker.lines("job claimed")) == len(cases)
        assert all(each.job.status().epoch == 1 for each in scene.jobs)


def test_a_failover_that_an_operator_asks_for_is_followed_before_the_old_master_is_told(
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    group: Group,
    namespace: str,
    tmp_path: Path,
) -> None:
    with (
        worker_of(models, group.url, namespace, tmp_path, slots=len(cases)) as worker,
        Scene(group.url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        scene.submit()
        scene.wait_tokens(75)
        group.fail_over()
        scene.assert_exact(references)
        # The old one was not made a replica yet, so whoever stayed with it has written there.
        with group.master.client() as new:
            for performance in scene.jobs:
                state = new.hget(Keys(namespace).job(performance.job.id), "state")
                assert state == b"completed"
        assert all(each.job.status().epoch == 1 for each in scene.jobs)


def test_a_job_that_a_replica_confirmed_outlives_the_master(group: Group, namespace: str) -> None:
    with group.master.client() as raw:
        RawWorker(raw, namespace).announce()
    with SyncClient(
        group.url, namespace=namespace, wait_replicas=1, wait_timeout=1, retry_for=60
    ) as client:
        kept = client.submit("m", "keep", max_tokens=4)
        group.cut_replication()
        with pytest.raises(ServerUnavailable, match="0 of 1 replicas") as refused:
            client.submit("m", "lose", max_tokens=4)
        lost = refused.value.message.split()[1].rstrip(":")
        master = group.master
        master.kill()
        group.wait_failover(master)
        assert kept.status().state == "queued"
        with pytest.raises(JobGone):
            client.job(lost).status()
