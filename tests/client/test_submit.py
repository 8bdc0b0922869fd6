"""Submit: one atomic step, once, and nothing at all where it is refused."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import msgpack
import pytest

from lossy_proxy import LossyProxy
from raw_worker import RawWorker, poll
from servers import RealServer
from tenuto_client import (
    Client,
    IdempotencyConflict,
    InvalidRequest,
    JobGone,
    JobState,
    Keys,
    ServerUnavailable,
    UnknownModel,
    unpack_spec,
)


def all_keys(raw: Any, keys: Keys) -> set[bytes]:
    """Every key of the namespace."""
    return set(raw.scan_iter(match=f"{keys.namespace}*", count=1000))


async def test_a_submit_writes_hash_index_event_queue_entry_and_ticket(
    client: Client, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    job = await client.submit("m", "hi", seed=5, priority=3, tenant="t", metadata={"a": [1]})

    assert raw.hget(keys.job(job.id), "state") == b"queued"
    assert unpack_spec(raw.hget(keys.job(job.id), "spec")).seed == 5
    assert raw.zrange(keys.jobs(), 0, -1) == [job.id.encode()]
    assert raw.zrange(keys.queue("m"), 0, -1) == [b"3:t"]
    assert raw.zrange(keys.lane("m", "3:t"), 0, -1) == [job.id.encode()]
    assert raw.zrange(keys.tickets("m"), 0, -1) == [f"{job.id}:1".encode()]
    assert msgpack.unpackb(raw.get(Keys.ticket_payload(f"{job.id}:1")))["f"] == "run_ticket"
    assert [entry for entry, _ in raw.xrange(keys.stream(job.id))] == [b"0-1"]
    raw.delete(Keys.ticket_payload(f"{job.id}:1"))


async def test_the_record_shows_what_was_submitted(client: Client, worker: RawWorker) -> None:
    record = await (await client.submit("m", "hi", priority=-7, metadata={"a": [1]})).status()
    assert (record.model, record.state, record.epoch) == ("m", JobState.QUEUED, 1)
    assert (record.priority, record.metadata, record.tokens) == (-7, {"a": [1]}, 0)
    assert (record.max_tokens, record.prompt_tokens, record.started_at) == (512, None, None)


@pytest.mark.parametrize(
    "options", [{"temprature": 1}, {"max_tokens": 0}, {"seed": 1.5}], ids=lambda each: str(each)
)
async def test_a_refused_submit_writes_nothing(
    options: Any, client: Client, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    before = all_keys(raw, keys)
    with pytest.raises(InvalidRequest):
        await client.submit("m", "hi", **options)
    assert all_keys(raw, keys) == before


async def test_an_unknown_model_is_refused_with_those_that_are_known(
    client: Client, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    before = all_keys(raw, keys)
    with pytest.raises(UnknownModel, match="known: m") as caught:
        await client.submit("other", "hi")
    assert caught.value.known == ["m"]
    assert all_keys(raw, keys) == before


async def test_what_cannot_fit_the_context_is_refused(client: Client, worker: RawWorker) -> None:
    worker.announce(context_length=100, vocab_size=50)
    await client.submit("m", [1] * 90, max_tokens=10)
    await client.submit("m", "hi", max_tokens=99)
    with pytest.raises(InvalidRequest, match="over the 100 tokens") as caught:
        await client.submit("m", [1] * 90, max_tokens=11)
    assert caught.value.field == "max_tokens"
    with pytest.raises(InvalidRequest, match="at most 99"):
        await client.submit("m", "hi", max_tokens=100)
    with pytest.raises(InvalidRequest, match="no token of m") as caught:
        await client.submit("m", [1, 50], max_tokens=1)
    assert caught.value.field == "prompt[1]"
    for field, value in (("logit_bias", {49: 1.0, 50: 1.0}), ("stop_token_ids", [49, 50])):
        wrong: Any = {field: value}
        with pytest.raises(InvalidRequest, match="50 is no token of m") as caught:
            await client.submit("m", "hi", max_tokens=1, **wrong)
        assert caught.value.field == field


async def test_an_idempotency_key_gives_the_same_job_for_the_same_body(
    client: Client, worker: RawWorker
) -> None:
    first = await client.submit("m", "hi", idempotency_key="k", deadline=timedelta(hours=1))
    again = await client.submit("m", "hi", idempotency_key="k", deadline=timedelta(hours=1))
    assert again.id == first.id
    assert len(await client.list()) == 1


async def test_an_idempotency_key_with_another_body_is_a_conflict(
    client: Client, worker: RawWorker
) -> None:
    first = await client.submit("m", "hi", idempotency_key="k")
    with pytest.raises(IdempotencyConflict) as caught:
        await client.submit("m", "ho", idempotency_key="k")
    assert caught.value.job_id == first.id
    assert len(await client.list()) == 1


async def test_an_idempotency_key_belongs_to_its_tenant(client: Client, worker: RawWorker) -> None:
    first = await client.submit("m", "hi", idempotency_key="k", tenant="a")
    other = await client.submit("m", "ho", idempotency_key="k", tenant="b")
    assert first.id != other.id


async def test_an_idempotency_key_lives_as_long_as_its_job(
    client: Client, worker: RawWorker
) -> None:
    first = await client.submit("m", "hi", idempotency_key="k:/ ü")
    await first.delete()
    second = await client.submit("m", "ho", idempotency_key="k:/ ü")
    assert second.id != first.id


async def test_one_key_submitted_by_many_at_once_is_one_job(
    client: Client, worker: RawWorker
) -> None:
    jobs = await asyncio.gather(*(client.submit("m", "hi", idempotency_key="k") for _ in range(20)))
    assert len({job.id for job in jobs}) == 1
    assert len(await client.list()) == 1


async def test_a_submit_whose_answer_was_lost_is_one_job(
    shared_server: RealServer, worker: RawWorker, namespace: str, raw: Any, keys: Keys
) -> None:
    async with (
        LossyProxy(shared_server.socket) as proxy,
        Client(proxy.url, namespace=namespace) as client,
    ):
        await client.submit("m", "the first one loads the script")
        proxy.needle = b"a needle"
        job = await client.submit("m", "a needle")
        assert proxy.lost == 1
        assert (await job.status()).state is JobState.QUEUED
        assert raw.zcard(keys.jobs()) == 2


async def test_a_delete_whose_answer_was_lost_is_no_error(
    shared_server: RealServer, worker: RawWorker, namespace: str
) -> None:
    async with (
        LossyProxy(shared_server.socket) as proxy,
        Client(proxy.url, namespace=namespace) as client,
    ):
        first, job = await client.submit("m", "hi"), await client.submit("m", "hi")
        await first.delete()
        proxy.needle = job.id.encode()
        await job.delete()
        assert proxy.lost == 1
        with pytest.raises(JobGone):
            await job.delete()


async def test_a_submit_waits_for_a_server_that_restarts(server: RealServer) -> None:
    with server.client() as raw:
        RawWorker(raw, "tenuto:").announce()
    async with Client(server.url) as client:
        await client.models()
        server.kill()
        submitting = asyncio.create_task(client.submit("m", "hi"))
        await asyncio.sleep(0)
        await asyncio.to_thread(server.start)
        job = await submitting
        assert (await job.status()).state is JobState.QUEUED


async def test_every_acknowledged_submit_survives_a_killed_server_whole(
    server: RealServer,
) -> None:
    with server.client() as raw:
        RawWorker(raw, "tenuto:").announce()
    async with Client(server.url, retry_for=0) as client:
        accepted: list[str] = []

        async def submit_until_it_breaks() -> None:
            while True:
                try:
                    accepted.append((await client.submit("m", "hi")).id)
                except ServerUnavailable:
                    return

        submitting = [asyncio.create_task(submit_until_it_breaks()) for _ in range(8)]
        await asyncio.to_thread(poll, lambda: len(accepted) >= 100)
        server.kill()
        await asyncio.gather(*submitting)
    server.start()

    keys = Keys()
    with server.client() as raw:
        jobs = {job.decode() for job in raw.zrange(keys.jobs(), 0, -1)}
        assert set(accepted) <= jobs
        # Also those that were not acknowledged are there as a whole or not at all.
        assert {job.decode() for job in raw.zrange(keys.lane("m", "0:default"), 0, -1)} == jobs
        assert {t.decode() for t in raw.zrange(keys.tickets("m"), 0, -1)} == {
            f"{job}:1" for job in jobs
        }
        assert {key.decode() for key in raw.scan_iter(match="tenuto:stream:*", count=1000)} == {
            keys.stream(job) for job in jobs
        }


async def test_a_server_that_was_never_reached_is_not_waited_for(tmp_path: Any) -> None:
    async with Client(f"unix://{tmp_path}/none", retry_for=3600) as client:
        with pytest.raises(ServerUnavailable, match="no answer from unix://"):
            await asyncio.wait_for(client.submit("m", "hi"), 10)


async def test_no_message_shows_the_password() -> None:
    async with Client("redis://user:sesame@localhost:1/0") as client:
        with pytest.raises(ServerUnavailable) as caught:
            await client.list()
    assert "localhost:1" in str(caught.value)
    assert "sesame" not in str(caught.value)
    with pytest.raises(InvalidRequest) as refused:
        Client("http://user:sesame@localhost:1/0")
    assert "sesame" not in str(refused.value)


async def test_a_wrong_password_is_told_apart_from_a_lost_server(server: RealServer) -> None:
    with server.client() as raw:
        raw.config_set("requirepass", "sesame")
        async with Client(server.url, retry_for=3600) as client:
            with pytest.raises(ServerUnavailable, match="refuses"):
                await asyncio.wait_for(client.list(), 10)


async def test_a_submit_that_waits_for_the_disk_returns_when_it_is_there(
    redis_url: str, worker: RawWorker, namespace: str
) -> None:
    async with Client(redis_url, namespace=namespace, wait_fsync=True) as client:
        job = await client.submit("m", "hi", idempotency_key="k")
        # The second one writes nothing new, and still has something to wait for.
        assert (await client.submit("m", "hi", idempotency_key="k")).id == job.id


async def test_a_submit_that_no_replica_confirms_is_an_error(
    redis_url: str, worker: RawWorker, namespace: str
) -> None:
    async with Client(redis_url, namespace=namespace, wait_replicas=1, wait_timeout=0.05) as client:
        with pytest.raises(ServerUnavailable, match="0 of 1 replicas"):
            await client.submit("m", "hi")


async def test_a_server_without_memory_refuses_a_submit_clearly(server: RealServer) -> None:
    with server.client() as raw:
        RawWorker(raw, "tenuto:").announce()
        raw.config_set("maxmemory", 1)
    async with Client(server.url) as client:
        with pytest.raises(ServerUnavailable, match="out of memory"):
            await client.submit("m", "hi")
