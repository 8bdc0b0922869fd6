"""A trace goes from the span of a submit into the worker's logs and spans."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from job_queue import JobQueue
from step_worker import StepWorker
from tenuto_client import Client, InvalidRequest, SyncClient
from tenuto_client._spec import make_request
from tenuto_worker._spans import _service
from workers import WorkerProcess, poll_until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
OPTIONS: dict[str, Any] = {"max_tokens": 12, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Gets all spans of this process; a provider can be set once only."""
    found = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    return found


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


@pytest.fixture
def worker(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path
) -> Iterator[StepWorker]:
    with StepWorker(redis_url, jobs.keys.namespace, tiny_model, tmp_path) as made:
        yield made


def attempts(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == "tenuto.attempt"]


def facts(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("tenuto."): value for name, value in (span.attributes or {}).items()}


# -- from the client -------------------------------------------------------------------


async def test_a_job_submitted_in_a_span_carries_its_traceparent(
    jobs: JobQueue, redis_url: str, spans: InMemorySpanExporter
) -> None:
    async with Client(redis_url, namespace=jobs.keys.namespace) as client:
        with trace.get_tracer("test").start_as_current_span("request") as span:
            job = await client.submit("tiny", "Tell me.", **OPTIONS)
        other = await client.submit("tiny", "Tell me.", **OPTIONS)
        given = await client.submit("tiny", "Tell me.", traceparent=PARENT, **OPTIONS)
    context = span.get_span_context()

    assert jobs.job(job.id)["traceparent"] == (
        f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    )
    assert "traceparent" not in jobs.job(other.id)
    assert jobs.job(given.id)["traceparent"] == PARENT


def test_the_blocking_client_sees_the_span_of_its_caller_too(
    jobs: JobQueue, redis_url: str, spans: InMemorySpanExporter
) -> None:
    with (
        SyncClient(redis_url, namespace=jobs.keys.namespace) as client,
        trace.get_tracer("test").start_as_current_span("request") as span,
    ):
        job = client.submit("tiny", "Tell me.", **OPTIONS)

    assert f"{span.get_span_context().span_id:016x}" in jobs.job(job.id)["traceparent"]


def test_a_repeated_key_from_another_span_is_the_same_request(
    jobs: JobQueue, redis_url: str, spans: InMemorySpanExporter
) -> None:
    tracer = trace.get_tracer("test")
    with SyncClient(redis_url, namespace=jobs.keys.namespace) as client:
        ids = set()
        for _ in range(2):
            with tracer.start_as_current_span("request"):
                ids.add(client.submit("tiny", "Hi", idempotency_key="k", **OPTIONS).id)

    assert len(ids) == 1


@pytest.mark.parametrize(
    "value",
    [
        "",
        TRACE,
        PARENT.upper(),
        PARENT + "-more",
        PARENT.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01",
        PARENT + "\n",
        17,
    ],
)
def test_what_is_no_traceparent_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequest, match="traceparent: is not a W3C traceparent"):
        make_request("tiny", "Hi", {"traceparent": value})


# -- in the worker ---------------------------------------------------------------------


def submit(jobs: JobQueue, traceparent: str | None = PARENT, **options: Any) -> str:
    job = jobs.submit(**{"max_tokens": 12} | options)
    if traceparent is not None:
        jobs.client.hset(jobs.keys.job(job), "traceparent", traceparent)
    return job


def test_an_attempt_is_a_span_below_that_of_the_submit_with_an_event_for_each_phase(
    jobs: JobQueue, worker: StepWorker, spans: InMemorySpanExporter
) -> None:
    job = submit(jobs)
    worker.claim()
    worker.finish()
    (span,) = attempts(spans)

    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    names = [event.name for event in span.events]
    assert [name for name in names if name in ("restore", "prefill", "decode", "ending")] == [
        "restore", "prefill", "decode", "ending",
    ]  # fmt: skip
    assert facts(span) == {
        "job": job, "model": "tiny", "epoch": 1, "attempt": 1,
        "outcome": "completed", "tokens": 12, "exactness": "exact",
    }  # fmt: skip
    assert span.status.is_unset


def test_the_engines_spans_are_below_that_of_their_attempt(
    jobs: JobQueue, worker: StepWorker, spans: InMemorySpanExporter
) -> None:
    submit(jobs, max_tokens=20)
    worker.claim()
    worker.finish()
    worker.save()
    (attempt,) = attempts(spans)
    engines = [span for span in spans.get_finished_spans() if span is not attempt]

    assert {span.name.removeprefix("tenuto.") for span in engines} == {
        "prefill", "prefill_chunk", "first_token", "decode", "checkpoint", "checkpoint_write",
    }  # fmt: skip
    assert {span.parent and span.parent.span_id for span in engines} == {attempt.context.span_id}
    (decode,) = [span for span in engines if span.name == "tenuto.decode"]
    assert facts(decode)["tokens"] == 20


def test_each_attempt_of_a_job_has_a_span_of_the_same_trace(
    jobs: JobQueue, worker: StepWorker, spans: InMemorySpanExporter
) -> None:
    job = submit(jobs, max_tokens=30)
    worker.claim()
    worker.decode(10)
    worker.publish()
    worker.save()
    jobs.lose_lease(job)
    jobs.scripts.reap(job)
    worker.rooms.lease.renew()
    worker.settle()
    worker.claim()
    worker.finish()
    first, second = attempts(spans)

    assert [facts(first)["outcome"], facts(second)["outcome"]] == ["fenced", "completed"]
    assert first.context.trace_id == second.context.trace_id == int(TRACE, 16)
    assert first.context.span_id != second.context.span_id
    assert (facts(second)["epoch"], facts(second)["attempt"]) == (2, 2)


def test_a_failed_attempt_is_an_error_and_names_no_text(
    jobs: JobQueue, worker: StepWorker, spans: InMemorySpanExporter
) -> None:
    submit(jobs, prompt="a canary in the prompt", max_tokens=1_000_000)
    worker.claim()
    worker.publish()
    (span,) = attempts(spans)

    assert facts(span)["outcome"] == "failed"
    assert not span.status.is_ok
    assert not span.status.is_unset
    assert "canary" not in span.to_json()


def test_a_job_without_a_trace_begins_one_of_its_own(
    jobs: JobQueue, worker: StepWorker, spans: InMemorySpanExporter
) -> None:
    submit(jobs, traceparent=None)
    worker.claim()
    assert worker.run.span is not None
    worker.finish()
    (span,) = attempts(spans)

    assert span.parent is None


def test_a_worker_without_opentelemetry_works_and_still_logs_the_trace_id(
    jobs: JobQueue, worker: StepWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("opentelemetry.trace", "opentelemetry"):
        monkeypatch.setitem(sys.modules, name, None)
    job = submit(jobs)
    worker.claim()
    context: Any = worker.run.log
    assert context._context["trace_id"] == TRACE
    worker.finish()

    assert jobs.state(job) == "completed"


# -- a real worker ---------------------------------------------------------------------


def test_every_line_of_a_job_has_the_trace_id_and_spans_go_where_the_environment_says(
    jobs: JobQueue, redis_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    job = submit(jobs)
    environ = {"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_SCHEDULE_DELAY": "600000"}
    with WorkerProcess(
        tiny_model, redis_url, tmp_path, namespace=jobs.keys.namespace, environ=environ
    ) as worker:
        worker.wait_for("job ended")
        poll_until(lambda: jobs.state(job) == "completed", "the end")
        assert worker.term() == 0
        mine = [line for line in worker.lines() if line.get("job") == job]
        assert {line["event"] for line in mine} >= {"job claimed", "attempt prepared", "job ended"}
        assert {line.get("trace_id") for line in mine} == {TRACE}
        assert '"name": "tenuto.attempt"' in worker.log(), "sent before the process left"
        assert f'"trace_id": "0x{TRACE}"' in worker.log()
        assert '"service.name": "tenuto-worker"' in worker.log()


@pytest.mark.parametrize(
    ("environ", "service"),
    [
        ({}, {"service.name": "tenuto-worker"}),
        ({"OTEL_SERVICE_NAME": "mine"}, {}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b, service.name=mine"}, {}),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b"}, {"service.name": "tenuto-worker"}),
    ],
)
def test_the_service_has_a_name_unless_the_environment_gives_one(
    environ: dict[str, str], service: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert _service() == service


def test_an_exporter_that_is_not_installed_ends_the_worker_with_2_and_is_named(
    redis_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    environ = {"OTEL_TRACES_EXPORTER": "carrier-pigeon"}
    with WorkerProcess(tiny_model, redis_url, tmp_path, environ=environ) as worker:
        assert worker.wait() == 2
        assert "OTEL_TRACES_EXPORTER: 'carrier-pigeon' is not installed" in worker.log()
