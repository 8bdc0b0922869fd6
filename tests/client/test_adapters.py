"""A submit that names a LoRA adapter: its name, who has it, and what the job tells of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from raw_worker import RawWorker
from tenuto_client import (
    Client,
    FakeClient,
    InvalidRequest,
    JobSpec,
    Keys,
    ModelInfo,
    WorkerInfo,
    pack_announcement,
    pack_spec,
    unpack_model,
    unpack_spec,
    unpack_worker,
)
from tenuto_client._command import main
from tenuto_client._outlook import waits_for_its_own
from tenuto_client._spec import make_request

Say = Callable[..., tuple[int, str, str]]
INFO = ModelInfo("m", 1000, 500, "f", 0.0, adapters={"poet": "g", "clerk": "h"})


@pytest.fixture
def say(
    redis_url: str, namespace: str, worker: RawWorker, capsys: pytest.CaptureFixture[str]
) -> Say:
    """Runs the command on a queue that a worker serves; exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*words, "--redis", redis_url, "--namespace", namespace])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


# -- the spec --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["p", "poet", "Poet-2.1_b", "7", "a" * 64])
def test_a_name_travels_as_it_is(name: str) -> None:
    spec = make_request("m", "hi", {"adapter": name}).spec
    assert unpack_spec(pack_spec(spec)) == spec
    assert spec.adapter == name


@pytest.mark.parametrize(
    "name", ["", "-a", ".a", "a/b", "..", "a b", "a" * 65, "é", 7, ["a"], b"a"]
)
def test_what_is_no_name_is_refused_by_name(name: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"adapter: .* is not an adapter's name") as caught:
        make_request("m", "hi", {"adapter": name})
    assert caught.value.field == "adapter"


def test_a_job_without_one_is_packed_as_before_and_the_body_tells_them_apart() -> None:
    plain = make_request("m", "hi", {"adapter": None})
    assert b"adapter" not in pack_spec(plain.spec)
    assert pack_spec(plain.spec) == pack_spec(JobSpec("m", "hi"))
    hashes = {make_request("m", "hi", {"adapter": name}).body_hash for name in ("a", "b")}
    assert len(hashes | {plain.body_hash}) == 3


@pytest.mark.parametrize("name", ["lora", "adapters", "adaptor", "adapter_path"])
def test_another_name_of_the_parameter_is_told_the_right_one(name: str) -> None:
    with pytest.raises(InvalidRequest, match="did you mean adapter"):
        make_request("m", "hi", {name: "poet"})


# -- what is announced -----------------------------------------------------------------


@pytest.mark.parametrize("adapters", [None, {}, {"poet": "g"}])
def test_an_announcement_tells_adapters_and_that_there_are_none(
    adapters: dict[str, str] | None,
) -> None:
    info = replace(INFO, adapters=adapters)
    assert unpack_model("m", pack_announcement(info)) == info
    assert (b"adapters" in pack_announcement(info)) == (adapters is not None)
    worker = WorkerInfo("w", ("m",), 1, 0, 0.0, 0.0, adapters={"m": adapters} if adapters else {})
    assert unpack_worker("w", pack_announcement(worker)) == worker


@pytest.mark.parametrize(
    ("adapters", "says"),
    [
        ({"poet": "g", "clerk": "h"}, "no worker of m has poett (did you mean poet?)"),
        ({"bard": "g", "clerk": "h"}, "no worker of m has poett (known: bard, clerk)"),
        ({}, "no worker of m has any adapter (tenuto worker --adapters DIR)"),
    ],
)
async def test_one_that_no_worker_has_is_refused_before_anything_is_written(
    raw: Any, keys: Keys, redis_url: str, namespace: str, adapters: dict[str, str], says: str
) -> None:
    info = replace(INFO, adapters=adapters)
    raw.hset(keys.models(), "m", pack_announcement(info))
    async with Client(redis_url, namespace=namespace) as real:
        for client in (FakeClient([info]), real):
            with pytest.raises(InvalidRequest) as caught:
                await client.submit("m", "hi", adapter="poett")
            assert str(caught.value) == f"adapter: {says}"
            assert await client.list() == []
            for name in adapters:
                job = await client.submit("m", "hi", adapter=name)
                assert (await job.status()).adapter == name
            assert (await (await client.submit("m", "hi")).status()).adapter is None


async def test_where_nobody_tells_any_name_is_taken(
    raw: Any, keys: Keys, redis_url: str, namespace: str
) -> None:
    raw.hset(keys.models(), "m", pack_announcement(replace(INFO, adapters=None)))
    async with Client(redis_url, namespace=namespace) as real:
        for client in (FakeClient(["m"]), FakeClient(), real):
            job = await client.submit("m", "hi", adapter="poet")
            assert (await job.status()).adapter == "poet"
    assert raw.hget(keys.job(job.id), "adapter") == b"poet"


async def test_a_repeated_key_gets_its_job_though_no_worker_has_its_adapter_now(
    raw: Any, keys: Keys, redis_url: str, namespace: str
) -> None:
    raw.hset(keys.models(), "m", pack_announcement(INFO))
    async with Client(redis_url, namespace=namespace) as client:
        job = await client.submit("m", "hi", adapter="poet", idempotency_key="k")
        raw.hset(keys.models(), "m", pack_announcement(replace(INFO, adapters={})))
        assert (await client.submit("m", "hi", adapter="poet", idempotency_key="k")).id == job.id


# -- the command -----------------------------------------------------------------------


def test_the_command_submits_and_shows_it(say: Say, raw: Any, keys: Keys) -> None:
    raw.hset(keys.models(), "m", pack_announcement(INFO))
    code, out, _ = say("submit", "m", "hi", "--adapter", "poet", "--json")
    assert code == 0
    record = json.loads(out)
    assert record["adapter"] == "poet"
    assert unpack_spec(raw.hget(keys.job(record["id"]), "spec")).adapter == "poet"
    assert json.loads(say("status", record["id"], "--json")[1])["adapter"] == "poet"
    assert "adapter" in say("status", record["id"])[1]
    plain = json.loads(say("submit", "m", "hi", "--json")[1])
    assert "adapter" not in plain
    code, _, told = say("submit", "m", "hi", "--adapter", "nobody")
    assert (code, "adapter: no worker of m has nobody (known: clerk, poet)" in told) == (2, True)
    assert "; adapters clerk, poet" in say("models")[1]
    assert json.loads(say("models", "--json")[1])["adapters"] == ["clerk", "poet"]


def test_status_says_that_no_living_worker_has_it(say: Say, raw: Any, keys: Keys) -> None:
    raw.hset(keys.models(), "m", pack_announcement(INFO))
    job = say("submit", "m", "hi", "--adapter", "poet")[1].strip()
    assert "that is alive has the adapter poet; tenuto models" in say("status", job)[1]
    seen = float(raw.time()[0])
    info = WorkerInfo("having", ("m",), 1, 0, 0.0, seen, adapters={"m": {"poet": "g"}})
    raw.hset(keys.workers(), "having", pack_announcement(info))
    assert "a worker of m is free to take it" in say("status", job)[1]
    assert "having: m; 0 of 1 slots in use; adapters poet of m" in say("doctor")[1]


def test_a_begun_job_waits_for_the_geometry_with_its_adapter() -> None:
    now = time.time()
    job = {"fingerprint": "g", "tokens": "0", "queued_at": str(now)}
    assert waits_for_its_own(job, now, [], INFO)
    assert not waits_for_its_own(job | {"adapter": "poet"}, now, [], INFO)
    assert waits_for_its_own(job | {"adapter": "clerk"}, now, [], INFO)
    assert waits_for_its_own(job | {"adapter": "poet"}, now, [], replace(INFO, adapters=None))


# -- a queue by hand -------------------------------------------------------------------


def test_a_worker_that_knows_no_adapters_leaves_such_jobs(
    say: Say, raw: Any, keys: Keys, worker: RawWorker
) -> None:
    raw.hset(keys.models(), "m", pack_announcement(INFO))
    job = say("submit", "m", "hi", "--adapter", "poet", "--priority", "9")[1].strip()
    behind = say("submit", "m", "hi")[1].strip()
    assert worker.claim().job_id == behind
    assert raw.hget(keys.job(job), "state") == b"queued"
