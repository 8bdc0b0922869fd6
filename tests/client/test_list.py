"""Listing jobs in pages, and what workers announce."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from raw_worker import RawWorker
from tenuto_client import (
    Client,
    InvalidRequest,
    JobGone,
    JobState,
    Keys,
    ModelInfo,
    ProtocolError,
    WorkerInfo,
    pack_announcement,
)


async def submit(client: Client, count: int, model: str = "m") -> list[str]:
    """Jobs, and their ids."""
    ids: list[str] = []
    while len(ids) < count:
        # Some at a time: each needs a connection, and a server's backlog is finite.
        some = range(min(50, count - len(ids)))
        ids += [job.id for job in await asyncio.gather(*(client.submit(model, "hi") for _ in some))]
    return ids


async def listed(client: Client, **options: Any) -> list[str]:
    """The ids of a page."""
    return [record.id for record in await client.list(**options)]


async def test_jobs_are_listed_newest_first(client: Client, worker: RawWorker) -> None:
    submitted = await submit(client, 5)
    assert sorted(await listed(client)) == sorted(submitted)
    times = [record.created_at for record in await client.list()]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("by_record", [True, False])
async def test_pages_follow_each_other_without_gap_or_repeat(
    client: Client, worker: RawWorker, by_record: bool
) -> None:
    await submit(client, 25)
    whole = await listed(client)
    pages: list[str] = []
    before: Any = None
    while page := await client.list(limit=4, before=before):
        pages += [record.id for record in page]
        before = page[-1] if by_record else page[-1].id
        # New jobs do not shift the pages that follow.
        await submit(client, 1)
    assert pages == whole


async def test_a_page_goes_on_after_a_record_that_is_gone(
    client: Client, worker: RawWorker
) -> None:
    await submit(client, 6)
    whole = await client.list()
    await client.job(whole[2].id).delete()
    assert await client.list(before=whole[2]) == whole[3:]
    with pytest.raises(JobGone):
        await client.list(before=whole[2].id)


async def test_a_page_may_be_of_one_state_and_of_one_model(
    client: Client, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    raw.hset(keys.models(), "n", pack_announcement(ModelInfo("n", None, None, "f", 0.0)))
    mine = await submit(client, 3)
    (other,) = await submit(client, 1, model="n")
    await client.job(mine[0]).cancel()
    assert await listed(client, model="n") == [other]
    assert await listed(client, state="cancelled") == [mine[0]]
    assert sorted(await listed(client, state=JobState.QUEUED, model="m")) == sorted(mine[1:])
    assert await listed(client, state="failed") == []


async def test_a_rare_state_is_found_among_many_jobs(client: Client, worker: RawWorker) -> None:
    first = await client.submit("m", "hi")
    await first.cancel()
    await submit(client, 520)
    assert await listed(client, state="cancelled", limit=1) == [first.id]
    assert len(await listed(client, limit=10_000)) == 521


@pytest.mark.parametrize(
    "bad",
    [
        {"state": "done"},
        {"limit": 0},
        {"limit": True},
        {"model": "\udcff"},
        {"model": ""},
        {"before": "\udcff"},
    ],
)
async def test_a_bad_filter_is_refused_by_name(client: Client, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.list(**bad)
    assert caught.value.field in bad


async def test_models_outlive_their_workers(
    client: Client, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    worker.announce(context_length=77)
    ((model,), (alive,)) = (await client.models(), await client.workers())
    assert (model.name, model.context_length) == ("m", 77)
    assert (alive.name, alive.models, alive.slots) == ("raw-1", ("m",), 1)
    silent = WorkerInfo("raw-1", ("m",), 1, 0, started_at=1.0, seen_at=alive.seen_at - 60)
    raw.hset(keys.workers(), "raw-1", pack_announcement(silent))
    assert await client.workers() == ()
    assert await client.models() == (replace(model, workers=0),)


async def test_fields_of_a_later_minor_version_are_left_alone(
    client: Client, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    packed = pack_announcement(ModelInfo("n", None, None, "f", 0.0))
    raw.hset(keys.models(), "n", b"\x87" + packed[1:] + b"\xa3new\x01")
    assert [model.name for model in await client.models()] == ["m", "n"]
    raw.hset(keys.models(), "n", b"\x81\xa1v\x07")
    with pytest.raises(ProtocolError, match="upgrade"):
        await client.models()
