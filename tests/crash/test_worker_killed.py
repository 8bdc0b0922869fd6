"""SIGKILL of the process that decodes: whatever it was doing, the stream ends the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from exact_runs import Case, Models, References, Scene, prepared, worker_of


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_a_child_killed_at_random_steps_changes_no_bit(
    seed: int,
    models: Models,
    cases: tuple[Case, ...],
    references: References,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
) -> None:
    total = sum(len(outcome.tokens) for outcome in references.values())
    steps = sorted(random.Random(seed).sample(range(1, total - 30), 3))
    with (
        worker_of(models, redis_url, namespace, tmp_path) as worker,
        Scene(redis_url, namespace, cases) as scene,
    ):
        worker.wait_ready()
        scene.submit()
        for step in steps:
            scene.wait_tokens(step)
            worker.kill_child()
        scene.assert_exact(references)
        assert len(worker.lines("child died")) == len(steps)
        # Some went on from a checkpoint, and had tokens to catch up.
        resumed = [line for line in prepared([worker]) if line["cached_tokens"]]
        assert any(
            line["cached_tokens"] < line["prompt_tokens"] + line["published"] for line in resumed
        )
