"""Models, jobs and what becomes of them undisturbed: made once for all these tests."""

from __future__ import annotations

import pytest

from exact_runs import KINDS, Case, Models, References, make_cases, outcome_of
from tenuto_engine import Engine
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
def references(models: Models, cases: tuple[Case, ...]) -> References:
    """What the cases come to when nothing happens, by name."""
    engines = {kind: Engine.load(folder, slots=2) for kind, folder in models.items()}
    outcomes = {case.name: outcome_of(case, engines[case.model]) for case in cases}
    for outcome in outcomes.values():
        assert outcome.finish_reason == "stop"
        assert len(outcome.tokens) > 80
    return outcomes
