"""Fixtures of all tests: a real server, and a namespace that belongs to one test."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from consulting import Doctor, consult
from servers import RealServer


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RealServer]:
    """One server for the whole run. Never kill, pause or flush it; take `server` for that."""
    with RealServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_url(shared_server: RealServer) -> str:
    """The URL of the shared server, for redis-py and for `Client`."""
    return shared_server.url


@pytest.fixture
def namespace(shared_server: RealServer) -> Iterator[str]:
    """A key prefix of this test alone, such as `t1f09c2ab:`; its keys are removed afterwards."""
    prefix = f"t{secrets.token_hex(4)}:"
    yield prefix
    with shared_server.client() as client:
        # One command: each one costs the server a sync.
        if keys := list(client.scan_iter(match=f"{prefix}*", count=1000)):
            client.unlink(*keys)


@pytest.fixture
def server() -> Iterator[RealServer]:
    """A server of this test alone, to be killed, paused and restarted at will."""
    with RealServer() as private:
        yield private


@pytest.fixture
def doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Doctor:
    """`tenuto doctor`, which knows nothing but what it is given."""
    monkeypatch.setenv("TENUTO_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("TENUTO_REDIS_URL", raising=False)
    return lambda *words: consult(capsys, *words)
