"""Fixtures of the worker's tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from job_queue import JobQueue
from model_shop import NAMES, ROW, Budget, Shop
from tenuto_engine import Engine
from tenuto_worker._models import RESERVE
from tiny_models import build_tiny_model


@pytest.fixture
def jobs(redis_url: str, namespace: str) -> Iterator[JobQueue]:
    """A queue under a namespace of this test alone."""
    queue = JobQueue(redis_url, namespace)
    yield queue
    queue.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny llama."""
    return build_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of different models, which nobody changes."""
    root = tmp_path_factory.mktemp("originals")
    return {name: build_tiny_model(root / name, seed=seed) for seed, name in enumerate(NAMES, 1)}


@pytest.fixture
def folders(originals: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Copies of them for one test."""
    return {
        name: Path(shutil.copytree(folder, tmp_path / name)) for name, folder in originals.items()
    }


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> Budget:
    """The budget for so many models and so many rows of `tokens`, and not a byte more."""
    engine = Engine.load(build_tiny_model(tmp_path_factory.mktemp("measured")))

    def of(models: int, rows: int, tokens: int = ROW) -> float:
        size = models * engine.weight_bytes + rows * engine.row_cost.of(tokens)
        return (size + 1) / (1 - RESERVE)

    return of


@pytest.fixture
def shop(
    redis_url: str, namespace: str, folders: dict[str, Path], tmp_path: Path
) -> Iterator[Shop]:
    with ExitStack() as stack:
        yield Shop(redis_url, namespace, folders, tmp_path / "data", stack)
