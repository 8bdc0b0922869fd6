"""Fixtures of the worker's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from job_queue import JobQueue
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
