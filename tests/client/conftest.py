"""A client and a scripted worker on a namespace of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from raw_worker import RawWorker
from servers import RealServer
from tenuto_client import Client, Keys


@pytest.fixture
def keys(namespace: str) -> Keys:
    """The key names of the test's namespace."""
    return Keys(namespace)


@pytest.fixture
def raw(shared_server: RealServer) -> Iterator[Any]:
    """A blocking `redis.Redis`, for looking at the keys themselves.

    Any, because redis-py's own types change from version to version.
    """
    with shared_server.client() as client:
        yield client


@pytest.fixture
def worker(raw: Any, namespace: str) -> RawWorker:
    """A worker that has announced the model `m`."""
    worker = RawWorker(raw, namespace)
    worker.announce()
    return worker


@pytest.fixture
async def client(redis_url: str, namespace: str) -> AsyncIterator[Client]:
    """The client under test."""
    async with Client(redis_url, namespace=namespace) as client:
        yield client
