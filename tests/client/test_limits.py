"""What submit refuses, of the real client and of the fake one alike; and the commands for it."""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from raw_worker import RawWorker
from tenuto_client import (
    Client,
    FakeClient,
    IdempotencyConflict,
    InvalidRequest,
    Job,
    JobState,
    Keys,
    LimitExceeded,
    ModelInfo,
    UnknownModel,
    WorkerInfo,
    pack_announcement,
)
from tenuto_client._client import BaseClient
from tenuto_client._command import main
from tenuto_client._limits import MEMORY

JOB_BYTES = 8192
TOKEN_BYTES = 64
LOGPROB_BYTES = 12


@pytest.fixture(params=["fake", "real"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[BaseClient]:
    """Both, one after the other; the model `m` is served."""
    if request.param == "fake":
        yield FakeClient([ModelInfo("m", 1000, 500, "f", 0.0)])
        return
    namespace = request.getfixturevalue("namespace")
    request.getfixturevalue("worker").announce(context_length=1000, vocab_size=500)
    async with Client(request.getfixturevalue("redis_url"), namespace=namespace) as real:
        yield real


async def queue(client: BaseClient, prompt: Any = "hi", **options: Any) -> Job:
    """A job that waits."""
    if isinstance(client, FakeClient):
        client.reply(["x"], start=False)
    return await client.submit("m", prompt, **options)


async def refused(client: BaseClient, prompt: Any = "hi", **options: Any) -> LimitExceeded:
    """The refusal of a submit, which leaves nothing behind."""
    before = await client.list()
    with pytest.raises(LimitExceeded) as caught:
        await queue(client, prompt, **options)
    assert await client.list() == before
    return caught.value


CASES: dict[str, tuple[int, dict[str, Any], int, bool]] = {
    # limit: value, what is over it, the value that is told, whether waiting helps
    "max_tokens": (9, {"max_tokens": 10}, 10, False),
    "max_prompt": (2, {"prompt": [1, 2, 3]}, 3, False),
    "max_queued_per_tenant": (0, {}, 1, True),
    "max_queued": (0, {}, 1, True),
}


@pytest.mark.parametrize("model", [None, "m"])
@pytest.mark.parametrize("name", CASES)
async def test_a_submit_over_a_limit_is_refused_with_its_name(
    client: BaseClient, name: str, model: str | None
) -> None:
    maximum, over, value, retryable = CASES[name]
    await client.set_limits({name: maximum}, model=model)
    error = await refused(client, **over)
    assert (error.limit, error.value, error.maximum) == (name, value, maximum)
    assert error.retryable is retryable
    assert str(error).startswith(f"{name}: ")
    assert error.hint
    await client.set_limits({name: value}, model=model)
    assert (await (await queue(client, **over)).status()).state is JobState.QUEUED


async def test_the_narrower_of_two_limits_counts(client: BaseClient) -> None:
    await client.set_limits({"max_tokens": 100})
    await client.set_limits({"max_tokens": 50}, model="m")
    assert (await refused(client, max_tokens=51)).maximum == 50
    await client.set_limits({"max_tokens": 20})
    assert (await refused(client, max_tokens=21)).maximum == 20


async def test_a_limit_of_another_model_bounds_nothing(client: BaseClient) -> None:
    await client.set_limits({"max_queued": 0}, model="other")
    await queue(client)


async def test_the_limits_of_a_job_are_told_before_those_of_the_queue(client: BaseClient) -> None:
    await client.set_limits(dict.fromkeys(reversed(CASES), 0))
    await client.set_limits({"max_stream_memory": 0})
    for name in CASES:
        assert (await refused(client, [1])).limit == name
        await client.clear_limits(name)
    assert (await refused(client, [1])).limit == "max_stream_memory"


async def test_each_tenant_has_its_own_count_and_an_ended_wait_frees_its_place(
    client: BaseClient,
) -> None:
    await client.set_limits({"max_queued_per_tenant": 2, "max_queued": 3})
    first = [await queue(client, tenant="a") for _ in range(2)]
    error = await refused(client, tenant="a")
    assert (error.limit, error.value) == ("max_queued_per_tenant", 3)
    assert "tenant a" in str(error)
    await queue(client, tenant="b")
    assert (await refused(client, tenant="b")).limit == "max_queued"
    await first[0].cancel()
    await queue(client, tenant="a")
    await first[1].delete()
    await queue(client, tenant="b")
    assert [model.queued for model in await client.models()] == [3]


async def test_memory_is_bounded_by_what_all_jobs_may_come_to(client: BaseClient) -> None:
    most = 2 * (JOB_BYTES + 1000 + 100 * (TOKEN_BYTES + 3 * LOGPROB_BYTES))
    await client.set_limits({"max_stream_memory": most})
    jobs = [await queue(client, max_tokens=100, logprobs=3) for _ in range(2)]
    error = await refused(client, max_tokens=100, logprobs=3)
    assert (error.limit, error.maximum, error.retryable) == ("max_stream_memory", most, True)
    assert most < error.value < 1.5 * most
    await jobs[0].cancel()  # an ended job takes what it wrote, and nothing was written
    await jobs[0].delete()
    await queue(client, max_tokens=100, logprobs=3)


async def test_jobs_that_are_there_and_resumes_are_never_refused(client: BaseClient) -> None:
    job = await queue(client, [1, 2, 3], max_tokens=5, idempotency_key="k")
    await client.set_limits({**dict.fromkeys(CASES, 0), "max_stream_memory": 0})
    again = await client.submit("m", [1, 2, 3], max_tokens=5, idempotency_key="k")
    assert again.id == job.id
    with pytest.raises(IdempotencyConflict):
        await client.submit("m", [1, 2], max_tokens=5, idempotency_key="k")
    with pytest.raises(IdempotencyConflict):
        await client.submit("m", [1, 2, 3], max_tokens=5, max_runtime=9, idempotency_key="k")
    await job.cancel()
    assert (await job.resume()).epoch == 2


async def test_limits_are_shown_set_and_cleared(client: BaseClient) -> None:
    await client.set_limits({"max_queued": 7, "max_stream_memory": 2**40})
    await client.set_limits({"max_tokens": 5, "max_prompt": 6}, model="m")
    assert await client.limits() == {
        "*": {"max_queued": 7, "max_stream_memory": 2**40},
        "m": {"max_prompt": 6, "max_tokens": 5},
    }
    await client.clear_limits("max_tokens", model="m")
    assert (await client.limits())["m"] == {"max_prompt": 6}
    await client.clear_limits()
    await client.clear_limits(model="m")
    assert await client.limits() == {}


@pytest.mark.parametrize(
    ("values", "model", "field"),
    [
        ({"max_queue": 1}, None, "max_queue"),
        ({"max_queued": -1}, None, "max_queued"),
        ({"max_queued": 1.5}, None, "max_queued"),
        ({"max_queued": True}, None, "max_queued"),
        ({"max_stream_memory": 1}, "m", "max_stream_memory"),
        ({"max_queued": 1}, "a model", "model"),
        ({"max_queued": 1}, "*", "model"),
    ],
)
async def test_a_limit_that_there_is_not_or_cannot_be_is_refused(
    client: BaseClient, values: dict[str, int], model: str | None, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.set_limits(values, model=model)
    assert caught.value.field == field
    assert await client.limits() == {}


@pytest.mark.parametrize("name", ["queue_ttl", "max_runtime"])
async def test_time_limits_come_back_in_the_record(client: BaseClient, name: str) -> None:
    options: Any = {name: 12.5}
    job = await queue(client, **options)
    assert getattr(await job.status(), name) == 12.5
    for bad in (0, -1, float("nan"), "5"):
        with pytest.raises(InvalidRequest) as caught:
            await queue(client, **{name: bad})
        assert caught.value.field == name


# -- what workers announce ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "over"),
    [
        ("max_tokens", {"max_tokens": 11}),
        ("max_prompt", {"prompt": [1] * 11, "max_tokens": 1}),
        ("max_context", {"prompt": [1] * 5, "max_tokens": 6}),
    ],
)
async def test_what_no_worker_takes_is_refused(
    raw: Any, keys: Keys, redis_url: str, namespace: str, name: str, over: dict[str, Any]
) -> None:
    info = replace(ModelInfo("m", 1000, 500, "f", 0.0), **cast(Any, {name: 10}))
    fake = FakeClient([info])
    raw.hset(keys.models(), "m", pack_announcement(info))
    async with Client(redis_url, namespace=namespace) as real:
        for client in (fake, real):
            error = await refused(client, **over)
            assert (error.limit, error.value, error.maximum) == (name, 11, 10)
            assert not error.retryable
            await queue(client, [1], max_tokens=9)


LONG = " " * 50 + "word " * 2000 + "\x04" * 50
"""10,000 characters that count, but for the last space."""


@pytest.mark.parametrize(
    ("announced", "field", "says"),
    [
        ({"context_length": 999}, "prompt", "has at least 1000 tokens, and m can hold 999"),
        ({"context_length": 1005}, "max_tokens", "6 after a prompt of at least 1000 is over the"),
        ({"max_prompt": 999}, "max_prompt", "at least 1000 tokens of prompt are over the 999"),
        ({"max_context": 1005}, "max_context", "at least 1006 tokens of prompt and generation"),
    ],
)
async def test_a_text_is_refused_that_is_too_long_whatever_it_is_tokenized_to(
    raw: Any,
    keys: Keys,
    redis_url: str,
    namespace: str,
    announced: dict[str, Any],
    field: str,
    says: str,
) -> None:
    wide = replace(ModelInfo("m", 4096, 500, "f", 0.0), longest_token=10)
    info = replace(wide, **announced)
    fake = FakeClient([info])
    async with Client(redis_url, namespace=namespace) as real:
        for client in (fake, real):
            raw.hset(keys.models(), "m", pack_announcement(info))
            with pytest.raises((InvalidRequest, LimitExceeded)) as caught:
                await client.submit("m", LONG, max_tokens=6)
            assert str(caught.value).startswith(f"{field}: ")
            assert says in str(caught.value)
            # Where nobody has proved how long a token may be, one will do; messages, too.
            await client.submit("m", [{"role": "user", "content": LONG}], max_tokens=6)
            raw.hset(keys.models(), "m", pack_announcement(replace(info, longest_token=None)))
        await real.submit("m", LONG, max_tokens=6)


async def test_a_text_is_refused_that_is_over_the_queues_limit_however_it_is_tokenized(
    raw: Any, keys: Keys, redis_url: str, namespace: str
) -> None:
    info = replace(ModelInfo("m", 4096, 500, "f", 0.0), longest_token=10)
    raw.hset(keys.models(), "m", pack_announcement(info))
    async with Client(redis_url, namespace=namespace) as real:
        for client in (FakeClient([info]), real):
            await client.set_limits({"max_prompt": 999})
            with pytest.raises(LimitExceeded, match="at least 1000 tokens of prompt") as caught:
                await client.submit("m", LONG, max_tokens=6)
            assert (caught.value.limit, caught.value.maximum) == ("max_prompt", 999)
            await client.set_limits({"max_prompt": 1000})
            job = await client.submit("m", LONG, max_tokens=6)
        assert raw.hget(keys.job(job.id), "max_prompt") == b"1000"


async def test_a_repeated_key_gets_its_job_though_no_worker_would_take_it_now(
    raw: Any, keys: Keys, redis_url: str, namespace: str, worker: RawWorker
) -> None:
    async with Client(redis_url, namespace=namespace) as client:
        job = await client.submit("m", "hi", max_tokens=20, idempotency_key="k")
        raw.hset(keys.models(), "m", pack_announcement(ModelInfo("m", 10, 5, "f", 0.0)))
        assert (await client.submit("m", "hi", max_tokens=20, idempotency_key="k")).id == job.id
        raw.delete(keys.models())
        assert (await client.submit("m", "hi", max_tokens=20, idempotency_key="k")).id == job.id


async def test_a_model_tells_who_serves_it_and_what_waits(client: BaseClient) -> None:
    await queue(client)
    await queue(client)
    (model,) = await client.models()
    assert (model.name, model.workers, model.queued) == ("m", 1, 2)


async def test_a_model_in_use_is_not_forgotten(client: BaseClient) -> None:
    with pytest.raises(InvalidRequest, match="serves m"):
        await client.forget_model("m")
    with pytest.raises(UnknownModel, match="did you mean m"):
        await client.forget_model("mm")


async def test_a_model_is_forgotten_when_nobody_serves_it_and_nothing_waits(
    redis_url: str, namespace: str, worker: RawWorker, raw: Any, keys: Keys
) -> None:
    async with Client(redis_url, namespace=namespace) as client:
        waiting = await client.submit("m", "hi")
        ran = await client.submit("m", "hi")
        attempt = worker.claim()
        raw.hset(keys.workers(), worker.name, pack_announcement(_silent(worker)))
        with pytest.raises(InvalidRequest, match="2 jobs of m still queued or running"):
            await client.forget_model("m")
        await ran.delete()
        with pytest.raises(InvalidRequest, match=r"1 job of m .*tenuto list --model m\)"):
            await client.forget_model("m")
        assert attempt.job_id == waiting.id
        attempt.finish()
        await client.forget_model("m")
        assert await client.models() == ()
        with pytest.raises(UnknownModel):
            await client.submit("m", "hi")
        assert not [key for key in raw.scan_iter(f"{namespace}*") if b":m" in key[-3:]]


def _silent(worker: RawWorker) -> WorkerInfo:
    return WorkerInfo(worker.name, ("m",), 1, 0, started_at=1.0, seen_at=2.0)


# -- the commands ------------------------------------------------------------------------


@pytest.fixture
def tenuto(
    redis_url: str,
    namespace: str,
    worker: RawWorker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """Runs a command; its exit code, what it printed, and what it complained of."""
    monkeypatch.setenv("TENUTO_REDIS_URL", redis_url)
    monkeypatch.setenv("TENUTO_NAMESPACE", namespace)
    monkeypatch.setenv("TENUTO_DATA_DIR", str(tmp_path / "data"))

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_limits_are_set_shown_and_cleared_by_command(tenuto: Any) -> None:
    assert tenuto("limits", "set", "max_queued=100", "max_stream_memory=1.5GiB")[0] == 0
    code, table, _ = tenuto("limits", "set", "--model", "m", "max_tokens=9")
    assert code == 0
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["all", "max_queued", "100"],
        ["all", "max_stream_memory", "1.5", "GiB"],
        ["m", "max_tokens", "9"],
    ]
    shown = [json.loads(line) for line in tenuto("limits", "--json")[1].splitlines()]
    assert {"model": "*", "limit": "max_stream_memory", "value": 3 * 2**29} in shown
    assert tenuto("limits", "clear", "max_queued")[0] == 0
    assert tenuto("limits", "clear", "--model", "m")[0] == 0
    shown = [json.loads(line) for line in tenuto("limits", "--json")[1].splitlines()]
    assert [line["limit"] for line in shown] == ["max_stream_memory"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("set",), "NAME=VALUE: is missing"),
        (("set", "max_queued"), "max_queued: needs a value"),
        (("set", "max_queued=many"), "max_queued: cannot be 'many'"),
        (("set", "max_stream_memory=1PB"), "max_stream_memory: cannot be '1PB'"),
        (("set", "max_queue=1"), "max_queue: no such limit"),
        (("clear", "max_queue"), "max_queue: no such limit"),
        (("show", "max_queued"), "max_queued: show takes no names"),
    ],
)
def test_a_limit_typed_wrongly_is_named(tenuto: Any, argv: tuple[str, ...], says: str) -> None:
    code, _, complaint = tenuto("limits", *argv)
    assert code == 2
    assert says in complaint


def test_clear_says_what_still_stands_and_all_leaves_nothing(tenuto: Any) -> None:
    tenuto("limits", "set", "max_queued=9")
    tenuto("limits", "set", "--model", "m", "max_tokens=9")
    said = tenuto("limits", "clear", "--model", "m")[2]
    assert said == "tenuto: what stands for all models holds for m, too (tenuto limits clear)\n"
    tenuto("limits", "set", "--model", "m", "max_tokens=9")
    said = tenuto("limits", "clear")[2]
    assert said == "tenuto: limits of m alone stand (tenuto limits clear --all)\n"
    tenuto("limits", "set", "max_queued=9")
    code, table, said = tenuto("limits", "clear", "--all")
    assert (code, len(table.splitlines()), said) == (0, 1, "")
    code, _, said = tenuto("limits", "clear", "--all", "--model", "m")
    assert (code, "--all: goes with clear" in said) == (2, True)


def test_limits_of_a_model_that_nobody_announced_are_set_with_a_note(tenuto: Any) -> None:
    code, table, said = tenuto("limits", "set", "--model", "mm", "max_queued=2")
    assert (code, table.splitlines()[1].split()) == (0, ["mm", "max_queued", "2"])
    assert said.startswith("tenuto: no worker has ever announced 'mm'; its limits hold once one")
    assert tenuto("limits", "set", "--model", "m", "max_queued=2")[2] == ""


@pytest.mark.parametrize("name", ["max_tokens", "max_queued", "max_queued_per_tenant", MEMORY])
def test_a_limit_of_0_names_what_lifts_it_and_no_waiting(tenuto: Any, name: str) -> None:
    tenuto("limits", "set", f"{name}=0")
    code, _, said = tenuto("submit", "m", "hi")
    # Who set it for a time, so that a queue runs empty, lifts it again.
    assert (code, f"tenuto: {name}: " in said) == (2 if name == "max_tokens" else 1, True)
    assert "0 refuses every job" in said
    assert "tenuto limits)" in said
    assert "submit again" not in said


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("8GB", 8 * 10**9, "7.5 GiB"),
        ("8GiB", 8 << 30, "8.0 GiB"),
        ("1.5 mb", 1_500_000, "1.4 MiB"),
        ("2k", 2000, "2.0 KiB"),
        ("1000", 1000, "1000 bytes"),
        ("1", 1, "1 byte"),
    ],
)
def test_memory_is_typed_in_any_unit_and_shown_by_its_size(
    tenuto: Any, text: str, value: int, shown: str
) -> None:
    _, table, _ = tenuto("limits", "set", f"{MEMORY}={text}")
    assert table.splitlines()[1].split(None, 2)[2] == shown
    assert json.loads(tenuto("limits", "--json")[1])["value"] == value


def test_a_refused_submit_exits_by_whether_waiting_helps(tenuto: Any) -> None:
    tenuto("limits", "set", "max_tokens=10", "max_queued=1")
    code, _, complaint = tenuto("submit", "m", "hi", "--max-tokens", "11")
    assert (code, "max_tokens: 11" in complaint) == (2, True)
    assert tenuto("submit", "m", "hi", "--max-tokens", "5")[0] == 0
    code, _, complaint = tenuto("submit", "m", "hi", "--max-tokens", "5")
    assert (code, "max_queued: 1 job waiting" in complaint) == (1, True)


def test_submit_says_when_nobody_serves_the_model_and_takes_the_job(
    tenuto: Any, raw: Any, keys: Keys, worker: RawWorker
) -> None:
    assert tenuto("submit", "m", "hi")[2] == ""
    raw.hset(keys.workers(), worker.name, pack_announcement(_silent(worker)))
    code, job_id, complaint = tenuto("submit", "m", "hi", "--queue-ttl", "60", "--max-runtime", "9")
    assert (code, "no worker serves m now" in complaint) == (0, True)
    record = json.loads(tenuto("status", job_id.strip(), "--json")[1])
    assert (record["queue_ttl"], record["max_runtime"]) == (60.0, 9.0)


def test_models_are_listed_and_forgotten_by_command(
    tenuto: Any, raw: Any, keys: Keys, worker: RawWorker
) -> None:
    tenuto("submit", "m", "hi")
    (line,) = [json.loads(line) for line in tenuto("models", "--json")[1].splitlines()]
    assert (line["name"], line["workers"], line["queued"]) == ("m", 1, 1)
    assert "max_prompt" not in line
    info = ModelInfo("m", 4096, 5, "f", 0.0, max_prompt=77)
    raw.hset(keys.models(), "m", pack_announcement(info))
    row = tenuto("models")[1].splitlines()[1].split()
    assert row[:4] == ["m", "4096", "1", "1"]
    assert row[-2:] == ["max_prompt", "77"]
    assert tenuto("models", "forget", "m")[0] == 2
    assert tenuto("models", "forget")[0] == 2
    worker.claim().finish()
    raw.delete(keys.workers())
    assert tenuto("models", "forget", "m")[0] == 0
    assert tenuto("models", "--json")[1] == ""


def doctor(tenuto: Any) -> list[dict[str, str]]:
    """What doctor finds of limits."""
    found = [json.loads(line) for line in tenuto("doctor", "--json")[1].splitlines()]
    return [line for line in found if line["subject"] == "limits"]


def test_doctor_names_a_limit_of_which_more_than_four_fifths_are_used(tenuto: Any) -> None:
    tenuto("limits", "set", "max_queued=10", "max_queued_per_tenant=5")
    for _ in range(4):
        tenuto("submit", "m", "hi")
    assert doctor(tenuto) == []
    tenuto("submit", "m", "hi")
    (finding,) = doctor(tenuto)
    assert finding["level"] == "problem"
    assert finding["says"] == (
        "5 jobs of tenant default waiting for m, 100 % of max_queued_per_tenant (5); "
        "submits are refused"
    )
    assert finding["fix"].startswith("tenuto limits set max_queued_per_tenant=10")
    # What it says to type ends it, though the limit is that of one model.
    tenuto("limits", "set", "--model", "m", "max_queued_per_tenant=5")
    tenuto("limits", "clear", "max_queued_per_tenant")
    (finding,) = doctor(tenuto)
    assert tenuto(*shlex.split(finding["fix"])[1:])[0] == 0
    assert doctor(tenuto) == []
    tenuto("limits", "clear", "--model", "m", "max_queued_per_tenant")
    tenuto("limits", "clear", "max_queued_per_tenant")
    for _ in range(4):
        tenuto("submit", "m", "hi")
    (finding,) = doctor(tenuto)
    assert (finding["level"], "90 % of max_queued (10)" in finding["says"]) == ("warning", True)


def test_doctor_names_the_memory_that_jobs_may_come_to(tenuto: Any, raw: Any, keys: Keys) -> None:
    tenuto("submit", "m", "hi", "--max-tokens", "1000")
    used = int(raw.hget(keys.usage(), "bytes"))
    tenuto("limits", "set", f"max_stream_memory={used * 10 // 7}")
    assert doctor(tenuto) == []
    tenuto("limits", "set", f"max_stream_memory={used * 10 // 9}")
    (finding,) = doctor(tenuto)
    assert (finding["level"], "max_stream_memory" in finding["says"]) == ("warning", True)


def test_status_says_that_no_living_worker_takes_so_much(tenuto: Any, raw: Any, keys: Keys) -> None:
    job = tenuto("submit", "m", "hi", "--max-tokens", "50")[1].strip()
    info = ModelInfo("m", 4096, 5, "f", 0.0, max_tokens=40)
    raw.hset(keys.models(), "m", pack_announcement(info))
    assert "takes so much (max_tokens 40, it needs 50; tenuto models)" in tenuto("status", job)[1]


def test_status_says_that_a_job_waits_for_a_worker_that_has_just_gone(
    tenuto: Any, raw: Any, keys: Keys
) -> None:
    job = tenuto("submit", "m", "hi", "--max-tokens", "50")[1].strip()
    narrow = {"m": {"max_tokens": 40}}
    seen = raw.time()[0]
    info = WorkerInfo("small", ("m",), 1, 0, 0.0, float(seen), limits=narrow)
    raw.delete(keys.workers())
    raw.hset(keys.workers(), "small", pack_announcement(info))
    said = tenuto("status", job)[1]
    assert "(max_tokens 40, it needs 50; it waits for one that did minutes ago)" in said
