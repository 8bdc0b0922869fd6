"""Models, jobs and what becomes of them undisturbed: made once for all these tests."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from exact_runs import KINDS, Case, Models, References, make_cases, perform, worker_of
from tiny_models import build_tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A tiny model of each cache kind."""
    root = tmp_path_factory.mktemp("models")
    return {kind: build_tiny_model(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def cases(models: Models) -> tuple[Case, ...]:
    """A greedy and a sampled job of each model."""
    return make_cases(models)


@pytest.fixture(scope="session")
def references(
    models: Models,
    cases: tuple[Case, ...],
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> References:
    """What the cases come to when nothing happens, by name."""
    namespace = f"t{secrets.token_hex(4)}:"
    data_dir: Path = tmp_path_factory.mktemp("undisturbed")
    with worker_of(models, redis_url, namespace, data_dir) as worker:
        worker.wait_ready()
        outcomes = perform(redis_url, namespace, cases)
        assert len(worker.lines("job claimed")) == len(cases)
    for outcome in outcomes.values():
        assert (outcome.finish_reason, outcome.exactness) == ("stop", "exact")
        assert len(outcome.tokens) > 80
    return outcomes
