"""A job that kills its worker: it ends, and takes its neighbours down once at most."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from exact_runs import Case, Models, References, Scene, worker_of
from tenuto_client import SyncClient, SyncJob
from workers import WorkerProcess, poll_until, with_site

SITE = Path(__file__).parent / "poison_site"
SEED = 666


# What 0 leaves to `test_a_new_token_clears_the_count`: that only deaths without progress count.
@pytest.mark.parametrize("token", [0, pytest.param(50, marks=pytest.mark.slow)])
def test_a_poison_job_ends_failed_and_its_neighbours_are_hit_once_and_exact(
    token: int,
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
) -> None:
    environ = poisoned(token)
    with (
        worker_of(models, redis_url, namespace, tmp_path, environ=environ) as worker,
        SyncClient(redis_url, namespace=namespace) as client,
        Scene(redis_url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        scene.submit()
        scene.wait_tokens(30)
        poison = client.submit("llama", "Tell me.", seed=SEED, ignore_eos=True, max_tokens=400)
        scene.assert_exact(references)
        poll_until(lambda: poison.status().state.is_over, "the poison job's end", timeout=120)
        record = poison.status()
        assert record.state == "failed"
        assert record.error is not None
        assert record.error.count("died") == 3
        victims = [innocents_at(worker, poison.id, death) for death in deaths(worker)]
        # More where some new tokens were published before it died; three in a row without end it.
        assert len(victims) >= 3
        # The first crash may hit all of them; from then on the bad one is by itself.
        assert not any(victims[1:])


def test_a_poison_job_that_kills_supervisors_too_ends_failed_alone(
    models: Models, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    """As where the kernel kills a whole group: nobody is left to tell of the death."""
    one: Models = {"llama": models["llama"]}
    environ = {**poisoned(0), "POISON_KILLS_ALL": "1"}

    def begin() -> WorkerProcess:
        return worker_of(one, redis_url, namespace, tmp_path, slots=4, environ=environ)

    def submit(client: SyncClient, seed: int) -> SyncJob:
        return client.submit("llama", "Tell me.", seed=seed, ignore_eos=True, max_tokens=50)

    with SyncClient(redis_url, namespace=namespace) as client:
        with begin() as worker:
            worker.wait_ready()
            undisturbed = [submit(client, seed).result(timeout=60) for seed in range(3)]
            bad = submit(client, SEED)
            good = [submit(client, seed) for seed in range(3)]
            poll_until(lambda: not worker.is_running, "its death")

        def is_done(worker: WorkerProcess) -> bool:
            return not worker.is_running or all(job.status().state.is_over for job in good)

        for _ in range(3):
            with begin() as worker:
                poll_until(partial(is_done, worker), "its death, or the ends of the jobs")
        assert (bad.status().state, bad.status().attempts) == ("failed", 3)
        for job, expected in zip(good, undisturbed, strict=True):
            result = job.result(timeout=60)
            assert result.tokens == expected.tokens
            assert (result.text, result.exactness) == (expected.text, "exact")


def poisoned(token: int) -> Mapping[str, str]:
    return {
        **with_site(SITE),
        "POISON_SEED": str(SEED),
        "POISON_TOKEN": str(token),
    }


def deaths(worker: WorkerProcess) -> list[int]:
    """At which line of the log each child died."""
    return [place for place, line in enumerate(worker.lines()) if line["event"] == "child died"]


def innocents_at(worker: WorkerProcess, poison: str, death: int) -> set[str]:
    """Whom a death hit besides the poison job: who had a row, and was taken back for it."""
    after: list[dict[str, Any]] = worker.lines()[death:]
    ready = next(
        (place for place, line in enumerate(after) if line["event"] == "worker ready"), len(after)
    )
    return {line["job"] for line in after[:ready] if line["event"] == "job taken back"} - {poison}
