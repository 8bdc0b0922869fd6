"""TLS: a client talks to whom it can trust, and to nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxies import TlsProxy
from raw_worker import RawWorker
from servers import RealServer
from tenuto_client import Client, ServerUnavailable, SyncClient


@pytest.fixture
def tls(shared_server: RealServer, tmp_path: Path) -> Iterator[TlsProxy]:
    """TLS before the shared server."""
    with TlsProxy(shared_server.socket, tmp_path) as proxy:
        yield proxy


async def test_a_job_is_submitted_and_streamed_over_tls(
    tls: TlsProxy, worker: RawWorker, namespace: str
) -> None:
    async with Client(tls.url, namespace=namespace) as client:
        job = await client.submit("m", "hi")
        attempt = worker.claim()
        attempt.publish(1, 3)
        attempt.finish()
        assert [token.index async for token in job.stream()] == [1, 2, 3]


def test_a_blocking_client_speaks_tls_too(tls: TlsProxy, worker: RawWorker, namespace: str) -> None:
    with SyncClient(tls.url, namespace=namespace) as client:
        assert [info.name for info in client.models()]


@pytest.mark.parametrize("scheme", ["rediss", "redis"])
async def test_a_server_that_nobody_vouches_for_is_not_talked_to(
    scheme: str, tls: TlsProxy, namespace: str
) -> None:
    url = f"{scheme}://:sesame@{tls.address}"
    async with Client(url, namespace=namespace, retry_for=0) as client:
        with pytest.raises(ServerUnavailable, match=tls.address) as refused:
            await asyncio.wait_for(client.models(), 20)
    assert "sesame" not in str(refused.value)


async def test_a_server_that_asks_for_a_certificate_gets_the_clients(
    shared_server: RealServer, worker: RawWorker, namespace: str, tmp_path: Path
) -> None:
    with TlsProxy(shared_server.socket, tmp_path, asks_clients=True) as tls:
        async with Client(tls.url_of_client, namespace=namespace) as client:
            assert await client.models()
        async with Client(tls.url, namespace=namespace, retry_for=0) as stranger:
            with pytest.raises(ServerUnavailable):
                await stranger.models()
